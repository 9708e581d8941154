-- bury: consume an entry that cannot be read, whatever it holds, keep it as a dead letter, and end the requests that it
-- is about.
-- KEYS live, stream, dead, control, ended, archive, then history, replies and shared texts of each request, and (if only an owner may) owner
-- ARGV owner or '', group, entry, dead_cap, retention_ms, reply_cap, number of parts of the letter, those parts...,
--      number of requests, their uids..., fields of the end...
-- Returns the uids that had not ended before; or LOST: the entry was consumed before; or FENCED.
if ARGV[1] ~= '' and fenced(KEYS[#KEYS], ARGV[1]) then return 'FENCED' end
local stream, dead, at = KEYS[2], KEYS[3], 8 + tonumber(ARGV[7])
if redis.call('XACK', stream, ARGV[2], ARGV[3]) == 0 then return 'LOST' end
local entry = redis.call('XRANGE', stream, ARGV[3], ARGV[3])[1]
if not entry then return 'LOST' end
redis.call('XDEL', stream, ARGV[3])
redis.call('XADD', dead, 'MAXLEN', '~', ARGV[4], '*', 'ms', now_ms(), 'entry', as_json(entry), unpack(ARGV, 8, at - 1))
local ended, count = {}, tonumber(ARGV[at])
for i = 1, count do
  KEYS[2], KEYS[3] = KEYS[4 + 3 * i], KEYS[5 + 3 * i] -- `seal` finds history and replies there
  local fields = slice(ARGV, at + count + 1, #ARGV)
  if seal(ARGV[at + i], ARGV[5], ARGV[5], ARGV[6], fields, KEYS[6 + 3 * i]) then ended[#ended + 1] = ARGV[at + i] end
end
return ended
