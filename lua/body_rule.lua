-- What a priority in the body is worth where no header names one: the policy's `body` and `trust`.

local priority = ...

local find = string.find

local body_rule = {}

-- An integer as JSON writes it. What else vLLM would read as one ("5", 5.0, true) is rejected.
local INTEGER = "^%-?%d+$"

-- vLLM's own priority of a request that names none. To write it costs less than to take a member out.
local UNNAMED = "0"

local function constant(text)
  return function()
    return text
  end
end

local function failure(why)
  return function()
    return nil, why
  end
end

-- A table with the entries of both, the first one's where both have one. Envoy Gateway's validator has no setmetatable.
local function merged(own, other)
  local result = {}
  for key, value in pairs(other) do
    result[key] = value
  end
  for key, value in pairs(own) do
    result[key] = value
  end
  return result
end

-- Clamps a value of the body. In the body of an engine whose order is reversed, it stands negated.
local function clamping(settings)
  local read = priority.reader(merged({ clamp = true, classes = {} }, settings))
  return function(old)
    if not find(old, INTEGER) then
      return nil, "not_integer"
    end
    local verdict = read(settings.negate and priority.negated(old) or old)
    if not verdict.text then
      return nil, verdict.outcome
    end
    return verdict.note ~= "" and verdict.text or nil
  end
end

-- Returns what decides under these settings, as a table of
--
--   read       see priority.reader()
--   by_policy  the rule for a body where the client may name a priority and has sent no header; nil: it passes unread
--   untrusted  the rule for a client that may not name one
--   dropped    the same, where it has named one in a header, which is removed
--   ignored    what by_policy becomes where the header is not valid and does not count, by the outcome of the header
--
-- A rule is a verdict (see priority.reader()), whose text is inserted where the body names no priority, and has
--
--   replace     what happens to a value in the body; see json_edit.new()
--   ignored_as  the outcome where a value was replaced, and there is no default
--   left        the outcome where nothing was changed, if it is not the editor's
--   clamps      true: values are clamped
function body_rule.of(settings)
  local read, default = priority.reader(settings)
  local text = default and default.text

  local function rule(replace, fields)
    fields.text, fields.source, fields.note, fields.replace = text, "default", fields.note or "", replace
    fields.bucket = default and default.bucket
    return fields
  end

  local function untrusted(left)
    local replace = settings.reject_untrusted and failure("untrusted") or constant(text or UNNAMED)
    return rule(replace, { note = "; untrusted", ignored_as = "untrusted", left = left })
  end

  local by_policy = default
  if settings.body == "ignore" then
    by_policy = rule(constant(text or UNNAMED), { ignored_as = "ignored" })
  elseif settings.body == "reject" then
    by_policy = rule(failure("not_allowed"), {})
  elseif settings.body == "clamp" then
    by_policy = rule(clamping(settings), { clamps = true })
  end
  local ignored = {}
  for _, outcome in ipairs(by_policy and { "invalid", "out_of_range", "ambiguous" } or {}) do
    ignored[outcome] = merged({ note = "; " .. outcome, left = outcome }, by_policy)
  end
  return {
    read = read,
    by_policy = by_policy,
    untrusted = untrusted(nil),
    dropped = untrusted("untrusted"),
    ignored = ignored,
  }
end

return body_rule
