-- renew: keep the lease, or take it again under the same epoch if it expired and nobody else took it. Publish the status,
-- unless it is empty.
-- KEYS lease, owner, status; with what the worker serves also the `serving` of its stage and of the others
-- ARGV owner, lease_ms, status, status_ms, what the worker serves (JSON) or ''
-- Returns 1, or 0 if the slot has another owner, or if others serve something else since the lease expired.
if fenced(KEYS[2], ARGV[1]) then return 0 end
local served = slice(KEYS, 4, #KEYS)
if ARGV[5] ~= '' and not fits(ARGV[5], served) then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- Redis never refuses it, so not the rest either
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if ARGV[3] ~= '' then redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4]) end
if ARGV[5] ~= '' then keep_serving(served[1], ARGV[5], ARGV[2]) end
return 1
