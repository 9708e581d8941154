-- open_archive: begin to tell archivers which requests end, and say which archive they write. The first archiver decides.
-- KEYS ended, archive   ARGV group, id of the archive   Returns the id of the namespace's archive.
redis.call('XACK', KEYS[1], ARGV[1], '0-0') -- changes nothing; Redis never refuses it, so not the rest
redis.call('HSETNX', KEYS[2], 'id', ARGV[2])
local reply = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if reply.err and not string.find(reply.err, 'BUSYGROUP', 1, true) then return reply end
return redis.call('HMGET', KEYS[2], 'id')[1]
