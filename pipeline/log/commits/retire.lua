-- retire: removes stored responses whose time is over; and, while all take more than most_bytes, those that have ended longer ago
-- than other histories are kept, the oldest first. With a history go the pieces of its texts that nobody else uses. One call looks
-- at 100 of each kind, and deletes about 5000 pieces; the next call goes on. Returns how many went before their time.
local key, arg = named()
local now = tonumber(now_ms())
local prefix = string.match(key.stored, '^{[^}]*}:')
local pieces, early = 0, 0

local function retire(uid)
  local base = string.match(uid, '^(.*)%.')
  local shared = base and prefix .. 'shared:' .. base -- the siblings go about now, too
  if shared and redis.call('PTTL', shared) > tonumber(arg.retention_ms) then
    redis.call('PEXPIRE', shared, arg.retention_ms)
  end
  pieces = pieces + drop_stored(key, uid)
  redis.call('PEXPIRE', prefix .. 'request:' .. uid, -1)
end

for _, uid in ipairs(redis.call('ZRANGEBYSCORE', key.stored, '-inf', now, 'LIMIT', 0, 100)) do
  if pieces < 5000 then retire(uid) end
end
for _, uid in ipairs(redis.call('ZRANGE', key.stored, 0, 99)) do
  local all = tonumber(redis.call('HMGET', key.stored_bytes, 'all')[1] or 0)
  if all <= tonumber(arg.most_bytes) or pieces >= 5000 then break end
  local last = redis.pcall('XREVRANGE', prefix .. 'request:' .. uid, '+', '-', 'COUNT', 1)[1]
  local ended = last and last[1] == SEAL and tonumber(last[2][2]) or now
  if now - ended >= tonumber(arg.retention_ms) and not redis.call('ZSCORE', key.live, uid) then
    retire(uid)
    early = early + 1
  end
end
if redis.call('ZCARD', key.stored) == 0 then redis.call('PEXPIRE', key.stored_bytes, -1) end
return early
