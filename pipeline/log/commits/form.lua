-- form: write the newest formation of a group of ranks. Rank 0 does, while it holds its slot. Older ones are deleted. ARGV
-- goes on with the fields besides nonce and moment.
-- Returns its id, or FENCED. With the nonce of the newest formation, nothing is written, and the group lives on.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 'FENCED' end
redis.call('PEXPIRE', key.ranks, arg.ttl_ms) -- Redis never refuses it, so not the rest either
local newest = redis.call('XREVRANGE', key.ranks, '+', '-', 'COUNT', 1)[1]
if newest and newest[2][2] == arg.nonce then return newest[1] end
for rank = 1, tonumber(arg.size) - 1 do
  local made = redis.pcall('XGROUP', 'CREATE', key.ranks, 'rank-' .. rank, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
end
local id = redis.call('XADD', key.ranks, 'MAXLEN', 1, '*', 'nonce', arg.nonce, 'ms', now_ms(), unpack(ARGV, 2))
redis.call('PEXPIRE', key.ranks, arg.ttl_ms)
return id
