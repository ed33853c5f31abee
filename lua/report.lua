-- Says what became of a priority where it is looked for: in Envoy's metadata, which its metrics, its access log and its
-- routes read, and in a counter where Envoy is not ours.

local settings = ...

local NAMESPACE = "vllm_priority"

local report = { NAMESPACE = NAMESPACE }

-- An outcome as a text. Without a verdict, no priority was applied.
function report.of(outcome, verdict)
  if not verdict then
    return "none; outcome=" .. outcome
  end
  return verdict.text .. "; source=" .. verdict.source .. "; outcome=" .. outcome .. verdict.note
end

-- Leaves the report of a request on this route. It is one entry of metadata, because Envoy copies the whole namespace
-- for each. What becomes a label of a metric comes from the policy or from a fixed list, whatever clients send.
function report.note(handle, outcome, verdict, route)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, "report", {
    text = report.of(outcome, verdict),
    route = route,
    outcome = outcome,
    value = verdict and verdict.text,
    source = verdict and verdict.source,
    class = verdict and verdict.class,
    priority = verdict and verdict.bucket,
  })
end

function report.count(handle, outcome)
  if settings.counts and handle.stats then
    handle:stats():counter(outcome):inc()
  end
end

function report.tell(handle, outcome, verdict, route)
  report.count(handle, outcome)
  report.note(handle, outcome, verdict, route)
end

return report
