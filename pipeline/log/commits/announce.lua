-- announce: publish the status of a worker that has no slot yet, under the slot that it will ask for.
-- Returns 1, or 0 if somebody holds the slot: the status is theirs then.
local key, arg = named()
redis.call('PEXPIRE', key.status, arg.status_ms) -- Redis never refuses it, so not the rest either
if redis.call('EXISTS', key.lease) == 1 then return 0 end
redis.call('SET', key.status, arg.status, 'PX', arg.status_ms)
return 1
