-- texts: returns the text of each chain, of which KEYS are the last pieces; nothing where a piece is gone.
local found = {}
for i, key in ipairs(KEYS) do found[i] = chain_text(string.sub(key, 1, -33), string.sub(key, -32)) or false end
return found
