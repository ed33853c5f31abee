-- Whether Envoy has the memory to hold more of a body.
--
-- Envoy's own means are not enough: its overload manager can reset HTTP/2 streams only, and a reset tells the client
-- nothing. So the filter looks at the resident set of the process, and a body that must not grow is rejected with 503.

local memory = {}

-- Bytes of bodies that arrive between two readings of the resident set, below the limit and above it. A reading takes
-- about 30 us.
local STEP, STEP_ABOVE = 1048576, 65536

-- A table with weak keys. Envoy Gateway's validator has no setmetatable, and holds no body.
local function weak()
  return setmetatable and setmetatable({}, { __mode = "k" }) or {}
end

-- Bytes by body that arrives in this worker, and the one body that may grow above the limit. The keys are weak, because
-- nothing tells a filter of a client that left in the middle of a body: its request is garbage from then on.
local held, favoured = weak(), weak()
local unread, resident, held_here, collected_at = STEP, 0, 0, 0

-- In bytes; 0 where there is no /proc.
local function resident_set()
  local file = io and io.open("/proc/self/status")
  if not file then
    return 0
  end
  local text = file:read("*a")
  file:close()
  return (tonumber((text or ""):match("VmRSS:%s*(%d+)")) or 0) * 1024
end

-- Sums up the bodies that arrive now. LuaJIT collects garbage as scripts allocate, which can take minutes where
-- requests are few, and bodies of clients that left would be counted as long. So it is collected here.
local function sum_held()
  local now = os.time()
  if now ~= collected_at then
    collected_at = now
    collectgarbage()
  end
  held_here = 0
  for _, bytes in pairs(held) do
    held_here = held_here + bytes
  end
end

-- True where a body must not grow further. `body` is a table that lives as long as the request, `limit` the resident
-- set in bytes above which bodies are shed, `size` how many bytes have just arrived.
--
-- Above the limit these may still grow:
-- - Any body, where this worker holds little: the resident set is then memory that was freed and is used again before
--   the system gives more.
-- - Up to an eighth above the limit, the first MiB of each body, and one body: without it, clients that all send large
--   bodies at the same time would all fail, and would all fail again.
function memory.is_exhausted(body, limit, size)
  local bytes = (held[body] or 0) + size
  held[body] = bytes
  unread = unread + size
  if unread >= (resident > limit and STEP_ABOVE or STEP) then
    unread = 0
    resident = resident_set()
    if resident > limit then
      sum_held()
    end
  end
  if resident <= limit or held_here <= limit / 16 then
    return false
  elseif resident > limit * 1.125 then
    return true
  elseif bytes <= STEP then
    return false
  end
  local first = next(favoured)
  if not first then
    favoured[body] = true
    return false
  end
  return first ~= body
end

-- Call at the end of a body: it leaves Envoy, or gives way to a response.
function memory.release(body)
  held[body], favoured[body] = nil, nil
end

return memory
