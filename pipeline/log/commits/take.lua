-- take: give an engine requests that wait, each owner its share. Fenced, so an engine that lost its slot takes nothing.
-- While all that wait are of one line, an owner's requests of one priority, they are entries of `tokenized` that the group has
-- not read, and `waiting` has the line in `only`. When another line comes, all that wait go into the queues of their owners,
-- `queue:<owner>`, in order of priority and arrival; `only` is empty until the queues are. Which owner is next is weighted fair
-- queueing (Demers, Keshav and Shenker, SIGCOMM 1989), deficit round robin whose deficits are told from one clock. `waiting` has of
-- each owner how many wait, what it was `given` (tokens of prompts and longest answers by its weight), its weight, and whether
-- one of its requests may overtake other owners: then its priority counts before theirs. The owner that was given least is
-- next. The clock `now` is what an owner would have that had always waited; who comes begins there, so it saved nothing, and is
-- before all that come later. `but`: owners of whom nothing is taken, because some of theirs wait in this engine.
-- An entry may prefer an engine, whose cache has the beginning of its prompt. It waits in a queue, too. Among requests of one
-- owner and priority, an engine takes those that prefer it first. It takes one that prefers another engine if that engine has no
-- lease, has no room (it is in `full`), or did not take it within steal_ms. `spare`: how many requests this engine could run. Of
-- what is for others, a take looks at a bounded number: more may wait for this engine behind them, for steal_ms at most.
-- Returns the entries, the last id that was delivered, or 0-0 if any wait in queues; how many of these it looked at and left;
-- the uids that ended elsewhere, the control cursor, and the last flush or ''; or FENCED.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 'FENCED' end
local FULL_MS = 3600000
local MOST_PASSED = 8 -- owners whose requests are all for other engines
local PATIENCE = 4 -- after so many steal_ms, an entry is no longer passed over by those that prefer this engine
local prefix = string.match(key.waiting, '^{[^}]*}:')
local looks = 128 -- so many entries more are looked at
local now -- of Redis' clock
local is_free = {} -- engines whose requests others may take

-- Returns whether this engine may take an entry, whether it is no other's, and how long the entry has waited. An id may be ahead
-- of the clock, after a failover; then that is not known, and counts as long.
local function may_take(one)
  local ms, engine = string.match(one, '^(%d+)%-%d+ %d+ %d %S* (%S+)$')
  if not engine or engine == arg.slot then return true, true, 0 end
  now = now or tonumber(now_ms())
  local waited = now - ms
  if waited < 0 then waited = math.huge end
  if is_free[engine] == nil then
    is_free[engine] = redis.call('EXISTS', prefix .. 'lease:' .. engine) == 0 or redis.call('SISMEMBER', key.full, engine) == 1
  end
  return is_free[engine] or waited >= tonumber(arg.steal_ms), false, waited
end

-- Returns what this engine takes next of a queue; nil if it is to leave what it looked at to others, false if there is nothing.
local function choose(queue)
  local first = redis.call('ZRANGE', queue, 0, 0)[1]
  if not first then return false end
  local may, is_own, waited = may_take(first)
  if is_own then return first end
  local found, score
  local entries = looks > 0 and redis.call('ZRANGE', queue, 0, looks - 1, 'WITHSCORES') or {}
  for i = 1, #entries, 2 do
    if found and entries[i + 1] ~= score then break end -- what follows is less urgent
    looks = looks - 1
    may, is_own, waited = may_take(entries[i])
    if is_own or may and waited >= PATIENCE * tonumber(arg.steal_ms) then return entries[i] end
    if may and not found then found, score = entries[i], entries[i + 1] end
  end
  return found
end

-- Takes the next of an owner's queue. Returns the entry, nil if somebody else has it, and its tokens; nil alone if what there is
-- is for others; false without one.
local function next_of(queue)
  local first = choose(queue)
  if not first then return first end
  redis.call('ZREM', queue, first)
  local ms, seq, tokens = string.match(first, '^(%d+)-(%d+) (%d+) ')
  local id = string.format('%s-%d', ms, seq)
  local item = redis.call('XPENDING', key.tokenized, 'generate', id, id, 1, WAITING)[1]
  local entry = item and redis.call('XRANGE', key.tokenized, id, id)[1]
  if entry then
    redis.call('XCLAIM', key.tokenized, 'generate', arg.slot, 0, id, 'JUSTID')
  elseif item then
    redis.call('XACK', key.tokenized, 'generate', id)
  end
  return entry or nil, tonumber(tokens)
end

