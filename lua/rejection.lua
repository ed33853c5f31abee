-- Rejections: which there are, and how a client gets one. Every one is a local response: nothing reaches vLLM.

local settings, priority = ...

local format, tostring = string.format, tostring

local rejection = {}

local HEADER, MAX_BODY = settings.header, settings.max_body_bytes

-- Why a body is not edited: what that is called, and the rejection, if any. One with `unmovable` is a matter of the
-- policy's on_unmovable, and only of a priority that the client has sent.
rejection.OF_BODY = {
  malformed = { outcome = "malformed_json" },
  not_object = { outcome = "not_an_object" },
  empty = { outcome = "empty_body" },
  media_type = {
    outcome = "unsupported_media_type",
    status = 415,
    unmovable = true,
    message = "the priority cannot be moved into this body. Send it with content-type application/json and no upgrade",
  },
  encoding = {
    outcome = "unsupported_encoding",
    status = 415,
    unmovable = true,
    message = "the priority cannot be moved into a body that has a content-encoding. Send the body without one",
  },
  charset = {
    outcome = "unsupported_charset",
    status = 415,
    unmovable = true,
    message = "the priority cannot be moved into a body in UTF-16 or UTF-32. Send the body in UTF-8",
  },
  too_many = {
    outcome = "ambiguous",
    status = 400,
    message = "the body names its priority more than 256 times. Name it once",
  },
  unclear = {
    outcome = "ambiguous",
    status = 400,
    message = "the priority in the body is longer than 4096 bytes or not a value for every JSON reader. Use an integer",
  },
}

if MAX_BODY then
  rejection.TOO_LARGE = {
    outcome = "too_large",
    status = 413,
    no_param = true,
    message = format(
      "the body is larger than %.0f bytes, the limit for a body whose priority is set (limits.max_body_bytes)",
      MAX_BODY
    ),
  }
end

rejection.OVERLOADED = {
  outcome = "overloaded",
  status = 503,
  no_param = true,
  message = "the sidecar holds as many request bodies as its memory limit allows. Send the request again later. "
    .. "If this happens often, raise the sidecar's memory limit, or lower limits.max_body_bytes",
}

rejection.AMBIGUOUS_HEADER = {
  outcome = "ambiguous",
  status = 400,
  message = HEADER .. ": this header has several lines with different values. Send one value",
}

rejection.CONTROL_CHARACTER = {
  outcome = "invalid_path",
  status = 400,
  no_param = true,
  message = "the path contains a control character. Send the path without it",
}

-- An error in vLLM's own shape (vllm/entrypoints/serve/engine/protocol.py, ErrorResponse).
function rejection.body(why)
  return priority.error_body(why.status, why.message, not why.no_param and HEADER or nil)
end

-- Responds with a rejection. `body` is what rejection.body() returned for it.
function rejection.respond(handle, status, body)
  local headers = { [":status"] = tostring(status), ["content-type"] = "application/json" }
  if handle:headers():get("origin") then
    headers["access-control-allow-origin"] = "*" -- else a page in a browser sees a network error
  end
  handle:respond(headers, body)
end

return rejection
