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
