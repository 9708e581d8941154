-- bury: consume an entry that cannot be read, whatever it holds, keep it as a dead letter, and end the requests that it
-- is about: `uids`, with their histories, replies and shared texts. Only `owner` may, if there is one. ARGV goes on with
-- the parts of the letter, num_parts of them, and the fields of the end.
-- Returns the uids that had not ended before; or LOST: the entry was consumed before; or FENCED.
local key, arg = named()
if arg.owner and fenced(key.owner, arg.owner) then return 'FENCED' end
if redis.call('XACK', key.stream, arg.group, arg.entry) == 0 then return 'LOST' end
local entry = redis.call('XRANGE', key.stream, arg.entry, arg.entry)[1]
if not entry then return 'LOST' end
redis.call('XDEL', key.stream, arg.entry)
local last_part = 1 + tonumber(arg.num_parts)
local letter = slice(ARGV, 2, last_part)
redis.call('XADD', key.dead, 'MAXLEN', '~', arg.dead_cap, '*', 'ms', now_ms(), 'entry', as_json(entry), unpack(letter))
local ended = {}
for i, uid in ipairs(arg.uids) do
  key.history, key.replies, key.shared = key.histories[i], key.all_replies[i], key.all_shared[i]
  if seal(key, arg, uid, slice(ARGV, last_part + 1, #ARGV)) then ended[#ended + 1] = uid end
end
return ended
