-- claim: take over pending entries of a consumer whose slot nobody holds. Never XAUTOCLAIM: it takes from the living.
-- KEYS my owner, the other's lease, stream   ARGV owner, group, me, the other, max_entries
-- Returns the entries, or FENCED. The write that Redis never refuses is XCLAIM.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
if redis.call('EXISTS', KEYS[2]) == 1 then return {} end
local ids = {}
for _, item in ipairs(redis.call('XPENDING', KEYS[3], ARGV[2], '-', '+', ARGV[5], ARGV[4])) do ids[#ids + 1] = item[1] end
if #ids == 0 then return {} end
redis.call('XCLAIM', KEYS[3], ARGV[2], ARGV[3], 0, unpack(ids))
local entries = {}
for _, id in ipairs(ids) do
  local found = redis.call('XRANGE', KEYS[3], id, id)
  if found[1] then entries[#entries + 1] = found[1] else redis.call('XACK', KEYS[3], ARGV[2], id) end
end
return entries
