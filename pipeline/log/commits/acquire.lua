-- acquire: take a free slot under a new epoch. From now on nobody else writes for the slot. A guest, whose nonce begins with
-- `guest-`, looks after a slot while its worker is away: a worker takes the slot from a guest, another guest does not.
-- With `serves`, what the worker serves (JSON), key.serving is that of its stage, and then those of the others.
-- Returns the epoch, 0 if somebody else holds the lease, or -1 if the worker does not fit to what is served.
local key, arg = named()
local function is_guest(nonce) return string.sub(nonce, 1, 6) == 'guest-' end
local holder = redis.call('GET', key.lease)
if holder then -- with this nonce: a retry of an acquire that had got through
  local epoch, nonce = string.match(holder, '^(%d+):(.*)$')
  if nonce == arg.nonce then return tonumber(epoch) end
  if is_guest(arg.nonce) or not is_guest(nonce) then return 0 end
end
if arg.serves and not fits(arg.serves, key.serving) then return -1 end
redis.call('PEXPIRE', key.lease, arg.lease_ms) -- Redis never refuses it, so not the rest either
local epoch = tonumber(string.match(redis.call('GET', key.owner) or '0:', '^%d+')) + 1
local owner = string.format('%d:%s', epoch, arg.nonce)
redis.call('SET', key.owner, owner)
redis.call('SET', key.lease, owner, 'PX', arg.lease_ms)
if arg.serves then keep_serving(key.serving[1], arg.serves, arg.lease_ms) end
return epoch
