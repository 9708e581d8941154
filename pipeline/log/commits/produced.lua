-- produced: consume a step and write what follows from it to the histories and the replies, and the step to the journal.
-- KEYS owner, steps, live, control, ended, archive, journal, then the histories, what siblings share, and the replies
-- ARGV owner, entry, reply_cap, retention_ms, journal_bytes, journal_cap, number of words for the journal, words...,
--      number of replies, (key index, payload)*, number of tokens, (id, token, text)*, of the first histories,
--      (key index, id, uid, 1 if the engine must be told, ms until a sealed history is gone, key index of what siblings
--      share or 0, number of fields, fields...)*
-- Returns OK, LOST (it was consumed before) or FENCED. A row that Redis refuses (the history is sealed, gone, or has the id)
-- does not stop the others. Nothing that happens to the journal stops the step.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end

local function size_of(fields)
  local size = 32 -- about what an entry takes besides its fields
  for _, text in ipairs(fields) do size = size + #text end
  return size
end

-- Appends the step to the journal and deletes the oldest steps: those beyond the byte limit, and those that are older than
-- the journal may get. Fields are first `bytes`, how many were written up to the step, then `ms`, its moment.
-- At maxmemory Redis refuses the append, as the first write of this script. Then the journal goes.
local function keep(key, id, fields)
  local last = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if last.err then return end
  local bytes = size_of(fields) + (last[1] and tonumber(last[1][2][2]) or 0)
  local total = string.format('%.0f', bytes)
  local added = redis.pcall('XADD', key, 'MAXLEN', '~', ARGV[6], id, 'bytes', total, unpack(fields))
  if type(added) == 'table' then
    if string.find(added.err, 'OOM', 1, true) then redis.call('DEL', key) end
    return
  end
  redis.call('PEXPIRE', key, ARGV[4])
  local oldest_ms = tonumber(now_ms()) - tonumber(ARGV[4])
  while true do
    local first = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
    if not first then return end
    local kept = bytes - (tonumber(first[2][2]) or 0) + size_of(slice(first[2], 3, #first[2]))
    if kept <= tonumber(ARGV[5]) and (tonumber(first[2][4]) or 0) >= oldest_ms then return end
    redis.call('XDEL', key, first[1])
  end
end

local words = tonumber(ARGV[7])
local at = 8 + words -- of the number of replies
if words > 0 then keep(KEYS[7], ARGV[2], slice(ARGV, 8, 7 + words)) end
if redis.call('XACK', KEYS[2], 'detokenize', ARGV[2]) == 0 then return 'LOST' end
redis.call('XDEL', KEYS[2], ARGV[2])
local now = now_ms()
local replies = at + 1
at = replies + 2 * tonumber(ARGV[at])
local tokens = at -- of their number
local keys, args, try = KEYS, ARGV, redis.pcall -- locals, because this is the largest commit, and globals are slow
for i = 8, 7 + tonumber(args[at]) do
  try('XADD', keys[i], 'NOMKSTREAM', args[at + 1], 'ms', now, 'kind', 'tokens', 'tokens', args[at + 2],
    'text', args[at + 3], 'step', args[2])
  at = at + 3
end
at = at + 1
while at <= #ARGV do
  local history, id, uid, count = KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 6])
  if id == SEAL then redis.call('ZREM', KEYS[3], uid) end
  if append(history, id, slice(ARGV, at + 7, at + 6 + count), now) and id == SEAL then
    redis.call('PEXPIRE', history, ARGV[at + 4])
    sibling_ended(KEYS[tonumber(ARGV[at + 5])], now, ARGV[at + 4])
    if ARGV[at + 3] == '1' then redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'uid', uid) end
    tell_archivers(KEYS[5], KEYS[6], uid, ARGV[4], now)
  end
  at = at + 7 + count
end
for i = replies, tokens - 1, 2 do
  redis.pcall('XADD', KEYS[tonumber(ARGV[i])], 'NOMKSTREAM', 'MAXLEN', '~', ARGV[3], '*', 'events', ARGV[i + 1])
end
return 'OK'
