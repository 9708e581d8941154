-- flush: ask every engine to forget the prefixes that no request uses. `control` may lose this, so the caller asks again.
-- Returns the id of the entry. The first write is XTRIM, which Redis never refuses.
local key, arg = named()
redis.call('XTRIM', key.control, 'MAXLEN', '~', 1000)
return redis.call('XADD', key.control, '*', 'flush', arg.by)
