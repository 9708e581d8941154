-- submit: begin a history and hand the request to the tokenizers; under an idempotency key, once.
-- KEYS history, live, submitted, tokenized, and with such a key: idempotency
-- ARGV uid, frontend, timeout_ms, retention_ms, max_queued, digest of the body, the uid that the key is taken from or '',
--      fields...
-- Returns the outcome and whose history it is about: ACCEPTED, DUPLICATE (a retry that had got through), BUSY; with a key
-- also ATTACH (that request has it) or MISMATCH (so, but with another body). The key lives as long as the history can.
-- The one script that begins with a write that Redis refuses at maxmemory, so new work waits while work in flight drains.
if redis.call('EXISTS', KEYS[1]) == 1 then return { 'DUPLICATE', ARGV[1] } end
local held = KEYS[5] and redis.call('GET', KEYS[5])
if held then
  local uid, digest = string.match(held, '^([^:]*):([^:]*)')
  if digest ~= ARGV[6] then return { 'MISMATCH', uid } end
  if uid ~= ARGV[7] then return { 'ATTACH', uid } end
end
if redis.call('XLEN', KEYS[3]) + redis.call('XLEN', KEYS[4]) >= tonumber(ARGV[5]) then return { 'BUSY', ARGV[1] } end
local now = now_ms()
local deadline = string.format('%.0f', tonumber(now) + tonumber(ARGV[3]))
local gone = string.format('%.0f', tonumber(deadline) + tonumber(ARGV[4]))
redis.call('XADD', KEYS[1], '0-1', 'ms', now, 'deadline_ms', deadline, unpack(slice(ARGV, 8, #ARGV)))
redis.call('PEXPIREAT', KEYS[1], gone)
if KEYS[5] then redis.call('SET', KEYS[5], ARGV[1] .. ':' .. ARGV[6], 'PX', gone - tonumber(now)) end
redis.call('ZADD', KEYS[2], deadline, ARGV[1])
redis.call('XADD', KEYS[3], '*', 'uid', ARGV[1], 'frontend', ARGV[2])
return { 'ACCEPTED', ARGV[1] }
