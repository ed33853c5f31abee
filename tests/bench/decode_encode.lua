-- Contender (e): the filter as people write it. The whole body becomes a Lua table and a text again.
-- The codec is the usual kind in plain Lua: one function a type, strings found with string.find, tables for both
-- arrays and objects. What it gets wrong (large integers, the order of keys, [] beside {}) every such codec does.

local byte, char, find, format, gsub, sub = string.byte, string.char, string.find, string.format, string.gsub, string.sub
local concat = table.concat

local decode_value

local ESCAPED = { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }

local function utf8_char(code)
  if code < 0x80 then
    return char(code)
  elseif code < 0x800 then
    return char(0xC0 + math.floor(code / 64), 0x80 + code % 64)
  elseif code < 0x10000 then
    return char(0xE0 + math.floor(code / 4096), 0x80 + math.floor(code / 64) % 64, 0x80 + code % 64)
  end
  return char(
    0xF0 + math.floor(code / 262144),
    0x80 + math.floor(code / 4096) % 64,
    0x80 + math.floor(code / 64) % 64,
    0x80 + code % 64
  )
end

-- `at` is the place after the opening quote; returns the text and the place after the closing one.
local function decode_string(text, at)
  local parts, count = {}, 0
  while true do
    local stop = find(text, '["\\]', at)
    if not stop then
      error("a string does not end")
    end
    count = count + 1
    parts[count] = sub(text, at, stop - 1)
    if byte(text, stop) == 34 then
      return count == 1 and parts[1] or concat(parts), stop + 1
    end
    local kind = sub(text, stop + 1, stop + 1)
    at = stop + 2
    if kind == "u" then
      local code = tonumber(sub(text, at, at + 3), 16)
      at = at + 4
      if code >= 0xD800 and code < 0xDC00 and sub(text, at, at + 1) == "\\u" then
        local low = tonumber(sub(text, at + 2, at + 5), 16)
        code = 0x10000 + (code - 0xD800) * 1024 + (low - 0xDC00)
        at = at + 6
      end
      count = count + 1
      parts[count] = utf8_char(code)
    else
      count = count + 1
      parts[count] = ESCAPED[kind] or error("an unknown escape")
    end
  end
end

local function after_space(text, at)
  return find(text, "[^ \t\r\n]", at) or #text + 1
end

local function decode_object(text, at)
  local object = {}
  at = after_space(text, at)
  if byte(text, at) == 125 then
    return object, at + 1
  end
  while true do
    local key, value
    key, at = decode_string(text, after_space(text, at) + 1)
    at = after_space(text, at) + 1 -- the colon
    value, at = decode_value(text, at)
    object[key] = value
    at = after_space(text, at)
    local mark = byte(text, at)
    at = at + 1
    if mark == 125 then
      return object, at
    elseif mark ~= 44 then
      error("a comma or a brace is missing")
    end
  end
end

local function decode_array(text, at)
  local array, count = {}, 0
  at = after_space(text, at)
  if byte(text, at) == 93 then
    return array, at + 1
  end
  while true do
    count = count + 1
    array[count], at = decode_value(text, at)
    at = after_space(text, at)
    local mark = byte(text, at)
    at = at + 1
    if mark == 93 then
      return array, at
    elseif mark ~= 44 then
      error("a comma or a bracket is missing")
    end
  end
end

function decode_value(text, at)
  at = after_space(text, at)
  local first = byte(text, at)
  if first == 34 then
    return decode_string(text, at + 1)
  elseif first == 123 then
    return decode_object(text, at + 1)
  elseif first == 91 then
    return decode_array(text, at + 1)
  elseif first == 116 then
    return true, at + 4
  elseif first == 102 then
    return false, at + 5
  elseif first == 110 then
    return nil, at + 4
  end
  local _, stop = find(text, "^[-+.%deE]+", at)
  return tonumber(sub(text, at, stop)), stop + 1
end

local NAMED = { ["\b"] = "\\b", ["\f"] = "\\f", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ['"'] = '\\"', ["\\"] = "\\\\" }

local function escaped(mark)
  return NAMED[mark] or format("\\u%04x", byte(mark))
end

local function encode(value, out, count)
  local kind = type(value)
  if kind == "string" then
    out[count + 1] = '"' .. gsub(value, '[%z\1-\31"\\]', escaped) .. '"'
    return count + 1
  elseif kind == "number" then
    out[count + 1] = format("%.14g", value)
    return count + 1
  elseif kind ~= "table" then
    out[count + 1] = tostring(value)
    return count + 1
  end
  if value[1] ~= nil then
    for index = 1, #value do
      out[count + 1] = index == 1 and "[" or ","
      count = encode(value[index], out, count + 1)
    end
    out[count + 1] = "]"
    return count + 1
  end
  local mark = "{"
  for key, member in pairs(value) do
    out[count + 1] = mark .. '"' .. gsub(key, '[%z\1-\31"\\]', escaped) .. '":'
    count = encode(member, out, count + 1)
    mark = ","
  end
  out[count + 1] = mark == "{" and "{}" or "}"
  return count + 1
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local priority = headers:get("x-vllm-priority")
  if not priority then
    return
  end
  local body = handle:body()
  local document = decode_value(body:getBytes(0, body:length()), 1)
  document.priority = tonumber(priority)
  local out = {}
  encode(document, out, 0)
  body:setBytes(concat(out))
  headers:remove("x-vllm-priority")
end
