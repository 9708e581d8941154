-- abandon: end a request whose client left, as `end` does, unless somebody else reads it. Each sibling is abandoned by
-- itself, under the one key that they have together.
-- KEYS live, history, replies, control, reader, and where it was submitted under such a key: idempotency
-- ARGV uid, base uid, retention_ms, reply_cap, 1 when another client sent it and this one came to it, fields...
-- Returns OK; ENDED (as for `end`); READ, and the key remembers that the client that sent it and its siblings has left; or
-- OWNED: that one has not left, and it is not up to the others.
local held = KEYS[6] and redis.call('GET', KEYS[6]) or ''
local holder, digest, left = string.match(held, '^([^:]*):([^:]*)(.*)$')
if ARGV[5] == '1' and not (holder == ARGV[2] and left == ':left') then return 'OWNED' end
if redis.call('EXISTS', KEYS[5]) == 1 then
  if holder == ARGV[2] and left == '' then
    local ttl_ms = redis.call('PTTL', KEYS[6])
    redis.call('PEXPIRE', KEYS[6], ttl_ms) -- changes nothing, but a script that begins so is not refused at maxmemory
    redis.call('SET', KEYS[6], held .. ':left', 'PX', ttl_ms)
  end
  return 'READ'
end
return seal(ARGV[1], ARGV[3], ARGV[4], slice(ARGV, 6, #ARGV)) and 'OK' or 'ENDED'
