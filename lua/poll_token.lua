-- Runs on the polls of the control plane, never on clients' requests. It adds the token of this sidecar, and reads the
-- file for each poll, because Kubernetes renews the token. A poll is sent every few seconds, from Envoy's main thread.
local settings = ...

function envoy_on_request(handle)
  local file = io.open(settings.token_file, "r")
  if file == nil then
    handle:logErr("the token file " .. settings.token_file .. " cannot be read; polls are sent without a token")
    return
  end
  local token = file:read("*l")
  file:close()
  if token ~= nil then
    handle:headers():replace("authorization", "Bearer " .. (token:gsub("%s", "")))
  end
end
