-- The Envoy filter. With hold.lua the only file that touches the stream handle.
--
-- A request that carries a priority, on a route that does not read the header: its body is edited, a long one while
-- it streams by. A route whose answer alone can carry it: the answer is. Everything else is let go at once.

local settings, json_edit, priority = ...

local tonumber, tostring = tonumber, tostring
local find, format, rep = string.find, string.format, string.rep
local concat, min = table.concat, math.min

local HEADER, REPORT, MEMBER, NAMESPACE = settings.header, settings.report_header, "priority", "vllm_priority"
local MAX_BODY = settings.max_body_bytes

local AMBIGUOUS = { outcome = "ambiguous", message = HEADER .. ": several lines of it differ; allowed: one value" }
local read, default = priority.reader(settings)
local route_of = priority.router(settings)

-- Why a priority cannot be moved into a body.
local UNMOVABLE = {
  not_json = "a priority can be moved only into a body of content-type application/json, and not with an upgrade",
  encoded = "a priority can be moved only into a body without content-encoding",
}

-- Envoy has no counters for Lua before 1.38. There a call to a cluster without endpoints is counted by Envoy
-- itself: nothing is sent, and nothing is waited for.
local NO_CALL = { [":method"] = "GET", [":path"] = "/", [":authority"] = "count" }

local function count(handle, outcome)
  if handle.stats then
    handle:stats():counter(outcome):inc()
  elseif settings.count_by_cluster then
    handle:httpCall(NAMESPACE .. "_" .. outcome, NO_CALL, "", 0, true)
  end
end

local function report_of(outcome, verdict)
  return verdict.text .. "; source=" .. verdict.source .. "; outcome=" .. outcome .. verdict.note
end

-- Where the access log and the answer find it. One entry of metadata and not one for each part: an entry costs as
-- much as the scan of a small body.
local function note(handle, report)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, "report", report)
end

-- Says what came of a priority: in a counter, in the access log, and in the answer.
local function tell(handle, outcome, verdict)
  count(handle, outcome)
  note(handle, verdict and report_of(outcome, verdict) or "none; outcome=" .. outcome)
end

local function refuse(handle, status, outcome, message, param)
  tell(handle, outcome, nil)
  handle:respond(
    { [":status"] = tostring(status), ["content-type"] = "application/json" },
    priority.error_body(status, message, param)
  )
end

-- Once its headers have gone a request can no longer be answered from here. Its body is spoiled instead, so
-- that no server takes it for JSON, and envoy_on_response puts this in place of what the server says to that.
local function refuse_late(handle, status, outcome, message, param)
  tell(handle, outcome, nil)
  local metadata = handle:streamInfo():dynamicMetadata()
  metadata:set(NAMESPACE, "refused_status", tostring(status))
  metadata:set(NAMESPACE, "refused_body", priority.error_body(status, message, param))
end

local SPOIL = "\0"

local TEXT_REFUSALS = {
  wide = { 415, "not_json", "the body is UTF-16 or UTF-32, which takes no priority; allowed: UTF-8" },
  padded = { 400, "not_json", "the body's object is followed by too much white space" },
  overfull = { 400, "ambiguous", "the body names its priority several times, too far apart; allowed: once" },
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
local function is_over_limit(handle, headers, report)
  if not MAX_BODY or headers:get("content-length") or headers:get("upgrade") then
    return false
  end
  if report then
    note(handle, report)
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

-- Bytes that are copied out of Envoy at a time. LuaJIT asks the kernel anew for each string of 128 KiB and more.
local PIECE = 65536

-- The bytes to pass on in place of a buffer's, or nil where it stays as it is.
local function edited_bytes(editor, buffer, size, frozen)
  if size <= PIECE then
    return json_edit.feed(editor, buffer:getBytes(0, size), frozen)
  end
  local parts, changed = {}, false
  for offset = 0, size - 1, PIECE do
    local bytes = buffer:getBytes(offset, min(PIECE, size - offset))
    local new = json_edit.feed(editor, bytes, frozen)
    parts[#parts + 1] = new or bytes
    changed = changed or new ~= nil
  end
  return changed and concat(parts) or nil
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
  local growth = json_edit.growth(json_edit.member(MEMBER, verdict.text), not settings.reject_unmovable)
  headers:replace("content-length", format("%.0f", length + growth))
  local editor = json_edit.new(MEMBER, verdict.text, length, growth, is_default)
  local passed, refusal = 0, nil
  -- An answer that does not wait for the whole body, or for any of it, finds this.
  note(handle, report_of("pending", verdict))
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      local frozen = passed <= settings.proven_after and passed + size < length
      local new = edited_bytes(editor, chunk, size, frozen)
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

-- A body of unknown length with lua/hold.lua behind, where it waits until it is whole: edited while it passes.
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
      local new = edited_bytes(editor, chunk, size, false)
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
  local new = edited_bytes(editor, body, size, false)
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
    -- The request cannot carry it. The answer is edited: see envoy_on_response.
    local metadata = handle:streamInfo():dynamicMetadata()
    metadata:set(NAMESPACE, "answer_value", verdict.text)
    metadata:set(NAMESPACE, "answer_source", verdict.source)
    metadata:set(NAMESPACE, "answer_note", verdict.note)
    if raw and not settings.keep_header then
      headers:remove(HEADER)
    end
    is_over_limit(handle, headers, nil) -- edit_answer() reports
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

-- Replaces an answer with the refusal of the request that it answers.
local function replace_answer(handle, headers, status, body)
  headers:replace(":status", status)
  headers:replace("content-type", "application/json")
  headers:remove("content-length")
  headers:remove("content-encoding")
  for chunk in handle:bodyChunks() do
    chunk:setBytes(body)
    body = ""
  end
end

local function edit_answer(handle, headers, metadata)
  local verdict = { text = metadata.answer_value, source = metadata.answer_source, note = metadata.answer_note }
  local encoding = headers:get("content-encoding")
  local outcome = (encoding and "encoded")
    or (headers:get(":status") == "200" and priority.is_json(headers:get("content-type")) and "response_edited")
    or "not_json"
  if outcome ~= "response_edited" then
    if REPORT then
      headers:replace(REPORT, "none; outcome=" .. outcome)
    end
    return tell(handle, outcome, nil)
  end
  if REPORT then
    headers:replace(REPORT, report_of(outcome, verdict))
  end
  headers:remove("content-length")
  local editor = json_edit.new(MEMBER, verdict.text, nil, 0, false)
  json_edit.accept_list(editor)
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      local new = edited_bytes(editor, chunk, size, false)
      if new then
        chunk:setBytes(new)
      end
    end
  end
  local result = json_edit.result(editor)
  tell(handle, result and outcome or "not_json", result and verdict)
end

function envoy_on_response(handle)
  local metadata = handle:streamInfo():dynamicMetadata():get(NAMESPACE)
  if not metadata then
    return
  end
  local headers = handle:headers()
  if metadata.answer_value and not metadata.report then
    return edit_answer(handle, headers, metadata)
  end
  if REPORT and metadata.report then
    headers:replace(REPORT, metadata.report)
  end
  if metadata.refused_status then
    replace_answer(handle, headers, metadata.refused_status, metadata.refused_body)
  end
end
