-- What a client's token says. Envoy has verified it before this filter (envoy.filters.http.jwt_authn) and left its
-- payload in dynamic metadata, where no client can write. A header with a payload is never read.

local find, match, type = string.find, string.match, type

local claims = {}

local NAMESPACE = "envoy.filters.http.jwt_authn"

-- The most members of a list, and the longest text of words, that are looked through.
local MAX_MEMBERS, MAX_WORDS = 256, 8192

local TOKEN = "^[%w_%-]+%.[%w_%-]+%.[%w_%-]+$"
local BEARER = "^[Bb][Ee][Aa][Rr][Ee][Rr] +(.*)$"

-- Whether the header is one line with one token: Envoy would look for a token in what follows another scheme, too.
local function is_one_token(headers, name)
  if headers:getNumValues(name) ~= 1 then
    return false
  end
  local value = headers:get(name)
  value = name == "authorization" and match(value, BEARER) or value
  return find(value, TOKEN) ~= nil
end

-- Returns the payload of the request's verified token, or nil. `rules.key` names what it was verified by, so that a
-- proxy which verifies by another policy's issuer, audiences or keys yields nothing.
function claims.payload(rules, headers, metadata)
  if not is_one_token(headers, rules.header) then
    return nil
  end
  local verified = metadata:get(NAMESPACE)
  local payload = verified and verified[rules.key]
  return type(payload) == "table" and payload or nil
end

local function is_word_of(text, word)
  return #text <= MAX_WORDS and find(" " .. text .. " ", " " .. word .. " ", 1, true) ~= nil
end

-- Whether a claim has this value: it is this text, a list with this member, or, where `words` is set, words with it.
local function has(claim, rule)
  if type(claim) == "table" then
    for index = 1, MAX_MEMBERS do
      if claim[index] == rule.value then
        return true
      end
    end
    return false
  end
  return claim == rule.value or (rule.words and type(claim) == "string" and is_word_of(claim, rule.value))
end

-- Says by which rule a payload is trusted, or nil. Without an `exp`, a token would be valid forever.
function claims.trusted_by(rules, payload)
  if type(payload.exp) ~= "number" then
    return nil
  end
  for _, rule in ipairs(rules.require) do
    if not has(payload[rule.name], rule) then
      return nil
    end
  end
  return rules.text
end

return claims
