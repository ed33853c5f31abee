-- Who may name a priority: by the address of the client, and by the identity in its certificate.
--
-- What cannot be read for certain is not trusted: an address of another form, a forwarded address that a proxy did not
-- write, a certificate that Envoy has not verified.

local find, floor, gmatch, match, sub = string.find, math.floor, string.gmatch, string.match, string.sub
local byte, char, gsub, rep, tonumber = string.byte, string.char, string.gsub, string.rep, tonumber

local trust = {}

-- The most addresses of an x-forwarded-for that are read. A longer chain is not trusted.
local MAX_FORWARDED = 32

-- The most bytes of an address with its brackets, zone and port.
local MAX_ADDRESS = 80

-- The four bytes of an IPv4 address, or nil.
local function ipv4(text)
  if not find(text, "^%d+%.%d+%.%d+%.%d+$") then
    return nil
  end
  local bytes = ""
  for part in gmatch(text, "%d+") do
    -- RFC 6943, 3.1.1: a leading zero is octal to some readers.
    if #part > 3 or tonumber(part) > 255 or (#part > 1 and byte(part) == 48) then
      return nil
    end
    bytes = bytes .. char(tonumber(part))
  end
  return bytes
end

-- The bytes of a list of groups such as "2001:db8", or nil.
local function groups(text)
  local bytes = ""
  if text == "" then
    return bytes
  end
  for group in gmatch(text .. ":", "([^:]*):") do
    if not match(group, "^%x%x?%x?%x?$") then
      return nil
    end
    local value = tonumber(group, 16)
    bytes = bytes .. char(floor(value / 256), value % 256)
  end
  return bytes
end

-- The bytes of an IPv6 address (RFC 4291, 2.2), or nil. An IPv4 address in IPv6 is the IPv4 address.
local function ipv6(text)
  local before, last = match(text, "^(.*:)([%d.]+)$")
  if before and find(last, ".", 1, true) then
    local bytes = ipv4(last)
    if not bytes then
      return nil
    end
    local a, b, c, d = byte(bytes, 1, 4)
    text = before .. ("%x:%x"):format(a * 256 + b, c * 256 + d)
  end
  local head, tail = match(text, "^(.-)::(.*)$")
  local first, second = groups(head or text), groups(tail or "")
  if not first or not second then
    return nil
  end
  local missing = 16 - #first - #second
  if (head and missing < 2) or (not head and missing ~= 0) then
    return nil
  end
  local bytes = first .. rep("\0", missing) .. second
  if sub(bytes, 1, 12) == rep("\0", 10) .. "\255\255" then
    return sub(bytes, 13)
  end
  return bytes
end

-- The bytes of an address, 4 or 16, or nil. A port may follow an IPv4 address, and an IPv6 address in brackets.
function trust.address(text)
  if #text > MAX_ADDRESS then
    return nil
  end
  local inner = match(text, "^%[(.*)%]$") or match(text, "^%[(.*)%]:%d+$")
  if inner then
    return ipv6((gsub(inner, "%%.*$", "")))
  end
  return ipv4(match(text, "^([%d.]+):%d+$") or text) or ipv6(text)
end

-- A network such as 10.0.0.0/8 as a function that says whether an address lies in it.
local function network(text)
  local address, size = match(text, "^(.*)/(%d+)$")
  local bytes = trust.address(address)
  local whole, bits = floor(tonumber(size) / 8), tonumber(size) % 8
  local length, prefix = #bytes, sub(bytes, 1, whole)
  local divisor = 2 ^ (8 - bits)
  local rest = bits > 0 and floor(byte(bytes, whole + 1) / divisor)
  return function(other)
    return #other == length
      and sub(other, 1, whole) == prefix
      and (not rest or floor(byte(other, whole + 1) / divisor) == rest)
  end
end

-- The text without the blanks before and after it. Blanks within it stay. One pattern for both ends would take time
-- that grows with the square of the blanks.
local function without_blanks(text)
  return match(text, "^([^ \t]*)[ \t]*$", find(text, "[^ \t]") or 1) or text
end

local function networks(texts)
  local found = {}
  for index, text in ipairs(texts or {}) do
    found[index] = { text = text, contains = network(text) }
  end
  return function(address)
    for _, entry in ipairs(found) do
      if address and entry.contains(address) then
        return entry.text
      end
    end
  end
end

-- The first pattern that matches a name in the client's verified certificate, as that name and the pattern's index.
local function matching(connection, patterns)
  if not connection or not connection:peerCertificateValidated() then
    return nil
  end
  local lists = { connection:uriSanPeerCertificate(), connection:dnsSansPeerCertificate() }
  for index, pattern in ipairs(patterns) do
    for _, names in ipairs(lists) do
      for _, name in ipairs(names) do
        if find(name, pattern) then
          return name, index
        end
      end
    end
  end
end

-- Returns a function that gives the tenant of a connection, or nil. `rules` holds the tenants' names and the patterns
-- of their identities, in the order in which they count.
function trust.tenants(rules)
  local patterns = {}
  for index, rule in ipairs(rules) do
    patterns[index] = rule.pattern
  end
  return function(connection)
    local _, index = matching(connection, patterns)
    return index and rules[index].name
  end
end

-- Returns a function that says by which rule a client may name a priority: the key and the entry, or nil.
--
--   peers         networks of client addresses
--   forwarded_by  networks of proxies whose x-forwarded-for is believed
--   identities    patterns of a verified certificate's URI and DNS names
function trust.rule(rules)
  local peer_of, is_proxy = networks(rules.peers), networks(rules.forwarded_by)

  -- The address that counts: the connection's own, or where that is a proxy's, the right-most one that is not.
  local function client(direct, forwarded)
    local address = trust.address(direct)
    if not is_proxy(address) then
      return address
    end
    local count = 0
    while forwarded and forwarded ~= "" do
      local before, last = match(forwarded, "^(.*),([^,]*)$")
      address = trust.address(without_blanks(last or forwarded))
      count = count + 1
      if not address or count > MAX_FORWARDED then
        return nil
      elseif not is_proxy(address) then
        return address
      end
      forwarded = before
    end
    return address
  end

  return function(direct, forwarded, connection)
    local entry = rules.peers and peer_of(client(direct, forwarded))
    if entry then
      return "trust.peers " .. entry
    end
    local name = rules.identities and matching(connection, rules.identities)
    return name and "trust.identities " .. name
  end
end

return trust
