-- leave: give a pending entry to a consumer that is nobody's slot, for a worker of a newer version. It is no delivery.
-- Returns 1, or 0 if the entry is not pending for this consumer.
local key, arg = named()
if not redis.call('XPENDING', key.stream, arg.group, arg.entry, arg.entry, 1, arg.consumer)[1] then return 0 end
redis.call('XCLAIM', key.stream, arg.group, arg.newer, 0, arg.entry, 'JUSTID')
return 1
