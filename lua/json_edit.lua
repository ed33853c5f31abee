-- Sets one top-level integer member of a JSON object that arrives in chunks of any size.
--
-- The text is edited, never decoded and encoded again: each value of the member is replaced where it
-- stands, under an escaped key too; where there is none, one member is added before the closing brace.
-- All other bytes stay. Memory is bounded by a chunk: nothing is kept of a chunk that was passed on.
--
-- With a promised length (Content-Length, which leaves before the body is seen) the text is longer by
-- growth() bytes whatever is found in it, and what the edit does not use is JSON white space behind it:
-- at most MAX_FILLER bytes, since a longer old value leaves white space where it stood, and members that
-- would outgrow the promise are taken out instead (their first one says the same).
--
-- Malformed JSON is passed on: the server's own error is the better one.

local byte, find, rep, sub = string.byte, string.find, string.rep, string.sub

local json_edit = {}

local MAX_FILLER = 32

-- A scalar that is longer is taken for well-formed: no integer that a server accepts is.
local MAX_SCALAR = 64

-- Members of the name in one object that are replaced. Each costs a copy of what a chunk became so far, so without a
-- bound a text of nothing else would take its square in time.
local MAX_FOUND = 256

-- Bytes held back while a member that may have to be taken out is not yet seen whole.
local MAX_HELD = 65536

-- Below this distance brackets are looked for byte by byte, above it by string.find, which is memchr.
local NEAR = 16

-- A position behind every chunk.
local BEYOND = math.huge

-- States: what the next byte belongs to. From DONE on nothing is looked at any more.
local FIRST_KEY, NEXT_KEY, KEY, COLON, VALUE, SCALAR, STRING, NESTED, AFTER, START, LIST, DONE, PASS, WIDE =
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14

local QUOTE, BACKSLASH, COMMA, COLON_SIGN = 34, 92, 44, 58
local OPEN_OBJECT, CLOSE_OBJECT, OPEN_LIST, CLOSE_LIST = 123, 125, 91, 93

-- What a byte outside strings does to the nesting depth.
local DEPTH_CHANGE = {}
for code = 0, 255 do
  DEPTH_CHANGE[code] = 0
end
DEPTH_CHANGE[OPEN_OBJECT], DEPTH_CHANGE[OPEN_LIST] = 1, 1
DEPTH_CHANGE[CLOSE_OBJECT], DEPTH_CHANGE[CLOSE_LIST] = -1, -1

-- The bytes that are behind a scalar: white space, and what must not be here, among them.
local ENDS_SCALAR = {}
for code = 0, 255 do
  ENDS_SCALAR[code] = code <= 32 or code == COMMA or code == CLOSE_OBJECT
end

-- The member as it is written into a text.
--   name    ASCII letters and digits
--   text    its value, a decimal integer
function json_edit.member(name, text)
  return '"' .. name .. '":' .. text
end

-- By how many bytes a text of promised length becomes longer.
--   wide    true: the filler must fit a UTF-16 or UTF-32 text, should it be one
function json_edit.growth(member, wide)
  local growth = #member + 1
  return wide and growth + -growth % 4 or growth
end

-- A new editor.
--   name    the member
--   text    its value, a decimal integer
--   length  bytes of the whole text where a length is promised, else nil
--   growth  by how many bytes it becomes longer then
--   keep    true: a member that is there stays, only a missing one is added
function json_edit.new(name, text, length, growth, keep)
  -- LuaJIT makes room for the keys that are written here, nil or not: more than 16 would double it.
  return {
    name = name,
    text = text,
    keep = keep,
    length = length,
    owed = length and growth or 0, -- bytes promised and not yet written
    received = 0,
    state = START,
    escaped = nil, -- true: in a string, and the next byte follows an odd number of backslashes
    depth = nil, -- inside a nested value
    in_string = nil, -- inside a string of a nested value
    key = nil, -- the part of a key that came with earlier chunks
    target = nil, -- true: the member's value comes next, or is there
    found = 0, -- members seen in this object
    outcome = nil, -- see result(): that of a member that was replaced or added
  }
  -- What few texts need:
  --   empty      true: the object has no members
  --   dropping   true: the bytes of an old value are left out
  --   erasing    true: and its key and comma with it
  --   scalar     an old value, kept until it is seen to be well-formed
  --   held       bytes not yet passed on
  --   head       the first bytes, which tell UTF-16 from UTF-32
  --   in_list    true: a top-level list is edited too; "open": this is one
  --   failed     why the text is no object that could be edited
end

-- Edits the objects of a top-level list too, each for itself. For texts without a promised length.
function json_edit.accept_list(editor)
  editor.in_list = true
