-- retire: stored responses go, in the order of their submits: those whose time is over; and, while all take more than most_bytes,
-- the oldest, which from now on are kept as other histories. With a history go the pieces of its texts that no later one uses. At
-- most 100 of each kind; the next call goes on. Returns how many went before their time.
local key, arg = named()
local now = tonumber(now_ms())
local prefix = string.match(key.stored, '^{[^}]*}:')

-- Lets the pieces of a chain go after so many ms, up to the first that a later response uses, and so all before it. Returns their
-- size.
local function drop_pieces(digest, uid, left_ms)
  local bytes = 0
  while digest ~= NO_PIECE do
    local piece = prefix .. 'text:' .. digest
    local head = redis.call('GETRANGE', piece, 0, 63)
    if string.sub(head, 33) ~= string.format('%-32.32s', uid) then return bytes end
    bytes = bytes + redis.call('STRLEN', piece) + 160
    digest = string.sub(head, 1, 32)
    redis.call('PEXPIRE', piece, left_ms)
  end
  return bytes
end

local function retire(uid, left_ms)
  local history = prefix .. 'request:' .. uid
  local bytes = tonumber(redis.call('HGET', key.stored_bytes, uid) or 0)
  for _, entry in ipairs(redis.call('XRANGE', history, '-', '0-2', 'COUNT', 2)) do
    for i = 1, #entry[2], 2 do
      if string.sub(entry[2][i], -1) == '~' then
        bytes = bytes + drop_pieces(string.sub(entry[2][i + 1], 1, 32), uid, left_ms)
      end
    end
  end
  redis.call('PEXPIRE', history, left_ms)
  redis.call('ZREM', key.stored, uid)
  redis.call('HDEL', key.stored_bytes, uid)
  redis.call('HINCRBY', key.stored_bytes, 'all', string.format('%.0f', -bytes))
end

local over = string.format('%.0f', now - tonumber(arg.stored_ms))
for _, uid in ipairs(redis.call('ZRANGEBYSCORE', key.stored, '-inf', over, 'LIMIT', 0, 100)) do retire(uid, 0) end
local early = 0
while early < 100 and tonumber(redis.call('HGET', key.stored_bytes, 'all') or 0) > tonumber(arg.most_bytes) do
  local uid = redis.call('ZRANGE', key.stored, 0, 0)[1]
  if not uid or redis.call('ZSCORE', key.live, uid) then break end
  local last = redis.call('XREVRANGE', prefix .. 'request:' .. uid, '+', '-', 'COUNT', 1)[1]
  local ended = last and tonumber(last[2][2]) or 0
  retire(uid, string.format('%.0f', math.max(ended + tonumber(arg.retention_ms) - now, 0)))
  early = early + 1
end
if redis.call('ZCARD', key.stored) == 0 then redis.call('DEL', key.stored_bytes) end
return early
