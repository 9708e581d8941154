-- end: ends a request outside a step, whoever ends it. The first seal wins; Redis refuses the second.
-- KEYS live, history, replies, control, submitted, dead; of a sibling: shared
-- ARGV uid, retention_ms, reply_cap, entry of `submitted` to consume or '', dead_cap, copy_bytes,
--      retention_ms where no token was produced, number of parts of a dead letter (0: no letter), those parts..., fields...
-- Returns OK, or ENDED: the request had ended before, or its history is gone. Then no letter is written.
local function text_of(digest)
  return KEYS[7] and redis.pcall('HMGET', KEYS[7], digest)[1] or ''
end

local function as_whole_json(entry)
  return as_json({ entry[1], whole(entry[2], text_of) })
end

-- Returns a history in JSON, of at most so many bytes: its first entry, and as many of the last ones as fit. Returns also
-- how many entries were left out.
local function copy_of(history, bytes)
  local first = redis.call('XRANGE', history, '-', '+', 'COUNT', 1)[1]
  local whole, kept, room = as_whole_json(first), {}, bytes - 2
  local has_first = #whole + 1 <= room
  if has_first then room = room - #whole - 1 end
  for _, entry in ipairs(redis.call('XREVRANGE', history, '+', '-', 'COUNT', 1000)) do -- more would never fit
    local text = as_whole_json(entry)
    if entry[1] == first[1] or #text + 1 > room then break end
    room = room - #text - 1
    table.insert(kept, 1, text)
  end
  if has_first then table.insert(kept, 1, whole) end
  return '[' .. table.concat(kept, ',') .. ']', redis.call('XLEN', history) - #kept
end

if ARGV[4] ~= '' then
  redis.call('XACK', KEYS[5], 'tokenize', ARGV[4])
  redis.call('XDEL', KEYS[5], ARGV[4])
end
local num_parts = tonumber(ARGV[8])
local ended_ms = seal(ARGV[1], ARGV[2], ARGV[7], ARGV[3], slice(ARGV, 9 + num_parts, #ARGV), KEYS[7])
if not ended_ms then return 'ENDED' end
if num_parts > 0 then
  local letter = slice(ARGV, 9, 8 + num_parts)
  local copy, left_out = copy_of(KEYS[2], tonumber(ARGV[6]))
  letter[#letter + 1] = 'history'
  letter[#letter + 1] = copy
  if left_out > 0 then
    letter[#letter + 1] = 'history_cut'
    letter[#letter + 1] = left_out
  end
  redis.call('XADD', KEYS[6], 'MAXLEN', '~', ARGV[5], '*', 'uid', ARGV[1], 'ms', ended_ms, unpack(letter))
end
return 'OK'
