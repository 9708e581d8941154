-- renew: keep the lease, or take it again under the same epoch if it expired and nobody else took it. Publish the status,
-- unless it is empty.
-- KEYS lease, owner, status   ARGV owner, lease_ms, status, status_ms   Returns 1, or 0 if the slot has another owner.
if fenced(KEYS[2], ARGV[1]) then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- Redis never refuses it, so not the rest either
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if ARGV[3] ~= '' then redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4]) end
return 1
