-- The Envoy filter: what is done to a request.
--
-- A request that carries a priority, on a route that does not read the header: its body is edited, a long one while
-- it streams by. A route whose answer alone can carry it: the answer is. Everything else is let go at once.

local settings, json_edit, priority, buffer, report, answer = ...

local tonumber, tostring = tonumber, tostring
local find, format, rep = string.find, string.format, string.rep
local note, tell, report_of = report.note, report.tell, report.of

local HEADER, MEMBER, NAMESPACE = settings.header, "priority", report.NAMESPACE
local MAX_BODY = settings.max_body_bytes

local AMBIGUOUS = { outcome = "ambiguous", message = HEADER .. ": several lines of it differ; allowed: one value" }
local read, default = priority.reader(settings)
local route_of = priority.router(settings)

-- Why a priority cannot be moved into a body.
local UNMOVABLE = {
  not_json = "a priority can be moved only into a body of content-type application/json, and not with an upgrade",
  encoded = "a priority can be moved only into a body without content-encoding",
}

local function refuse(handle, status, outcome, message, param)
  tell(handle, outcome, nil)
  handle:respond(
    { [":status"] = tostring(status), ["content-type"] = "application/json" },
    priority.error_body(status, message, param)
  )
end

-- Once its headers have gone a request can no longer be answered from here. Its body is spoiled instead, so
-- that no server takes it for JSON, and this is put in place of what the server says to that.
local function refuse_late(handle, status, outcome, message, param)
  tell(handle, outcome, nil)
  answer.refuse(handle, status, priority.error_body(status, message, param))
end

local SPOIL = "\0"

local TEXT_REFUSALS = {
  wide = { 415, "not_json", "the body is UTF-16 or UTF-32, which takes no priority; allowed: UTF-8" },
  padded = { 400, "not_json", "the body's object is followed by too much white space" },
  overfull = { 400, "ambiguous", "the body names its priority too often, or too far apart; allowed: once" },
}

local function too_large()
  return "the body is too large for this route; allowed: at most " .. MAX_BODY .. " bytes"
end

-- The header's one value, or nil where its lines differ. Envoy joins lines with commas.
local function header_value(headers, raw)
  if not find(raw, ",", 1, true) then
    return raw
  end
  local first = headers:getAtIndex(HEADER, 0)
  for index = 1, headers:getNumValues(HEADER) - 1 do
    if headers:getAtIndex(HEADER, index) ~= first then
      return nil
    end
  end
  return first
end

-- Holds a body whose length was not said to the limit; true where it was refused. Envoy's own answer to one that it
-- cannot hold finds the report.
local function is_over_limit(handle, headers, pending)
  if not MAX_BODY or headers:get("content-length") or headers:get("upgrade") then
    return false
  end
  if pending then
    note(handle, pending)
  end
  local body = handle:body()
  if body and body:length() > MAX_BODY then
    refuse(handle, 413, "too_large", too_large(), nil)
    return true
  end
  return false
end

local function tell_result(handle, result, verdict)
  if not result then
    tell(handle, "not_json", nil)
  elseif result == "kept" then
    tell(handle, "absent", nil)
  else
    tell(handle, verdict == default and "default" or result, verdict)
  end
end

-- Why the editor's text is refused, or nil.
local function text_refusal(editor, is_default)
  local refusal = TEXT_REFUSALS[json_edit.failure(editor)]
  if refusal and not is_default and (settings.reject_unmovable or refusal[1] == 400) then
    return refusal
  end
end

-- A body of a known length that is too long to be held: it is edited while it streams by, and its new length is
-- promised before any of it is seen.
--
-- setBytes() sets content-length to the length of the one chunk, in headers that leave only once the connection to
-- the upstream is up. So nothing is changed before that is certain: more has been passed on than Envoy takes
-- from a client whose upstream is not there.
local function edit_stream(handle, headers, verdict, length)
  local is_default = verdict == default
  local growth = json_edit.growth(json_edit.member(MEMBER, verdict.text), is_default or not settings.reject_unmovable)
  headers:replace("content-length", format("%.0f", length + growth))
  local editor = json_edit.new(MEMBER, verdict.text, length, growth, is_default)
  local passed, refusal = 0, nil
  -- An answer that does not wait for the whole body, or for any of it, finds this.
  note(handle, report_of("pending", verdict))
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      local frozen = passed <= settings.proven_after and passed + size < length
      local new = buffer.edited(editor, chunk, size, frozen)
      if not frozen then
        if not refusal then
          refusal = text_refusal(editor, is_default)
          if refusal then
            refuse_late(handle, refusal[1], refusal[2], refusal[3], HEADER)
          end
        end
        if refusal then
          new = rep(SPOIL, new and #new or size)
        end
        if new then
          chunk:setBytes(new)
        end
      end
      passed = passed + size
      if passed >= length and not refusal then
        return tell_result(handle, json_edit.result(editor), verdict)
      end
    end
  end
  if not refusal then
    tell_result(handle, json_edit.result(editor), verdict)
  end
end

-- A body of unknown length with lua/behind.lua behind, where it waits until it is whole: edited while it passes.
local function edit_chunks(handle, verdict)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, "held", true)
  local editor = json_edit.new(MEMBER, verdict.text, nil, 0, verdict == default)
  local passed, refused = 0, false
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    passed = passed + size
    if refused then
      chunk:setBytes("")
    elseif MAX_BODY and passed > MAX_BODY then
      refused = true
      refuse_late(handle, 413, "too_large", too_large(), nil)
      chunk:setBytes("")
    elseif size > 0 then
      local new = buffer.edited(editor, chunk, size, false)
      local refusal = text_refusal(editor, verdict == default)
      if refusal then
        refused = true
        refuse_late(handle, refusal[1], refusal[2], refusal[3], HEADER)
      elseif new then
        chunk:setBytes(new)
      end
    end
  end
  if not refused then
    tell_result(handle, json_edit.result(editor), verdict)
  end
