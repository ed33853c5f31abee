-- Envoy's buffers through the editor.

local json_edit = ...

local byte, char, concat, format, gmatch, gsub, min, sub, tonumber =
  string.byte, string.char, table.concat, string.format, string.gmatch, string.gsub, math.min, string.sub, tonumber

local body = {}

-- Bytes that are copied out of Envoy at a time. LuaJIT maps memory anew for each string of 128 KiB and more.
local PIECE = 65536

-- Feeds a buffer to the editor. Returns the bytes to pass on in its place, or nil where it passes as it is.
function body.edit(editor, buffer, size)
  if size <= PIECE then
    return json_edit.feed(editor, buffer:getBytes(0, size))
  end
  local parts, changed = {}, false
  for offset = 0, size - 1, PIECE do
    local bytes = buffer:getBytes(offset, min(PIECE, size - offset))
    local new = json_edit.feed(editor, bytes)
    parts[#parts + 1] = new or bytes
    changed = changed or new ~= nil
  end
  return changed and concat(parts) or nil
end

-- The editor's patches as one text, which dynamic metadata carries from one filter to the next. The bytes are in
-- hexadecimal, since metadata is UTF-8.
function body.write_patches(patches)
  local parts = {}
  for index, patch in ipairs(patches) do
    local text = gsub(patch.text, ".", function(c)
      return format("%02x", byte(c))
    end)
    parts[index] = format("%d+%d=%s;", patch.at, patch.size, text)
  end
  return concat(parts)
end

-- A text with those patches applied.
function body.patch(text, patches)
  local parts, from = {}, 1
  for at, size, new in gmatch(patches, "(%d+)%+(%d+)=(%x*);") do
    parts[#parts + 1] = sub(text, from, at)
    parts[#parts + 1] = gsub(new, "%x%x", function(digits)
      return char(tonumber(digits, 16))
    end)
    from = at + size + 1
  end
  parts[#parts + 1] = sub(text, from)
  return concat(parts)
end

return body
