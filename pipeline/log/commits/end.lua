-- end: ends a request outside a step, whoever ends it. The first seal wins; Redis refuses the second.
-- KEYS live, history, replies, control, ended, archive, submitted, dead; of a sibling: shared
-- ARGV uid, retention_ms, reply_cap, entry of `submitted` to consume or '', dead_cap, copy_bytes,
--      retention_ms where no token was produced, age at which entries of `ended` are dropped or 0,
--      number of parts of a dead letter (0: no letter), those parts..., fields...
-- Returns OK, or ENDED: the request had ended before, or its history is gone. Then no letter is written.
local function text_of(digest)
  return KEYS[9] and redis.pcall('HMGET', KEYS[9], digest)[1] or ''
end

local function as_whole_json(entry)
  return as_json({ entry[1], whole(entry[2], text_of) })
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
  local fields = has_first and {} or whole(first[2], text_of)
  for i = 1, #fields, 2 do
    if fields[i] == 'labels' and #fields[i + 1] <= 4096 then labels = fields[i + 1] end
  end
  return '[' .. table.concat(kept, ',') .. ']', redis.call('XLEN', history) - #kept, labels
end

if ARGV[4] ~= '' then
  redis.call('XACK', KEYS[7], 'tokenize', ARGV[4])
  redis.call('XDEL', KEYS[7], ARGV[4])
end
local num_parts = tonumber(ARGV[9])
local ended_at = seal(ARGV[1], ARGV[2], ARGV[7], ARGV[3], slice(ARGV, 10 + num_parts, #ARGV), KEYS[9], ARGV[8])
if not ended_at then return 'ENDED' end
if num_parts > 0 then
  local letter = slice(ARGV, 10, 9 + num_parts)
  local copy, left_out, labels = copy_of(KEYS[2], tonumber(ARGV[6]))
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
  redis.call('XADD', KEYS[8], 'MAXLEN', '~', ARGV[5], '*', 'uid', ARGV[1], 'ms', ended_at, unpack(letter))
end
return 'OK'
