-- recounted: note that usage was recounted from the archive. It is noted for this life of the log alone: data that comes
-- back without the owner of the slot may lack the usage, too. Returns OK or FENCED.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 'FENCED' end
redis.call('HDEL', key.archive, 'recounted') -- Redis never refuses it, so not the rest
redis.call('HSET', key.archive, 'recounted', '1')
return 'OK'
