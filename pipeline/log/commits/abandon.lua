-- abandon: end a request whose client left, as `end` does, unless another client reads it. Siblings are abandoned one by
-- one, under the idempotency key that they share. ARGV goes on with the fields of the end.
-- Returns
--   OK     the request is ended
--   ENDED  as for `end`
--   READ   another client reads it; the key remembers that the sender has left it and its siblings
--   OWNED  this client attached to it, and the sender has not left
local key, arg = named()
local held = key.idempotency and redis.call('GET', key.idempotency) or ''
local holder, digest, left = string.match(held, '^([^:]*):([^:]*)(.*)$')
if arg.attached and not (holder == arg.base and left == ':left') then return 'OWNED' end
if redis.call('EXISTS', key.reader) == 1 then
  if holder == arg.base and left == '' then
    local ttl_ms = redis.call('PTTL', key.idempotency)
    redis.call('PEXPIRE', key.idempotency, ttl_ms) -- changes nothing; Redis never refuses it, so not the rest
    redis.call('SET', key.idempotency, held .. ':left', 'PX', ttl_ms)
  end
  return 'READ'
end
return seal(key, arg, arg.uid, slice(ARGV, 2, #ARGV)) and 'OK' or 'ENDED'
