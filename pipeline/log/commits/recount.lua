-- recount: raise the figures of an owner's usage on a day to those that the archive has. ARGV goes on with (field, figure)*.
local key, arg = named()
redis.call('PEXPIRE', key.usage, USAGE_MS) -- Redis never refuses it, so not the rest
for i = 2, #ARGV, 2 do
  local lacks = tonumber(ARGV[i + 1]) - tonumber(redis.call('HGET', key.usage, ARGV[i]) or 0)
  if lacks > 0 then redis.call('HINCRBY', key.usage, ARGV[i], lacks) end
end
redis.call('PEXPIRE', key.usage, USAGE_MS)
redis.call('ZADD', key.users, 'GT', arg.day, arg.owner)
redis.call('PEXPIRE', key.users, USAGE_MS)
