-- tokenized: consume an entry of `submitted`, write the prompt's tokens to the history, hand the request to the engines.
-- ARGV goes on with (digest, text)* of the texts that siblings may share, num_texts of them, and the fields.
-- Returns OK, LOST (another worker consumed the entry) or GONE (the request has ended, or its history is gone).
local key, arg = named()
if redis.call('XACK', key.submitted, 'tokenize', arg.entry) == 0 then return 'LOST' end
redis.call('XDEL', key.submitted, arg.entry)
local first, texts = 2 + 2 * tonumber(arg.num_texts), {}
for i = 2, first - 1, 2 do texts[ARGV[i]] = ARGV[i + 1] end
local fields = slice(ARGV, first, #ARGV)
if key.shared and not is_shared(key.shared) then -- of an older version, or gone
  fields, texts = whole(fields, function(digest) return texts[digest] end), {}
end
if not append(key.history, '0-2', fields, now_ms()) then return 'GONE' end
for digest, text in pairs(texts) do redis.call('HSET', key.shared, digest, text) end
redis.call('XADD', key.tokenized, '*', 'uid', arg.uid, 'frontend', arg.frontend or '')
return 'OK'
