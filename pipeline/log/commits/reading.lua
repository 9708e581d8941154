-- reading: say that a process reads requests which others sent, for a minute more; not of those that ended or are gone.
-- KEYS (reader, history)*   ARGV who, ttl_ms
for i = 1, #KEYS, 2 do
  local last = redis.call('XREVRANGE', KEYS[i + 1], '+', '-', 'COUNT', 1)[1]
  if last and last[1] ~= SEAL then
    redis.call('PEXPIRE', KEYS[i], ARGV[2]) -- changes nothing, but a script that begins so is not refused at maxmemory
    redis.call('SADD', KEYS[i], ARGV[1])
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
  end
end
