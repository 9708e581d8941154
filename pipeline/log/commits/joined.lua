-- joined: consume formations: this rank has joined them, or they are stale. They stay for the other ranks.
-- Returns OK or FENCED.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 'FENCED' end
redis.call('XACK', key.ranks, arg.group, unpack(arg.entries))
return 'OK'
