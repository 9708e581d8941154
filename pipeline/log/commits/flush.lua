-- flush: ask every engine to forget the prefixes that nobody uses. `control` may lose it, so who waits asks again.
-- KEYS control   ARGV who asks   Returns the id of the entry. The write that Redis never refuses is XTRIM.
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', 1000)
return redis.call('XADD', KEYS[1], '*', 'flush', ARGV[1])
