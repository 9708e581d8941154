-- release: give the lease back and drop the status.
-- KEYS lease, status   ARGV owner   Returns 1, or 0 if the lease is not this owner's.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
