-- acquire: take a free slot under a new epoch. From now on nobody else writes for the slot. A guest, whose nonce begins with
-- `guest-`, looks after a slot while its worker is away: a worker takes the slot from a guest, another guest does not.
-- KEYS lease, owner; with what the worker serves also the `serving` of its stage and of the others
-- ARGV nonce, lease_ms, what the worker serves (JSON) or ''
-- Returns the epoch, 0 if somebody else holds the lease, or -1 if the worker does not fit to what is served.
local function is_guest(nonce) return string.sub(nonce, 1, 6) == 'guest-' end
local holder = redis.call('GET', KEYS[1])
if holder then -- with this nonce: a retry of an acquire that had got through
  local epoch, nonce = string.match(holder, '^(%d+):(.*)$')
  if nonce == ARGV[1] then return tonumber(epoch) end
  if is_guest(ARGV[1]) or not is_guest(nonce) then return 0 end
end
local served = slice(KEYS, 3, #KEYS)
if ARGV[3] ~= '' and not fits(ARGV[3], served) then return -1 end
redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- Redis never refuses it, so not the rest either
local epoch = tonumber(string.match(redis.call('GET', KEYS[2]) or '0:', '^%d+')) + 1
local owner = string.format('%d:%s', epoch, ARGV[1])
redis.call('SET', KEYS[2], owner)
redis.call('SET', KEYS[1], owner, 'PX', ARGV[2])
if ARGV[3] ~= '' then keep_serving(served[1], ARGV[3], ARGV[2]) end
return epoch
