-- reading: note for a minute more that the process `who` reads requests that others sent. Skips those that ended or are
-- gone.
local key, arg = named()
for i, reader in ipairs(key.readers) do
  local last = redis.pcall('XREVRANGE', key.histories[i], '+', '-', 'COUNT', 1)[1] -- another type of key has no entries
  if last and last[1] ~= SEAL then
    redis.call('PEXPIRE', reader, arg.ttl_ms) -- Redis never refuses it, so not the rest either
    redis.call('SADD', reader, arg.who)
    redis.call('PEXPIRE', reader, arg.ttl_ms)
  end
end
