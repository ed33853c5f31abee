"""Who may set a priority, and what one in the body is worth, on real Envoy: ours, in Istio and in Envoy Gateway."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import RENDER, SidecarFactory, run_sidecars
from .meshes import GatewayProxy, IstioSidecar
from .sidecars import RunningSidecar
from .upstream import RecordingUpstream
from .wire import TRANSPORTS, Answer, Header, call, priority

CHAT, MESSAGES, EMBEDDINGS = "/v1/chat/completions", "/v1/messages", "/v1/embeddings"
PROXIES: dict[str, type[RunningSidecar]] = {
    "sidecar": RunningSidecar,
    "istio": IstioSidecar,
    "envoy-gateway": GatewayProxy,
}
# Envoy Gateway adds the address of the connection, and where that is loopback the machine's own.
OWN = "127.0.0.0/8, 10.0.0.0/8, 172.16.0.0/12, 192.0.0.0/8, 100.64.0.0/10"
BEHIND_A_PROXY = f"peers: [203.0.113.0/24], forwarded_by: [{OWN}]"


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    request: pytest.FixtureRequest,
    envoy: Path,
    _upstream: RecordingUpstream,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(PROXIES[request.param], envoy, _upstream, tmp_path_factory)


def forwarded(text: str) -> Header:
    return (b"X-Forwarded-For", text.encode())


def sent(upstream: RecordingUpstream, answer: Answer) -> tuple[str | None, int, bytes, list[str]]:
    """The report, the status, and the body and priority headers that vLLM gets."""
    request = upstream.only if answer.status == 200 else None
    found = (request.body, request.all("x-vllm-priority")) if request else (b"", [])
    return answer.applied, answer.status, *found


# policy, headers, body -> the report, the status, and the body that vLLM gets
CASES: dict[str, tuple[str, tuple[Header, ...], bytes, str, int, bytes]] = {
    "a trusted peer": (
        "trust: {peers: [127.0.0.0/8]}", (priority("5"),), b"{}",
        "5; source=header; outcome=inserted", 200, b'{"priority":5}',
    ),
    "another peer": (
        "trust: {peers: [203.0.113.0/24]}", (priority("5"),), b'{"priority":-9}',
        "none; outcome=untrusted", 200, b'{"priority":0}',
    ),
    "another peer, with a default": (
        "{default: 3, trust: {peers: [203.0.113.0/24]}}", (priority("5"),), b"{}",
        "3; source=default; outcome=inserted; untrusted", 200, b'{"priority":3}',
    ),
    "another peer, rejected": (
        "trust: {peers: [203.0.113.0/24], otherwise: reject}", (priority("5"),), b"{}",
        "none; outcome=untrusted", 403, b"",
    ),
    "another peer, rejected for its body": (
        "trust: {peers: [203.0.113.0/24], otherwise: reject}", (), b'{"priority":-9}',
        "none; outcome=untrusted", 403, b"",
    ),
    "a forwarded address": (
        f"trust: {{{BEHIND_A_PROXY}}}", (priority("5"), forwarded("203.0.113.7")), b"{}",
        "5; source=header; outcome=inserted", 200, b'{"priority":5}',
    ),
    "an address that the client wrote": (
        f"trust: {{{BEHIND_A_PROXY}}}", (priority("5"), forwarded("203.0.113.7, 8.8.8.8")), b"{}",
        "none; outcome=untrusted", 200, b"{}",
    ),
    "two lines of forwarded addresses": (
        f"trust: {{{BEHIND_A_PROXY}}}", (priority("5"), forwarded("203.0.113.7"), forwarded("8.8.8.8")), b"{}",
        "none; outcome=untrusted", 200, b"{}",
    ),
    "no certificate": (
        "trust: {identities: ['spiffe://cluster.local/*']}", (priority("5"),), b"{}",
        "none; outcome=untrusted", 200, b"{}",
    ),
    "clamped": (
        "{body: clamp, range: {min: 0}}", (), b'{"priority":-9}',
        "0; source=body; outcome=replaced; clamped", 200, b'{"priority":0}',
    ),
    "clamped, a string": (
        "{body: clamp, range: {min: 0}}", (), b'{"priority":"-9"}', "none; outcome=invalid", 400, b"",
    ),
    "clamped, another charset": (
        "{body: clamp, range: {min: 0}}", (), '{"priority":-9}'.encode("utf-16"),
        "none; outcome=unsupported_charset", 415, b"",
    ),
    "ignored": ("body: ignore", (), b'{"priority":-9}', "none; outcome=ignored", 200, b'{"priority":0}'),
    "rejected": ("body: reject", (), b'{"priority":-9}', "none; outcome=not_allowed", 400, b""),
    "a tenant": (
        "tenants: {header: x-tenant, rules: {batch: {range: {min: 0}, default: 10}}}",
        ((b"X-Tenant", b"batch"),), b"{}",
        "10; source=default; outcome=inserted", 200, b'{"priority":10}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_decides_in_every_proxy(
    proxy: SidecarFactory, upstream: RecordingUpstream, name: str, transport: str
) -> None:
    policy, headers, body, report, status, left = CASES[name]
    answer = call(proxy(policy=policy).address, RENDER, body, *headers, transport=transport)
    assert sent(upstream, answer)[:3] == (report, status, left)


@pytest.mark.parametrize("size", [20_000, 200_000, 2_000_000])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("policy", ["body: ignore", "{body: clamp, range: {min: 0}}", "body: reject"])
def test_a_rule_reaches_the_end_of_a_long_body(
    sidecar: SidecarFactory, upstream: RecordingUpstream, policy: str, transport: str, size: int
) -> None:
    filler = b'{"x":"' + b"x" * size + b'"'
    answer = call(sidecar(policy=policy).address, RENDER, filler + b',"priority":-9}', transport=transport)
    if policy == "body: reject":
        assert (answer.status, answer.applied) == (400, "none; outcome=not_allowed")
    else:
        assert upstream.only.body == filler + b',"priority":0}'
    upstream.clear()
    answer = call(sidecar(policy=policy).address, RENDER, filler + b"}", transport=transport)
    assert (answer.applied, upstream.only.body) == ("none; outcome=absent", filler + b"}")


ORDINARY = "{ordinary: enforce, classes: {batch: 10}, range: {min: -5}, body: clamp}"


@pytest.fixture(params=["sidecar", "istio"])
def ordinary(
    request: pytest.FixtureRequest,
    envoy: Path,
    _upstream: RecordingUpstream,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(PROXIES[request.param], envoy, _upstream, tmp_path_factory)


def test_on_an_ordinary_route_vllm_gets_what_the_policy_allows(
    ordinary: SidecarFactory, upstream: RecordingUpstream
) -> None:
    front = ordinary("engine", ORDINARY)
    for path, headers, body, expected in (
        (CHAT, [priority("batch")], b"{}", ("10; source=class; outcome=header_set", 200, b"{}", ["10"])),
        (CHAT, [priority("007")], b"{", ("7; source=header; outcome=header_set", 200, b"{", ["7"])),
        (CHAT, [priority("9" * 30)], b"{}", ("none; outcome=out_of_range", 400, b"", [])),
        (CHAT, [priority("-6")], b"{}", ("none; outcome=out_of_range", 400, b"", [])),
        (CHAT, [], b'{"priority":-9}', ("-5; source=body; outcome=replaced; clamped", 200, b'{"priority":-5}', [])),
        (CHAT + "%0a", [], b"{}", ("none; outcome=invalid_path", 400, b"", [])),
        ("/v1/chat/%63ompletions?x=1", [priority("batch")], b"{}",
         ("10; source=class; outcome=header_set", 200, b"{}", ["10"])),
        (MESSAGES, [priority("batch")], b'{"priority":-9}',
         ("10; source=class; outcome=header_set", 200, b'{"priority":-9}', ["10"])),
        (EMBEDDINGS, [priority("batch")], b"{}", ("10; source=class; outcome=inserted", 200, b'{"priority":10}', [])),
        (EMBEDDINGS, [], b'{"priority":-9}',
         ("-5; source=body; outcome=replaced; clamped", 200, b'{"priority":-5}', [])),
        ("/v1/models", [priority("batch")], b"{}", (None, 200, b"{}", ["batch"])),
    ):  # fmt: skip
        upstream.clear()
        assert sent(upstream, call(front.address, path, body, *headers)) == expected, path


def test_without_enforce_an_ordinary_route_keeps_every_byte(
    sidecar: SidecarFactory, upstream: RecordingUpstream
) -> None:
    front = sidecar("engine", "{body: reject, trust: {peers: [203.0.113.0/24]}}")
    answer = call(front.address, CHAT, b'{"priority":-9}', priority("batch"))
    assert sent(upstream, answer) == (None, 200, b'{"priority":-9}', ["batch"])
