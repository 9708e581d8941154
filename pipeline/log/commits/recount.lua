-- recount: raise the figures of an owner's usage on a day to those that the archive has. ARGV goes on with (model, figures)*.
local key, arg = named()
redis.call('PEXPIRE', key.usage, USAGE_MS) -- Redis never refuses it, so not the rest
for i = 2, #ARGV, 2 do
  local figures, before = {}, redis.call('HGET', key.usage, ARGV[i]) or '0 0 0 0 0'
  local has = string.gmatch(before, '%d+')
  for figure in string.gmatch(ARGV[i + 1], '%d+') do
    figures[#figures + 1] = string.format('%.0f', math.max(tonumber(figure), tonumber(has() or 0)))
  end
  redis.call('HSET', key.usage, ARGV[i], table.concat(figures, ' '))
end
redis.call('PEXPIRE', key.usage, USAGE_MS)
redis.call('ZADD', key.users, 'GT', arg.day, arg.owner)
redis.call('PEXPIRE', key.users, USAGE_MS)