end

-- What every proxy holds: Envoy Gateway's own limit is the lowest.
local SURELY_HELD = 32768

local function edit_request(handle, headers, verdict)
  local length = headers:get("content-length")
  length = length and tonumber(length)
  if verdict ~= default and not settings.keep_header then
    headers:remove(HEADER)
  end
  if length and settings.stream_above and length > settings.stream_above then
    return edit_stream(handle, headers, verdict, length)
  end

  -- All else is held until it is whole. A server can do nothing with less, and its length is right by itself.
  if not length or length > SURELY_HELD then
    note(handle, report_of("pending", verdict)) -- Envoy's own answer to a body that it does not hold finds this
  end
  if not length and handle:metadata():get("held_behind") then
    return edit_chunks(handle, verdict)
  end
  local body = handle:body()
  local size = body and body:length() or 0
  if size == 0 then
    return tell(handle, "not_json", nil)
  end
  if MAX_BODY and size > MAX_BODY then
    return refuse(handle, 413, "too_large", too_large(), nil)
  end
  local editor = json_edit.new(MEMBER, verdict.text, nil, 0, verdict == default)
  local new = buffer.edited(editor, body, size, false)
  local refusal = text_refusal(editor, verdict == default)
  if refusal then
    return refuse(handle, refusal[1], refusal[2], refusal[3], HEADER)
  end
  if new then
    body:setBytes(new)
    if not length then
      handle:headers():remove("content-length") -- chunked it came, and chunked it goes
    end
  end
  tell_result(handle, json_edit.result(editor), verdict)
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local edited = route_of(headers:get(":path"))
  if not edited or headers:get(":method") ~= "POST" then
    return
  end

  if MAX_BODY then
    local length = headers:get("content-length")
    length = length and tonumber(length)
    if length and length > MAX_BODY then
      return refuse(handle, 413, "too_large", too_large(), nil)
    end
  end

  local raw = headers:get(HEADER)
  local verdict = default
  if raw then
    local value = header_value(headers, raw)
    verdict = value and read(value) or AMBIGUOUS
    if not verdict.text and settings.reject_invalid then
      return refuse(handle, 400, verdict.outcome, verdict.message, HEADER)
    end
  end
  if not verdict or not verdict.text then
    if not is_over_limit(handle, headers, "none; outcome=pending") then
      tell(handle, verdict and verdict.outcome or "absent", nil)
    end
    return
  end

  if edited == "response" then
    -- The request cannot carry it. The answer is edited: see lua/answer.lua.
    answer.expect(handle, verdict)
    if raw and not settings.keep_header then
      headers:remove(HEADER)
    end
    is_over_limit(handle, headers, nil) -- answer.finish() reports
    return
  end

  local encoding = headers:get("content-encoding")
  -- What follows an upgrade is no body, and has no end to wait for.
  local unmovable = (encoding and encoding ~= "identity" and "encoded")
    or ((not priority.is_json(headers:get("content-type")) or headers:get("upgrade")) and "not_json")
  if not unmovable then
    return edit_request(handle, headers, verdict)
  end
  if settings.reject_unmovable and raw then
    return refuse(handle, 415, unmovable, UNMOVABLE[unmovable], HEADER)
  end
  if not is_over_limit(handle, headers, "none; outcome=pending") then
    tell(handle, unmovable, nil)
  end
end

-- An Envoy of our own adds the report to the answer by itself, and what else an answer needs is done behind, on the
-- few routes where it can be needed: Lua is then not asked about answers at all.
if not settings.answers_behind then
  function envoy_on_response(handle)
    local metadata = handle:streamInfo():dynamicMetadata():get(NAMESPACE)
    if not metadata then
      return
    end
    if settings.old_report_header then
      handle:headers():remove(settings.old_report_header)
    end
    answer.finish(handle, metadata)
  end
end
