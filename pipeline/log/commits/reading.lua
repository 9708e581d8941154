-- reading: note for a minute more that a process reads requests that others sent. Skips those that ended or are gone.
-- KEYS (reader, history)*   ARGV who, ttl_ms
for i = 1, #KEYS, 2 do
  local last = redis.pcall('XREVRANGE', KEYS[i + 1], '+', '-', 'COUNT', 1)[1] -- another type of key has no entries
  if last and last[1] ~= SEAL then
    redis.call('PEXPIRE', KEYS[i], ARGV[2]) -- Redis never refuses it, so not the rest either
    redis.call('SADD', KEYS[i], ARGV[1])
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
  end
end
