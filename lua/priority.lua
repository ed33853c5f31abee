-- The header's value, the routes and the policy: all that can be decided without a body. No Envoy in here.
--
-- A priority is kept as text from end to end. Lua's numbers are doubles, which hold no int64, and its
-- tonumber takes "0x10", "1e3" and "inf" for numbers.

local byte, char, find, format, gsub, lower, match, sub =
  string.byte, string.char, string.find, string.format, string.gsub, string.lower, string.match, string.sub

local priority = {}

local INT64_MIN, INT64_MAX = "-9223372036854775808", "9223372036854775807"

-- Values and paths repeat from request to request, so what was found for one is kept: for this many at most,
-- and none that is longer. Who sends ever new ones gets no memory.
local MAX_KEPT, MAX_KEPT_LENGTH = 1024, 256

local function kept(find_out)
  local known, count = {}, 0
  return function(key)
    local found = known[key]
    if found == nil then
      if #key > MAX_KEPT_LENGTH then
        return find_out(key)
      end
      if count >= MAX_KEPT then
        known, count = {}, 0
      end
      found = find_out(key)
      known[key], count = found, count + 1
    end
    return found
  end
end

-- Whether decimal a is below decimal b; both as written by canonical().
local function is_below(a, b)
  local a_negative, b_negative = byte(a) == 45, byte(b) == 45
  if a_negative ~= b_negative then
    return a_negative
  end
  if a_negative then
    a, b = sub(b, 2), sub(a, 2)
  end
  if #a ~= #b then
    return #a < #b
  end
  return a < b
end

-- A text without the white space around it. Its time grows with the text and not with the text's square, as
-- "^%s*(.-)%s*$" does: a header's value may be 90 KB long.
local function trimmed(text)
  local first = find(text, "%S")
  return first and match(text, "^.*%S", first) or ""
end

-- The plain decimal of what Python's int() reads: a sign, ASCII digits, single underscores between digits. The
-- white space that it takes around them is gone. nil for all else.
local function canonical(text)
  local sign, digits = match(text, "^([+-]?)(%d[%d_]*)$")
  if not digits or find(digits, "__", 1, true) or sub(digits, -1) == "_" then
    return nil
  end
  digits = match(gsub(digits, "_", ""), "^0*(%d+)$")
  return (sign == "-" and digits ~= "0") and "-" .. digits or digits
end

local function negated(text)
  if text == "0" then
    return text
  end
  return byte(text) == 45 and sub(text, 2) or "-" .. text
end

-- A text as a JSON string, its bytes beyond ASCII as escapes, cut where it is long.
local function quoted(text)
  if #text > 500 then
    text = sub(text, 1, 497) .. "..."
  end
  return '"' .. gsub(text, '[%c"\\\127-\255]', function(c)
    return format("\\u%04x", byte(c))
  end) .. '"'
end

-- An error in vLLM's own shape (vllm/entrypoints/serve/engine/protocol.py, ErrorResponse).
local TYPES = {
  [400] = "Bad Request",
  [413] = "Payload Too Large",
  [415] = "Unsupported Media Type",
}

function priority.error_body(code, message, param)
  return format(
    '{"error":{"message":%s,"type":"%s","param":%s,"code":%d}}',
    quoted(message),
    TYPES[code],
    param and quoted(param) or "null",
    code
  )
end

-- What a header's value means under these settings: a function of the raw value. It gives a table with
--   text     the priority to write, or nil
--   source   "header", "class" or "default"
--   outcome  why there is no text: "invalid" or "out_of_range"
--   message  the same, for a person
--   note     what else the report says of it: "; clamped", or ""
function priority.reader(settings)
  local minimum, maximum = settings.min or INT64_MIN, settings.max or INT64_MAX
  local names = {}
  for name in pairs(settings.classes) do
    names[#names + 1] = name
  end
  table.sort(names)
  local or_class = #names > 0 and ", or a class: " .. table.concat(names, ", ") or ""
  local allowed = format("an integer within %s..%s%s", minimum, maximum, or_class)

  local function refused(raw, outcome, what)
    if #raw > 40 then
      raw = sub(raw, 1, 37) .. "..."
    end
    return { outcome = outcome, message = format("%s: '%s' %s; allowed: %s", settings.header, raw, what, allowed) }
  end

  local function accepted(text, source, note)
    if settings.negate then
      text = negated(text)
    end
    return { text = text, source = source, note = note }
  end

  local read = kept(function(raw)
    local name = trimmed(raw)
    local class = settings.classes[name]
    if class then
      return accepted(class, "class", "")
    end
    local text = canonical(name)
    if not text then
      return refused(raw, "invalid", #names > 0 and "is no integer and no class" or "is no integer")
    end
    local below, above = is_below(text, minimum), is_below(maximum, text)
    if not below and not above then
      if settings.negate and text == INT64_MIN then
        return refused(raw, "out_of_range", "cannot be negated")
      end
      return accepted(text, "header", "")
    end
    local bound = below and settings.min or (above and settings.max)
    if settings.clamp and bound then
      return accepted(bound, "header", "; clamped")
    end
    return refused(raw, "out_of_range", "is out of range")
  end)

  local default = settings.default and accepted(settings.default, "default", "")
  return read, default
end

-- Whether Python's and vLLM's media type is application/json: any case, parameters ignored
-- (vllm/entrypoints/utils.py, validate_json_request).
function priority.is_json(content_type)
  if content_type == "application/json" then
    return true
  end
  return content_type ~= nil and trimmed(match(lower(content_type), "^[^;]*")) == "application/json"
end

local function decoded(digits)
  return char(tonumber(digits, 16))
end

-- What is edited for a request target: "request", "response", or false. Routes are matched as Starlette does:
-- on the percent-decoded path, without its query, case and slashes as they are.
function priority.router(settings)
  local routes = settings.routes
  local unusual = kept(function(target)
    local path = gsub(match(target, "^[^?#]*"), "%%(%x%x)", decoded)
    return routes[path] or false
  end)
  return function(target)
    if not target then
      return false
    end
    local found = routes[target]
    if found then
      return found
    end
    if find(target, "?", 1, true) or find(target, "%", 1, true) then
      return unusual(target)
    end
    return false
  end
end

return priority
