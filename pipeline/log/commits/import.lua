-- import: write the whole history of a request that has ended, as it is. No worker hears of it.
-- KEYS history   ARGV retention_ms, the entries in JSON: [[id, [name, value, ...]], ...]
-- Returns OK, or THERE: there is such a history already, or one of an earlier try. It stays as it is.
-- Like submit, it is refused at maxmemory: it is no work in flight. Once it has begun, Redis refuses none of its writes.
if redis.call('EXISTS', KEYS[1]) == 1 then return 'THERE' end
for _, entry in ipairs(cjson.decode(ARGV[2])) do redis.call('XADD', KEYS[1], entry[1], unpack(entry[2])) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 'OK'
