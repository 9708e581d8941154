-- import: write the whole history of a request that has ended, as it is. No worker hears of it.
-- KEYS history   ARGV retention_ms, the entries in JSON: [[id, [name, value, ...]], ...], 1: also in place of a tombstone
-- Returns OK, or THERE: there is such a history already, or one of an earlier try. It stays as it is. Or for how many
-- milliseconds its tombstone stays.
-- Like submit, it is refused at maxmemory: it is no work in flight. Once it has begun, Redis refuses none of its writes.
if redis.call('EXISTS', KEYS[1]) == 1 then
  local first = redis.pcall('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  if not first or first[1] ~= SEAL then return 'THERE' end
  if ARGV[3] ~= '1' then return redis.call('PTTL', KEYS[1]) end
  redis.call('PEXPIRE', KEYS[1], -1)
end
for _, entry in ipairs(cjson.decode(ARGV[2])) do redis.call('XADD', KEYS[1], entry[1], unpack(entry[2])) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 'OK'
