-- step: append one step of an engine and consume the `tokenized` entries of the requests that ended in it.
-- KEYS owner, lease, steps, tokenized, control
-- ARGV owner, lease_ms, step_id, control_cursor, number of entries, entries..., fields...
-- Returns the length of `steps`, the id of the newest entry of `tokenized` or 0-0, the uids that ended elsewhere, the
-- control cursor, and the last flush or ''; or FENCED; or BEHIND: somebody else wrote an entry with a larger id, and it
-- is still there. Redis refuses the id of a step that is there already (a retry); XACK and XDEL are idempotent.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
local first = 6 + tonumber(ARGV[5])

local function add()
  return redis.pcall('XADD', KEYS[3], ARGV[3], 'ms', now_ms(), unpack(slice(ARGV, first, #ARGV)))
end

-- Says whether the last id of `steps`, which may be of an entry that is gone, is larger than that of this step.
local function is_behind()
  local info, last = redis.call('XINFO', 'STREAM', KEYS[3]), ''
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
  local function padded(id)
    return (string.gsub(id, '%d+', function(part) return string.rep('0', 20 - #part) .. part end))
  end
  return padded(last) > padded(ARGV[3])
end

redis.call('PEXPIRE', KEYS[2], ARGV[2])
local added = add()
if type(added) == 'table' and is_behind() then
  if redis.call('XLEN', KEYS[3]) > 0 then return 'BEHIND' end
  redis.call('DEL', KEYS[3]) -- Redis forgets the last id only with the stream
  redis.call('XGROUP', 'CREATE', KEYS[3], 'detokenize', '0', 'MKSTREAM')
  added = add()
end
if type(added) == 'table' and not string.find(added.err, 'equal or smaller', 1, true) then return added end
for i = 6, first - 1 do
  redis.call('XACK', KEYS[4], 'generate', ARGV[i])
  redis.call('XDEL', KEYS[4], ARGV[i])
end
local newest = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
return { redis.call('XLEN', KEYS[3]), newest and newest[1] or '0-0', control_after(KEYS[5], ARGV[4]) }