-- Returns the owners that wait or were given more than the clock says, and the clock.
local function read_owners()
  local told, owners, clock = redis.call('HGETALL', key.waiting), {}, 0
  local queues = prefix .. 'queue'
  for i = 1, #told, 2 do
    if told[i] == 'now' then
      clock = tonumber(told[i + 1])
    elseif told[i] ~= 'only' then
      local count, given, weight, overtakes = string.match(told[i + 1], '^(%d+) (%d+) (%d+) (%d)$')
      owners[#owners + 1] = { field = told[i], queue = queues .. told[i], count = tonumber(count), given = tonumber(given),
        weight = tonumber(weight), overtakes = overtakes == '1' }
    end
  end
  return owners, clock
end

-- Returns the owner whose turn it is, and the weight of all that wait and whose priority counts no less.
local function next_owner(owners, but)
  local best, weights = nil, 0
  for _, one in ipairs(owners) do
    one.band = one.count > 0 and (one.band or one.overtakes and band_of(one.queue) or 0)
    local is_first = not best or one.band and (one.band < best.band or one.band == best.band and (one.given < best.given
      or one.given == best.given and (one.count < best.count or one.count == best.count and one.field < best.field)))
    if one.band and is_first and not but[one.field] then best = one end
  end
  for _, one in ipairs(owners) do
    if best and one.band and one.band <= best.band then weights = weights + one.weight end
  end
  return best, weights
end

local function take_turns(most, but)
  local taken, left, passed, num_passed = {}, 0, 0, 0
  local owners, clock = read_owners()
  while #taken < most and num_passed < MOST_PASSED do
    local one, weights = next_owner(owners, but)
    if not one then break end
    local entry, tokens = next_of(one.queue)
    if entry == nil and not tokens then
      but[one.field], passed, num_passed = true, passed + one.count, num_passed + 1
    else
      one.count, one.band, one.is_changed = entry == false and 0 or one.count - 1, nil, true
    end
    if entry then
      taken[#taken + 1], clock = entry, math.max(clock, one.given) + math.floor(1000 * tokens / weights)
      one.given = one.given + math.max(math.floor(1000 * tokens / one.weight), 1)
    end
  end
  for _, one in ipairs(owners) do left = left + one.count end
  if left == 0 then
    redis.call('DEL', key.waiting) -- all are served
    for _, item in ipairs(redis.call('XPENDING', key.tokenized, 'generate', '-', '+', 1000, WAITING)) do
      local entry = redis.call('XRANGE', key.tokenized, item[1], item[1])[1] -- its queue was lost
      redis.call('HSET', key.waiting, 'only', '')
      if entry then queue_entry(key.waiting, entry) else redis.call('XACK', key.tokenized, 'generate', item[1]) end
      left = left + 1
    end
    return taken, left, passed
  end
  for _, one in ipairs(owners) do
    if one.count == 0 and one.given <= clock then
      redis.call('HDEL', key.waiting, one.field)
    elseif one.is_changed then
      local told = string.format('%.0f %.0f %d %s', one.count, one.given, one.weight, one.overtakes and '1' or '0')
      redis.call('HSET', key.waiting, one.field, told)
    end
  end
  redis.call('HSET', key.waiting, 'now', string.format('%.0f', clock))
  return taken, left, passed
end

local most, taken, left, passed, but = tonumber(arg.max_entries), {}, 0, 0, {}
for _, owner in ipairs(arg.but or {}) do but[':' .. owner] = true end
local only = redis.call('HGET', key.waiting, 'only')
if only == '' and most > 0 then
  local refused = enqueue(key.tokenized, key.waiting)
  if refused then return refused end
  taken, left, passed = take_turns(most, but)
elseif only == '' then
  left = 1
elseif most > 0 and not but[':' .. string.match(only or '\n0\n0', '^(.*)\n%-?%d+\n%d$')] then
  local reply = redis.call('XREADGROUP', 'GROUP', 'generate', arg.slot, 'COUNT', most, 'STREAMS', key.tokenized, '>')
  if reply then taken = reply[1][2] end
end
if #taken >= tonumber(arg.spare) then
  if redis.call('SADD', key.full, arg.slot) == 1 then redis.call('PEXPIRE', key.full, FULL_MS) end
elseif most > 0 then
  redis.call('SREM', key.full, arg.slot)
end
local delivered = '0-0'
if left == 0 then
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', key.tokenized)) do -- without a stream this is an error, which has no parts
    if group[2] == 'generate' then delivered = group[8] end
  end
end
return { taken, delivered, passed, control_after(key.control, arg.control_cursor) }
