std = "luajit"
max_line_length = 120
files["lua/filter.lua"] = { globals = { "envoy_on_request", "envoy_on_response" } }
files["lua/behind.lua"] = { globals = { "envoy_on_request", "envoy_on_response" } }
