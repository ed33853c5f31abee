"""Who may name a priority, as lua/trust.lua decides: LuaJIT in process, against Python's ipaddress."""

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

import lupa.luajit21 as luajit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.package_data import read_text

_lua = luajit.LuaRuntime(encoding=None)
_trust = _lua.execute(b"return (function(...) " + read_text("lua", "trust.lua").encode() + b"\nend)()")


def packed(text: str) -> bytes | None:
    found: bytes | None = _trust[b"address"](text.encode("latin-1"))
    return found


def by_python(text: str) -> bytes | None:
    if re.fullmatch(r"[0-9.]+:[0-9]+", text):
        text = text.partition(":")[0]  # the port of an IPv4 address
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed


def rule(
    peer: str,
    forwarded: str | None = None,
    *,
    peers: Sequence[str] = (),
    forwarded_by: Sequence[str] = (),
) -> str | None:
    def array(texts: Sequence[str]) -> Any:
        return _lua.table_from([text.encode() for text in texts]) if texts else None

    rules = _lua.table_from({b"peers": array(peers), b"forwarded_by": array(forwarded_by)})
    found = _trust[b"rule"](rules)(peer.encode(), None if forwarded is None else forwarded.encode("latin-1"), None)
    return found.decode() if found else None


addresses = st.ip_addresses().map(str)
address_like = st.text("0123456789abcdef:.", max_size=24) | st.text("01:", max_size=20) | st.text("0123.", max_size=16)
exploded = st.ip_addresses(v=6).map(lambda address: address.exploded.upper())
embedded = st.tuples(st.sampled_from(["::", "::ffff:", "64:ff9b::", "1:2:3:4:5:6:", "1::"]), st.ip_addresses(v=4))


@given(addresses | address_like | exploded | embedded.map(lambda parts: f"{parts[0]}{parts[1]}"))
@settings(deadline=None, max_examples=3000)
def test_an_address_is_read_as_python_reads_it(text: str) -> None:
    assert packed(text) == by_python(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.1.2.3:55", "10.1.2.3"), ("[2001:db8::1]:80", "2001:db8::1"), ("[::1]", "::1"),
        ("[fe80::1%eth0]:9", "fe80::1"), ("[::ffff:10.1.2.3]:9", "10.1.2.3"),
    ],
)  # fmt: skip
def test_a_port_and_a_zone_are_left_away(text: str, address: str) -> None:
    assert packed(text) == ipaddress.ip_address(address).packed


@pytest.mark.parametrize(
    "text",
    ["", "unknown", "_hidden", "10.1.2.3:", "10.1.2.3:x", "[10.1.2.3]", "010.1.2.3", "1.2.3", "1.2.3.4.5", "::1:80:",
     "[::1", "::1]", "/var/run/x.sock", "[::1]x", "1.2.3.4\0", " 1.2.3.4", "1.2.3.256", "1:2:3:4:5:6:7:8:9",
     "1::2::3", ":::", "12345::", "1.2.3.4" + "0" * 90],
)  # fmt: skip
def test_what_is_not_an_address_is_none(text: str) -> None:
    assert packed(text) is None


@given(st.ip_addresses(), st.ip_addresses(), st.data())
@settings(deadline=None, max_examples=1500)
def test_a_network_holds_what_python_says(first: Any, second: Any, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, first.max_prefixlen))
    network = ipaddress.ip_network(f"{first}/{size}", strict=False)
    if getattr(network.network_address, "ipv4_mapped", None):
        return  # a policy names IPv4 networks as such
    near = data.draw(st.integers(int(network.network_address), int(network.broadcast_address)))
    for address in (second, type(first)(near)):
        wanted = getattr(address, "ipv4_mapped", None) or address
        assert (rule(str(address), peers=[str(network)]) is not None) == (wanted in network)


PROXIES = {"forwarded_by": ["10.1.0.0/16", "fd00::/8"], "peers": ["192.0.2.0/24"]}


