-- retry: count one more try of a pending entry, before the work on it begins.
-- Returns the number of tries with this one, or 0 if the entry is not pending for this consumer; or FENCED.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 'FENCED' end
local item = redis.call('XPENDING', key.stream, arg.group, arg.entry, arg.entry, 1, arg.slot)[1]
if not item then return 0 end
redis.call('XCLAIM', key.stream, arg.group, arg.slot, 0, arg.entry)
return item[4] + 1
