-- flush: ask every engine to forget the prefixes that no request uses. `control` may lose this, so the caller asks again.
-- KEYS control   ARGV who asks   Returns the id of the entry. The first write is XTRIM, which Redis never refuses.
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', 1000)
return redis.call('XADD', KEYS[1], '*', 'flush', ARGV[1])
