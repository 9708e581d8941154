-- purge: copy the next entries of a stream without some, and put the copy in the place of the stream when it has all.
-- XDEL alone leaves an entry in the memory and the files of Redis for as long as some of its neighbours are there.
-- The copy goes up to the id `from` (none: begin it) and is to go up to the id `to`. ARGV goes on with the ids to leave out.
-- Returns
--   DONE  nothing is left of what was left out
--   MORE  the stream goes on; nothing has changed yet
--   GONE  the copy has expired, or somebody else has meanwhile purged the stream or dropped an entry: begin again
-- Others may meanwhile append to the stream and delete its oldest entries. Who deletes others counts that in versions.
local key, arg = named()
local begins, mark = not arg.from, '0-1' -- the mark is an entry of the copy: the version of the stream when it was begun
redis.call('PEXPIRE', key.copy, arg.copy_ms) -- Redis never refuses it, so not the rest
local version = redis.call('HMGET', key.versions, key.stream)[1] or '0'
if begins then
  redis.call('XADD', key.copy, mark, 'version', version)
  redis.call('PEXPIRE', key.copy, arg.copy_ms)
else
  local marked = redis.call('XRANGE', key.copy, mark, mark)[1]
  if not marked or marked[2][2] ~= version then
    redis.call('PEXPIRE', key.copy, -1)
    return 'GONE'
  end
end
local left_out = {}
for i = 2, #ARGV do left_out[ARGV[i]] = true end
local cursor = begins and '-' or '(' .. arg.from
while true do
  local entries = redis.call('XRANGE', key.stream, cursor, arg.to, 'COUNT', 100)
  for _, entry in ipairs(entries) do
    if not left_out[entry[1]] then redis.call('XADD', key.copy, entry[1], unpack(entry[2])) end
    cursor = '(' .. entry[1]
  end
  if #entries < 100 then break end
end
if redis.call('XRANGE', key.stream, '(' .. arg.to, '+', 'COUNT', 1)[1] then return 'MORE' end
-- The beginning of the stream may have been deleted since it was copied.
local first = redis.call('XRANGE', key.stream, '-', '+', 'COUNT', 1)[1]
if first then redis.call('XTRIM', key.copy, 'MINID', first[1]) end
local last = redis.call('XREVRANGE', key.stream, '+', '-', 'COUNT', 1)[1]
if last then
  -- The next entry gets a later id than the last one had, even if that was left out.
  if type(redis.pcall('XADD', key.copy, last[1], 'last', '')) == 'string' then redis.call('XDEL', key.copy, last[1]) end
  redis.call('XDEL', key.copy, mark)
  local ttl_ms = redis.call('PTTL', key.stream)
  redis.call('PEXPIRE', key.stream, -1) -- before the copy: the server needs memory for two of them, not for three
  redis.call('COPY', key.copy, key.stream)
  if ttl_ms < 0 then redis.call('PERSIST', key.stream) else redis.call('PEXPIRE', key.stream, ttl_ms) end
  redis.call('HINCRBY', key.versions, key.stream, 1)
  redis.call('PEXPIRE', key.versions, arg.copy_ms)
end
redis.call('PEXPIRE', key.copy, -1)
return 'DONE'
