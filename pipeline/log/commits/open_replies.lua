-- open_replies: create the stream that a frontend listens to, or keep it for a minute more, without what it has read.
-- KEYS replies   ARGV ttl_ms, the id of the last reply that was read, or ''   Returns its last id.
redis.call('PEXPIRE', KEYS[1], ARGV[1])
if ARGV[2] ~= '' then redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2]) end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if not last[1] then last = { { redis.call('XADD', KEYS[1], '*', 'events', '[]') } } end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return last[1][1]
