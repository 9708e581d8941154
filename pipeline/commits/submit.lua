-- submit: begin a history and hand the request to the tokenizers; under an idempotency key, once; under a quota, if that
-- is not used up.
-- KEYS history, live, submitted, tokenized, with a quota: running, limit of the first minute, of the second, of the third;
--      with an idempotency key: idempotency
-- ARGV uid, frontend, timeout_ms, retention_ms, max_queued, digest of the body, the uid that the key is taken from or '',
--      requests per minute, concurrent requests (0: no such limit), number of the first minute ('': no quota), fields...
-- Returns the outcome, whose history it is about, and a number: ACCEPTED, DUPLICATE (a retry that had got through), BUSY;
-- with a key also ATTACH (that request has it) or MISMATCH (so, but with another body); with a quota also TOO_FAST (and
-- how many ms the minute still has), TOO_MANY, or MINUTE: Redis has that one, which is none of the three. The idempotency
-- key lives as long as the history can. What is not accepted changes nothing, and is not counted.
-- The one script that begins with a write that Redis refuses at maxmemory, so new work waits while work in flight drains.
local uid, quota = ARGV[1], ARGV[10] ~= ''
local once = KEYS[quota and 9 or 5]
if redis.call('EXISTS', KEYS[1]) == 1 then return { 'DUPLICATE', uid, 0 } end
local held = once and redis.call('GET', once)
if held then
  local other, digest = string.match(held, '^([^:]*):([^:]*)')
  if digest ~= ARGV[6] then return { 'MISMATCH', other, 0 } end
  if other ~= ARGV[7] then return { 'ATTACH', other, 0 } end
end
local now = now_ms()

local per_minute, at_once = quota and tonumber(ARGV[8]) or 0, quota and tonumber(ARGV[9]) or 0
local limit, ended = nil, {}
if per_minute > 0 then
  local minute = math.floor(tonumber(now) / 60000)
  local place = minute - tonumber(ARGV[10])
  if place < 0 or place > 2 then return { 'MINUTE', uid, minute } end
  limit = KEYS[6 + place]
  if tonumber(redis.call('GET', limit) or 0) >= per_minute then
    return { 'TOO_FAST', uid, 60000 - tonumber(now) % 60000 }
  end
end
if at_once > 0 and redis.call('SCARD', KEYS[5]) >= at_once then -- only then it matters which of them have ended
  local uids = redis.call('SMEMBERS', KEYS[5])
  for first = 1, #uids, 1000 do -- Lua cannot unpack many more
    local part = slice(uids, first, math.min(first + 999, #uids))
    for i, deadline in ipairs(redis.call('ZMSCORE', KEYS[2], unpack(part))) do
      if not deadline then ended[#ended + 1] = part[i] end
    end
  end
  if #uids - #ended >= at_once then return { 'TOO_MANY', uid, 0 } end
end
if redis.call('XLEN', KEYS[3]) + redis.call('XLEN', KEYS[4]) >= tonumber(ARGV[5]) then return { 'BUSY', uid, 0 } end

local deadline = string.format('%.0f', tonumber(now) + tonumber(ARGV[3]))
local gone = string.format('%.0f', tonumber(deadline) + tonumber(ARGV[4]))
redis.call('XADD', KEYS[1], '0-1', 'ms', now, 'deadline_ms', deadline, unpack(slice(ARGV, 11, #ARGV)))
redis.call('PEXPIREAT', KEYS[1], gone)
if once then redis.call('SET', once, uid .. ':' .. ARGV[6], 'PX', gone - tonumber(now)) end
redis.call('ZADD', KEYS[2], deadline, uid)
redis.call('XADD', KEYS[3], '*', 'uid', uid, 'frontend', ARGV[2])
if limit then
  redis.call('INCR', limit)
  redis.call('PEXPIRE', limit, 120000)
end
if at_once > 0 then
  for _, other in ipairs(ended) do redis.call('SREM', KEYS[5], other) end
  redis.call('SADD', KEYS[5], uid)
  if redis.call('PTTL', KEYS[5]) < gone - tonumber(now) then redis.call('PEXPIREAT', KEYS[5], gone) end
end
return { 'ACCEPTED', uid, 0 }
