-- What is done to an answer, where its request left word of it in the metadata.

local settings, json_edit, priority, buffer, report = ...

local REPORT = settings.report_header

local answer = {}

-- Tells lua/behind.lua that the word is for it.
local function for_behind(metadata)
  if settings.answers_behind then
    metadata:set(report.NAMESPACE, "answered_behind", true)
  end
end

-- Leaves word that the answer's priority is to be this verdict's: the request cannot carry one.
function answer.expect(handle, verdict)
  local metadata = handle:streamInfo():dynamicMetadata()
  metadata:set(report.NAMESPACE, "answer_value", verdict.text)
  metadata:set(report.NAMESPACE, "answer_source", verdict.source)
  metadata:set(report.NAMESPACE, "answer_note", verdict.note)
  for_behind(metadata)
end

-- Leaves word that the answer, whatever it is, is to be replaced by this refusal.
function answer.refuse(handle, status, body)
  local metadata = handle:streamInfo():dynamicMetadata()
  metadata:set(report.NAMESPACE, "refused_status", tostring(status))
  metadata:set(report.NAMESPACE, "refused_body", body)
  for_behind(metadata)
end

local function replace(handle, headers, status, body)
  headers:replace(":status", status)
  headers:replace("content-type", "application/json")
  headers:remove("content-length")
  headers:remove("content-encoding")
  for chunk in handle:bodyChunks() do
    chunk:setBytes(body)
    body = ""
  end
end

local function edit(handle, headers, metadata)
  local verdict = { text = metadata.answer_value, source = metadata.answer_source, note = metadata.answer_note }
  local encoding = headers:get("content-encoding")
  local outcome = (encoding and encoding ~= "identity" and "encoded")
    or (headers:get(":status") == "200" and priority.is_json(headers:get("content-type")) and "response_edited")
    or "not_json"
  if outcome ~= "response_edited" then
    verdict = nil
  end
  if REPORT then
    headers:replace(REPORT, report.of(outcome, verdict))
  end
  if not verdict then
    return report.tell(handle, outcome, nil)
  end
  headers:remove("content-length")
  local editor = json_edit.new("priority", verdict.text, nil, 0, false)
  json_edit.accept_list(editor)
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      local new = buffer.edited(editor, chunk, size, false)
      if new then
        chunk:setBytes(new)
      end
    end
  end
  local result = json_edit.result(editor)
  report.tell(handle, result and outcome or "not_json", result and verdict)
end

-- Does what the request left word of, and says in the answer what came of the request.
function answer.finish(handle, metadata)
  local headers = handle:headers()
  if metadata.answer_value and not metadata.report then
    return edit(handle, headers, metadata)
  end
  if REPORT and metadata.report then
    headers:replace(REPORT, metadata.report)
  end
  if metadata.refused_status then
    replace(handle, headers, metadata.refused_status, metadata.refused_body)
  end
end

return answer
