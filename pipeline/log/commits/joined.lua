-- joined: consume formations: this rank has joined them, or they are stale. They stay for the other ranks.
-- KEYS owner, ranks   ARGV owner, group, entries...
-- Returns OK or FENCED.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
redis.call('XACK', KEYS[2], ARGV[2], unpack(slice(ARGV, 3, #ARGV)))
return 'OK'
