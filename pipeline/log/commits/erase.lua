-- erase: replace the history of a request that has ended by a tombstone, an end alone: nothing begins the request again.
-- `tells`: the archivers are to be told. ARGV goes on with the fields of the tombstone.
-- Returns OK, or LIVES: the request has not ended. A history of another type is replaced, too.
-- Nothing is dropped from `ended`: whoever erases may have another retention than the server.
-- PEXPIRE deletes at once. Redis never refuses it, so not the rest.
local key, arg = named()
local last = redis.pcall('XREVRANGE', key.history, '+', '-', 'COUNT', 1)
if last[1] and last[1][1] ~= SEAL then return 'LIVES' end
redis.call('PEXPIRE', key.history, -1)
redis.call('PEXPIRE', key.reader, -1)
if key.shared then redis.call('PEXPIRE', key.shared, -1) end
drop_stored(key, arg.uid)
local now = now_ms()
redis.call('XADD', key.history, SEAL, 'ms', now, unpack(ARGV, 2))
redis.call('PEXPIRE', key.history, arg.retention_ms)
if arg.tells then redis.pcall('XADD', key.ended, 'NOMKSTREAM', '*', 'uid', arg.uid) end
return 'OK'
