-- Says what became of a priority where it is looked for: in a counter, in the access log, and in the response.

local settings = ...

local NAMESPACE = "vllm_priority"

local report = { NAMESPACE = NAMESPACE }

-- Envoy offers Lua no counters before 1.38. There, a call to a cluster without endpoints is counted by Envoy itself:
-- nothing is sent, and nothing is waited for.
local NO_CALL = { [":method"] = "GET", [":path"] = "/", [":authority"] = "count" }

local function count(handle, outcome)
  if handle.stats then
    handle:stats():counter(outcome):inc()
  elseif settings.count_by_cluster then
    handle:httpCall(NAMESPACE .. "_" .. outcome, NO_CALL, "", 0, true)
  end
end

-- An outcome as a text. Without a verdict, no priority was applied.
function report.of(outcome, verdict)
  if not verdict then
    return "none; outcome=" .. outcome
  end
  return verdict.text .. "; source=" .. verdict.source .. "; outcome=" .. outcome .. verdict.note
end

-- Leaves a text for the access log and the response. It is one entry of metadata and not one for each part, since an
-- entry costs as much as the scan of a small body.
function report.note(handle, text)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, "report", text)
end

function report.tell(handle, outcome, verdict)
  count(handle, outcome)
  report.note(handle, report.of(outcome, verdict))
end

return report
