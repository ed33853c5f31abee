-- The deferred filter. It comes after the main filter, which edits a long body, or one of unknown length, in chunks
-- while they pass. Here the body is held, with its headers, until it is complete. Nothing of it has left when its
-- length is set, when a patch is applied, or when the request is rejected. Envoy keeps the body as it came: nothing is
-- copied.
local body, rejection, report = ...

local format, tonumber = string.format, tonumber

local function word_of(handle)
  return handle:streamInfo():dynamicMetadata():get(report.NAMESPACE)
end

function envoy_on_request(handle)
  local metadata = word_of(handle)
  if not metadata or not metadata.deferred then
    return
  end
  local held = handle:body()
  metadata = word_of(handle)
  if metadata.patches and held then
    held:setBytes(body.patch(held:getBytes(0, held:length()), metadata.patches))
    if not word_of(handle).deferred then
      return -- Envoy has responded, because the edited body exceeds its buffer
    end
  end
  report.count(handle, metadata.report.outcome)
  -- From here on no response is about the hold, and a second instance has nothing to do.
  handle:streamInfo():dynamicMetadata():set(report.NAMESPACE, "deferred", false)
  if metadata.rejected_status then
    return rejection.respond(handle, tonumber(metadata.rejected_status), metadata.rejected_body)
  end
  -- Every chunk that was changed has written its own length into content-length.
  if metadata.deferred == "length" then
    handle:headers():replace("content-length", format("%d", held and held:length() or 0))
  else
    handle:headers():remove("content-length") -- it came chunked, and leaves chunked
  end
end
