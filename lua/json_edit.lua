-- Sets one top-level integer member of a JSON object that arrives in pieces.
--
-- The text is edited, never decoded and encoded again: each value of the member is replaced where it stands, under an
-- escaped key too; where the object has no such member, one is inserted before the closing brace. All other bytes stay.
--
-- A text that is not JSON never becomes JSON. An old value is replaced only once it has been seen whole, is a value by
-- JSON's grammar, and is followed by a byte that can follow a value; until then its bytes are held back. Where the scan
-- finds anything wrong, the rest passes unchanged, and finish() says how to undo what was changed in earlier pieces.
--
-- An editor begins in one of two modes, and may go from the first to the second:
--
--   lazy   No piece so far could name the member. The pieces passed unscanned, and are remembered until one might.
--   scan   Every piece is scanned (json_scan.lua), until the scan fails: then every piece passes unchanged.

local json_scan = ...

local byte, concat, find, sub = string.byte, table.concat, string.find, string.sub
local classify, next_event = json_scan.classify, json_scan.next

local json_edit = {}

-- The most members of the name in one object, and the most bytes of one value of it. No client needs more.
local MAX_FOUND, MAX_VALUE = 256, 4096

-- Texts of these lengths begin in lazy mode. A shorter one costs little to scan, and if it is malformed, that is
-- reported; a longer one would have to be remembered.
local MIN_LAZY, MAX_LAZY = 16384, 1048576

-- The most bytes of old values that can be put back into a malformed text.
local MAX_UNDO = 65536

local BYTE_ORDER_MARK, CLOSE_OBJECT, OPEN_OBJECT = "\239\187\191", 125, 123

-- A new editor.
--   name     the member: ASCII letters and digits
--   text     the value of a missing member, a decimal integer; nil: none is inserted
--   replace  a function of an old value's text. It returns the new text; nil where the old one stays; or nil and a
--            failure where the text is not to be edited. Without a function, every old value stays
--   length   bytes of the whole text, where they are known, else nil
--   in_list  true: the objects of a top-level list are edited too, each for itself
function json_edit.new(name, text, replace, length, in_list)
  return {
    name = name,
    text = text,
    replace = replace,
    length = length,
    scanner = json_scan.new(name, in_list),
    skipped = length and length >= MIN_LAZY and length <= MAX_LAZY and {} or nil, -- lazy mode: the pieces so far
    tail = "", -- lazy mode: the last bytes of what was skipped
    received = 0, -- bytes taken
    written = 0, -- bytes given
    value = nil, -- the bytes of an old value whose end has not come yet: they are held back
    outcome = nil, -- "inserted", "replaced" or "absent"
    last = nil, -- the text that has replaced the last old value
    failed = nil, -- see finish()
    undo = nil, -- patches that take back what was changed
    undo_bytes = 0, -- of the old values in them
    late = nil, -- a patch that inserts the member into a piece that has already passed
  }
end

local function member(editor)
  return (editor.scanner.empty and "" or ",") .. '"' .. editor.name .. '":' .. editor.text
end

