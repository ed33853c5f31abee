-- Stands behind the filter, on the route of bodies whose length was not said: holds one that is edited until it is
-- whole. Envoy keeps it as it came in, so nothing of it is copied.
--
-- The filter edits such a body chunk by chunk, and each chunk:setBytes() writes that one chunk's length into
-- content-length. As long as the headers wait here this can be put right, and the request can still be refused.

function envoy_on_request(handle)
  local metadata = handle:streamInfo():dynamicMetadata():get("vllm_priority")
  if not metadata or not metadata.held then
    return
  end
  handle:body()
  metadata = handle:streamInfo():dynamicMetadata():get("vllm_priority")
  if metadata.refused_status then
    handle:respond(
      { [":status"] = metadata.refused_status, ["content-type"] = "application/json" },
      metadata.refused_body
    )
  else
    handle:headers():remove("content-length") -- chunked it came, and chunked it goes
  end
end
