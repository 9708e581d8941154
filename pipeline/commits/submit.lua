-- submit: begin a history and hand the request to the tokenizers.
-- KEYS history, live, submitted, tokenized   ARGV uid, frontend, timeout_ms, retention_ms, max_queued, fields...
-- Returns ACCEPTED, DUPLICATE (a retry that had got through) or BUSY. The one script that begins with a write that
-- Redis refuses at maxmemory, so new work waits while work in flight drains.
if redis.call('EXISTS', KEYS[1]) == 1 then return 'DUPLICATE' end
if redis.call('XLEN', KEYS[3]) + redis.call('XLEN', KEYS[4]) >= tonumber(ARGV[5]) then return 'BUSY' end
local now = now_ms()
local deadline = string.format('%.0f', tonumber(now) + tonumber(ARGV[3]))
redis.call('XADD', KEYS[1], '0-1', 'ms', now, 'deadline_ms', deadline, unpack(slice(ARGV, 6, #ARGV)))
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', tonumber(deadline) + tonumber(ARGV[4])))
redis.call('ZADD', KEYS[2], deadline, ARGV[1])
redis.call('XADD', KEYS[3], '*', 'uid', ARGV[1], 'frontend', ARGV[2])
return 'ACCEPTED'