end

-- Why the text cannot be edited, as far as it has come: see result(). nil where it can.
function json_edit.failure(editor)
  return editor.failed
end

-- What came of it, once the text has ended: "inserted", "replaced", "kept" (a member was there and was to
-- stay), or nil and why not: "malformed", "not_object", "wide" (UTF-16 or UTF-32), "overfull" (members that must go
-- are too far apart, or too many), "padded" (the object ended where nothing could be changed yet).
function json_edit.result(editor)
  if editor.failed then
    return nil, editor.failed
  elseif editor.state ~= DONE then
    return nil, "malformed"
  elseif editor.outcome then
    return editor.outcome
  elseif editor.found > 0 then
    return "kept"
  end
  return nil, "not_object"
end

-- Whether the byte at position i follows an odd number of backslashes, none of them before `first`.
local function is_escaped(s, i, first)
  -- One backslash as a rule: no loop for it, which LuaJIT would not compile into the loop around.
  if i - 2 < first or byte(s, i - 2) ~= BACKSLASH then
    return i - 1 >= first and byte(s, i - 1) == BACKSLASH
  end
  local k = i - 1
  while k >= first and byte(s, k) == BACKSLASH do
    k = k - 1
  end
  return (i - k) % 2 == 0
end

-- Position of the quote that ends a string, from position i on, and the three bytes behind it as far as they are
-- there (one call for all, since a call is what costs). Without a quote: nil, and whether the byte after the chunk is
-- escaped. Only a quote can end a string, so only what precedes one is looked at.
local function string_end(s, i, escaped)
  local first = escaped and i + 1 or i
  local quote = find(s, '"', first, true)
  if quote and quote > first then
    local before, _, a, b, c = byte(s, quote - 1, quote + 3)
    if before ~= BACKSLASH then
      return quote, a, b, c
    end
    while quote and quote > first and byte(s, quote - 1) == BACKSLASH and is_escaped(s, quote, first) do
      quote = find(s, '"', quote + 1, true)
    end
  end
  if quote then
    return quote, byte(s, quote + 1, quote + 3)
  end
  -- A chunk that ends before the escaped byte came leaves it escaped.
  return nil, (escaped and i > #s) or is_escaped(s, #s + 1, first)
end

-- The nesting depth after the bytes i to stop - 1, none of which is inside a string. Where it comes to 0:
-- 0 and that position. Each kind of bracket is looked for only once it is passed.
local function depth_after(s, i, stop, depth, near)
  local open_object, open_list, close_object, close_list = near[1], near[2], near[3], near[4]
  while true do
    if close_list < i then
      close_list = find(s, "]", i, true) or BEYOND
    end
    if close_object < i then
      close_object = find(s, "}", i, true) or BEYOND
    end
    if open_list < i then
      open_list = find(s, "[", i, true) or BEYOND
    end
    if open_object < i then
      open_object = find(s, "{", i, true) or BEYOND
    end
    local close = close_list < close_object and close_list or close_object
    local open = open_list < open_object and open_list or open_object
    if close < open then
      if close >= stop then
        break
      end
      depth = depth - 1
      if depth == 0 then
        return 0, close
      end
      i = close + 1
    else
      if open >= stop then
        break
      end
      depth = depth + 1
      i = open + 1
    end
  end
  near[1], near[2], near[3], near[4] = open_object, open_list, close_object, close_list
  return depth
end

-- The same for few bytes, without a loop as long as there are no more than between two values as a rule.
local function depth_after_few(s, i, stop, depth)
  local a, b, c, d = byte(s, i, i + 3)
  depth = depth + DEPTH_CHANGE[a]
  if depth == 0 then
    return 0, i
  elseif i + 1 >= stop then
    return depth
  end
  depth = depth + DEPTH_CHANGE[b]
  if depth == 0 then
    return 0, i + 1
  elseif i + 2 >= stop then
    return depth
  end
  depth = depth + DEPTH_CHANGE[c]
  if depth == 0 then
    return 0, i + 2
  elseif i + 3 >= stop then
    return depth
  end
  depth = depth + DEPTH_CHANGE[d]
  if depth == 0 then
    return 0, i + 3
  end
  for k = i + 4, stop - 1 do
    depth = depth + DEPTH_CHANGE[byte(s, k)]
    if depth == 0 then
      return 0, k
    end
  end
  return depth
end

-- Position of the bracket that ends the nested value, from position i on; nil where it is not in this chunk.
--
-- One turn of the loop is one quote, and its usual ways branch as little as they can: this is where the time
-- of a large chat goes.
local function nested_end(editor, s, i)
  local depth = editor.depth
  local inside = editor.in_string
  local first = i
  if editor.escaped and i <= #s then
    first = i + 1
    i = first
    editor.escaped = nil
  end
  local near = nil
  while true do
    local quote = find(s, '"', i, true)
    if inside then
      if not quote then
        editor.depth, editor.in_string = depth, true
        editor.escaped = is_escaped(s, #s + 1, first)
        return nil
      end
      if byte(s, quote - 1) ~= BACKSLASH or quote == first or not is_escaped(s, quote, first) then
        inside = false
      end
    else
      local stop = quote or #s + 1
      local gap = stop - i
      if gap == 1 then
        depth = depth + DEPTH_CHANGE[byte(s, i)]
        if depth == 0 then
          return i
        end
      elseif gap > NEAR then
        near = near or { 0, 0, 0, 0 }
        local at
        depth, at = depth_after(s, i, stop, depth, near)
        if at then
          return at
        end
      elseif gap > 0 then
        local at
        depth, at = depth_after_few(s, i, stop, depth)
        if at then
          return at
        end
      end
      if not quote then
        editor.depth, editor.in_string = depth, false
        return nil
      end
      inside = true
    end
    i = quote + 1
  end
end

-- Position and code of the first byte from i on that is no white space; the code is nil at the end.
local function skip_space(s, i)
  local code = byte(s, i)
  while code == 32 or code == 10 or code == 13 or code == 9 do
    i = i + 1
    code = byte(s, i)
  end
  return i, code
end

local function unescape(digits)
  return string.char(tonumber(digits, 16))
end

-- Whether a key, as it is written at positions i to stop, is the name.
local function is_name(s, i, stop, name)
  local size = stop - i + 1
  if size == #name then
    return sub(s, i, stop) == name
  end
  -- Written with escapes it is longer by 5 bytes for each.
  if size < #name + 5 or size > #name * 6 then
    return false
  end
  local key = sub(s, i, stop)
  return find(key, "\\", 1, true) ~= nil and key:gsub("\\u00(%x%x)", unescape) == name
end

-- Position of the last byte of a number, true, false or null, from position i on; nil where the chunk ends first.
-- Nearly all are of 1 to 5 bytes, which cost the least in one turn.
local function scalar_end(s, i)
  local a, b, c, d, e, f = byte(s, i, i + 5)
  local size = ENDS_SCALAR[b] and 1
    or ENDS_SCALAR[c] and 2
    or ENDS_SCALAR[d] and 3
    or ENDS_SCALAR[e] and 4
    or ENDS_SCALAR[f] and 5
  if size and not ENDS_SCALAR[a] then
    return i + size - 1
  end
  local stop = find(s, "[%z\1- ,}]", i)
  return stop and stop - 1
end

local function is_scalar(text)
  return find(text, "^-?%d+%.?%d*[eE]?[+-]?%d*$") ~= nil
    or text == "true"
    or text == "false"
    or text == "null"
    or text == "NaN"
    or text == "Infinity"
    or text == "-Infinity"
end

-- White space in place of `count` old bytes that went, as far as it would not fit behind the text.
local function owe(editor, count)
  if not editor.length then
    return ""
  end
  local owed = editor.owed + count
  if owed <= MAX_FILLER then
    editor.owed = owed
    return ""
  end
  editor.owed = MAX_FILLER
  return rep(" ", owed - MAX_FILLER)
end

local function give_up(editor, why)
  editor.state, editor.failed = why == "wide" and WIDE or PASS, why
end

-- White space for what is still owed, in the units of the text's encoding (json.detect_encoding of Python).
local function filler(editor)
  local owed = editor.owed
  editor.owed = 0
  if editor.state ~= WIDE then
    return rep(" ", owed)
  end
  local a, b, c, d = byte(editor.head or "", 1, 4)
  local unit
  if a == 0 and b == 0 then
    unit = "\0\0\0 "
  elseif a == 0 or (a == 254 and b == 255) then
    unit = "\0 "
  elseif c == 0 and d == 0 then
    unit = " \0\0\0"
  else
    unit = " \0"
  end
  return rep(unit, math.floor(owed / #unit)) .. rep(" ", owed % #unit)
end

-- The position and state behind the text's first byte; START where that is not in this chunk.
local function begin(editor, s)
  local i = 1
  -- A byte order mark may stand before the text; all else that is no object goes on as it is.
  if editor.received == #s and sub(s, 1, 3) == "\239\187\191" then
    i = 4
  end
  local code, second = byte(s, i, i + 1)
  if code and code ~= OPEN_OBJECT then
    i, code = skip_space(s, i)
    while code == 239 or code == 187 or code == 191 do -- a byte order mark in pieces
      i, code = skip_space(s, i + 1)
    end
    second = nil
  end
  if code == OPEN_OBJECT then
    if second == QUOTE then
      return i + 2, KEY
    end
    return i + 1, FIRST_KEY
  elseif code == OPEN_LIST and editor.in_list then
    editor.in_list = "open"
    return i + 1, LIST
  elseif code == 0 or code == 254 or code == 255 then
    give_up(editor, "wide")
    return i, WIDE
  elseif code then
    give_up(editor, "not_object")
    return i, PASS
  end
  return i, START
end

-- Edits one chunk: the bytes to pass on instead of it, or nil where it is passed on as it is.
--   frozen  true: it has to be passed on as it is. A member in it stays, and counts as none: one is added at
--           the end, and readers take the last.
function json_edit.feed(editor, s, frozen)
  editor.received = editor.received + #s
  local last = editor.length and editor.received >= editor.length
  local state = editor.state
  if (state == DONE or state == PASS) and not last then
    return nil
  end
  local out = nil -- what was written before position `from`; nil while that is unchanged
  local from = 1 -- the first byte not yet written (or not yet left out)
  if editor.held then
    s = editor.held .. s
    editor.held, out = nil, ""
  end
  local size = #s
  local i = 1
  local comma = nil -- position of a comma that may have to go with its member
  if editor.dropping then
    out = ""
  end

  if state == START then
    i, state = begin(editor, s)
  end

  -- One turn of the loop is one member. The states stand in the order in which they follow each other, so that each
  -- goes on to the next; at the end of a chunk there is no byte, and a state stays what it is.
  --
  -- LuaJIT compiles the loop once it has seen a turn that ends as it began, in KEY as a rule, and that meets no other
  -- loop. So what is usual has none in here, and what is not a member is read before.
  while i <= size and state < DONE do
    local code, second, third -- the bytes from i on, where they are known already

    if state <= NEXT_KEY then
      i, code = skip_space(s, i)
      if code == QUOTE then
        state = KEY
        i = i + 1
      elseif code == CLOSE_OBJECT and state == FIRST_KEY then
        editor.empty = true
        state = AFTER
      elseif code == 0 and state == FIRST_KEY then
        give_up(editor, "wide")
        state = WIDE
      elseif code then
        give_up(editor, "malformed")
        state = PASS
      end
    end

    if state == KEY then
      local quote, a, b, c = string_end(s, i, editor.escaped)
      local key = editor.key
      if quote then
        local is_target
        if key then
          key = key .. sub(s, i, quote - 1)
          is_target = is_name(key, 1, #key, editor.name)
          editor.key, editor.escaped = nil, nil
        else
          is_target = is_name(s, i, quote - 1, editor.name)
        end
        if is_target and editor.found == MAX_FOUND and not editor.keep then
          give_up(editor, "overfull")
          state, comma = PASS, nil
          break
        elseif is_target and (editor.keep or not frozen) then
          editor.target = true
          editor.found = editor.found + 1
          if comma then
            out = (out or "") .. sub(s, from, comma - 1)
            from = comma
            editor.dropping, editor.erasing = true, true
          end
        end
        comma = nil
        -- The value follows at once as a rule, or behind one space.
        if a ~= COLON_SIGN then
          state = COLON
          i = quote + 1
        elseif b == 32 then
          state = VALUE
          i, code = quote + 3, c
        else
          state = VALUE
          i, code = quote + 2, b
        end
      else
        if not key or #key <= #editor.name * 6 then
          key = (key or "") .. sub(s, i)
        end
        if #key > #editor.name * 6 then
          comma = nil -- too long to be the name, however it is written
        end
        editor.key, editor.escaped = key, a
        i = size + 1
      end
    end

    if state == COLON then
      i, code = skip_space(s, i)
      if code == COLON_SIGN then
        state = VALUE
        i, code = i + 1, nil
      elseif code then
        give_up(editor, "malformed")
        state = PASS
      end
    end

    if state == VALUE then
      if not code or code <= 32 then
        i, code = skip_space(s, i)
      end
      if code == QUOTE then
        state = STRING
      elseif code == OPEN_LIST or code == OPEN_OBJECT then
        state = NESTED
        editor.depth, editor.in_string = 1, false
      elseif code == COMMA or code == CLOSE_OBJECT or code == CLOSE_LIST or code == COLON_SIGN then
        give_up(editor, "malformed")
        state = PASS
      elseif code then
        state = SCALAR
      end
      if code and state ~= PASS then
        if editor.target and not editor.keep then
          if not editor.erasing then
            out = (out or "") .. sub(s, from, i - 1)
            from = i
            editor.dropping = true
            if state == SCALAR then
              editor.scalar = ""
            else
              out = out .. editor.text
              editor.owed = editor.owed - (editor.length and #editor.text or 0)
            end
          end
          editor.outcome = editor.outcome or "replaced"
        end
        if state ~= SCALAR then
          i = i + 1
        end
      end
    end

    if state >= SCALAR and state <= NESTED then
      local stop
      if state == STRING then
        stop, code, second, third = string_end(s, i, editor.escaped)
        if not stop then
          editor.escaped = code
        elseif editor.escaped then
          editor.escaped = nil
        end
      elseif state == NESTED then
        stop, code = nested_end(editor, s, i), nil
      else
        stop, code = scalar_end(s, i), nil
        if editor.scalar then
          editor.scalar = editor.scalar .. sub(s, i, stop or size)
          if stop or #editor.scalar > MAX_SCALAR then
            local text = editor.text
            if #editor.scalar <= MAX_SCALAR and not is_scalar(editor.scalar) then
              text = editor.scalar
              give_up(editor, "malformed")
            end
            editor.scalar = nil
            out = out .. text
            editor.owed = editor.owed - (editor.length and #text or 0)
          end
        end
      end
      if stop then
        state = AFTER
        i = stop + 1
        if editor.target then
          if editor.dropping then
            out = out .. owe(editor, stop - from + 1)
            from = i
            editor.dropping, editor.erasing = false, false
          end
          editor.target = false
          state = editor.failed and PASS or AFTER
        end
      else
        i = size + 1
      end
    end

    if state == AFTER then
      if not code then
        code, second, third = byte(s, i, i + 2)
      end
      if code and code <= 32 then
        i, code = skip_space(s, i)
        second = nil
      end
      if code == COMMA then
        if editor.length and editor.found > 0 and not editor.keep and editor.owed < #editor.text then
          comma = i
        end
        -- The next key follows at once as a rule, or behind one space.
        if second == QUOTE then
          state = KEY
          i = i + 2
        elseif second == 32 and third == QUOTE then
          state = KEY
          i = i + 3
        else
          state = NEXT_KEY
          i = i + 1
        end
      elseif code == CLOSE_OBJECT and frozen and editor.found == 0 then
        give_up(editor, "padded")
        state = PASS
      elseif code == CLOSE_OBJECT then
        if editor.found == 0 then
          local separator = editor.empty and "" or ","
          local member = json_edit.member(editor.name, editor.text)
          -- Nothing is changed behind the object, but for the next one of a list: all at once is copied less often.
          local stop = editor.in_list and i - 1 or size
          out = (out or "") .. sub(s, from, i - 1) .. separator .. member .. sub(s, i, stop)
          from = stop + 1
          if editor.length then
            editor.owed = editor.owed - #separator - #member
          end
          editor.outcome = "inserted"
        end
        state = editor.in_list == "open" and LIST or DONE
        i = i + 1
      elseif code then
        give_up(editor, "malformed")
        state = PASS
      end
    elseif state == LIST then
      i, code = skip_space(s, i)
      if code == OPEN_OBJECT then
        editor.found, editor.empty = 0, false
        state = FIRST_KEY
      elseif code == CLOSE_LIST then
        state = DONE
      elseif code and code ~= COMMA then
        give_up(editor, "not_object")
        state = PASS
      end
      i = i + 1
    end
  end

  editor.state = state
  if editor.length and (not editor.head or #editor.head < 4) then
    editor.head = sub((editor.head or "") .. s, 1, 4)
  end
  if comma and not last then
    -- Whether this comma stays is not known yet: it waits, and is looked at again with what follows.
    out = (out or "") .. sub(s, from, comma - 1)
    editor.key, editor.escaped = nil, nil
    if size - comma >= MAX_HELD then
      give_up(editor, "overfull")
      return out .. sub(s, comma)
    end
    editor.held, editor.state = sub(s, comma), AFTER
    return out
  end
  if editor.dropping then
    out = out .. owe(editor, size - from + 1)
    from = size + 1
    if last and editor.scalar then
      local text = sub(editor.scalar, 1, editor.owed)
      out = out .. text
      editor.owed = editor.owed - #text
    end
  end
  if last and editor.owed > 0 then
    return (out or "") .. sub(s, from) .. filler(editor)
  end
  if not out or from > size then
    return out
  end
  return out .. sub(s, from)
end

return json_edit
