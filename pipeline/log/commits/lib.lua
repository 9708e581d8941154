-- What several commits share. It comes before every script.
--
-- At maxmemory, Redis refuses a script at its first write, if that write may take memory. Every commit but submit and import
-- begins with a write that Redis never refuses, so work in flight drains while new work waits.
local NO_PIECE = string.rep('-', 32)
local PIECE_BYTES = 168 -- about what a piece takes beside its text
local SEAL = '18446744073709551615-18446744073709551615'
local WAITING = 'waiting' -- consumer of `tokenized` for the entries that wait for an engine in the queues of their owners
local DAY_MS = 86400000
local RATES = { 'requests_per_minute', 'requests_per_day', 'tokens_per_minute', 'tokens_per_day' }
local USAGE_MS = 40 * DAY_MS

local function now_ms() -- Redis' clock, as text
  local now = redis.call('TIME')
  return string.format('%d%03d', now[1], math.floor(now[2] / 1000))
end

-- Returns the keys and the arguments of a commit by their names; step and produced have them by their places. ARGV[1] is
-- JSON: an argument is a text or a list of texts, and one without a value is missing; `keys` has the index of each key, or
-- of several. ARGV goes on with what is too long for that.
local function named()
  local arg, key = cjson.decode(ARGV[1]), {}
  for name, at in pairs(arg.keys) do
    if type(at) == 'table' then
      key[name] = {}
      for i, one in ipairs(at) do key[name][i] = KEYS[one] end
    else
      key[name] = KEYS[at]
    end
  end
  return key, arg
end

