-- leave: give a pending entry to a consumer that is nobody's slot, for a worker of a newer version. It is no delivery.
-- KEYS stream   ARGV group, consumer, entry, the other consumer
-- Returns 1, or 0 if the entry is not pending for this consumer.
if not redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])[1] then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[4], 0, ARGV[3], 'JUSTID')
return 1
