-- import: write the whole history of a request that has ended, as it is; with `again`, also in place of a tombstone. No
-- worker hears of it. ARGV goes on with the entries in JSON: [[id, [name, value, ...]], ...].
-- Returns OK, or THERE: there is such a history already, or one of an earlier try. It stays as it is. Or for how many
-- milliseconds its tombstone stays.
-- Like submit, it is refused at maxmemory: it is no work in flight. Once it has begun, Redis refuses none of its writes.
local key, arg = named()
if redis.call('EXISTS', key.history) == 1 then
  local first = redis.pcall('XRANGE', key.history, '-', '+', 'COUNT', 1)[1]
  if not first or first[1] ~= SEAL then return 'THERE' end
  if not arg.again then return redis.call('PTTL', key.history) end
  redis.call('PEXPIRE', key.history, -1)
end
for _, entry in ipairs(cjson.decode(ARGV[2])) do redis.call('XADD', key.history, entry[1], unpack(entry[2])) end
redis.call('PEXPIRE', key.history, arg.retention_ms)
return 'OK'
