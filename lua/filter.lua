-- The main filter: what happens to a request, step by step.
--
-- A request that names a priority, on a route that does not read the header, has its body edited. On a route whose
-- response alone can carry the priority, the response is edited. Where the policy says so, a header that vLLM reads
-- itself is written anew, and a priority in the body is checked. Everything else passes at once, untouched.

local settings, json_edit, priority, body_rule, body, report, rejection, response, memory, trust, claims = ...

local find, tonumber = string.find, tonumber
local note, tell = report.note, report.tell

local HEADER, MEMBER, NAMESPACE = settings.header, "priority", report.NAMESPACE
local MAX_BODY = settings.max_body_bytes

-- Whether the proxy is not ours, so that another instance of this filter may be in it.
local SHARED = settings.counts

-- A body up to this size is held here; a longer one, and one of unknown length, by the deferred filter. Every proxy can
-- hold it, edited, too: Envoy Gateway's own limit is the lowest, 32 KiB.
local HELD_HERE = SHARED and 24576 or 32768

-- A longer body that turns out to be malformed after a value was replaced is rejected: to put the old value back, the
-- deferred filter would have to copy all of it.
local MAX_PATCHED = 1048576

-- Of a request that is rejected, a body up to this size is read to its end first: a client that is still sending would
-- find its connection reset instead of a response. A body that exceeds the proxy's buffer cannot be read to its end.
local MAX_DRAINED = settings.buffer_bytes or 67108864

local route_of = priority.router(settings)

-- Whether the policy decides what a body may say. Then what cannot be read is rejected.
local ENFORCES = settings.body ~= "accept" or settings.trust ~= nil
local REJECTIONS = ENFORCES and rejection.OF_UNREAD_BODY or rejection.OF_BODY

local RULES, OF_TENANT = body_rule.of(settings), {}
for tenant, own in pairs(settings.tenants or {}) do
  for _, shared in ipairs({ "header", "negate", "body", "reject_untrusted" }) do
    own[shared] = settings[shared]
  end
  OF_TENANT[tenant] = body_rule.of(own)
end

local trusted_by = settings.trust and trust.rule(settings.trust)
local token_rules = settings.trust and settings.trust.claims
local tenant_of = settings.tenant_identities and trust.tenants(settings.tenant_identities)
local HAS_TENANTS = settings.tenant_header or settings.tenant_claim or tenant_of

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
  if why.status and not (why.unmovable and (verdict.source == "default" or not settings.reject_unmovable)) then
    return why
  end
end

-- What is reported of a body that was edited: an outcome, and the verdict that was applied, if any.
local function result(outcome, verdict, last)
  if outcome == "replaced" and verdict.clamps then
    return outcome, { text = last, source = "body", note = "; clamped", bucket = priority.bucket_of(last) }
  elseif outcome ~= "inserted" and outcome ~= "replaced" then
    return verdict.left or outcome, nil
  elseif not verdict.text then
    return verdict.ignored_as, nil
  end
  return outcome, verdict
end

-- What became of the body that the editor has seen: the rejection, if any, the editor's outcome, what is reported.
local function finish(editor, size, verdict)
  local outcome, failure = json_edit.finish(editor)
  if outcome then
    return nil, outcome, result(outcome, verdict, editor.last)
  end
  local why = REJECTIONS[size == 0 and "empty" or failure]
  return rejection_of(why, verdict), nil, why.outcome, nil
end

local function word_of(handle)
  return handle:streamInfo():dynamicMetadata():get(NAMESPACE)
end

local function respond(handle, why)
  rejection.respond(handle, why.status, rejection.body(why))
end

