-- Envoy's buffers through the editor.

local json_edit = ...

local concat, min = table.concat, math.min

local buffer = {}

-- Bytes that are copied out of Envoy at a time. LuaJIT asks the kernel anew for each string of 128 KiB and more.
local PIECE = 65536

-- The bytes to pass on in place of a buffer's, or nil where it stays as it is.
function buffer.edited(editor, held, size, frozen)
  if size <= PIECE then
    return json_edit.feed(editor, held:getBytes(0, size), frozen)
  end
  local parts, changed = {}, false
  for offset = 0, size - 1, PIECE do
    local bytes = held:getBytes(offset, min(PIECE, size - offset))
    local new = json_edit.feed(editor, bytes, frozen)
    parts[#parts + 1] = new or bytes
    changed = changed or new ~= nil
  end
  return changed and concat(parts) or nil
end

return buffer
