-- acquire: take a free slot under a new epoch. From now on nobody else writes for the slot. A guest, whose nonce begins with
-- `guest-`, looks after a slot while its worker is away: a worker takes the slot from a guest, another guest does not.
-- KEYS lease, owner   ARGV nonce, lease_ms   Returns the epoch, or 0 if somebody else holds the lease.
local function is_guest(nonce) return string.sub(nonce, 1, 6) == 'guest-' end
local holder = redis.call('GET', KEYS[1])
if holder then -- with this nonce: a retry of an acquire that had got through
  local epoch, nonce = string.match(holder, '^(%d+):(.*)$')
  if nonce == ARGV[1] then return tonumber(epoch) end
  if is_guest(ARGV[1]) or not is_guest(nonce) then return 0 end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- Redis never refuses it, so not the rest either
local epoch = tonumber(string.match(redis.call('GET', KEYS[2]) or '0:', '^%d+')) + 1
local owner = string.format('%d:%s', epoch, ARGV[1])
redis.call('SET', KEYS[2], owner)
redis.call('SET', KEYS[1], owner, 'PX', ARGV[2])
return epoch
