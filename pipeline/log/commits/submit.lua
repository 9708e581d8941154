-- submit: begin the histories of one or several requests and hand them to the tokenizers, all of them or none. Under an
-- idempotency key, once. Under a quota, only within it. Sent again from a dead letter, only if that is there; it is dropped.
-- KEYS live, submitted, tokenized, the histories; of siblings: shared;
--      with a quota: running, the limits of three minutes, and its bytes; with an idempotency key: idempotency;
--      from a dead letter: dead, versions
-- ARGV base uid, number of requests, timeout_ms, retention_ms, max_queued, digest of the body, the uid that may lose the
--      key or '', requests per minute, concurrent requests (0: no such limit), number of the first minute ('': no quota),
--      bytes within the retention (0: no such limit), how many bytes these requests count,
--      number of shared texts, id of the dead letter or '', ms for which its version is kept, (digest, text)*,
--      (uid, frontend, number of fields, fields...)*
-- Returns an outcome, the base uid that it is about, and a number:
--   ACCEPTED
--   DUPLICATE  the requests are there: an earlier try had got through
--   BUSY       not all of them may wait beside those that wait already
--   ATTACH     that request has the idempotency key
--   MISMATCH   so it is, but with another body
--   GONE       there is no such dead letter: somebody else has sent it again, or dropped it
--   TOO_FAST   the quota of this minute is used up; the number is how many ms the minute still lasts
--   TOO_MANY   as many requests of the API key run as may
--   TOO_MUCH   the share of the API key is used up; the number is how many ms it is so. Returns how much is used, too
--   MINUTE     Redis' clock is in none of the three minutes; the number is the one it is in
-- A refusal changes nothing and is not counted. An accepted submit counts once for its minute, and each of its requests as
-- one that runs. Siblings are accepted where one request would be: more than may run at once could never be accepted
-- otherwise. The idempotency key lives as long as the histories can, and so does what siblings share until they end.
-- Redis refuses this script at maxmemory. Once it has begun, Redis refuses none of its writes.

-- Returns which of these requests have ended.
local function ended_of(uids)
  local ended = {}
  for first = 1, #uids, 1000 do -- Lua cannot unpack many more
    local part = slice(uids, first, math.min(first + 999, #uids))
    for i, deadline in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(part))) do
      if not deadline then ended[#ended + 1] = part[i] end
    end
  end
  return ended
end

-- Returns whether more than so many requests wait: they live, and no engine has taken them. Entries of both streams stay
-- for a while when their request has ended, so the numbers say it only where they are far from the limit.
local function more_wait_than(most)
  local living = redis.call('ZCARD', KEYS[1])
  if most < 0 or living <= most then return most < 0 end
  local group = redis.pcall('XPENDING', KEYS[3], 'generate') -- an error where there is no group
  local num_taken = group.err and 0 or group[1]
  if redis.call('XLEN', KEYS[2]) + redis.call('XLEN', KEYS[3]) - num_taken <= most then return false end
  if living - num_taken > most then return true end
  local taken = {}
  for i, entry in ipairs(redis.call('XRANGE', KEYS[3], '-', '+', 'COUNT', num_taken)) do taken[i] = entry[2][2] end
  return living - (#taken - #ended_of(taken)) > most
end

-- Returns what an API key has submitted within the retention: {begin, bytes} of each sixteenth of it, and the sum.
local function spent(key, now, kept_ms)
  local parts, used = {}, 0
  for begin, bytes in string.gmatch(redis.call('GET', key) or '', '(%d+):(%d+)') do
    if tonumber(begin) + kept_ms > now then
      parts[#parts + 1] = { tonumber(begin), tonumber(bytes) }
      used = used + tonumber(bytes)
    end
  end
  return parts, used
end

-- Returns after how many ms an API key has used less than its share, of which it has used all.
local function free_in(parts, used, share, now, kept_ms)
  for _, part in ipairs(parts) do
    used = used - part[2]
    if used < share then return part[1] + kept_ms - now end
  end
end

local uid, count, quota = ARGV[1], tonumber(ARGV[2]), ARGV[10] ~= ''
local keys = 3 + count + (count > 1 and 1 or 0) -- those before the quota
local running, once = quota and KEYS[keys + 1], ARGV[6] ~= '' and KEYS[keys + (quota and 6 or 1)]
local letter, letters, versions = ARGV[14], KEYS[#KEYS - 1], KEYS[#KEYS] -- the keys are these if there is a letter
for i = 4, 3 + count do -- the first may be gone while others are there
  if redis.call('EXISTS', KEYS[i]) == 1 then return { 'DUPLICATE', uid, 0 } end
end
if letter ~= '' and #redis.call('XRANGE', letters, letter, letter) == 0 then return { 'GONE', uid, 0 } end
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
  limit = KEYS[keys + 2 + place]
  if tonumber(redis.call('GET', limit) or 0) >= per_minute then
    return { 'TOO_FAST', uid, 60000 - tonumber(now) % 60000 }
  end
end
if at_once > 0 and redis.call('SCARD', running) >= at_once then -- only now it matters which of them have ended
  local uids = redis.call('SMEMBERS', running)
  ended = ended_of(uids)
  if #uids - #ended >= at_once then return { 'TOO_MANY', uid, 0 } end
end
local share, part_ms, kept_ms, parts = tonumber(ARGV[11]), nil, nil, nil
if share > 0 then
  part_ms = math.max(math.ceil(tonumber(ARGV[4]) / 16), 1)
  kept_ms = tonumber(ARGV[4]) + part_ms -- so long after its begin, all of a part is older than the retention
  local used
  parts, used = spent(KEYS[keys + 5], tonumber(now), kept_ms)
  if used >= share then return { 'TOO_MUCH', uid, free_in(parts, used, share, tonumber(now), kept_ms), used } end
end
if more_wait_than(tonumber(ARGV[5]) - count) then return { 'BUSY', uid, 0 } end

local deadline = string.format('%.0f', tonumber(now) + tonumber(ARGV[3]))
local gone = string.format('%.0f', tonumber(deadline) + tonumber(ARGV[4]))
local uids, at = {}, 16 + 2 * tonumber(ARGV[13])
if count > 1 then
  local shared = KEYS[4 + count]
  redis.call('HSET', shared, 'left', count)
  for i = 16, at - 1, 2 do redis.call('HSET', shared, ARGV[i], ARGV[i + 1]) end
  redis.call('PEXPIREAT', shared, gone)
end
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
if letter ~= '' then drop_letter(letters, versions, letter, ARGV[15]) end
if limit then
  redis.call('INCR', limit)
  redis.call('PEXPIRE', limit, 120000)
end
if at_once > 0 then
  for _, other in ipairs(ended) do redis.call('SREM', running, other) end
  for _, sibling in ipairs(uids) do redis.call('SADD', running, sibling) end
  if redis.call('PTTL', running) < gone - tonumber(now) then redis.call('PEXPIREAT', running, gone) end
end
if share > 0 then
  local begin, text = math.floor(tonumber(now) / part_ms) * part_ms, {}
  if #parts == 0 or parts[#parts][1] ~= begin then parts[#parts + 1] = { begin, 0 } end
  parts[#parts][2] = parts[#parts][2] + tonumber(ARGV[12])
  for i, part in ipairs(parts) do text[i] = string.format('%.0f:%.0f', part[1], part[2]) end
  redis.call('SET', KEYS[keys + 5], table.concat(text, ' '), 'PX', kept_ms)
end
return { 'ACCEPTED', uid, 0 }
