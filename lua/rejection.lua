-- Rejections: which there are, and how a client gets one. Every one is a local response: nothing reaches vLLM.

local settings, priority = ...

local format, tostring = string.format, tostring

local rejection = {}

local HEADER, MAX_BODY = settings.header, settings.max_body_bytes

-- Why a body is not edited: what that is called, and the rejection, if any. One with `unmovable` is a matter of the
-- policy's on_unmovable, and only of a priority that the client has sent.
rejection.OF_BODY = {
  malformed = { outcome = "malformed_json", why = "is not valid JSON" },
  not_object = { outcome = "not_an_object", why = "is not a JSON object" },
  empty = { outcome = "empty_body", why = "is empty" },
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

-- What the policy's `body` and `trust` reject.
local function of_value(outcome, status, message)
  return { outcome = outcome, status = status, message = message }
end

local INTEGER = "the priority in the body %s. Use an integer within the policy's range, or send the header " .. HEADER
rejection.OF_BODY.not_integer = of_value("invalid", 400, format(INTEGER, "is not a plain integer"))
rejection.OF_BODY.out_of_range = of_value("out_of_range", 400, format(INTEGER, "is out of range"))
rejection.OF_BODY.not_allowed =
  of_value("not_allowed", 400, "the policy takes no priority from the body. Send the header " .. HEADER)
rejection.UNTRUSTED = of_value("untrusted", 403, HEADER .. ": the policy does not let this client set a priority")
rejection.OF_BODY.untrusted = rejection.UNTRUSTED

-- Where the policy decides what the body may say, a body that cannot be read for certain is rejected too: vLLM reads
-- more than this filter does, UTF-16 for one.
rejection.OF_UNREAD_BODY = {}
for failure, why in pairs(rejection.OF_BODY) do
  rejection.OF_UNREAD_BODY[failure] = {
    outcome = why.outcome,
    status = why.status or 400,
    message = why.message
      or format("the body %s, so that its priority cannot be set or checked. Send a JSON object", why.why),
  }
end

if MAX_BODY then
  rejection.TOO_LARGE = {
    outcome = "too_large",
    status = 413,
    no_param = true,
    message = format(
      "the body is larger than %.0f bytes, the limit for a body whose priority is set (%s)",
      MAX_BODY,
      MAX_BODY == settings.buffer_bytes and "what a waypoint can hold" or "limits.max_body_bytes"
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
