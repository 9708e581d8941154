-- open_replies: create the stream that a frontend listens to, or keep it for a minute more, without what it has `read`.
-- Returns its last id.
local key, arg = named()
redis.call('PEXPIRE', key.replies, arg.ttl_ms)
if arg.read then redis.call('XTRIM', key.replies, 'MINID', arg.read) end
local last = redis.call('XREVRANGE', key.replies, '+', '-', 'COUNT', 1)
if not last[1] then last = { { redis.call('XADD', key.replies, '*', 'events', '[]') } } end
redis.call('PEXPIRE', key.replies, arg.ttl_ms)
return last[1][1]