-- Holds the whole body here, then edits it.
local function edit_held(handle, length, verdict, route)
  local held = handle:body()
  local size = held and held:length() or 0
  if MAX_BODY and size > MAX_BODY then
    tell(handle, rejection.TOO_LARGE.outcome, nil, route)
    return respond(handle, rejection.TOO_LARGE)
  end
  local editor = json_edit.new(MEMBER, verdict.text, verdict.replace, size, false)
  local new = size > 0 and body.edit(editor, held, size) or nil
  local why, outcome, reported, applied = finish(editor, size, verdict)
  if why then
    tell(handle, reported, nil, route)
    return respond(handle, why)
  end
  local patches = json_edit.patches(editor)
  if outcome and patches then
    new = body.patch(new or held:getBytes(0, size), body.write_patches(patches))
  end
  if outcome and new then
    if settings.buffer_bytes and #new > settings.buffer_bytes then
      tell(handle, rejection.TOO_LARGE.outcome, nil, route)
      return respond(handle, rejection.TOO_LARGE)
    end
    held:setBytes(new)
    if not length then
      handle:headers():remove("content-length") -- it came chunked, and leaves chunked
    end
  end
  tell(handle, reported, applied, route)
end

-- Envoy's objects end with each chunk, so they are fetched anew.
local function tell_deferred(handle, key, value)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, key, value)
end

local function reject_deferred(handle, why)
  tell_deferred(handle, "rejected_status", why.status)
  tell_deferred(handle, "rejected_body", rejection.body(why))
end

-- Edits the chunks of a body while they pass to the deferred filter, which holds them until the body is complete. Of a
-- body that is rejected, by `why` or by what is found in it, nothing passes; the deferred filter responds at its end.
local function edit_passing(handle, length, verdict, route, why)
  tell_deferred(handle, "deferred", length and "length" or "chunked")
  local editor = verdict and json_edit.new(MEMBER, verdict.text, verdict.replace, length, false)
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
      why = failure and rejection_of(REJECTIONS[failure], verdict)
      if new and not why then
        chunk:setBytes(new)
      end
    end
    if why then
      chunk:setBytes("")
    end
  end
  memory.release(held)
  -- The deferred filter counts what is noted here, once it holds the whole body.
  local reported, applied, _ = why and why.outcome, nil, nil
  if not why then
    why, _, reported, applied = finish(editor, passed, verdict)
  end
  note(handle, reported, applied, route)
  if why then
    return reject_deferred(handle, why)
  end
  local patches = json_edit.patches(editor)
  if patches and passed <= MAX_PATCHED then
    tell_deferred(handle, "patches", body.write_patches(patches))
  elseif patches ~= nil then
    reject_deferred(handle, rejection.OF_UNREAD_BODY[json_edit.failure(editor)])
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
local function reject(handle, headers, why, route)
  local length = content_length(headers)
  note(handle, why.outcome, nil, route) -- for a response of Envoy's own to what is still to come
  -- What follows an upgrade is not a body; a client that expects a 100 Continue has not sent one.
  if not headers:get("upgrade") and not headers:get("expect") and (length or 0) <= MAX_DRAINED then
    if (not length or length > HELD_HERE) and has_deferred_filter(handle) then
      return edit_passing(handle, length, nil, route, why)
    end
    handle:body()
  end
  tell(handle, why.outcome, nil, route)
  respond(handle, why)
end

local function edit_request(handle, headers, verdict, route)
  local length = content_length(headers)
  if MAX_BODY and length and length > MAX_BODY then
    return reject(handle, headers, rejection.TOO_LARGE, route)
  end
  if verdict.source ~= "default" and not settings.keep_header then
    headers:remove(HEADER)
  end
  if length and length <= HELD_HERE then
    return edit_held(handle, length, verdict, route)
  end
  -- For a response of Envoy's own to a body that it cannot hold.
  note(handle, "pending", verdict.text and verdict, route)
  if has_deferred_filter(handle) then
    return edit_passing(handle, length, verdict, route)
  end
  return edit_held(handle, length, verdict, route)
end

-- Why no body of this request can be edited, or nil.
local function unmovable(headers, content_type)
  local encoding = headers:get("content-encoding")
  if encoding and encoding ~= "identity" then
    return REJECTIONS.encoding
  elseif not priority.is_json(content_type) or headers:get("upgrade") then
    return REJECTIONS.media_type -- what follows an upgrade is not a body, and has no end to wait for
  end
