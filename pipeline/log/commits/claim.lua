-- claim: take over pending entries of another consumer. Never XAUTOCLAIM, which takes from living consumers. With `guest`,
-- the owner under which this worker is a guest in the other slot, that owner must still be the slot's: its former worker
-- can write no more. Without, takes nothing from a slot that somebody holds.
-- Returns the entries, or FENCED. The first write is XCLAIM or XACK.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 'FENCED' end
if not arg.guest then
  if redis.call('EXISTS', key.other_lease) == 1 then return {} end
elseif fenced(key.other_owner, arg.guest) then
  return {}
end
local ids = {}
for _, item in ipairs(redis.call('XPENDING', key.stream, arg.group, '-', '+', arg.max_entries, arg.other)) do
  ids[#ids + 1] = item[1]
end
if #ids == 0 then return {} end
ids[#ids + 1] = 'JUSTID' -- which does not count as a delivery: `retry` counts
redis.call('XCLAIM', key.stream, arg.group, arg.slot, 0, unpack(ids))
ids[#ids] = nil
local entries = {}
for _, id in ipairs(ids) do
  local found = redis.call('XRANGE', key.stream, id, id)
  if found[1] then entries[#entries + 1] = found[1] else redis.call('XACK', key.stream, arg.group, id) end
end
return entries
