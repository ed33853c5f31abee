-- What is done to a response, where its request left word of it in the metadata.

local settings, json_edit, priority, body, report = ...

local NAMESPACE, REPORT = report.NAMESPACE, settings.report_header

local response = {}

-- Leaves word that the response is to carry this verdict's priority, since the request cannot.
function response.expect(handle, verdict, route)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, "response", {
    text = verdict.text,
    source = verdict.source,
    note = verdict.note,
    class = verdict.class,
    bucket = verdict.bucket,
    route = route,
  })
end

local function edit(handle, headers, verdict)
  local route = verdict.route
  local encoding = headers:get("content-encoding")
  local outcome = "response_edited"
  if headers:get(":status") ~= "200" or not priority.is_json(headers:get("content-type")) then
    outcome, verdict = "upstream_error", nil
  elseif encoding and encoding ~= "identity" then
    outcome, verdict = "unsupported_encoding", nil
  end
  report.note(handle, outcome, verdict, route)
  if REPORT then
    headers:replace(REPORT, report.of(outcome, verdict))
  end
  if not verdict then
    return report.tell(handle, outcome, nil, route)
  end
  headers:remove("content-length")
  local editor = json_edit.new("priority", verdict.text, function()
    return verdict.text
  end, nil, true)
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      local new = body.edit(editor, chunk, size)
      if new then
        chunk:setBytes(new)
      end
    end
  end
  if json_edit.finish(editor) then
    report.tell(handle, outcome, verdict, route)
  else
    report.tell(handle, "malformed_json", nil, route)
  end
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
  if metadata.response and not metadata.report then
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
