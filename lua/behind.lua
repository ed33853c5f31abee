-- Stands behind the filter in an Envoy of our own, on the routes where a request or its answer may need what the
-- filter cannot do or should not cost every request.
--
-- It holds a body of unknown length that is edited until it is whole. Envoy keeps it as it came in, so nothing of it is
-- copied. The filter edits such a body chunk by chunk, and each chunk:setBytes() writes that one chunk's length into
-- content-length. As long as the headers wait here this can be put right, and the request can still be refused.
--
-- And it does to an answer what the filter left word of. It acts on `answered_behind` only: a filter of an older or
-- a newer policy may see to its answers itself.

local report, answer = ...

function envoy_on_request(handle)
  local metadata = handle:streamInfo():dynamicMetadata():get(report.NAMESPACE)
  if not metadata or not metadata.held then
    return
  end
  handle:body()
  metadata = handle:streamInfo():dynamicMetadata():get(report.NAMESPACE)
  if metadata.refused_status then
    handle:respond(
      { [":status"] = metadata.refused_status, ["content-type"] = "application/json" },
      metadata.refused_body
    )
  else
    handle:headers():remove("content-length") -- chunked it came, and chunked it goes
  end
end

function envoy_on_response(handle)
  local metadata = handle:streamInfo():dynamicMetadata():get(report.NAMESPACE)
  if metadata and metadata.answered_behind then
    answer.finish(handle, metadata)
  end
end
