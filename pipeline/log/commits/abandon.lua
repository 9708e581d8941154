-- abandon: end a request whose client left, as `end` does, unless another client reads it. Siblings are abandoned one by
-- one, under the idempotency key that they share.
-- KEYS live, history, replies, control, ended, archive, reader; of a sibling: shared; if it was submitted under an idempotency key: that
-- ARGV uid, base uid, retention_ms, reply_cap, 1 if another client sent the request and this one attached to it,
--      retention_ms where no token was produced, fields...
-- Returns
--   OK     the request is ended
--   ENDED  as for `end`
--   READ   another client reads it; the key remembers that the sender has left it and its siblings
--   OWNED  this client attached to it, and the sender has not left
local shared, key = nil, KEYS[8]
if ARGV[1] ~= ARGV[2] then shared, key = KEYS[8], KEYS[9] end
local held = key and redis.call('GET', key) or ''
local holder, digest, left = string.match(held, '^([^:]*):([^:]*)(.*)$')
if ARGV[5] == '1' and not (holder == ARGV[2] and left == ':left') then return 'OWNED' end
if redis.call('EXISTS', KEYS[7]) == 1 then
  if holder == ARGV[2] and left == '' then
    local ttl_ms = redis.call('PTTL', key)
    redis.call('PEXPIRE', key, ttl_ms) -- changes nothing; Redis never refuses it, so not the rest
    redis.call('SET', key, held .. ':left', 'PX', ttl_ms)
  end
  return 'READ'
end
return seal(ARGV[1], ARGV[3], ARGV[6], ARGV[4], slice(ARGV, 7, #ARGV), shared) and 'OK' or 'ENDED'
