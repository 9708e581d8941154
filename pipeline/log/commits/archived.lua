-- archived: consume entries of `ended`: their requests are on the disk, or need not be there, or are lost.
-- KEYS owner, ended, archive   ARGV owner, group, number of lost ones, their entries..., the other entries...
-- Returns OK or FENCED. The lost ones are counted.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
local num_lost, lost = tonumber(ARGV[3]), 0
for i = 4, #ARGV do
  local found = redis.call('XACK', KEYS[2], ARGV[2], ARGV[i])
  if i < 4 + num_lost then lost = lost + found end
  redis.call('XDEL', KEYS[2], ARGV[i])
end
if lost > 0 then redis.call('HINCRBY', KEYS[3], 'unarchived', lost) end
return 'OK'