local function slice(list, first, last)
  local part = {}
  for i = first, last do part[#part + 1] = list[i] end
  return part
end

-- Returns the values of an entry by the names of its fields.
local function named_fields(entry)
  local field = {}
  for i = 1, #entry[2], 2 do field[entry[2][i]] = entry[2][i + 1] end
  return field
end

-- Returns true if the entry was appended. False: the history is sealed, is gone, or has this id from an earlier call.
local function append(history, id, fields, now)
  local reply = redis.pcall('XADD', history, 'NOMKSTREAM', id, 'ms', now, unpack(fields))
  return type(reply) == 'string'
end

-- Returns the text of a chain of pieces; nil if one is gone. *texts* is the beginning of their keys.
local function chain_text(texts, digest)
  local pieces = {}
  while digest ~= NO_PIECE do
    local piece = redis.call('GET', texts .. digest)
    if not piece then return nil end
    pieces[#pieces + 1], digest = string.sub(piece, 41), string.sub(piece, 1, 32)
  end
  for i = 1, math.floor(#pieces / 2) do pieces[i], pieces[#pieces + 1 - i] = pieces[#pieces + 1 - i], pieces[i] end
  return table.concat(pieces)
end

-- Counts a user more of a piece of a text, or fewer; returns how many it has: entries of histories, and pieces that come after it.
-- The number is in the piece, after the digest of the piece before it.
local function count_user(piece, by)
  local users = tonumber(redis.call('GETRANGE', piece, 32, 39) or '') + by
  redis.call('SETRANGE', piece, 32, string.format('%08d', users))
  return users
end

-- Keeps what a stored response shares: *pieces*, of which those that are not there are *texts*, for at least so long, and the last
-- pieces that an entry with these *fields* names. Takes it into account, with *own* bytes more.
local function keep_pieces(key, uid, pieces, texts, fields, left_ms, own)
  local all = own
  local prefix = pieces[1] and string.sub(pieces[1], 1, -33)
  for i, piece in ipairs(pieces) do
    local left = redis.call('PTTL', piece)
    if left == -2 then
      local before = string.sub(texts[i], 1, 32)
      redis.call('SET', piece, before .. '00000000' .. string.sub(texts[i], 33), 'PX', left_ms)
      if before ~= NO_PIECE then count_user(prefix .. before, 1) end
      all = all + #texts[i] + PIECE_BYTES
    elseif left < tonumber(left_ms) then
      redis.call('PEXPIRE', piece, left_ms)
    end
  end
  local bytes, names = string.match(redis.call('HMGET', key.stored_bytes, uid)[1] or '0', '^(%d+)(.*)')
  for i = 1, #fields, 2 do
    if string.sub(fields[i], -1) == '~' then
      local last = string.sub(fields[i + 1], 1, 32)
      count_user(prefix .. last, 1)
      names = names .. ' ' .. last
    end
  end
  redis.call('HSET', key.stored_bytes, uid, string.format('%.0f', bytes + own) .. names)
  redis.call('HINCRBY', key.stored_bytes, 'all', string.format('%.0f', all))
  return all
end

-- Forgets that a request is a stored response, and deletes the pieces of texts that nobody else uses. Returns how many.
local function drop_stored(key, uid)
  local told = redis.call('HMGET', key.stored_bytes, uid)[1]
  redis.call('ZREM', key.stored, uid)
  if not told then return 0 end
  redis.call('HDEL', key.stored_bytes, uid)
  local texts = string.match(key.stored, '^{[^}]*}:') .. 'text:'
  local bytes, num = tonumber(string.match(told, '^%d+')), 0
  for digest in string.gmatch(told, ' (%x+)') do
    while digest ~= NO_PIECE do
      local piece = texts .. digest
      local before = redis.call('GETRANGE', piece, 0, 31)
      if before == '' or count_user(piece, -1) > 0 then break end
      bytes, num = bytes + redis.call('STRLEN', piece) - 8 + PIECE_BYTES, num + 1
      redis.call('PEXPIRE', piece, -1)
      digest = before
    end
  end
  redis.call('HINCRBY', key.stored_bytes, 'all', string.format('%.0f', -bytes))
  return num
end

-- Returns fields with whole texts. A field `<name>@` is a beginning and then a digest, for which *text_of* returns the rest; a
-- field `<name>~` is the digest of a chain, below *texts*, and then the rest.
local function whole(fields, text_of, texts)
  local found = {}
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if string.sub(name, -1) == '@' then
      name, value = string.sub(name, 1, -2), string.sub(value, 1, -33) .. text_of(string.sub(value, -32))
    elseif string.sub(name, -1) == '~' then
      name, value = string.sub(name, 1, -2), (chain_text(texts, string.sub(value, 1, 32)) or '') .. string.sub(value, 33)
    end
    found[i], found[i + 1] = name, value
  end
  return found
end

-- Returns whether *shared* is the key of what siblings share, and is there.
local function is_shared(shared)
  return shared and redis.pcall('HMGET', shared, 'left')[1]
end

local function period_ms(rate)
  return string.sub(rate, -6) == 'minute' and 60000 or DAY_MS
end

-- Returns an owner's token buckets at a moment: name -> { how much fits in, how much is in it }.
local function buckets_at(balance, now)
  local buckets, told = {}, redis.call('HMGET', balance, 'ms', unpack(RATES))
  for i, name in ipairs(RATES) do
    local most, level = string.match(told[i + 1] or '', '^(%S+) (%S+)$')
    if most then
      level = level + (now - told[1]) * most / period_ms(name)
      buckets[name] = { tonumber(most), math.min(level, tonumber(most)) }
    end
  end
  return buckets
end

-- Keeps token buckets until they are full again, and for *least_ms* at least.
local function keep_buckets(balance, buckets, now, least_ms)
  local words, kept_ms = { 'ms', string.format('%.0f', now) }, least_ms
  for name, bucket in pairs(buckets) do
    words[#words + 1], words[#words + 2] = name, string.format('%.0f %.9f', bucket[1], bucket[2])
    kept_ms = math.max(kept_ms, (bucket[1] - bucket[2]) * period_ms(name) / bucket[1])
  end
  redis.call('HSET', balance, unpack(words))
  redis.call('PEXPIRE', balance, string.format('%.0f', kept_ms + 1))
end

-- Returns what an engine has read of a request that did not finish: tokens of its prompt, and how many of them were cached.
local function read_by_engine(history)
  for _, entry in ipairs(redis.pcall('XRANGE', history, '0-3', '0-99', 'COUNT', 8)) do
    local told = named_fields(entry)
    if told.kind == 'admitted' then return told.prompt_tokens or 0, told.cached_tokens or 0 end
  end
  return 0, 0
end

-- Counts a request that has ended for its owner; a history is sealed once, so it is counted once. `submit` has written in
-- `account:<uid>` whose it is. *fields* are those of the end. *has_begun*: an engine may have read the prompt.
local function count_usage(live, uid, history, fields, now, has_begun)
  local prefix = string.match(live, '^{[^}]*}:')
  local account = redis.call('GETDEL', prefix .. 'account:' .. uid)
  if not account then return end
  local has_prompt, has_buckets, is_used, owner, model = string.match(account, '^(%d)(%d)(%d)([^\n]*)\n(.*)$')
  local kind, n, prompt, cached = nil, 0, nil, nil
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if name == 'kind' then kind = value elseif name == 'n' then n = tonumber(value) elseif name == 'usage' then
      prompt, cached = string.match(value, '"prompt_tokens":(%d+)'), string.match(value, '"cached_tokens":(%d+)')
    end
  end
  if has_prompt == '0' or not has_begun then
    prompt, cached = 0, 0
  elseif not prompt then
    prompt, cached = read_by_engine(history)
  end
  local day = math.floor(now / DAY_MS)
  local usage = string.format('%susage:%s:%d', prefix, owner, day)
  local function count(what, number)
    number = tonumber(number or 0)
    return is_used == '1' and number > 0 and redis.call('HINCRBY', usage, what .. ' ' .. model, number)
  end
  if count('requests', 1) == 1 then
    redis.call('PEXPIRE', usage, USAGE_MS)
    redis.call('ZADD', prefix .. 'users', day, owner)
    redis.call('PEXPIRE', prefix .. 'users', USAGE_MS)
  end
  count('failed', kind == 'failed' and 1)
  count('prompt_tokens', prompt)
  count('cached_tokens', cached)
  count('output_tokens', n)
  if has_buckets == '1' then
    local balance = prefix .. 'balance:' .. owner
    local buckets = buckets_at(balance, now)
    for _, name in ipairs({ 'tokens_per_minute', 'tokens_per_day' }) do
      if buckets[name] then buckets[name][2] = buckets[name][2] - prompt - n end
    end
    if next(buckets) then keep_buckets(balance, buckets, now, redis.call('PTTL', balance)) end
  end
end

-- Returns a whole number of a field, of 12 digits at most; *other*, if it is none: anybody may have written it.
local function number_in(text, other)
  return tonumber(string.match(text or '', '^%d%d?%d?%d?%d?%d?%d?%d?%d?%d?%d?%d?$') or other)
end

-- Returns the priority of the first of a queue if it counts before other owners; else 0.
local function band_of(queue)
  local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  return first[1] and string.match(first[1], '^%S+ %d+ 1') and tonumber(first[2]) or 0
end

-- Puts an entry of `tokenized` into the queue of its owner. Who did not wait, or nothing as urgent, begins at the clock, unless
-- it was given more.
local function queue_entry(waiting, entry)
  local field = named_fields(entry)
  local owner, ms, seq = field.owner or '', string.match(entry[1], '^(%d+)-(%d+)$')
  local overtakes, weight = field.overtakes == '1' and 1 or 0, math.max(number_in(field.weight, 1), 1)
  local prefer = string.match(field.prefer or '', '^%S+$')
  local one = string.format('%s-%06d %.0f %d %s', ms, seq, number_in(field.tokens, 1), overtakes, field.uid or '')
  if prefer then one = one .. ' ' .. prefer end
  local sign = string.sub(field.priority or '', 1, 1) == '-' and -1 or 1
  local score = sign * number_in(string.gsub(field.priority or '', '^-', ''), 0)
  local queue = string.match(waiting, '^{[^}]*}:') .. 'queue:' .. owner
  local told = redis.call('HMGET', waiting, ':' .. owner, 'now')
  local count, given, may_overtake = string.match(told[1] or '0 0 1 0', '^(%d+) (%d+) %d+ (%d)$')
  local is_new = count == '0' or may_overtake == '1' and overtakes * score < band_of(queue)
  if redis.call('ZADD', queue, score, one) == 0 then return end
  if is_new then given = math.max(given, told[2] or 0) end
  local said = string.format('%.0f %.0f %.0f %d', count + 1, given, weight, math.max(may_overtake, overtakes))
  redis.call('HSET', waiting, ':' .. owner, said)
end

-- Puts new entries of `tokenized` into the queues of their owners, where they wait for `take`; take.lua says how. Returns
-- an error if there is no group: the first engine makes it.
local function enqueue(tokenized, waiting)
  local reply = redis.pcall('XREADGROUP', 'GROUP', 'generate', WAITING, 'COUNT', 1000, 'STREAMS', tokenized, '>')
  if not reply or reply.err then return reply or nil end
  for _, entry in ipairs(reply[1][2]) do queue_entry(waiting, entry) end
end

-- Says that one of several siblings has ended. What they share expires with the last of their histories. *shared* is its
-- key; nil, or a key that is not there: they share nothing.
local function sibling_ended(shared, now, retention_ms)
  if not is_shared(shared) then return end
  local last = redis.call('HMGET', shared, 'gone')[1]
  local gone = math.max(tonumber(now) + tonumber(retention_ms), tonumber(last or 0))
  redis.call('HSET', shared, 'gone', string.format('%.0f', gone))
  if redis.pcall('HINCRBY', shared, 'left', -1) == 0 or redis.call('PTTL', shared) < tonumber(retention_ms) then
    redis.call('PEXPIRE', shared, string.format('%.0f', gone - tonumber(now)))
  end
end

-- Deletes a dead letter and returns how many letters had the id. It has a new version then, for those who purge letters.
local function drop_letter(letters, versions, id, kept_ms)
  local dropped = redis.call('XDEL', letters, id)
  if dropped > 0 then
    redis.call('HINCRBY', versions, letters, 1)
    redis.call('PEXPIRE', versions, kept_ms)
  end
  return dropped
end

-- Tells the archivers that a request has ended. Without archivers there is no stream, and none is made. What is older than
-- *ended_ms*, the longest retention, is dropped, because its history is gone, and counted; 0: nothing is.
local function tell_archivers(ended, archive, uid, ended_ms, now)
  if type(redis.pcall('XADD', ended, 'NOMKSTREAM', '*', 'uid', uid)) ~= 'string' or tonumber(ended_ms) == 0 then return end
  local oldest = string.format('%.0f', math.max(tonumber(now) - tonumber(ended_ms), 0))
  local dropped = redis.call('XTRIM', ended, 'MINID', oldest)
  if dropped > 0 then redis.call('HINCRBY', archive, 'unarchived', dropped) end
end

-- Returns for how long a history is kept from its end on: *brief_ms*, if it is to be kept briefly, or *retention_ms*. A stored
-- response is kept until `retire` lets it go, after *stored_ms*; its bytes that came since its submit are counted.
local function kept_after(key, uid, history, retention_ms, stored_ms, brief_ms)
  local told = redis.call('ZSCORE', key.stored, uid) and redis.call('HMGET', key.stored_bytes, uid)[1]
  if not told then return brief_ms or retention_ms end
  redis.call('ZADD', key.stored, string.format('%.0f', tonumber(now_ms()) + tonumber(brief_ms or stored_ms)), uid)
  local came = 80 * redis.call('XLEN', history) -- about what an event of one token takes
  local bytes, names = string.match(told, '^(%d+)(.*)')
  redis.call('HSET', key.stored_bytes, uid, string.format('%.0f', bytes + came) .. names)
  redis.call('HINCRBY', key.stored_bytes, 'all', came)
  return redis.call('PTTL', history)
end

-- Seals a history. *key* has live, history, replies, control, ended, archive, stored, stored_bytes, and of a sibling shared;
-- *arg* has reply_cap, retention_ms, stored_ms, ended_ms, see tell_archivers, and perhaps brief_ms, for which a history without
-- tokens is kept.
-- Returns the moment, or false if the history was sealed before or is gone. The number of tokens is read off the history.
local function seal(key, arg, uid, fields)
  redis.call('ZREM', key.live, uid)
  local last = redis.pcall('XREVRANGE', key.history, '+', '-', 'COUNT', 1) -- another type of key has no entries
  local now = now_ms()
  fields[#fields + 1] = 'n'
  local n = last[1] and string.match(last[1][1], '^%d+') or '0'
  fields[#fields + 1] = n
  if not append(key.history, SEAL, fields, now) then return false end
  count_usage(key.live, uid, key.history, fields, now, n ~= '0' or last[1] and tonumber(string.match(last[1][1], '%d+$')) > 2)
  local kept_ms = kept_after(key, uid, key.history, arg.retention_ms, arg.stored_ms, n == '0' and arg.brief_ms)
  redis.call('PEXPIRE', key.history, kept_ms)
  sibling_ended(key.shared, now, kept_ms)
  redis.pcall('XADD', key.replies, 'NOMKSTREAM', 'MAXLEN', '~', arg.reply_cap, '*', 'uid', uid, 'ms', now, unpack(fields))
  redis.call('XADD', key.control, 'MAXLEN', '~', 1000, '*', 'uid', uid)
  tell_archivers(key.ended, key.archive, uid, arg.ended_ms, now)
  return now
end

local function as_json(entry) -- [id, name, value, ...]
  local parts = { entry[1] }
  for _, part in ipairs(entry[2]) do parts[#parts + 1] = part end
  return cjson.encode(parts)
end

local function fenced(owner_key, owner)
  return redis.call('GET', owner_key) ~= owner
end

-- Returns what a stage serves; nothing where the key is gone, or holds something else.
local function served_at(key)
  local is_json, served = pcall(cjson.decode, redis.pcall('GET', key))
  return is_json and type(served) == 'table' and served or {}
end

-- Returns whether what a worker serves fits to what the living workers of some stages serve. `Serving.difference` in
-- pipeline/serving.py has the rule.
local function fits(serving, keys)
  local mine = cjson.decode(serving)
  for _, key in ipairs(keys) do
    local served = served_at(key)
    for _, part in ipairs({ 'weights', 'tokenizer' }) do
      if mine[part] and served[part] and mine[part] ~= served[part] then return false end
    end
    if mine.context and type(served.context) == 'number' and mine.context < served.context then return false end
  end
  return true
end

-- Keeps what a stage serves for as long as the lease of one of its workers. It stays as the first of them said it.
local function keep_serving(key, serving, lease_ms)
  if next(served_at(key)) == nil then redis.call('SET', key, serving, 'PX', lease_ms) end
  if redis.call('PTTL', key) < tonumber(lease_ms) then redis.call('PEXPIRE', key, lease_ms) end
end

-- Returns what `control` has after a cursor: uids, the cursor for the next call, and the id of the last flush or ''.
local function control_after(control, cursor)
  local uids, flush = {}, ''
  for _, entry in ipairs(redis.call('XRANGE', control, '(' .. cursor, '+', 'COUNT', 1000)) do
    cursor = entry[1]
    if entry[2][1] == 'uid' then uids[#uids + 1] = entry[2][2] elseif entry[2][1] == 'flush' then flush = cursor end
  end
  return uids, cursor, flush
end
