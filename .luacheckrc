std = "luajit"
max_line_length = 120
files["lua/filter.lua"] = { globals = { "envoy_on_request" } }
files["lua/deferred.lua"] = { globals = { "envoy_on_request" } }
files["lua/on_response.lua"] = { globals = { "envoy_on_response" } }
files["lua/poll_token.lua"] = { globals = { "envoy_on_request" } }
