-- retry: count one more try of a pending entry, before the work on it begins.
-- KEYS owner, stream   ARGV owner, group, consumer, entry
-- Returns the number of tries with this one, or 0 if the entry is not pending for this consumer; or FENCED.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
local item = redis.call('XPENDING', KEYS[2], ARGV[2], ARGV[4], ARGV[4], 1, ARGV[3])[1]
if not item then return 0 end
redis.call('XCLAIM', KEYS[2], ARGV[2], ARGV[3], 0, ARGV[4])
return item[4] + 1
