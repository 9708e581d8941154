-- produced: consume a step and write what follows from it to the histories and the replies.
-- KEYS owner, steps, live, control, then the histories, what siblings share, and the replies
-- ARGV owner, entry, reply_cap, number of replies, (key index, payload)*,
--      (key index, id, uid, 1 if the engine must be told, ms until a sealed history is gone, key index of what siblings
--      share or 0, number of fields, fields...)*
-- Returns OK, LOST (it was consumed before) or FENCED. A row that Redis refuses (the history is sealed, gone, or has the id)
-- does not stop the others.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
if redis.call('XACK', KEYS[2], 'detokenize', ARGV[2]) == 0 then return 'LOST' end
redis.call('XDEL', KEYS[2], ARGV[2])
local now = now_ms()
local at = 5 + 2 * tonumber(ARGV[4])
while at <= #ARGV do
  local history, id, uid, count = KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 6])
  if id == SEAL then redis.call('ZREM', KEYS[3], uid) end
  if append(history, id, slice(ARGV, at + 7, at + 6 + count), now) and id == SEAL then
    redis.call('PEXPIRE', history, ARGV[at + 4])
    sibling_ended(KEYS[tonumber(ARGV[at + 5])], now, ARGV[at + 4])
    if ARGV[at + 3] == '1' then redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'uid', uid) end
  end
  at = at + 7 + count
end
for i = 5, 4 + 2 * tonumber(ARGV[4]), 2 do
  redis.pcall('XADD', KEYS[tonumber(ARGV[i])], 'NOMKSTREAM', 'MAXLEN', '~', ARGV[3], '*', 'events', ARGV[i + 1])
end
return 'OK'