@pytest.mark.parametrize(
    ("peer", "forwarded", "trusted"),
    [
        ("192.0.2.7:1", None, True),
        ("192.0.2.7:1", "8.8.8.8", True),  # it is not a proxy: what it forwards is not believed
        ("8.8.8.8:1", "192.0.2.7", False),
        ("10.1.2.3:1", "192.0.2.7", True),
        ("[fd00::1]:1", "192.0.2.7", True),
        ("[::ffff:10.1.2.3]:1", "192.0.2.7", True),
        ("10.1.2.3:1", "8.8.8.8, 192.0.2.7", True),
        ("10.1.2.3:1", "192.0.2.7, 8.8.8.8", False),  # the client wrote the first one
        ("10.1.2.3:1", "192.0.2.7,10.1.9.9 , fd00::5", True),
        ("10.1.2.3:1", "192.0.2.7:4711, 10.1.9.9", True),
        ("10.1.2.3:1", "192.0.2.7, unknown", False),
        ("10.1.2.3:1", "192.0.2.7,", False),
        ("10.1.2.3:1", "192.0.2.7, ", False),
        ("10.1.2.3:1", "", False),
        ("10.1.2.3:1", None, False),
        ("10.1.2.3:1", "10.1.2.3", False),
        ("10.1.2.3:1", "192.0.2.7" + ", 10.1.2.3" * 31, True),
        ("10.1.2.3:1", "192.0.2.7" + ", 10.1.2.3" * 32, False),
        ("10.1.2.3:1", "192.0.2.7" + " " * 90_000 + "x", False),
        ("10.1.2.3:1", " " * 90_000 + "192.0.2.7 x", False),
        ("10.1.2.3:1", " " * 90_000 + "192.0.2.7\t ", True),
        ("10.1.2.3:1", "192.0.2 .7", False),
        ("10.1.2.3:1", "19\t2.0.2.7", False),
        ("10.1.2.3:1", "192.0.2.7, 10.1. 9.9", False),
        ("/run/envoy.sock", "192.0.2.7", False),
    ],
)
def test_a_forwarded_address_counts_only_where_a_known_proxy_wrote_it(
    peer: str, forwarded: str | None, trusted: bool
) -> None:
    assert rule(peer, forwarded, **PROXIES) == ("trust.peers 192.0.2.0/24" if trusted else None)


class Certificate:
    """What Envoy's connection object says of a client's certificate."""

    def __init__(self, uris: Sequence[str] = (), names: Sequence[str] = (), *, verified: bool = True) -> None:
        self._uris, self._names, self._verified = uris, names, verified

    def peerCertificateValidated(self) -> bool:
        return self._verified

    def uriSanPeerCertificate(self) -> Any:
        return _lua.table_from([uri.encode() for uri in self._uris])

    def dnsSansPeerCertificate(self) -> Any:
        return _lua.table_from([name.encode() for name in self._names])


GATEWAY = "spiffe://cluster.local/ns/gateway/sa/edge"


@pytest.mark.parametrize(
    ("certificate", "trusted"),
    [
        (Certificate([GATEWAY]), True),
        (Certificate([GATEWAY], verified=False), False),
        (Certificate(["spiffe://evil/x", GATEWAY]), True),
        (Certificate(["spiffe://cluster.local/ns/gateway/sa/"]), False),
        (Certificate([GATEWAY + "/more"]), False),
        (Certificate(["x" + GATEWAY]), False),
        (Certificate([GATEWAY.replace(".", "x")]), False),
        (Certificate(names=["edge.example"]), True),
        (Certificate(names=["edgexexample"]), False),
        (Certificate(), False),
        (None, False),
    ],
)
def test_an_identity_is_a_name_in_a_verified_certificate(certificate: Certificate | None, trusted: bool) -> None:
    from control_plane.policy.trust import identity_pattern

    patterns = [identity_pattern(text) for text in ("spiffe://cluster.local/ns/gateway/sa/*", "edge.example")]
    rules = _lua.table_from({b"identities": _lua.table_from([pattern.encode() for pattern in patterns])})
    assert bool(_trust[b"rule"](rules)(b"8.8.8.8:1", None, certificate)) == trusted
