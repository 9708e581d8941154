-- tokenized: consume an entry of `submitted`, write the prompt's tokens to the history, hand the request to the engines.
-- KEYS submitted, history, tokenized; of a sibling: shared
-- ARGV entry, uid, frontend, number of texts that siblings may share, (digest, text)*, fields...
-- Returns OK, LOST (another worker consumed the entry) or GONE (the request has ended, or its history is gone).
if redis.call('XACK', KEYS[1], 'tokenize', ARGV[1]) == 0 then return 'LOST' end
redis.call('XDEL', KEYS[1], ARGV[1])
local first, texts = 5 + 2 * tonumber(ARGV[4]), {}
for i = 5, first - 1, 2 do texts[ARGV[i]] = ARGV[i + 1] end
local fields, shared = slice(ARGV, first, #ARGV), KEYS[4]
if shared and not is_shared(shared) then -- of an older version, or gone
  fields, texts = whole(fields, function(digest) return texts[digest] end), {}
end
if not append(KEYS[2], '0-2', fields, now_ms()) then return 'GONE' end
for digest, text in pairs(texts) do redis.call('HSET', shared, digest, text) end
redis.call('XADD', KEYS[3], '*', 'uid', ARGV[2], 'frontend', ARGV[3])
return 'OK'
