-- form: write the newest formation of a group of ranks. Rank 0 does, while it holds its slot. Older ones are deleted.
-- KEYS owner, ranks   ARGV owner, number of ranks, ttl_ms, nonce, other fields...
-- Returns its id, or FENCED. With the nonce of the newest formation, nothing is written, and the group lives on.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
redis.call('PEXPIRE', KEYS[2], ARGV[3]) -- Redis never refuses it, so not the rest either
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if newest and newest[2][2] == ARGV[4] then return newest[1] end
for rank = 1, tonumber(ARGV[2]) - 1 do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[2], 'rank-' .. rank, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
end
local fields = slice(ARGV, 5, #ARGV)
local id = redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'nonce', ARGV[4], 'ms', now_ms(), unpack(fields))
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return id
