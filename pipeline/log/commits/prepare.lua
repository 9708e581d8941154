-- prepare: make a stream and its group where they are missing; the group reads what was appended before, too.
-- KEYS stream   ARGV group
redis.call('XACK', KEYS[1], ARGV[1], '0-0') -- changes nothing, but a script that begins so is not refused at maxmemory
local reply = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if reply.err and not string.find(reply.err, 'BUSYGROUP', 1, true) then return reply end
return 1
