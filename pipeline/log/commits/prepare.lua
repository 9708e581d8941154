-- prepare: create a stream and its group where they are missing. The group also reads what was appended before.
local key, arg = named()
redis.call('XACK', key.stream, arg.group, '0-0') -- changes nothing; Redis never refuses it, so not the rest
local reply = redis.pcall('XGROUP', 'CREATE', key.stream, arg.group, '0', 'MKSTREAM')
if reply.err and not string.find(reply.err, 'BUSYGROUP', 1, true) then return reply end
return 1
