-- What is done to a response, where its request left word of it in the metadata.

local settings, json_edit, priority, body, report = ...

local tonumber = tonumber

local NAMESPACE, REPORT = report.NAMESPACE, settings.report_header

local response = {}

-- Leaves word that the response is to carry this verdict's priority, since the request cannot. Until there is one, the
-- outcome is pending: a request whose client goes away is counted, too.
function response.expect(handle, verdict, route)
  report.note(handle, "pending", verdict, route)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, "response", {
    text = verdict.text,
    source = verdict.source,
    note = verdict.note,
    class = verdict.class,
    bucket = verdict.bucket,
    route = route,
  })
end

-- A response up to this size is held until it is edited, so that the report says what was done. A longer one, and one
-- of unknown length, is edited while it passes, and its header says what is about to be done. A proxy that is not ours
-- may have small buffers: Envoy Gateway's are 32 KiB by default, and a response that exceeds them becomes a 500.
local HELD_HERE = settings.counts and 24576 or 131072

local function say(handle, headers, outcome, verdict, route)
  report.note(handle, outcome, verdict, route)
  if REPORT then
    headers:replace(REPORT, report.of(outcome, verdict))
  end
end

-- What a whole response has become, and its verdict.
local function finish(editor, verdict)
  local edited, failure = json_edit.finish(editor)
  if edited then
    return "response_edited", verdict
  end
  return failure == "not_object" and "not_an_object" or "malformed_json", nil
end

local function edit_held(handle, editor, verdict)
  local held = handle:body()
  local size = held and held:length() or 0
  local new = size > 0 and body.edit(editor, held, size)
  local outcome, applied = finish(editor, verdict)
  if new and applied then
    held:setBytes(new)
  end
  say(handle, handle:headers(), outcome, applied, verdict.route)
  report.tell(handle, outcome, applied, verdict.route)
end

local function edit_passing(handle, headers, editor, verdict, length)
  local received = 0
  say(handle, headers, "response_edited", verdict, verdict.route)
  headers:remove("content-length")
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      received = received + size
      local new = body.edit(editor, chunk, size)
      if received == length then
        new = new and new .. json_edit.held_back(editor)
      end
      if new then
        chunk:setBytes(new)
      end
    end
  end
  local outcome, applied = finish(editor, verdict)
  report.tell(handle, outcome, applied, verdict.route)
end

local function edit(handle, headers, verdict)
  local encoding = headers:get("content-encoding")
  local failure
  if headers:get(":status") ~= "200" or not priority.is_json(headers:get("content-type")) then
    failure = "upstream_error"
  elseif encoding and encoding ~= "identity" then
    failure = "unsupported_encoding"
  end
  if failure then
    say(handle, headers, failure, nil, verdict.route)
    return report.tell(handle, failure, nil, verdict.route)
  end
  local editor = json_edit.new("priority", verdict.text, function()
    return verdict.text
  end, nil, true)
  local length = tonumber(headers:get("content-length") or "")
  if length and length <= HELD_HERE then
    return edit_held(handle, editor, verdict)
  end
  edit_passing(handle, headers, editor, verdict, length)
end

-- Does what the request left word of. Where Envoy's routes do not do it, also says in the response what became of the
-- request. The routes are those of the policy that an Envoy started with: where they name the report by another header
-- than the policy does now, it is renamed.
function response.finish(handle)
  local metadata = handle:streamInfo():dynamicMetadata():get(NAMESPACE)
  if not metadata then
    return
  end
  local headers = handle:headers()
  local noted = metadata.report
  if
    noted
    and not metadata.response
    and (metadata.deferred or noted.outcome == "pending")
    and headers:get(":status") == "413"
  then
    -- Envoy's own response, to a body that exceeds its buffer: nothing has reached the server.
    report.tell(handle, "too_large", nil, noted.route)
    handle:streamInfo():dynamicMetadata():set(NAMESPACE, "deferred", false)
    metadata = handle:streamInfo():dynamicMetadata():get(NAMESPACE)
  end
  if metadata.response and (not noted or noted.outcome == "pending") then
    edit(handle, headers, metadata.response)
  elseif metadata.report and not settings.report_by_routes then
    if settings.routes_report then
      headers:remove(settings.routes_report)
    end
    if REPORT then
      headers:replace(REPORT, metadata.report.text)
    end
  end
end

return response
