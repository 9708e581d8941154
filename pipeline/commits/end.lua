-- end: the one door through which a request ends, whoever says so. The first seal wins; Redis refuses the second.
-- KEYS live, history, replies, control, submitted   ARGV uid, retention_ms, reply_cap, entry of submitted or '', fields...
-- Returns OK or ENDED (it had ended before, or its history is gone). The number of tokens is read off the history.
redis.call('ZREM', KEYS[1], ARGV[1])
if ARGV[4] ~= '' then
  redis.call('XACK', KEYS[5], 'tokenize', ARGV[4])
  redis.call('XDEL', KEYS[5], ARGV[4])
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local n = last[1] and string.match(last[1][1], '^%d+') or '0'
local now = now_ms()
local fields = slice(ARGV, 5, #ARGV)
fields[#fields + 1] = 'n'
fields[#fields + 1] = n
if not append(KEYS[2], SEAL, fields, now) then return 'ENDED' end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.pcall('XADD', KEYS[3], 'NOMKSTREAM', 'MAXLEN', '~', ARGV[3], '*', 'uid', ARGV[1], 'ms', now, unpack(fields))
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'uid', ARGV[1])
return 'OK'
