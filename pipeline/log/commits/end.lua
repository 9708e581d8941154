-- end: ends a request outside a step, whoever ends it. The first seal wins; Redis refuses the second. Consumes `entry` of
-- `submitted`, if there is one. ARGV goes on with the parts of a dead letter, num_parts of them (0: there is none), and the
-- fields of the end. With the letter goes a copy of the history, of copy_bytes at most.
-- Returns OK, or ENDED: the request had ended before, its history is gone, or the entry is. Then no letter is written.
local key, arg = named()

local texts = string.match(key.history, '^{[^}]*}:') .. 'text:'

local function text_of(digest)
  return key.shared and redis.pcall('HMGET', key.shared, digest)[1] or ''
end

local function as_whole_json(entry)
  return as_json({ entry[1], whole(entry[2], text_of, texts) })
end

-- Returns a history in JSON, of at most so many bytes: its first entry, and as many of the last ones as fit. Returns also
-- how many entries were left out, and the labels of the first entry if this is one of them; nil if they are long.
local function copy_of(history, bytes)
  local first = redis.call('XRANGE', history, '-', '+', 'COUNT', 1)[1]
  local beginning, kept, room = as_whole_json(first), {}, bytes - 2
  local has_first = #beginning + 1 <= room
  if has_first then room = room - #beginning - 1 end
  for _, entry in ipairs(redis.call('XREVRANGE', history, '+', '-', 'COUNT', 1000)) do -- more would never fit
    local text = as_whole_json(entry)
    if entry[1] == first[1] or #text + 1 > room then break end
    room = room - #text - 1
    table.insert(kept, 1, text)
  end
  if has_first then table.insert(kept, 1, beginning) end
  local labels
  local fields = has_first and {} or whole(first[2], text_of, texts)
  for i = 1, #fields, 2 do
    if fields[i] == 'labels' and #fields[i + 1] <= 4096 then labels = fields[i + 1] end
  end
  return '[' .. table.concat(kept, ',') .. ']', redis.call('XLEN', history) - #kept, labels
end

if arg.entry then
  -- An entry that is not pending was consumed by another worker, or is of a Redis that has lost all.
  if redis.call('XACK', key.submitted, 'tokenize', arg.entry) == 0 then return 'ENDED' end
  redis.call('XDEL', key.submitted, arg.entry)
end
local num_parts = tonumber(arg.num_parts)
local ended_at = seal(key, arg, arg.uid, slice(ARGV, 2 + num_parts, #ARGV))
if not ended_at then return 'ENDED' end
if num_parts > 0 then
  local letter = slice(ARGV, 2, 1 + num_parts)
  local copy, left_out, labels = copy_of(key.history, tonumber(arg.copy_bytes))
  letter[#letter + 1] = 'history'
  letter[#letter + 1] = copy
  if labels then
    letter[#letter + 1] = 'labels'
    letter[#letter + 1] = labels
  end
  if left_out > 0 then
    letter[#letter + 1] = 'history_cut'
    letter[#letter + 1] = left_out
  end
  redis.call('XADD', key.dead, 'MAXLEN', '~', arg.dead_cap, '*', 'uid', arg.uid, 'ms', ended_at, unpack(letter))
end
return 'OK'
