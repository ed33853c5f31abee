-- The main filter: what happens to a request, step by step.
--
-- A request that names a priority, on a route that does not read the header, has its body edited. On a route whose
-- response alone can carry the priority, the response is edited. Everything else passes at once, untouched.

local settings, json_edit, priority, body, report, rejection, response, memory = ...

local find, tonumber = string.find, tonumber
local note, report_of, tell = report.note, report.of, report.tell

local HEADER, MEMBER, NAMESPACE = settings.header, "priority", report.NAMESPACE
local MAX_BODY = settings.max_body_bytes

-- A body up to this size is held here; a longer one, and one of unknown length, by the deferred filter. It is what
-- every proxy holds: Envoy Gateway's own limit is the lowest.
local HELD_HERE = 32768

-- A longer body that turns out to be malformed after a value was replaced keeps the new value. It stays malformed.
local MAX_PATCHED = 1048576

-- Of a request that is rejected, a body up to this size is read to its end first: a client that is still sending would
-- find its connection reset instead of a response.
local MAX_DRAINED = 67108864

local read, default = priority.reader(settings)
local route_of = priority.router(settings)

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

-- The rejection of a body, or nil where it passes.
local function rejection_of(why, verdict)
  if why.status and not (why.unmovable and (verdict == default or not settings.reject_unmovable)) then
    return why
  end
end

-- Reports what became of the body that the editor has seen. Returns the rejection, if any, and the outcome.
local function finish(handle, editor, size, verdict)
  local outcome, failure = json_edit.finish(editor)
  if outcome then
    tell(handle, outcome, outcome ~= "kept" and verdict or nil)
    return nil, outcome
  end
  local why = rejection.OF_BODY[size == 0 and "empty" or failure]
  tell(handle, why.outcome, nil)
  return rejection_of(why, verdict), nil
end

local function respond(handle, why)
  rejection.respond(handle, why.status, rejection.body(why))
end

-- Holds the whole body here, then edits it.
local function edit_held(handle, length, verdict)
  local held = handle:body()
  local size = held and held:length() or 0
  if MAX_BODY and size > MAX_BODY then
    tell(handle, rejection.TOO_LARGE.outcome, nil)
    return respond(handle, rejection.TOO_LARGE)
  end
  local editor = json_edit.new(MEMBER, verdict.text, size, verdict == default, false)
  local new = size > 0 and body.edit(editor, held, size) or nil
  local why, outcome = finish(handle, editor, size, verdict)
  if why then
    return respond(handle, why)
  end
  local patches = json_edit.patches(editor)
  if outcome and patches then
    new = body.patch(new or held:getBytes(0, size), body.write_patches(patches))
  end
  if outcome and new then
    held:setBytes(new)
    if not length then
      handle:headers():remove("content-length") -- it came chunked, and leaves chunked
    end
  end
end

-- Envoy's objects end with each chunk, so they are fetched anew.
local function tell_deferred(handle, key, value)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, key, value)
end

-- Edits the chunks of a body while they pass to the deferred filter, which holds them until the body is complete. Of a
-- body that is rejected, by `why` or by what is found in it, nothing passes; the deferred filter responds at its end.
local function edit_passing(handle, length, verdict, why)
  tell_deferred(handle, "deferred", length and "length" or "chunked")
  local editor = verdict and json_edit.new(MEMBER, verdict.text, length, verdict == default, false)
  local passed, held, memory_limit = 0, {}, handle:metadata():get("held_memory")
  memory_limit = tonumber(memory_limit) -- Envoy Gateway's validator returns a text for every key
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    passed = passed + size
    if not why and MAX_BODY and passed > MAX_BODY then
      why = rejection.TOO_LARGE
    elseif not why and memory_limit and memory.is_exhausted(held, memory_limit, size) then
      why = rejection.OVERLOADED
    end
    if not why and size > 0 then
      local new = body.edit(editor, chunk, size)
      local failure = json_edit.failure(editor)
      why = failure and rejection_of(rejection.OF_BODY[failure], verdict)
      if new and not why then
        chunk:setBytes(new)
      end
    end
    if why then
      chunk:setBytes("")
    end
  end
  if why then
    tell(handle, why.outcome, nil)
    tell_deferred(handle, "rejected_status", why.status)
    tell_deferred(handle, "rejected_body", rejection.body(why))
    return
  end
  finish(handle, editor, passed, verdict)
  local patches = passed <= MAX_PATCHED and json_edit.patches(editor)
  if patches then
    tell_deferred(handle, "patches", body.write_patches(patches))
  end
end

local function has_deferred_filter(handle)
  return settings.deferred or handle:metadata():get("deferred")
end

local function content_length(headers)
  local length = headers:get("content-length")
  return length and tonumber(length)
end

-- Rejects a request whose body has not been looked at.
local function reject(handle, headers, why)
  local length = content_length(headers)
  note(handle, report_of(why.outcome, nil)) -- for a response of Envoy's own to what is still to come
  -- What follows an upgrade is not a body; a client that expects a 100 Continue has not sent one.
  if not headers:get("upgrade") and not headers:get("expect") and (length or 0) <= MAX_DRAINED then
    if (not length or length > HELD_HERE) and has_deferred_filter(handle) then
      return edit_passing(handle, length, nil, why)
    end
    handle:body()
  end
  tell(handle, why.outcome, nil)
  respond(handle, why)
end

local function edit_request(handle, headers, verdict)
  local length = content_length(headers)
  if MAX_BODY and length and length > MAX_BODY then
    return reject(handle, headers, rejection.TOO_LARGE)
  end
  if verdict ~= default and not settings.keep_header then
    headers:remove(HEADER)
  end
  if length and length <= HELD_HERE then
    return edit_held(handle, length, verdict)
  end
  note(handle, report_of("pending", verdict)) -- for a response of Envoy's own to a body that it cannot hold
  if has_deferred_filter(handle) then
    return edit_passing(handle, length, verdict)
  end
  return edit_held(handle, length, verdict)
end

-- Why no body of this request can be edited, or nil.
local function unmovable(headers, content_type)
  local encoding = headers:get("content-encoding")
  if encoding and encoding ~= "identity" then
    return rejection.OF_BODY.encoding
  elseif not priority.is_json(content_type) or headers:get("upgrade") then
    return rejection.OF_BODY.media_type -- what follows an upgrade is not a body, and has no end to wait for
  end
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local content_type = headers:get("content-type")
  if content_type and find(content_type, ",", 1, true) then
    content_type = priority.repeated_line(content_type) or content_type
    headers:replace("content-type", content_type)
  end
  local kind = route_of(headers:get(":path"))
  if not kind or headers:get(":method") ~= "POST" then
    return
  end
  if kind == "control character" then
    return reject(handle, headers, rejection.CONTROL_CHARACTER)
  end

  local raw = headers:get(HEADER)
  local verdict = default
  if raw then
    local value = header_value(headers, raw)
    verdict = value and read(value) or rejection.AMBIGUOUS_HEADER
    if not verdict.text and settings.reject_invalid then
      return reject(handle, headers, verdict)
    end
  end
  if not verdict or not verdict.text then
    return tell(handle, verdict and verdict.outcome or "absent", nil)
  end

  if kind == "response" then
    response.expect(handle, verdict)
    if raw and not settings.keep_header then
      headers:remove(HEADER)
    end
    return
  end

  local why = unmovable(headers, content_type)
  if not why then
    return edit_request(handle, headers, verdict)
  end
  if rejection_of(why, verdict) then
    return reject(handle, headers, why)
  end
  tell(handle, why.outcome, nil)
end
