-- Put before every script: what several commits share.
local SEAL = '18446744073709551615-18446744073709551615'

local function now_ms() -- Redis' clock, as text
  local now = redis.call('TIME')
  return string.format('%d%03d', now[1], math.floor(now[2] / 1000))
end

local function slice(list, first, last)
  local part = {}
  for i = first, last do part[#part + 1] = list[i] end
  return part
end

-- True when the append took place. False when the history is sealed, gone, or has this id: then it was done before.
local function append(history, id, fields, now)
  local reply = redis.pcall('XADD', history, 'NOMKSTREAM', id, 'ms', now, unpack(fields))
  return type(reply) == 'string'
end

-- The end of a history, whoever says it: KEYS begin with live, history, replies, control. Returns the moment, or false when
-- it had ended before, or is gone. The number of tokens is read off the history. Begins with a write that Redis never
-- refuses.
local function seal(uid, retention_ms, reply_cap, fields)
  redis.call('ZREM', KEYS[1], uid)
  local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
  local now = now_ms()
  fields[#fields + 1] = 'n'
  fields[#fields + 1] = last[1] and string.match(last[1][1], '^%d+') or '0'
  if not append(KEYS[2], SEAL, fields, now) then return false end
  redis.call('PEXPIRE', KEYS[2], retention_ms)
  redis.pcall('XADD', KEYS[3], 'NOMKSTREAM', 'MAXLEN', '~', reply_cap, '*', 'uid', uid, 'ms', now, unpack(fields))
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'uid', uid)
  return now
end

local function fenced(owner_key, owner)
  return redis.call('GET', owner_key) ~= owner
end

-- What `control` has after a cursor: uids, the cursor to go on from, the id of the last flush or ''.
local function control_after(control, cursor)
  local uids, flush = {}, ''
  for _, entry in ipairs(redis.call('XRANGE', control, '(' .. cursor, '+', 'COUNT', 1000)) do
    cursor = entry[1]
    if entry[2][1] == 'uid' then uids[#uids + 1] = entry[2][2] elseif entry[2][1] == 'flush' then flush = cursor end
  end
  return uids, cursor, flush
end
