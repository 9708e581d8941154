-- acquire: take a free slot under a new epoch; from now on nobody else writes for it.
-- KEYS lease, owner   ARGV nonce, lease_ms   Returns the epoch, or 0 when somebody else holds the lease.
local holder = redis.call('GET', KEYS[1])
if holder then -- with this nonce it is a retry that had got through
  local epoch, nonce = string.match(holder, '^(%d+):(.*)$')
  return nonce == ARGV[1] and tonumber(epoch) or 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- changes nothing, but a script that begins so is not refused at maxmemory
local epoch = tonumber(string.match(redis.call('GET', KEYS[2]) or '0:', '^%d+')) + 1
local owner = string.format('%d:%s', epoch, ARGV[1])
redis.call('SET', KEYS[2], owner)
redis.call('SET', KEYS[1], owner, 'PX', ARGV[2])
return epoch
