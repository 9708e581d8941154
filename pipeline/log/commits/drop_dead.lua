-- drop_dead: delete a dead letter. Who purges the dead letters meanwhile begins again: purge.lua may have copied it.
-- KEYS dead, versions   ARGV the id, ms for which the version is kept   Returns how many letters had the id.
local dropped = redis.call('XDEL', KEYS[1], ARGV[1])
if dropped > 0 then
  redis.call('HINCRBY', KEYS[2], KEYS[1], 1)
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
return dropped
