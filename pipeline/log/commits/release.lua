-- release: give the lease back and drop the status. Returns 1, or 0 if the lease is not this owner's.
local key, arg = named()
if redis.call('GET', key.lease) ~= arg.owner then return 0 end
redis.call('DEL', key.lease, key.status)
return 1
