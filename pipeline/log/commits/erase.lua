-- erase: replace the history of a request that has ended by a tombstone, an end alone: nothing begins the request again.
-- KEYS history, ended, reader; of a sibling: shared
-- ARGV uid, retention_ms, 1 if the archivers are to be told, fields of the tombstone...
-- Returns OK, or LIVES: the request has not ended. A history of another type is replaced, too.
-- Nothing is dropped from `ended`: whoever erases may have another retention than the server.
-- PEXPIRE deletes at once. Redis never refuses it, so not the rest.
local last = redis.pcall('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if last[1] and last[1][1] ~= SEAL then return 'LIVES' end
redis.call('PEXPIRE', KEYS[1], -1)
redis.call('PEXPIRE', KEYS[3], -1)
if KEYS[4] then redis.call('PEXPIRE', KEYS[4], -1) end
local now = now_ms()
redis.call('XADD', KEYS[1], SEAL, 'ms', now, unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[3] == '1' then redis.pcall('XADD', KEYS[2], 'NOMKSTREAM', '*', 'uid', ARGV[1]) end
return 'OK'