-- Scans and edits one piece. Returns the bytes to pass on in its place, or nil where it passes as it is.
local function edit(editor, s)
  local scanner, replacement = editor.scanner, editor.replace
  local out, size, from = {}, 0, 1 -- what was written, its bytes, and the first byte of the piece not yet written
  local undo, outcome, failed = {}, editor.outcome, nil
  local held = editor.value or "" -- what came of an old value in earlier pieces
  local start = editor.value and 1 or nil -- where its bytes begin in this one

  local function replace(first, stop, old, new)
    out[#out + 1] = sub(s, from, first - 1)
    out[#out + 1] = new
    undo[#undo + 1] = { at = editor.written + size + first - from, size = #new, text = old }
    size = size + first - from + #new
    from = stop
  end

  local event, at, i = next_event(scanner, s, 1)
  while event do
    if event == "object_end" then
      if scanner.found == 0 and editor.text then
        replace(at, at, "", member(editor))
        outcome = "inserted"
      end
    elseif event == "value" and replacement then
      start = at
      if scanner.found > MAX_FOUND then
        failed = "too_many"
        break
      end
    elseif event == "value_end" and replacement then
      local old = held .. sub(s, start, at - 1)
      local kind = #old <= MAX_VALUE and classify(old) or "unclear"
      if kind ~= "value" then
        failed = kind
        break
      end
      local new, refused = replacement(old)
      if refused then
        failed = refused
        break
      end
      if new then
        outcome = outcome or "replaced"
        editor.last = new
      end
      replace(start, at, old, new or old)
      held, start = "", nil
    end
    event, at, i = next_event(scanner, s, i)
  end

  failed = failed or scanner.failed
  if start and not failed and #held + #s - start >= MAX_VALUE then
    failed = "unclear"
  end
  if failed then
    -- Nothing of this piece is changed; what was held back goes before it.
    editor.failed = failed
    held = editor.value
    editor.value = nil
    return held and held .. s
  end

  editor.outcome = outcome
  for index = 1, #undo do
    editor.undo = editor.undo or {}
    editor.undo_bytes = editor.undo_bytes + #undo[index].text
    editor.undo[#editor.undo + 1] = undo[index]
  end
  editor.value = start and held .. sub(s, start)
  if #out == 0 and not start then
    return nil
  end
  out[#out + 1] = sub(s, from, start and start - 1)
  return concat(out)
end

-- Whether a key in this piece, or across its beginning, could be the name: as it is, or with an escaped ASCII letter.
local function may_name(editor, s)
  local name = editor.name
  local seam = editor.tail .. sub(s, 1, #name - 1)
  editor.tail = sub(#s < #name and seam or s, 1 - #name)
  return find(s, name, 1, true) or find(s, "u00", 1, true) or find(seam, name, 1, true) or find(seam, "u00", 1, true)
end

-- Position and code of the last byte up to position i that is not white space; the code is nil where there is none.
local function skip_space_back(s, i)
  local code = byte(s, i)
  while i > 0 and (code == 32 or code == 10 or code == 13 or code == 9) do
    i = i - 1
    code = byte(s, i)
  end
  return i, i > 0 and code or nil
end

-- Inserts the member into a text that is now complete and cannot name it. Returns nil where its ends are not those of
-- an object that lies in this piece.
--
-- No scan is needed. If the text with the member is JSON, its last brace closes the object, so the member stands after
-- a complete one, or after the opening brace: then the text without it is JSON, too.
local function insert_unscanned(editor, s)
  local first = editor.skipped[1] or s
  if not find(first, "^[ \t\r\n]*{", sub(first, 1, 3) == BYTE_ORDER_MARK and 4 or 1) then
    return nil
  end
  local close, code = skip_space_back(s, #s)
  if code ~= CLOSE_OBJECT then
    return nil
  end
  local _, before = skip_space_back(s, close - 1)
  if not before then
    return nil
  end
  editor.scanner.empty = before == OPEN_OBJECT
  editor.outcome, editor.skipped = editor.text and "inserted" or "absent", nil
  editor.complete = true
  return editor.text and sub(s, 1, close - 1) .. member(editor) .. sub(s, close)
end

-- Scans what lazy mode has skipped. No value of the member is in it, but its object may end there.
local function scan_skipped(editor)
  local offset = 0
  for _, piece in ipairs(editor.skipped) do
    local event, at, i = next_event(editor.scanner, piece, 1)
    while event do
      if event == "object_end" and editor.scanner.found == 0 and editor.text then
        editor.late = { at = offset + at - 1, size = 0, text = member(editor) }
        editor.outcome = "inserted"
      end
      event, at, i = next_event(editor.scanner, piece, i)
    end
    offset = offset + #piece
  end
  editor.skipped = nil
  editor.failed = editor.scanner.failed
end

local function feed(editor, s)
  if editor.skipped then
    if not may_name(editor, s) then
      if editor.received < editor.length then
        editor.skipped[#editor.skipped + 1] = s
        return nil
      end
      local new = insert_unscanned(editor, s)
      if editor.complete then
        return new
      end
    end
    scan_skipped(editor)
  end
  if editor.failed or editor.complete then
    return nil
  end
  return edit(editor, s)
end

-- Takes one piece. Returns the bytes to pass on in its place, or nil where it passes as it is.
function json_edit.feed(editor, s)
  editor.received = editor.received + #s
  local new = feed(editor, s)
  editor.written = editor.written + #(new or s)
  return new
end

-- Why the text is not edited, as far as it has come: see finish(). nil while nothing is wrong with it.
function json_edit.failure(editor)
  return editor.failed
end

-- The bytes that are held back at the end of a text, which is then malformed, or "".
function json_edit.held_back(editor)
  return editor.value or ""
end

-- Ends the text. Returns its outcome: "inserted", "replaced", "kept" (a member was there and was to stay) or "absent"
-- (none was there, and none was to be inserted), or nil and the reason why it is not edited. That is what the replacing
-- function has returned as a failure, or:
--
--   "malformed"   it is not JSON
--   "not_object"  it is neither an object nor, with `in_list`, a list of objects
--   "charset"     it is UTF-16 or UTF-32
--   "too_many"    the object names the member more than MAX_FOUND times
--   "unclear"     a value of the member is not one for every reader, or has more than MAX_VALUE bytes
function json_edit.finish(editor)
  if not editor.failed and not editor.complete and not json_scan.is_complete(editor.scanner) then
    editor.failed = "malformed"
    if editor.value then
      editor.undo = editor.undo or {}
      editor.undo[#editor.undo + 1] = { at = editor.written, size = 0, text = editor.value }
    end
  end
  if editor.failed then
    return nil, editor.failed
  end
  if editor.scanner.found > 0 then
    return editor.outcome or "kept"
  elseif editor.text then
    return editor.outcome, "not_object"
  end
  return "absent"
end

-- After finish(): what is left to splice into the bytes that were given, in order. Each patch is a table of `at`, an
-- offset into those bytes, `size`, how many of them to take out there, and `text`, what to put in their place. nil
-- where there is nothing to do.
--
-- For a sound text that is a member that belongs into a piece that had already passed; for one that is not edited, it
-- is whatever had been changed before the fault was found, or false where that is too much to put back.
function json_edit.patches(editor)
  if editor.failed then
    return editor.undo and (editor.undo_bytes <= MAX_UNDO and editor.undo)
  end
  return editor.late and { editor.late }
end

return json_edit
