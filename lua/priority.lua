-- The header's value, the routes and the policy: what can be decided without a body. Nothing of Envoy is used here.
--
-- A priority is text from end to end. Lua's numbers are doubles, which cannot hold every int64, and its tonumber
-- accepts "0x10", "1e3" and "inf".

local byte, char, find, format, gsub, lower, match, rep, sub =
  string.byte, string.char, string.find, string.format, string.gsub, string.lower, string.match, string.rep, string.sub

local priority = {}

local INT64_MIN, INT64_MAX = "-9223372036854775808", "9223372036854775807"

-- Results are memoized, because header values and paths repeat. The cache holds at most MAX_CACHED entries and skips
-- long keys, so clients cannot grow it without bound.
local MAX_CACHED, MAX_CACHED_LENGTH = 1024, 256

local function memoized(work_out)
  local cache, count = {}, 0
  return function(key)
    local found = cache[key]
    if found == nil then
      if #key > MAX_CACHED_LENGTH then
        return work_out(key)
      end
      if count >= MAX_CACHED then
        cache, count = {}, 0
      end
      found = work_out(key) or false
      cache[key], count = found, count + 1
    end
    return found
  end
end

-- Whether decimal a is less than decimal b, both as written by canonical().
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

-- A text without the white space around it, in linear time. The pattern "^%s*(.-)%s*$" takes quadratic time, and a
-- header's value may be 90 KB long.
local function trimmed(text)
  local first = find(text, "%S")
  return first and match(text, "^.*%S", first) or ""
end

-- The plain decimal of a text that Python's int() accepts: a sign, ASCII digits, single underscores between digits. The
-- white space around it has been removed. nil for any other text.
local function canonical(text)
  local sign, digits = match(text, "^([+-]?)(%d[%d_]*)$")
  if not digits or find(digits, "__", 1, true) or sub(digits, -1) == "_" then
    return nil
  end
  digits = match(gsub(digits, "_", ""), "^0*(%d+)$")
  return (sign == "-" and digits ~= "0") and "-" .. digits or digits
end

-- The decimal with the other sign.
function priority.negated(text)
  if text == "0" then
    return text
  end
  return byte(text) == 45 and sub(text, 2) or "-" .. text
end

-- The bounds of the buckets that metrics count priorities in, and the buckets' names. Most priorities are small.
local BUCKETS = {
  { "-100", "below -100" },
  { "-10", "-100 to -11" },
  { "0", "-10 to -1" },
  { "1", "0" },
  { "11", "1 to 10" },
  { "101", "11 to 100" },
}

local function bucket_of(text)
  for _, entry in ipairs(BUCKETS) do
    if is_below(text, entry[1]) then
      return entry[2]
    end
  end
  return "above 100"
end

-- A text as a JSON string. Bytes beyond ASCII are escaped, and a long text is cut.
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
  [403] = "Forbidden",
  [413] = "Payload Too Large",
  [415] = "Unsupported Media Type",
  [503] = "Service Unavailable",
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

-- Returns a function that reads a header's raw value under these settings, and the verdict of a request without a value
-- (nil where the policy has no default). A verdict is a table of
--   text     the priority to write, or nil where the value is rejected
--   source   "header", "class" or "default"
--   note     what the report adds: "; clamped", or ""
--   class    the name of the class, where it came from one
--   bucket   the range that metrics count the text in
--   replace  gives the text for a value in the body; the default has none, and leaves what is there
--   outcome  why the value is rejected: "invalid" or "out_of_range"
--   message  the same, for a person
--   status   the status to reject it with
function priority.reader(settings)
  local minimum, maximum = settings.min or INT64_MIN, settings.max or INT64_MAX
  local names = {}
  for name in pairs(settings.classes) do
    names[#names + 1] = name
  end
  table.sort(names)
  local or_class = #names > 0 and ", or a class: " .. table.concat(names, ", ") or ""
  local valid = format("Use an integer from %s to %s%s", minimum, maximum, or_class)

  local function rejected(raw, outcome, what)
    if #raw > 40 then
      raw = sub(raw, 1, 37) .. "..."
    end
    local message = format("%s: '%s' %s. %s", settings.header, raw, what, valid)
    return { outcome = outcome, message = message, status = 400 }
  end

  local function accepted(text, source, note, class)
    if settings.negate then
      text = priority.negated(text)
    end
    local replace = source ~= "default" and function()
      return text
    end or nil
    return {
      text = text,
      source = source,
      note = note,
      class = class,
      bucket = bucket_of(text),
      replace = replace,
    }
  end

  local read = memoized(function(raw)
    local name = trimmed(raw)
    local class = settings.classes[name]
    if class then
      return accepted(class, "class", "", name)
    end
    local text = canonical(name)
    if not text then
      return rejected(raw, "invalid", "is not an integer" .. (#names > 0 and " or a class" or ""))
    end
    local below, above = is_below(text, minimum), is_below(maximum, text)
    if not below and not above then
      if settings.negate and text == INT64_MIN then
        return rejected(raw, "out_of_range", "cannot be negated")
      end
      return accepted(text, "header", "")
    end
    local bound = below and settings.min or (above and settings.max)
    if settings.clamp and bound then
      return accepted(bound, "header", "; clamped")
    end
    return rejected(raw, "out_of_range", "is out of range")
  end)

  local default = settings.default and accepted(settings.default, "default", "")
  return read, default
end

-- Whether vLLM accepts this content-type: application/json in any case, parameters ignored
-- (vllm/entrypoints/utils.py, validate_json_request).
function priority.is_json(content_type)
  if content_type == "application/json" then
    return true
  end
  return content_type ~= nil and trimmed(match(lower(content_type), "^[^;]*")) == "application/json"
end

-- Envoy joins the lines of a repeated header with commas. Gives the one line where all lines of a content-type are
-- equal, and nil otherwise: lines that differ stay joined, so that vLLM rejects what could be read in two ways.
local MAX_LINES = 8

function priority.repeated_line(joined)
  for count = MAX_LINES, 2, -1 do
    local length = (#joined + 1) / count - 1
    if length >= 1 and length % 1 == 0 then
      local line = sub(joined, 1, length)
      if rep(line .. ",", count - 1) .. line == joined then
        return line
      end
    end
  end
end

local function decoded(digits)
  return char(tonumber(digits, 16))
end

-- The bucket of a decimal.
priority.bucket_of = bucket_of

-- Returns a function that says what is edited for a request target, and its route: "request", "response", or false; or
-- "control character" where its path has one. Routes are matched as Starlette does: on the percent-decoded path,
-- without its query, case and slashes as they are. Starlette would also match a path that ends in a newline (its regex
-- ends in $).
function priority.router(settings)
  local routes = settings.routes
  local unusual = memoized(function(target)
    local path = gsub(match(target, "^[^?#]*"), "%%(%x%x)", decoded)
    if find(path, "[%z\1-\31\127]") then
      return { "control character", "" }
    end
    return routes[path] and { routes[path], path }
  end)
  return function(target)
    if not target then
      return false
    end
    local found = routes[target]
    if found then
      return found, target
    end
    if find(target, "?", 1, true) or find(target, "%", 1, true) then
      found = unusual(target)
      if found then
        return found[1], found[2]
      end
    end
    return false
  end
end

return priority
