-- renew: keep the lease, or take it again under the same epoch if it expired and nobody else took it. Publish the status,
-- if there is one. `serves` and key.serving are as for acquire.
-- Returns 1, or 0 if the slot has another owner, or if others serve something else since the lease expired.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 0 end
if arg.serves and not fits(arg.serves, key.serving) then return 0 end
redis.call('PEXPIRE', key.lease, arg.lease_ms) -- Redis never refuses it, so not the rest either
redis.call('SET', key.lease, arg.owner, 'PX', arg.lease_ms)
if arg.status then redis.call('SET', key.status, arg.status, 'PX', arg.status_ms) end
if arg.serves then keep_serving(key.serving[1], arg.serves, arg.lease_ms) end
return 1
