-- step: append one step of an engine and consume the `tokenized` entries of the requests that ended in it.
-- KEYS owner, lease, steps, tokenized, control
-- ARGV owner, lease_ms, step_id, control_cursor, number of entries, entries..., fields...
-- Returns the length of `steps`, the id of the newest entry of `tokenized` or 0-0, the uids that ended elsewhere, the
-- control cursor, and the last flush or ''; or FENCED. Redis refuses the id of a step that is there already (a retry);
-- XACK and XDEL are idempotent.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
local first = 6 + tonumber(ARGV[5])
local added = redis.pcall('XADD', KEYS[3], ARGV[3], 'ms', now_ms(), unpack(slice(ARGV, first, #ARGV)))
if type(added) == 'table' and not string.find(added.err, 'equal or smaller', 1, true) then return added end
for i = 6, first - 1 do
  redis.call('XACK', KEYS[4], 'generate', ARGV[i])
  redis.call('XDEL', KEYS[4], ARGV[i])
end
local newest = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
return { redis.call('XLEN', KEYS[3]), newest and newest[1] or '0-0', control_after(KEYS[5], ARGV[4]) }
