-- What several commits share. It comes before every script.
--
-- At maxmemory, Redis refuses a script at its first write, if that write may take memory. Every commit but submit begins
-- with a write that Redis never refuses, so work in flight drains while new work waits.
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

-- Returns true if the entry was appended. False: the history is sealed, is gone, or has this id from an earlier call.
local function append(history, id, fields, now)
  local reply = redis.pcall('XADD', history, 'NOMKSTREAM', id, 'ms', now, unpack(fields))
  return type(reply) == 'string'
end

-- Seals a history. KEYS begin with live, history, replies, control. Returns the moment, or false if the history was sealed
-- before or is gone. The number of tokens is read off the history, which is kept for the second time if there is none.
local function seal(uid, retention_ms, tokenless_ms, reply_cap, fields)
  redis.call('ZREM', KEYS[1], uid)
  local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
  local now = now_ms()
  fields[#fields + 1] = 'n'
  local n = last[1] and string.match(last[1][1], '^%d+') or '0'
  fields[#fields + 1] = n
  if not append(KEYS[2], SEAL, fields, now) then return false end
  redis.call('PEXPIRE', KEYS[2], n == '0' and tokenless_ms or retention_ms)
  redis.pcall('XADD', KEYS[3], 'NOMKSTREAM', 'MAXLEN', '~', reply_cap, '*', 'uid', uid, 'ms', now, unpack(fields))
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'uid', uid)
  return now
end

local function fenced(owner_key, owner)
  return redis.call('GET', owner_key) ~= owner
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
