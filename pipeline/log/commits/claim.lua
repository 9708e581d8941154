-- claim: take over pending entries of another consumer. Never XAUTOCLAIM, which takes from living consumers.
-- KEYS my owner, the other's lease, the other's owner, stream
-- ARGV owner, group, my slot, the other slot, max_entries, the owner under which I am a guest in the other slot, or ''
-- Returns the entries, or FENCED. Without that owner, takes nothing from a slot that somebody holds. With it, the owner must
-- still be the slot's, so that its former worker can write no more. The first write is XCLAIM or XACK.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
if ARGV[6] == '' then
  if redis.call('EXISTS', KEYS[2]) == 1 then return {} end
elseif fenced(KEYS[3], ARGV[6]) then
  return {}
end
local ids = {}
for _, item in ipairs(redis.call('XPENDING', KEYS[4], ARGV[2], '-', '+', ARGV[5], ARGV[4])) do ids[#ids + 1] = item[1] end
if #ids == 0 then return {} end
ids[#ids + 1] = 'JUSTID' -- which does not count as a delivery: `retry` counts
redis.call('XCLAIM', KEYS[4], ARGV[2], ARGV[3], 0, unpack(ids))
ids[#ids] = nil
local entries = {}
for _, id in ipairs(ids) do
  local found = redis.call('XRANGE', KEYS[4], id, id)
  if found[1] then entries[#entries + 1] = found[1] else redis.call('XACK', KEYS[4], ARGV[2], id) end
end
return entries
