-- archived: consume entries of `ended`: their requests are on the disk or need not be there (`done`), or are `lost`.
-- Returns OK or FENCED. The lost ones are counted.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 'FENCED' end
local function consume(entries)
  local found = 0
  for _, entry in ipairs(entries) do
    found = found + redis.call('XACK', key.ended, arg.group, entry)
    redis.call('XDEL', key.ended, entry)
  end
  return found
end
local lost = consume(arg.lost)
consume(arg.done)
if lost > 0 then redis.call('HINCRBY', key.archive, 'unarchived', lost) end
return 'OK'
