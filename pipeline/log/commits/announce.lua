-- announce: publish the status of a worker that has no slot yet, under the slot that it will ask for.
-- KEYS lease, status   ARGV status, status_ms   Returns 1, or 0 if somebody holds the slot: the status is theirs then.
redis.call('PEXPIRE', KEYS[2], ARGV[2]) -- Redis never refuses it, so not the rest either
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 1
