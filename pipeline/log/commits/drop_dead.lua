-- drop_dead: delete a dead letter. Who purges the dead letters meanwhile begins again: purge.lua may have copied it.
-- Returns how many letters had the id.
local key, arg = named()
return drop_letter(key.dead, key.versions, arg.letter, arg.version_ms)
