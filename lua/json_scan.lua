-- Scans a JSON text that arrives in pieces, and says where the values of one top-level member stand.
--
-- Between two bytes, a scanner is in one state:
--
--   START -> FIRST_KEY -> KEY -> COLON -> VALUE -> SCALAR | STRING | NESTED -> [VALUE_END] -> AFTER -> DONE
--   AFTER -> NEXT_KEY -> KEY (after a comma)             AFTER -> LIST -> FIRST_KEY (the next object of a list)
--
-- Invariants:
--   * In a valid text, the scanner is right about where each top-level key and value begins and ends.
--   * The bytes of a piece are looked at once, and nothing of it is kept but the part of a key: however the text is
--     cut, time is linear in it and memory is constant.
--   * Nested values are only skipped, by their strings and brackets. What that cannot see is harmless: an editor
--     replaces whole values that classify() calls values, and inserts before the closing brace, and by JSON's grammar
--     (RFC 8259) neither can turn an invalid text into a valid one.
--   * FAILED is final. `failed` then says why.

local byte, char, find, gsub, match, sub, tonumber =
  string.byte, string.char, string.find, string.gsub, string.match, string.sub, tonumber

local json_scan = {}

local START, FIRST_KEY, NEXT_KEY, KEY, COLON, VALUE, SCALAR, STRING, NESTED, VALUE_END, AFTER, LIST, DONE, FAILED =
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14

-- How deeply a value of the member may be nested. Readers differ in where they stop, and no integer is nested.
local MAX_DEPTH = 64

local BYTE_ORDER_MARK, BEYOND = "\239\187\191", math.huge
local QUOTE, BACKSLASH, COMMA, COLON_SIGN = 34, 92, 44, 58
local OPEN_OBJECT, CLOSE_OBJECT, OPEN_LIST, CLOSE_LIST = 123, 125, 91, 93
-- Below this distance, brackets are looked for byte by byte; above it by string.find, which is memchr.
local NEAR = 16

-- What a byte outside strings does to the nesting depth.
local DEPTH_CHANGE = {}
for code = 0, 255 do
  DEPTH_CHANGE[code] = 0
end
DEPTH_CHANGE[OPEN_OBJECT], DEPTH_CHANGE[OPEN_LIST] = 1, 1
DEPTH_CHANGE[CLOSE_OBJECT], DEPTH_CHANGE[CLOSE_LIST] = -1, -1

local IS_SPACE = { [32] = true, [9] = true, [10] = true, [13] = true }

-- A new scanner for the member `name`, which consists of ASCII letters and digits. With `in_list`, the objects of a
-- top-level list are scanned too, each for itself.
function json_scan.new(name, in_list)
  return {
    name = name,
    in_list = in_list,
    state = START,
    failed = nil, -- "malformed", "not_object" or "charset" (UTF-16 or UTF-32)
    mark = 0, -- bytes of a byte-order mark so far; nil once none can follow
    escaped = nil, -- true: inside a string, and the next byte follows an odd number of backslashes
    depth = nil, -- of the nested value; nil outside one
    in_string = nil, -- inside a string of the nested value
    near = nil, -- the next brackets of this piece: else each of its nested values would search to its end
    key = nil, -- the part of a key that came with earlier pieces
    target = nil, -- true: the current value is the member's
    found = 0, -- members of that name in this object
    empty = nil, -- true: this object has no members
  }
end

-- Whether the byte at position i follows an odd number of backslashes, none of them before `first`.
local function is_escaped(s, i, first)
  -- JIT: one backslash is usual, so the loop is entered only for two: an inner loop ends the trace around it.
  if i - 2 < first or byte(s, i - 2) ~= BACKSLASH then
    return i - 1 >= first and byte(s, i - 1) == BACKSLASH
  end
  local k = i - 1
  while k >= first and byte(s, k) == BACKSLASH do
    k = k - 1
  end
  return (i - k) % 2 == 0
end

