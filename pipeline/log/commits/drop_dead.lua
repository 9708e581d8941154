-- drop_dead: delete a dead letter. Who purges the dead letters meanwhile begins again: purge.lua may have copied it.
-- KEYS dead, versions   ARGV the id, ms for which the version is kept   Returns how many letters had the id.
return drop_letter(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
