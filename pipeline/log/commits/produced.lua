-- produced: consume steps, all or none, and write what follows from them to the histories and the replies, and the steps to the
-- journal. Or, of a single step: write what follows from a part of it, and count its tries up to a number instead.
-- KEYS owner, steps, live, control, ended, archive, journal, stored, stored_bytes, then the histories, what siblings share, and the replies
-- ARGV owner, reply_cap, retention_ms, stored_ms, ended_ms, journal_bytes, journal_cap, tries or 0 to consume, number of steps,
--      (entry, when it was made, number of words for the journal, words..., number of tokens, (id, token, text)*, of the
--      first histories)*, number of replies, (key index, payload)*,
--      (key index, id, uid, 1 if the engine must be told, ms until a sealed history is gone or 0: as others, key index of what siblings
--      share or 0, when its tokens were made, number of fields, fields...)*
-- When something was made is in ms of Redis' clock; 0: unknown, or no tokens. Tokens say how long before the commit that was.
-- Returns OK, LOST (one of them was consumed before, or the part was written before) or FENCED. A row that Redis refuses (the history is sealed, gone, or has
-- the id) does not stop the others. Nothing that happens to the journal stops the steps.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end

local function size_of(fields)
  local size = 32 -- about what an entry takes besides its fields
  for _, text in ipairs(fields) do size = size + #text end
  return size
end

-- Appends steps to the journal and deletes the oldest ones: those beyond the byte limit, and those that are older than
-- the journal may get. Fields are first `bytes`, how many were written up to the step, then `ms`, its moment.
-- At maxmemory Redis refuses the append, as the first write of this script. Then the journal goes.
local function keep(key, steps, now)
  local last = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if last.err then return end
  local bytes, is_kept = last[1] and tonumber(last[1][2][2]) or 0, false
  for _, step in ipairs(steps) do
    local fields = slice(ARGV, step[2] + 1, step[3] - 1)
    if #fields > 0 then
      local total = bytes + size_of(fields)
      local said = string.format('%.0f', total)
      local added = redis.pcall('XADD', key, 'MAXLEN', '~', ARGV[7], step[1], 'bytes', said, unpack(fields))
      local is_full = type(added) == 'table' and string.find(added.err, 'OOM', 1, true)
      if is_full then redis.call('DEL', key) end
      if is_full then return end
      if type(added) ~= 'table' then bytes, is_kept = total, true end
    end
  end
  if not is_kept then return end
  redis.call('PEXPIRE', key, ARGV[3])
  local oldest_ms = tonumber(now) - tonumber(ARGV[3])
  while true do
    local first = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
    if not first then return end
    local kept = bytes - (tonumber(first[2][2]) or 0) + size_of(slice(first[2], 3, #first[2]))
    if kept <= tonumber(ARGV[6]) and (tonumber(first[2][4]) or 0) >= oldest_ms then return end
    redis.call('XDEL', key, first[1])
  end
end

-- Returns the fields that say how long before *now* something was made: none, if that is unknown.
local function age(made, now)
  if made == '0' then return {} end
  return { 'age_ms', string.format('%.0f', math.max(tonumber(now) - tonumber(made), 0)) }
end

local tries, num_steps, at = tonumber(ARGV[8]), tonumber(ARGV[9]), 10
-- Of a step: entry, index of the number of its words for the journal, of the number of its tokens, when it was made.
local steps, ids = {}, {}
local is_journalled = false
for i = 1, num_steps do
  local words = at + 2
  local tokens = words + tonumber(ARGV[words]) + 1
  steps[i], ids[i] = { ARGV[at], words, tokens, ARGV[at + 1] }, ARGV[at]
  is_journalled = is_journalled or tokens > words + 1
  at = tokens + 3 * tonumber(ARGV[tokens]) + 1
end
if num_steps > 1 then -- an engine is never so many steps ahead of its detokenizer that others come between these
  local found, are_pending = redis.pcall('XPENDING', KEYS[2], 'detokenize', ids[1], ids[num_steps], 10000), {}
  for _, entry in ipairs(found) do are_pending[entry[1]] = true end
  for _, id in ipairs(ids) do
    if not are_pending[id] then return 'LOST' end
  end
end
local now = now_ms()
if is_journalled then keep(KEYS[7], steps, now) end
if tries > 0 then
  local item = redis.call('XPENDING', KEYS[2], 'detokenize', ids[1], ids[1], 1)[1]
  if not item or item[4] >= tries then return 'LOST' end
  redis.call('XCLAIM', KEYS[2], 'detokenize', item[2], 0, ids[1], 'RETRYCOUNT', tries, 'JUSTID')
else
  if redis.call('XACK', KEYS[2], 'detokenize', unpack(ids)) == 0 then return 'LOST' end
  redis.call('XDEL', KEYS[2], unpack(ids))
end
local replies = at + 1
at = replies + 2 * tonumber(ARGV[at])
local writes = at
local keys, args, try, unpack = KEYS, ARGV, redis.pcall, unpack -- locals, because this is the largest commit, and globals are slow
local history = 9
for _, step in ipairs(steps) do
  local id, token, age_ms = step[1], step[3] + 1, age(step[4], now)
  for _ = 1, tonumber(args[step[3]]) do
    history = history + 1
    try('XADD', keys[history], 'NOMKSTREAM', args[token], 'ms', now, 'kind', 'tokens', 'tokens', args[token + 1],
      'text', args[token + 2], 'step', id, unpack(age_ms))
    token = token + 3
  end
end
while at <= #ARGV do
  local history, id, uid, count = KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 7])
  local fields = slice(ARGV, at + 8, at + 7 + count)
  for _, word in ipairs(age(ARGV[at + 6], now)) do fields[#fields + 1] = word end
  if id == SEAL then redis.call('ZREM', KEYS[3], uid) end
  if append(history, id, fields, now) and id == SEAL then
    count_usage(KEYS[3], uid, history, fields, now, true)
    local brief_ms = ARGV[at + 4] ~= '0' and ARGV[at + 4]
    local kept_ms = kept_after({ stored = KEYS[8], stored_bytes = KEYS[9] }, uid, history, ARGV[3], ARGV[4], brief_ms)
    redis.call('PEXPIRE', history, kept_ms)
    sibling_ended(KEYS[tonumber(ARGV[at + 5])], now, kept_ms)
    if ARGV[at + 3] == '1' then redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'uid', uid) end
    tell_archivers(KEYS[5], KEYS[6], uid, ARGV[5], now)
  end
  at = at + 8 + count
end
for i = replies, writes - 1, 2 do
  redis.pcall('XADD', KEYS[tonumber(ARGV[i])], 'NOMKSTREAM', 'MAXLEN', '~', ARGV[2], '*', 'events', ARGV[i + 1])
end
return 'OK'
