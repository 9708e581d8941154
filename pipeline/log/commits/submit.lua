-- submit: begin the histories of one or several requests and hand them to the tokenizers, all of them or none. Under an
-- idempotency key, once. Under a quota, only within it. Sent again from a dead letter, only if that is there; it is dropped.
-- The quota is rates, which say how much fits into the owner's token buckets, at_once, queued and log_bytes; 0: no such limit.
-- key.spent is what the API key has submitted, to which these requests add num_bytes. accounts: what `count_usage` is to know of
-- each request; empty: it is not counted. ARGV goes on with
-- (digest, text)* of what siblings share, num_texts of them, with the pieces of texts that key.pieces are, and with the fields
-- of each request, num_fields of them. Of a stored response, num_bytes has none of the pieces.
-- Returns an outcome, the base uid that it is about, and a number:
--   ACCEPTED
--   DUPLICATE  the requests are there: an earlier try had got through
--   BUSY       not all of them may wait beside those that wait already
--   ATTACH     that request has the idempotency key
--   MISMATCH   so it is, but with another body
--   GONE       there is no such dead letter: somebody else has sent it again, or dropped it
--   TOO_FAST   a token bucket is empty; the number is for how many ms. Returns its name, too
--   TOO_MANY_WAIT  as many requests of the API key wait for an engine as may
--   TOO_MANY   as many requests of the API key run as may
--   TOO_MANY_IN_BACKGROUND  as many requests of their owner run in the background as may
--   TOO_MUCH   the share of the API key is used up; the number is how many ms it is so. Returns how much is used, too
-- again: the log had accepted the requests and lost them. Then no limit refuses them, and another request keeps the key that it has
-- taken meanwhile.
-- With acks, WAIT comes after it on this connection, and waits for what the connection has written last. So a request that is
-- there already is written to, too.
-- A refusal changes nothing and is not counted. An accepted submit counts once for its rate, and each of its requests as
-- one that runs. Siblings are accepted where one request would be: more than may run at once could never be accepted
-- otherwise. The idempotency key lives as long as the histories can, and so does what siblings share until they end.
-- Redis refuses this script at maxmemory. Once it has begun, Redis refuses none of its writes.

local key, arg = named()

