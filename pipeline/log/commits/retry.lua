-- retry: count that an entry is about to be worked on again, and say how often it was, this time included.
-- KEYS owner, stream   ARGV owner, group, consumer, entry   Returns the number, 0 when it is not this consumer's; or FENCED.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
local item = redis.call('XPENDING', KEYS[2], ARGV[2], ARGV[4], ARGV[4], 1, ARGV[3])[1]
if not item then return 0 end
redis.call('XCLAIM', KEYS[2], ARGV[2], ARGV[3], 0, ARGV[4])
return item[4] + 1
