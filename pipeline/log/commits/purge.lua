-- purge: copy the next entries of a stream without some, and put the copy in the place of the stream when it has all.
-- XDEL alone leaves an entry in the memory and the files of Redis for as long as some of its neighbours are there.
-- KEYS stream, copy, versions
-- ARGV the id up to which the copy goes ('': begin it), the id up to which it is to go, ms for which the copy and the
--      version are kept, the ids to leave out...
-- Returns
--   DONE  nothing is left of what was left out
--   MORE  the stream goes on; nothing has changed yet
--   GONE  the copy has expired, or somebody else has meanwhile purged the stream or dropped an entry: begin again
-- Others may meanwhile append to the stream and delete its oldest entries. Who deletes others counts that in versions.
local begins, mark = ARGV[1] == '', '0-1' -- the mark is an entry of the copy: the version of the stream when it was begun
redis.call('PEXPIRE', KEYS[2], ARGV[3]) -- Redis never refuses it, so not the rest
local version = redis.call('HMGET', KEYS[3], KEYS[1])[1] or '0'
if begins then
  redis.call('XADD', KEYS[2], mark, 'version', version)
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
else
  local marked = redis.call('XRANGE', KEYS[2], mark, mark)[1]
  if not marked or marked[2][2] ~= version then
    redis.call('PEXPIRE', KEYS[2], -1)
    return 'GONE'
  end
end
local left_out = {}
for i = 4, #ARGV do left_out[ARGV[i]] = true end
local cursor = begins and '-' or '(' .. ARGV[1]
while true do
  local entries = redis.call('XRANGE', KEYS[1], cursor, ARGV[2], 'COUNT', 100)
  for _, entry in ipairs(entries) do
    if not left_out[entry[1]] then redis.call('XADD', KEYS[2], entry[1], unpack(entry[2])) end
    cursor = '(' .. entry[1]
  end
  if #entries < 100 then break end
end
if redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', 1)[1] then return 'MORE' end
-- The beginning of the stream may have been deleted since it was copied.
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if first then redis.call('XTRIM', KEYS[2], 'MINID', first[1]) end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last then
  -- The next entry gets a later id than the last one had, even if that was left out.
  if type(redis.pcall('XADD', KEYS[2], last[1], 'last', '')) == 'string' then redis.call('XDEL', KEYS[2], last[1]) end
  redis.call('XDEL', KEYS[2], mark)
  local ttl_ms = redis.call('PTTL', KEYS[1])
  redis.call('PEXPIRE', KEYS[1], -1) -- before the copy: the server needs memory for two of them, not for three
  redis.call('COPY', KEYS[2], KEYS[1])
  if ttl_ms < 0 then redis.call('PERSIST', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ttl_ms) end
  redis.call('HINCRBY', KEYS[3], KEYS[1], 1)
  redis.call('PEXPIRE', KEYS[3], ARGV[3])
end
redis.call('PEXPIRE', KEYS[2], -1)
return 'DONE'
