-- tokenized: consume an entry of `submitted`, write the prompt's tokens to the history, let the request wait for
-- an engine: beside those of its line, or in the queue of its owner. It has no line if it prefers an engine.
-- ARGV goes on with (digest, text)* of the texts that siblings may share, num_texts of them, with the pieces that key.pieces
-- are, and with the fields.
-- Returns OK, LOST (another worker consumed the entry) or GONE (the request has ended, or its history is gone).
local key, arg = named()
if redis.call('XACK', key.submitted, 'tokenize', arg.entry) == 0 then return 'LOST' end
redis.call('XDEL', key.submitted, arg.entry)
local pieces_at, texts = 2 + 2 * tonumber(arg.num_texts), {}
for i = 2, pieces_at - 1, 2 do texts[ARGV[i]] = ARGV[i + 1] end
local first = pieces_at + #key.pieces
local fields = slice(ARGV, first, #ARGV)
if key.shared and not is_shared(key.shared) then -- of an older version, or gone
  fields, texts = whole(fields, function(digest) return texts[digest] end), {}
end
if not append(key.history, '0-2', fields, now_ms()) then return 'GONE' end
if #key.pieces > 0 then
  keep_pieces(key, arg.uid, key.pieces, slice(ARGV, pieces_at, first - 1), fields, redis.call('PTTL', key.history), 0)
end
for digest, text in pairs(texts) do redis.call('HSET', key.shared, digest, text) end
redis.call('XADD', key.tokenized, '*', 'uid', arg.uid, 'frontend', arg.frontend, unpack(arg.turn))
local only = redis.call('HGET', key.waiting, 'only')
if only ~= '' and only ~= arg.line then
  only = only and '' or arg.line
  redis.call('HSET', key.waiting, 'only', only)
end
if only == '' then enqueue(key.tokenized, key.waiting) end
return 'OK'
