-- open_archive: begin to tell archivers which requests end, and say which archive they write. The first archiver decides.
-- Returns the id of the namespace's archive.
local key, arg = named()
redis.call('XACK', key.ended, arg.group, '0-0') -- changes nothing; Redis never refuses it, so not the rest
redis.call('HSETNX', key.archive, 'id', arg.archive)
local reply = redis.pcall('XGROUP', 'CREATE', key.ended, arg.group, '0', 'MKSTREAM')
if reply.err and not string.find(reply.err, 'BUSYGROUP', 1, true) then return reply end
return redis.call('HMGET', key.archive, 'id')[1]