-- Returns the position of the quote that ends a string, searching from position i, or nil where the piece ends first.
-- Only a quote can end a string, so backslashes are counted only before one, and at the end of the piece.
local function string_end(scanner, s, i)
  local first = scanner.escaped and i + 1 or i
  local quote = find(s, '"', first, true)
  -- JIT: most strings have no backslash before the quote, and then this loop is not entered.
  while quote and quote > first and byte(s, quote - 1) == BACKSLASH and is_escaped(s, quote, first) do
    quote = find(s, '"', quote + 1, true)
  end
  -- A piece that ends before the escaped byte came leaves it escaped.
  scanner.escaped = not quote and (first > #s + 1 or is_escaped(s, #s + 1, first)) or nil
  return quote
end

-- The nesting depth after the bytes i to stop - 1, none of which is inside a string. Where the depth reaches 0, returns
-- 0 and that position. `near` has the next position of each kind of bracket, searched for only once it is passed.
local function depth_after(s, i, stop, depth, near)
  local open_object, open_list, close_object, close_list = near[1], near[2], near[3], near[4]
  while true do
    open_object = open_object < i and (find(s, "{", i, true) or BEYOND) or open_object
    open_list = open_list < i and (find(s, "[", i, true) or BEYOND) or open_list
    close_object = close_object < i and (find(s, "}", i, true) or BEYOND) or close_object
    close_list = close_list < i and (find(s, "]", i, true) or BEYOND) or close_list
    local close = close_list < close_object and close_list or close_object
    local open = open_list < open_object and open_list or open_object
    local bracket = close < open and close or open
    if bracket >= stop or depth + (close < open and -1 or 1) == 0 then
      near[1], near[2], near[3], near[4] = open_object, open_list, close_object, close_list
      if bracket >= stop then
        return depth
      end
      return 0, close
    end
    depth = depth + (close < open and -1 or 1)
    i = bracket + 1
  end
end

-- The same for a few bytes.
-- JIT: the first four bytes are written out, because a loop in here would keep LuaJIT from compiling the caller's.
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

-- Returns the position of the bracket that ends the nested value, searching from position i, or nil where the piece
-- ends first.
-- JIT: one turn of the loop is one quote, and its usual ways have no loop and few branches: this is where the time of a
-- large chat goes.
local function nested_end(scanner, s, i)
  local depth, in_string, near = scanner.depth, scanner.in_string, scanner.near
  local first = i
  if scanner.escaped and i <= #s then
    first = i + 1
    i = first
    scanner.escaped = nil
  end
  while true do
    local quote = find(s, '"', i, true)
    if in_string then
      if not quote then
        scanner.depth, scanner.in_string = depth, true
        scanner.escaped = scanner.escaped or is_escaped(s, #s + 1, first)
        return nil
      end
      if byte(s, quote - 1) ~= BACKSLASH or quote == first or not is_escaped(s, quote, first) then
        in_string = false
      end
    else
      local stop = quote or #s + 1
      local gap, at = stop - i, nil
      if gap == 1 then
        depth = depth + DEPTH_CHANGE[byte(s, i)]
        at = depth == 0 and i or nil
      elseif gap > NEAR then
        near = near or { 0, 0, 0, 0 }
        scanner.near = near
        depth, at = depth_after(s, i, stop, depth, near)
      elseif gap > 0 then
        depth, at = depth_after_few(s, i, stop, depth)
      end
      if at then
        return at
      end
      if not quote then
        scanner.depth, scanner.in_string = depth, false
        return nil
      end
      in_string = true
    end
    i = quote + 1
  end
end

-- Returns the position and code of the first byte from i on that is not white space; the code is nil at the end.
local function skip_space(s, i)
  local code = byte(s, i)
  while IS_SPACE[code] do
    i = i + 1
    code = byte(s, i)
  end
  return i, code
end

local function unescape(digits)
  return char(tonumber(digits, 16))
end

local function fail(scanner, why)
  scanner.state, scanner.failed = FAILED, why
end

-- Reads what comes before the object: a byte-order mark, which a piece may end inside, and white space. Returns the
-- position to go on from.
local function begin(scanner, s)
  local i, code = 1, byte(s, 1)
  while scanner.mark and code do
    if code == byte(BYTE_ORDER_MARK, scanner.mark + 1) then
      scanner.mark, i = scanner.mark + 1, i + 1
      code = byte(s, i)
    elseif scanner.mark > 0 then
      fail(scanner, "malformed")
      return i
    end
    if scanner.mark == 0 or scanner.mark == 3 then
      scanner.mark = nil
    end
  end
  i, code = skip_space(s, i)
  if code == OPEN_OBJECT then
    scanner.state = FIRST_KEY
  elseif code == OPEN_LIST and scanner.in_list then
    scanner.state = LIST
  elseif code == 0 or code == 254 or code == 255 then
    fail(scanner, "charset")
  elseif code then
    fail(scanner, "not_object")
  end
  return i + 1
end

-- Scans from position i of a piece to the next event. Returns the event, its position, and the position to go on from:
--
--   "value"       the first byte of a value of the member
--   "value_end"   the byte after it: white space, a comma or a closing brace
--   "object_end"  the closing brace
--   nil           the piece has ended, or the scan has failed
--
-- Call it until it returns nil, and then with the next piece and position 1.
function json_scan.next(scanner, s, i)
  if i == 1 then
    scanner.near = nil -- a new piece
  end
  if scanner.state == START then
    i = begin(scanner, s)
  end
  local size, state, name = #s, scanner.state, scanner.name

  -- At the end of a piece, a state stays what it is.
  while i <= size and state < DONE do
    local code
    if state == KEY then
      local quote = string_end(scanner, s, i)
      -- A longer key cannot be the name, however it is written, so no more of it is kept.
      local key = (scanner.key or "") .. sub(s, i, math.min(quote and quote - 1 or size, i + #name * 6))
      if quote then
        if
          key == name
          or (#key <= #name * 6 and find(key, "\\u00", 1, true) and gsub(key, "\\u00(%x%x)", unescape) == name)
        then
          scanner.target, scanner.found = true, scanner.found + 1
        end
        scanner.key, state = nil, COLON
      else
        scanner.key = sub(key, 1, #name * 6 + 1)
      end
      i = (quote or size) + 1
    elseif state == SCALAR or state == STRING or state == NESTED then
      local stop
      if state == STRING then
        stop = string_end(scanner, s, i)
      elseif state == NESTED then
        stop = nested_end(scanner, s, i)
      else
        stop = find(s, "[%z\1- ,}]", i)
        stop = stop and stop - 1
      end
      if stop then
        state = scanner.target and VALUE_END or AFTER
      end
      i = (stop or size) + 1
    elseif state == VALUE_END then
      code = byte(s, i)
      scanner.target = nil
      if not (code == COMMA or code == CLOSE_OBJECT or IS_SPACE[code]) then
        fail(scanner, "malformed")
        return nil
      end
      scanner.state = AFTER
      return "value_end", i, i
    else
      i, code = skip_space(s, i)
      if not code then
        break
      elseif state == COLON and code == COLON_SIGN then
        state, i = VALUE, i + 1
      elseif (state == FIRST_KEY or state == NEXT_KEY) and code == QUOTE then
        state, i = KEY, i + 1
      elseif state == AFTER and code == COMMA then
        state, i = NEXT_KEY, i + 1
      elseif (state == AFTER or state == FIRST_KEY) and code == CLOSE_OBJECT then
        scanner.empty = state == FIRST_KEY
        scanner.state = scanner.list and LIST or DONE
        return "object_end", i, i + 1
      elseif
        state == VALUE
        and code ~= COMMA
        and code ~= COLON_SIGN
        and code ~= CLOSE_OBJECT
        and code ~= CLOSE_LIST
      then
        local start = i
        state = code == QUOTE and STRING or SCALAR
        if code == OPEN_OBJECT or code == OPEN_LIST then
          state, scanner.depth, scanner.in_string = NESTED, 1, false
        end
        i = state == SCALAR and i or i + 1
        if scanner.target then
          scanner.state = state
          return "value", start, i
        end
      elseif state == LIST and (code == OPEN_OBJECT or code == CLOSE_LIST or code == COMMA) then
        scanner.list = true
        if code == OPEN_OBJECT then
          state, scanner.found = FIRST_KEY, 0
        elseif code == CLOSE_LIST then
          state = DONE
        end
        i = i + 1
      else
        fail(
          scanner,
          (state == LIST and "not_object") or (code == 0 and state == FIRST_KEY and "charset") or "malformed"
        )
        return nil
      end
    end
  end

  scanner.state = state
  if state == DONE and find(s, "[^ \t\r\n]", i) then
    fail(scanner, "malformed") -- only white space may follow
  end
  return nil
end

-- Whether the whole text was scanned and nothing was wrong with it.
function json_scan.is_complete(scanner)
  return scanner.state == DONE
end

local function is_number(text)
  local whole, rest = match(text, "^%-?(%d+)(.*)$")
  if not whole or (#whole > 1 and byte(whole) == 48) then
    return false
  end
  rest = gsub(gsub(rest, "^%.%d+", ""), "^[eE][+-]?%d+", "")
  return rest == ""
end

-- What a string may hold beside plain ASCII: escapes and UTF-8. The last two of the lenient ones are lone surrogates.
local ESCAPES_AND_UTF8 = {
  '\\["\\/bfnrt]',
  "\\u[dD][89abAB]%x%x\\u[dD][c-fC-F]%x%x",
  "\\u[0-9a-cA-CefEF]%x%x%x",
  "\\u[dD][0-7]%x%x",
  "[\194-\223][\128-\191]",
  "\224[\160-\191][\128-\191]",
  "[\225-\236\238\239][\128-\191][\128-\191]",
  "\237[\128-\159][\128-\191]",
  "\240[\144-\191][\128-\191][\128-\191]",
  "[\241-\243][\128-\191][\128-\191][\128-\191]",
  "\244[\128-\143][\128-\191][\128-\191]",
  lenient = { "\\u%x%x%x%x", "\237[\160-\191][\128-\191]" },
}
local WORDS = {
  ["true"] = true,
  ["false"] = true,
  ["null"] = true,
  lenient = { NaN = true, Infinity = true, ["-Infinity"] = true },
}

-- Whether values are read as Python's json module reads them, and whether one was nested too deeply to be read.
local lenient, too_deep = false, false

-- Whether the bytes between two quotes are a string. What is valid is replaced by a blank, so that no two parts of it
-- can join into something else.
local function is_string(text)
  if not find(text, '[%z\1-\31\\"\128-\255]') then
    return true
  end
  for _, pattern in ipairs(ESCAPES_AND_UTF8) do
    text = gsub(text, pattern, " ")
  end
  for _, pattern in ipairs(lenient and ESCAPES_AND_UTF8.lenient or {}) do
    text = gsub(text, pattern, " ")
  end
  return find(text, '[%z\1-\31\\"\128-\255]') == nil
end

-- Returns the position after the value at position i, or nil where there is no value.
local function value_end(s, i, depth)
  local code = byte(s, i)
  if code == QUOTE then
    local stop = string_end({}, s, i + 1)
    return stop and is_string(sub(s, i + 1, stop - 1)) and stop + 1 or nil
  elseif code ~= OPEN_OBJECT and code ~= OPEN_LIST then
    local text = match(s, "^[%w.+-]+", i)
    local valid = text and (WORDS[text] or is_number(text) or (lenient and WORDS.lenient[text]))
    return valid and i + #text or nil
  end
  local close = code == OPEN_OBJECT and CLOSE_OBJECT or CLOSE_LIST
  local nowhere = #s + 1
  i, code = skip_space(s, i + 1)
  if code == close then
    return i + 1
  end
  too_deep = too_deep or depth == 0
  while depth > 0 do
    if close == CLOSE_OBJECT then
      i, code = skip_space(s, code == QUOTE and value_end(s, i, depth) or nowhere)
      i = code == COLON_SIGN and skip_space(s, i + 1) or nowhere
    end
    i, code = skip_space(s, value_end(s, i, depth - 1) or nowhere)
    if code ~= COMMA then
      return code == close and i + 1 or nil
    end
    i, code = skip_space(s, i + 1)
  end
  return nil
end

-- What a text is as a value of the member:
--
--   "value"      one JSON value by RFC 8259
--   "malformed"  not a value for any reader
--   "unclear"    a value for some readers only: NaN, Infinity, a lone surrogate, or nested deeper than MAX_DEPTH. Its
--                text must not pass unchanged: a reader that accepts it may find another value of the member after it.
function json_scan.classify(text)
  lenient, too_deep = false, false
  if value_end(text, 1, MAX_DEPTH) == #text + 1 then
    return "value"
  end
  lenient = true
  return (too_deep or value_end(text, 1, MAX_DEPTH) == #text + 1 or too_deep) and "unclear" or "malformed"
end

return json_scan
