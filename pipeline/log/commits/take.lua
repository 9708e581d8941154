-- take: read new entries of `tokenized` for an engine. The read is fenced, so an engine that lost its slot takes nothing.
-- KEYS owner, tokenized, control   ARGV owner, slot, max_entries, control_cursor
-- Returns the entries, the last id that was delivered to any engine, the uids that ended elsewhere, the control cursor, and
-- the last flush or ''; or FENCED.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
local entries = {}
if tonumber(ARGV[3]) > 0 then
  local reply = redis.call('XREADGROUP', 'GROUP', 'generate', ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[2], '>')
  if reply then entries = reply[1][2] end
end
local delivered = '0-0'
for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', KEYS[2])) do -- without a stream this is an error, which has no parts
  if group[2] == 'generate' then delivered = group[8] end
end
return { entries, delivered, control_after(KEYS[3], ARGV[4]) }
