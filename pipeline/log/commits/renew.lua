-- renew: keep the lease, or take it again under the same epoch when it ran out and nobody else took it; say how one is,
-- unless the status is empty.
-- KEYS lease, owner, status   ARGV owner, lease_ms, status, status_ms   Returns 1, or 0 when the owner has changed.
if fenced(KEYS[2], ARGV[1]) then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- never refused at maxmemory, so the rest is not either
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if ARGV[3] ~= '' then redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4]) end
return 1
