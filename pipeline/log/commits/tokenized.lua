-- tokenized: consume an entry of `submitted`, write the prompt's tokens to the history, hand the request to the engines.
-- KEYS submitted, history, tokenized   ARGV entry, uid, frontend, fields...
-- Returns OK, LOST (another worker consumed the entry) or GONE (the request has ended, or its history is gone).
if redis.call('XACK', KEYS[1], 'tokenize', ARGV[1]) == 0 then return 'LOST' end
redis.call('XDEL', KEYS[1], ARGV[1])
if not append(KEYS[2], '0-2', slice(ARGV, 4, #ARGV), now_ms()) then return 'GONE' end
redis.call('XADD', KEYS[3], '*', 'uid', ARGV[2], 'frontend', ARGV[3])
return 'OK'
