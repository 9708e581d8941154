-- submit: begin the histories of requests that come together, one or several, and hand them to the tokenizers, all or
-- none; under an idempotency key, once; under a quota, if that is not used up.
-- KEYS live, submitted, tokenized, the histories, with a quota: running, limit of the first minute, of the second, of the
--      third; with an idempotency key: idempotency
-- ARGV base uid, number of requests, timeout_ms, retention_ms, max_queued, digest of the body, the uid that the key is
--      taken from or '', requests per minute, concurrent requests (0: no such limit), number of the first minute ('': no
--      quota), (uid, frontend, number of fields, fields...)*
-- Returns the outcome, the base uid that it is about, and a number: ACCEPTED, DUPLICATE (a retry that had got through),
-- BUSY; with a key also ATTACH (that one has it) or MISMATCH (so, but with another body); with a quota also TOO_FAST (and
-- how many ms the minute still has), TOO_MANY, or MINUTE: Redis has that one, which is none of the three. The idempotency
-- key lives as long as the histories can. What is not accepted changes nothing, and is not counted. What is accepted
-- counts once for its minute, and each of its requests as one that runs; where there is place for one there is for all,
-- as several may be more than may ever run at once.
-- The one script that begins with a write that Redis refuses at maxmemory, so new work waits while work in flight drains;
-- once it has begun, none of its writes is refused.
local uid, count, quota = ARGV[1], tonumber(ARGV[2]), ARGV[10] ~= ''
local running, once = quota and KEYS[4 + count], KEYS[count + (quota and 8 or 4)]
for i = 4, 3 + count do -- the first may have ended and be gone before the others are
  if redis.call('EXISTS', KEYS[i]) == 1 then return { 'DUPLICATE', uid, 0 } end
end
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
  limit = KEYS[5 + count + place]
  if tonumber(redis.call('GET', limit) or 0) >= per_minute then
    return { 'TOO_FAST', uid, 60000 - tonumber(now) % 60000 }
  end
end
if at_once > 0 and redis.call('SCARD', running) >= at_once then -- only then it matters which of them have ended
  local uids = redis.call('SMEMBERS', running)
  for first = 1, #uids, 1000 do -- Lua cannot unpack many more
    local part = slice(uids, first, math.min(first + 999, #uids))
    for i, deadline in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(part))) do
      if not deadline then ended[#ended + 1] = part[i] end
    end
  end
  if #uids - #ended >= at_once then return { 'TOO_MANY', uid, 0 } end
end
if redis.call('XLEN', KEYS[2]) + redis.call('XLEN', KEYS[3]) + count > tonumber(ARGV[5]) then
  return { 'BUSY', uid, 0 }
end

local deadline = string.format('%.0f', tonumber(now) + tonumber(ARGV[3]))
local gone = string.format('%.0f', tonumber(deadline) + tonumber(ARGV[4]))
local uids, at = {}, 11
for i = 1, count do
  local history, last = KEYS[3 + i], at + 2 + tonumber(ARGV[at + 2])
  uids[i] = ARGV[at]
  redis.call('XADD', history, '0-1', 'ms', now, 'deadline_ms', deadline, unpack(ARGV, at + 3, last))
  redis.call('PEXPIREAT', history, gone)
  redis.call('ZADD', KEYS[1], deadline, uids[i])
  redis.call('XADD', KEYS[2], '*', 'uid', uids[i], 'frontend', ARGV[at + 1])
  at = last + 1
end
if once then redis.call('SET', once, uid .. ':' .. ARGV[6], 'PX', gone - tonumber(now)) end
if limit then
  redis.call('INCR', limit)
  redis.call('PEXPIRE', limit, 120000)
end
if at_once > 0 then
  for _, other in ipairs(ended) do redis.call('SREM', running, other) end
  for _, sibling in ipairs(uids) do redis.call('SADD', running, sibling) end
  if redis.call('PTTL', running) < gone - tonumber(now) then redis.call('PEXPIREAT', running, gone) end
end
return { 'ACCEPTED', uid, 0 }