end

-- The rules of the client's tenant. `payload` is that of its verified token, if any.
local function rules_of_tenant(handle, headers, payload)
  local tenant
  if settings.tenant_header then
    tenant = headers:get(settings.tenant_header)
  elseif settings.tenant_claim then
    tenant = payload and payload[settings.tenant_claim]
  elseif tenant_of then
    tenant = tenant_of(handle:streamInfo():downstreamSslConnection())
  end
  local rules = tenant and OF_TENANT[tenant]
  if not rules then
    return RULES
  end
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, "tenant", tenant)
  return rules
end

-- Who the client is: whether it may name a priority, and the rules of its tenant. A client that may not name a priority
-- may not name its tenant either.
local function client_of(handle, headers)
  local payload
  if trusted_by then
    local stream = handle:streamInfo()
    local forwarded, connection = headers:get("x-forwarded-for"), stream:downstreamSslConnection()
    local metadata = stream:dynamicMetadata()
    local by = trusted_by(stream:downstreamDirectRemoteAddress(), forwarded, connection)
    payload = token_rules and claims.payload(token_rules, headers, metadata)
    by = by or (payload and claims.trusted_by(token_rules, payload))
    metadata:set(NAMESPACE, "trusted_by", by or "nothing")
    if not by then
      return RULES, false
    end
  end
  return HAS_TENANTS and rules_of_tenant(handle, headers, payload) or RULES, true
end

-- Where vLLM reads the header itself, it is written as a plain integer.
local function set_header(handle, headers, verdict, route)
  headers:replace(HEADER, verdict.text)
  tell(handle, "header_set", verdict, route)
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local content_type = headers:get("content-type")
  if content_type and find(content_type, ",", 1, true) then
    local line = priority.repeated_line(content_type)
    if line then
      headers:replace("content-type", line)
      content_type = line
    end
  end
  local kind, route = route_of(headers:get(":path"))
  if not kind or headers:get(":method") ~= "POST" then
    return
  end
  local word = SHARED and word_of(handle)
  if word and (word.report or word.response) then
    return -- another instance has edited this request
  end
  if kind == "control character" then
    return reject(handle, headers, rejection.CONTROL_CHARACTER, route)
  end

  local vllm_reads_header = kind == "ordinary" or kind == "header"
  local rules, trusted = client_of(handle, headers)
  local raw, verdict = headers:get(HEADER), rules.by_policy
  if not trusted then
    if raw and settings.reject_untrusted then
      return reject(handle, headers, rejection.UNTRUSTED, route)
    end
    headers:remove(HEADER)
    verdict = raw and rules.dropped or rules.untrusted
  elseif raw then
    local value = header_value(headers, raw)
    local named = value and rules.read(value) or rejection.AMBIGUOUS_HEADER
    if named.text and vllm_reads_header then
      return set_header(handle, headers, named, route)
    elseif named.text then
      verdict = named
    elseif settings.reject_invalid then
      return reject(handle, headers, named, route)
    else
      if settings.enforces_ordinary then
        headers:remove(HEADER) -- vLLM reads some integers that are rejected here
      end
      verdict = rules.ignored[named.outcome]
      if not verdict then
        return tell(handle, named.outcome, nil, route)
      end
    end
  end

  if not verdict or (not verdict.text and (kind == "header" or kind == "response")) then
    return tell(handle, verdict and verdict.left or "absent", nil, route)
  elseif kind == "header" then
    return set_header(handle, headers, verdict, route)
  elseif kind == "response" then
    response.expect(handle, verdict, route)
    if raw and not settings.keep_header then
      headers:remove(HEADER)
    end
    return
  end

  local why = unmovable(headers, content_type)
  if not why then
    return edit_request(handle, headers, verdict, route)
  end
  if rejection_of(why, verdict) then
    return reject(handle, headers, why, route)
  end
  tell(handle, why.outcome, nil, route)
end
