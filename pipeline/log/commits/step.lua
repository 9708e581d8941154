-- step: append steps of an engine, all or none, and consume the `tokenized` entries of the requests that ended in them.
-- KEYS owner, lease, steps, tokenized, control
-- ARGV owner, lease_ms, control_cursor, number of entries, entries..., (step id, number of fields, fields...)*
-- The ids ascend. Returns the length of `steps`, the id of the newest entry of `tokenized` or 0-0, the moment, the uids that
-- ended elsewhere, the control cursor, and the last flush or ''; or FENCED; or BEHIND: somebody else wrote an entry with an id that
-- is not smaller than these, and it is still there. If the last id of `steps` is that of the last step, they are there
-- already (a retry); XACK and XDEL are idempotent.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
local first = 5 + tonumber(ARGV[4])

-- Appends all steps. Returns the error of the first, if Redis refuses that, or nil; and the id of the last step.
local function append_all()
  local at, now, refused, last = first, now_ms(), nil, nil
  while at <= #ARGV do
    local count = tonumber(ARGV[at + 1])
    if not refused then
      local added = redis.pcall('XADD', KEYS[3], ARGV[at], 'ms', now, unpack(ARGV, at + 2, at + 1 + count))
      if type(added) == 'table' then refused = added end
    end
    last = ARGV[at]
    at = at + 2 + count
  end
  return refused, last
end

-- Returns the last id of `steps`, which may be of an entry that is gone.
local function last_id()
  local info = redis.call('XINFO', 'STREAM', KEYS[3])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end

redis.call('PEXPIRE', KEYS[2], ARGV[2])
local refused, last = append_all()
local is_of_ids = refused and (string.find(refused.err, 'equal or smaller') or string.find(refused.err, 'last possible ID'))
if refused and not is_of_ids then return refused end
if refused and last_id() ~= last then
  if redis.call('XLEN', KEYS[3]) > 0 then return 'BEHIND' end
  redis.call('DEL', KEYS[3]) -- Redis forgets the last id only with the stream
  redis.call('XGROUP', 'CREATE', KEYS[3], 'detokenize', '0', 'MKSTREAM')
  append_all()
end
for i = 5, first - 1 do
  redis.call('XACK', KEYS[4], 'generate', ARGV[i])
  redis.call('XDEL', KEYS[4], ARGV[i])
end
local newest = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
return { redis.call('XLEN', KEYS[3]), newest and newest[1] or '0-0', now_ms(), control_after(KEYS[5], ARGV[3]) }