-- Returns which of these requests have ended.
local function ended_of(uids)
  local ended = {}
  for first = 1, #uids, 1000 do -- Lua cannot unpack many more
    local part = slice(uids, first, math.min(first + 999, #uids))
    for i, deadline in ipairs(redis.call('ZMSCORE', key.live, unpack(part))) do
      if not deadline then ended[#ended + 1] = part[i] end
    end
  end
  return ended
end

-- Returns whether more than so many requests wait: they live, and no engine has taken them. Entries of both streams stay
-- for a while when their request has ended, so the numbers say it only where they are far from the limit.
local function more_wait_than(most)
  local living = redis.call('ZCARD', key.live)
  if most < 0 or living <= most then return most < 0 end
  local group = redis.pcall('XPENDING', key.tokenized, 'generate') -- an error where there is no group
  local engines, num_taken = {}, 0
  for _, consumer in ipairs(not group.err and group[4] or {}) do
    if consumer[1] ~= WAITING then
      engines[#engines + 1], num_taken = consumer, num_taken + tonumber(consumer[2])
    end
  end
  if redis.call('XLEN', key.submitted) + redis.call('XLEN', key.tokenized) - num_taken <= most then return false end
  if living - num_taken > most then return true end
  local taken = {}
  for _, engine in ipairs(engines) do
    for _, item in ipairs(redis.call('XPENDING', key.tokenized, 'generate', '-', '+', engine[2], engine[1])) do
      local entry = redis.call('XRANGE', key.tokenized, item[1], item[1])[1]
      if entry then taken[#taken + 1] = entry[2][2] end
    end
  end
  return living - (#taken - #ended_of(taken)) > most
end

-- Returns whether as many requests of the owner wait, and live, as may.
local function too_many_wait(most)
  local num_there = redis.call('XLEN', key.submitted) + redis.call('XLEN', key.tokenized)
  if num_there < most then return false end
  local uids, unread = {}, '-'
  for i, one in ipairs(redis.call('ZRANGE', key.queue, 0, -1)) do uids[i] = string.match(one, '^%S+ %d+ %d (%S*)') end
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', key.tokenized)) do
    if group[2] == 'generate' then unread = '(' .. group[8] end
  end
  for _, entry in ipairs(redis.call('XRANGE', key.tokenized, unread, '+')) do
    local field = named_fields(entry)
    if field.owner == arg.owner then uids[#uids + 1] = field.uid end
  end
  for _, entry in ipairs(redis.call('XRANGE', key.submitted, '-', '+')) do
    local account = redis.call('GET', string.match(key.live, '^{[^}]*}:') .. 'account:' .. entry[2][2])
    if account and string.match(account, '^%d%d%d([^\n]*)') == arg.owner then uids[#uids + 1] = entry[2][2] end
  end
  return #uids - #ended_of(uids) >= most
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

-- Sets again when a key expires.
local function write_again(expiring)
  local left_ms = arg.acks and redis.call('PTTL', expiring) or 0
  if left_ms > 0 then redis.call('PEXPIRE', expiring, left_ms) end
end

local uid, count = arg.uid, #arg.uids
for _, history in ipairs(key.histories) do -- the first may be gone while others are there
  if redis.call('EXISTS', history) == 1 then
    write_again(history)
    return { 'DUPLICATE', uid, 0 }
  end
end
if arg.letter and #redis.call('XRANGE', key.dead, arg.letter, arg.letter) == 0 then return { 'GONE', uid, 0 } end
local held = arg.digest and redis.call('GET', key.idempotency)
if held then
  local other, digest = string.match(held, '^([^:]*):([^:]*)')
  if arg.again then
    if other ~= uid then arg.digest = nil end
  elseif digest ~= arg.digest then return { 'MISMATCH', other, 0 }
  elseif other ~= arg.instead_of then
    write_again(key.idempotency)
    return { 'ATTACH', other, 0 }
  end
end
local now = now_ms()

local at_once, buckets = tonumber(arg.at_once), {}
if arg.rates then
  local kept, wait_ms, slowest = buckets_at(key.balance, tonumber(now)), 0, ''
  for name, most in pairs(cjson.decode(arg.rates)) do
    local level = kept[name] and math.min(kept[name][2], most) or most
    local lacks = (string.match(name, '^requests') and 1 or 0) - level
    local lasts_ms = lacks > 1e-6 and lacks * period_ms(name) / most or 0
    if lasts_ms > wait_ms then wait_ms, slowest = lasts_ms, name end
    buckets[name] = { most, level }
  end
  if wait_ms > 0 and not arg.again then return { 'TOO_FAST', uid, math.ceil(wait_ms), slowest } end
end
local counts = {} -- sets of running requests, and how many there may be
if at_once > 0 then counts[1] = { key.running, at_once, 'TOO_MANY', {} } end
if key.background then counts[#counts + 1] = { key.background, tonumber(arg.max_background), 'TOO_MANY_IN_BACKGROUND', {} } end
for _, count in ipairs(counts) do
  if redis.call('SCARD', count[1]) >= count[2] then -- only now it matters which of them have ended
    local uids = redis.call('SMEMBERS', count[1])
    count[4] = ended_of(uids)
    if #uids - #count[4] >= count[2] and not arg.again then return { count[3], uid, 0 } end
  end
end
local share, part_ms, kept_ms, parts = tonumber(arg.log_bytes), nil, nil, nil
if share > 0 then
  part_ms = math.max(math.ceil(tonumber(arg.share_ms) / 16), 1)
  kept_ms = tonumber(arg.share_ms) + part_ms -- so long after its begin, all of a part is older than the retention
  local used
  parts, used = spent(key.spent, tonumber(now), kept_ms)
  if used >= share and not arg.again then return { 'TOO_MUCH', uid, free_in(parts, used, share, tonumber(now), kept_ms), used } end
end
if arg.queued and not arg.again and too_many_wait(tonumber(arg.queued)) then return { 'TOO_MANY_WAIT', uid, 0 } end
if not arg.again and more_wait_than(tonumber(arg.max_queued) - count) then return { 'BUSY', uid, 0 } end

local deadline = string.format('%.0f', tonumber(now) + tonumber(arg.timeout_ms))
local gone = string.format('%.0f', tonumber(deadline) + tonumber(arg.retention_ms))
local due = string.format('%.0f', tonumber(deadline) + tonumber(arg.stored_ms)) -- then `retire` lets a stored response go
if key.stored then gone = string.format('%.0f', tonumber(due) + 3600000) end
local pieces_at = 2 + 2 * tonumber(arg.num_texts)
local at = pieces_at + #key.pieces
local num_bytes = tonumber(arg.num_bytes)
if count > 1 then
  redis.call('HSET', key.shared, 'left', count)
  for i = 2, pieces_at - 1, 2 do redis.call('HSET', key.shared, ARGV[i], ARGV[i + 1]) end
  redis.call('PEXPIREAT', key.shared, gone)
end
local texts, left_ms, stored_bytes = slice(ARGV, pieces_at, at - 1), gone - tonumber(now), 0
for i, history in ipairs(key.histories) do
  local last = at - 1 + tonumber(arg.num_fields[i])
  if key.stored then
    local own = math.floor(num_bytes / count)
    redis.call('ZADD', key.stored, due, arg.uids[i])
    stored_bytes = stored_bytes + keep_pieces(key, arg.uids[i], key.pieces, texts, slice(ARGV, at, last), left_ms, own)
  end
  redis.call('XADD', history, '0-1', 'ms', now, 'deadline_ms', deadline, unpack(ARGV, at, last))
  redis.call('PEXPIREAT', history, gone)
  redis.call('ZADD', key.live, deadline, arg.uids[i])
  if arg.accounts[i] ~= '' then redis.call('SET', key.accounts[i], arg.accounts[i], 'PX', left_ms) end
  redis.call('XADD', key.submitted, '*', 'uid', arg.uids[i], 'frontend', arg.frontends[i])
  at = last + 1
end
if arg.digest then redis.call('SET', key.idempotency, uid .. ':' .. arg.digest, 'PX', gone - tonumber(now)) end
if arg.letter then drop_letter(key.dead, key.versions, arg.letter, arg.version_ms) end
if arg.rates then
  for _, name in ipairs({ 'requests_per_minute', 'requests_per_day' }) do
    if buckets[name] then buckets[name][2] = buckets[name][2] - 1 end
  end
  keep_buckets(key.balance, buckets, tonumber(now), gone - tonumber(now))
end
for _, count in ipairs(counts) do
  for _, other in ipairs(count[4]) do redis.call('SREM', count[1], other) end
  for _, sibling in ipairs(arg.uids) do redis.call('SADD', count[1], sibling) end
  if redis.call('PTTL', count[1]) < gone - tonumber(now) then redis.call('PEXPIREAT', count[1], gone) end
end
if key.stored then num_bytes = stored_bytes end
if share > 0 then
  local begin, text = math.floor(tonumber(now) / part_ms) * part_ms, {}
  if #parts == 0 or parts[#parts][1] ~= begin then parts[#parts + 1] = { begin, 0 } end
  parts[#parts][2] = parts[#parts][2] + num_bytes
  for i, part in ipairs(parts) do text[i] = string.format('%.0f:%.0f', part[1], part[2]) end
  redis.call('SET', key.spent, table.concat(text, ' '), 'PX', kept_ms)
end
return { 'ACCEPTED', uid, 0 }
