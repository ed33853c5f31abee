-- Lets a script see responses. A script that need not goes without, because Envoy would call it for every response.

local response = ...

envoy_on_response = response.finish
