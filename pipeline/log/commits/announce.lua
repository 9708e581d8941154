-- announce: say how a worker is that has no slot yet, under the one it is going to ask for.
-- KEYS lease, status   ARGV status, status_ms   Returns 1, or 0 when somebody holds the slot, whose status it is then.
redis.call('PEXPIRE', KEYS[2], ARGV[2]) -- never refused at maxmemory, so the rest is not either
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 1
