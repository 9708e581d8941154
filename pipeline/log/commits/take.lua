-- take: read new entries of `tokenized` for an engine. The read is fenced, so an engine that lost its slot takes nothing.
-- Returns the entries, the last id that was delivered to any engine, the uids that ended elsewhere, the control cursor, and
-- the last flush or ''; or FENCED.
local key, arg = named()
if fenced(key.owner, arg.owner) then return 'FENCED' end
local entries = {}
if tonumber(arg.max_entries) > 0 then
  local reply =
    redis.call('XREADGROUP', 'GROUP', 'generate', arg.slot, 'COUNT', arg.max_entries, 'STREAMS', key.tokenized, '>')
  if reply then entries = reply[1][2] end
end
local delivered = '0-0'
for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', key.tokenized)) do -- without a stream this is an error, which has no parts
  if group[2] == 'generate' then delivered = group[8] end
end
return { entries, delivered, control_after(key.control, arg.control_cursor) }
