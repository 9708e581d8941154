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

-- The uids in `control` after a cursor, and the cursor to go on from.
local function control_after(control, cursor)
  local uids = {}
  for _, entry in ipairs(redis.call('XRANGE', control, '(' .. cursor, '+', 'COUNT', 1000)) do
    uids[#uids + 1] = entry[2][2]
    cursor = entry[1]
  end
  return uids, cursor
end
