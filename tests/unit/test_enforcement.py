"""Who may set a priority, and what one in the body is worth: the whole filter, with a stand-in for Envoy's handle."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pydantic_core
import pytest

from control_plane.explain import Explanation, Filter
from control_plane.policy.load import parse_policies
from control_plane.stream_handle import Client
from tests.fuzz.documents import Generator

CHAT, RENDER, MESSAGES = "/v1/chat/completions", "/v1/chat/completions/render", "/v1/messages"
JSON = ("content-type", "application/json")
X = "x-vllm-priority"
BOUNDS = "range: {min: -5, max: 20}"
_filters: dict[str, Filter] = {}


def send(
    policy: str,
    body: bytes,
    priority: str | None = None,
    *,
    path: str = RENDER,
    headers: Sequence[tuple[str, str]] = (JSON,),
    client: Client | None = None,
    chunks: Sequence[bytes] | None = None,
    length: bool = True,
) -> Explanation:
    if policy not in _filters:
        _filters[policy] = Filter(parse_policies(policy).default, "engine")
    lines = [*headers, *([(X, priority)] if priority is not None else [])]
    lines += [("content-length", str(len(body)))] if length else []
    return _filters[policy].explain(path, lines, chunks or [body], client=client or Client())


def result(found: Explanation) -> tuple[str | None, int | bytes]:
    return found.report, found.rejection[0] if found.rejection else found.body


def names(found: Explanation) -> list[str]:
    return [value for name, value in found.headers if name == X]


CLAMP = f"{{body: clamp, {BOUNDS}}}"
IGNORE, IGNORE_DEFAULT = "body: ignore", "{body: ignore, default: 3}"
REJECT = "body: reject"

# policy, body -> the report, and the body that leaves or the status
BODIES = [
    (CLAMP, b'{"priority":7}', "none; outcome=kept", b'{"priority":7}'),
    (CLAMP, b'{"priority":-100}', "-5; source=body; outcome=replaced; clamped", b'{"priority":-5}'),
    (CLAMP, b'{"priority":99}', "20; source=body; outcome=replaced; clamped", b'{"priority":20}'),
    (CLAMP, b'{"priority":99,"priority":-99}', "-5; source=body; outcome=replaced; clamped",
     b'{"priority":20,"priority":-5}'),
    (CLAMP, b'{"\\u0070riority":99}', "20; source=body; outcome=replaced; clamped", b'{"\\u0070riority":20}'),
    (CLAMP, b'{"priority":%d}' % 2**70, "20; source=body; outcome=replaced; clamped", b'{"priority":20}'),
    ("{body: clamp, range: {min: 0}}", b'{"priority":%d}' % 2**63, "none; outcome=out_of_range", 400),
    (CLAMP, b'{"priority":"7"}', "none; outcome=invalid", 400),
    (CLAMP, b'{"priority":" 7 "}', "none; outcome=invalid", 400),
    (CLAMP, b'{"priority":7.0}', "none; outcome=invalid", 400),
    (CLAMP, b'{"priority":1e3}', "none; outcome=invalid", 400),
    (CLAMP, b'{"priority":true}', "none; outcome=invalid", 400),
    (CLAMP, b'{"priority":null}', "none; outcome=invalid", 400),
    (CLAMP, b'{"priority":[-100]}', "none; outcome=invalid", 400),
    (CLAMP, b'{"priority":NaN}', "none; outcome=ambiguous", 400),
    (CLAMP, b'{"a":1}', "none; outcome=absent", b'{"a":1}'),
    (f"{{body: clamp, {BOUNDS}, default: 3}}", b"{}", "3; source=default; outcome=inserted", b'{"priority":3}'),
    (IGNORE, b'{"priority":-100}', "none; outcome=ignored", b'{"priority":0}'),
    (IGNORE, b'{"priority":"-100"}', "none; outcome=ignored", b'{"priority":0}'),
    (IGNORE, b'{"a":1}', "none; outcome=absent", b'{"a":1}'),
    (IGNORE_DEFAULT, b'{"priority":-100}', "3; source=default; outcome=replaced", b'{"priority":3}'),
    (IGNORE_DEFAULT, b"{}", "3; source=default; outcome=inserted", b'{"priority":3}'),
    (REJECT, b'{"priority":0}', "none; outcome=not_allowed", 400),
    (REJECT, b'{"a":{"priority":0}}', "none; outcome=absent", b'{"a":{"priority":0}}'),
    (REJECT, b'{"a":', "none; outcome=malformed_json", 400),
    (REJECT, b"[1]", "none; outcome=not_an_object", 400),
    (REJECT, b"", "none; outcome=empty_body", 400),
    (REJECT, '{"priority":-100}'.encode("utf-16"), "none; outcome=unsupported_charset", 400),
    (REJECT, '{"priority":-100}'.encode("utf-32-le"), "none; outcome=unsupported_charset", 415),
]  # fmt: skip


@pytest.mark.parametrize("path", [RENDER, "/v1/completions/%72ender", CHAT, "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize(("policy", "body", "report", "left"), BODIES)
def test_the_policy_decides_what_the_body_may_say(
    policy: str, body: bytes, report: str, left: bytes | int, path: str
) -> None:
    policy = f"{{ordinary: enforce, {policy.strip('{}')}}}" if policy[0] != "{" else "{ordinary: enforce, " + policy[1:]
    for length in (True, False):
        for size in (1, max(len(body), 1)):
            chunks = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
            found = result(send(policy, body, path=path, chunks=chunks, length=length))
            if "unsupported_charset" in report:
                assert (found[0], found[1] in (400, 415)) == (report, True)
            else:
                assert found == (report, left)


@pytest.mark.parametrize("headers", [[JSON, ("content-encoding", "gzip")], [("content-type", "text/plain")], []])
def test_a_body_that_cannot_be_read_does_not_pass_a_rule(headers: list[tuple[str, str]]) -> None:
    policy = "{body: clamp, range: {max: 5}, on_unmovable: forward}"
    assert result(send(policy, b'{"priority":9}', headers=headers))[1] == 415
    assert result(send(policy, b'{"priority":9}', "5", headers=headers))[1] == 415


def test_the_header_still_wins() -> None:
    for policy in (CLAMP, IGNORE, REJECT):
        assert result(send(policy, b'{"priority":-99}', "5"))[1] == b'{"priority":5}'


def test_a_header_that_is_ignored_leaves_the_body_to_its_rule() -> None:
    policy = "{on_invalid: ignore, ordinary: enforce, body: ignore}"
    for path in (RENDER, CHAT):
        found = send(policy, b'{"priority":-99}', "9" * 30, path=path)
        assert result(found) == ("none; outcome=ignored", b'{"priority":0}')
    assert names(found) == []  # vLLM would read this header


# policy, header -> the report, and the header that leaves or the status
ORDINARY = [
    ("ordinary: enforce", "5", "5; source=header; outcome=header_set", "5"),
    ("ordinary: enforce", " +0_7 ", "7; source=header; outcome=header_set", "7"),
    ("{ordinary: enforce, classes: {batch: 10}}", "batch", "10; source=class; outcome=header_set", "10"),
    ("ordinary: enforce", "9" * 30, "none; outcome=out_of_range", 400),
    ("ordinary: enforce", "high", "none; outcome=invalid", 400),
    ("{ordinary: enforce, range: {min: 0, outside: clamp}}", "-9",
     "0; source=header; outcome=header_set; clamped", "0"),
    ("{ordinary: enforce, on_invalid: ignore}", "high", "none; outcome=invalid", None),
    ("ordinary: enforce", None, "none; outcome=absent", None),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses", "/v1/chat/comple%74ions"])
@pytest.mark.parametrize(("policy", "value", "report", "left"), ORDINARY)
def test_on_ordinary_routes_vllm_gets_a_plain_integer_within_the_range(
    policy: str, value: str | None, report: str, left: str | int | None, path: str
) -> None:
    body = b'{ "priority" : 1, "x": [NaN] '
    found = send(policy, body, value, path=path)
    assert found.report == report
    if isinstance(left, int):
        assert found.rejection is not None and found.rejection[0] == left
    else:
        assert (names(found), found.body) == ([left] if left is not None else [], body)


@pytest.mark.parametrize(
    ("path", "priority", "body", "report", "left"),
    [
        ("/invocations", "5", b"{}", "5; source=header; outcome=inserted", b'{"priority":5}'),
        ("/invocations", None, b'{"priority":-99}', "-5; source=body; outcome=replaced; clamped", b'{"priority":-5}'),
        ("/cohere/v2/chat", "5", b"{}", "5; source=header; outcome=header_set", b"{}"),
        (
            "/cohere/v2/chat",
            None,
            b'{"priority":-99}',
            "-5; source=body; outcome=replaced; clamped",
            b'{"priority":-5}',
        ),
    ],
)
def test_other_ways_to_a_chat_obey_the_policy_too(
    path: str, priority: str | None, body: bytes, report: str, left: bytes
) -> None:
    found = send(f"{{ordinary: enforce, body: clamp, {BOUNDS}}}", body, priority, path=path)
    assert (found.report, found.body) == (report, left)
    assert names(found) == (["5"] if "header_set" in report else []), "vLLM reads the header on both"
    ignored = send("{ordinary: enforce, on_invalid: ignore}", b"{}", "9" * 30, path=path)
    assert names(ignored) == [], "vLLM would read it"


def test_a_header_that_is_ignored_leaves_the_default_on_every_route() -> None:
    policy = "{ordinary: enforce, on_invalid: ignore, default: 3}"
    for path in (RENDER, CHAT, "/v1/embeddings"):
        found = send(policy, b"{}", "high", path=path)
        assert result(found) == ("3; source=default; outcome=inserted; invalid", b'{"priority":3}'), path
    found = send(policy, b"{}", "high", path=MESSAGES)
    assert (found.report, names(found)) == ("3; source=default; outcome=header_set; invalid", ["3"])
    found = send("{on_invalid: ignore, default: 3}", b"{}", "high", path="/v1/messages/render")
    assert (found.report, found.response) == ("3; source=default; outcome=response_edited; invalid", b'{"priority":3}')


def test_two_header_lines_leave_as_one() -> None:
    found = send("ordinary: enforce", b"{}", path=CHAT, headers=[JSON, (X, "5"), (X, "5")])
    assert set(names(found)) == {"5"}
    assert result(send("ordinary: enforce", b"{}", path=CHAT, headers=[JSON, (X, "5"), (X, "6")]))[1] == 400


def test_without_enforce_ordinary_routes_are_not_touched() -> None:
    policy = "{body: reject, trust: {peers: [10.0.0.0/8]}}"
    found = send(policy, b'{"priority":-99}', "-100", path=CHAT)
    assert (result(found), names(found)) == ((None, b'{"priority":-99}'), ["-100"])


def test_the_default_reaches_messages_by_its_only_way() -> None:
    found = send("{ordinary: enforce, default: 4}", b'{"priority":-9}', path=MESSAGES)
    assert (result(found), names(found)) == (("4; source=default; outcome=header_set", b'{"priority":-9}'), ["4"])


GATEWAY, STRANGER = Client("10.1.2.3:55"), Client("192.0.2.1:55")
TRUST = "trust: {peers: [10.0.0.0/8]}"
TRUST_REJECT = "trust: {peers: [10.0.0.0/8], otherwise: reject}"

# policy, header, body, client -> the report, and the body that leaves or the status
CLIENTS = [
    (TRUST, "5", b"{}", GATEWAY, "5; source=header; outcome=inserted", b'{"priority":5}'),
    (TRUST, None, b'{"priority":-9}', GATEWAY, "none; outcome=absent", b'{"priority":-9}'),
    (TRUST, "5", b"{}", STRANGER, "none; outcome=untrusted", b"{}"),
    (TRUST, "5", b'{"priority":-9}', STRANGER, "none; outcome=untrusted", b'{"priority":0}'),
    (TRUST, "high", b"{}", STRANGER, "none; outcome=untrusted", b"{}"),
    (TRUST, None, b'{"priority":-9}', STRANGER, "none; outcome=untrusted", b'{"priority":0}'),
    (TRUST, None, b"{}", STRANGER, "none; outcome=absent", b"{}"),
    (f"{{default: 3, {TRUST}}}", "-9", b"{}", STRANGER,
     "3; source=default; outcome=inserted; untrusted", b'{"priority":3}'),
    (f"{{default: 3, {TRUST}}}", None, b'{"priority":-9}', STRANGER,
     "3; source=default; outcome=replaced; untrusted", b'{"priority":3}'),
    (TRUST_REJECT, "5", b"{}", STRANGER, "none; outcome=untrusted", 403),
    (TRUST_REJECT, None, b'{"priority":-9}', STRANGER, "none; outcome=untrusted", 403),
    (TRUST_REJECT, None, b"{}", STRANGER, "none; outcome=absent", b"{}"),
    (TRUST_REJECT, "5", b"{}", GATEWAY, "5; source=header; outcome=inserted", b'{"priority":5}'),
    ("trust: {identities: [edge.example]}", "5", b"{}", Client(identities=("edge.example",)),
     "5; source=header; outcome=inserted", b'{"priority":5}'),
    ("trust: {}", "5", b"{}", GATEWAY, "none; outcome=untrusted", b"{}"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "value", "body", "client", "report", "left"), CLIENTS)
def test_only_a_trusted_client_names_a_priority(
    policy: str, value: str | None, body: bytes, client: Client, report: str, left: bytes | int
) -> None:
    assert result(send(policy, body, value, client=client)) == (report, left)


def test_a_stranger_sets_nothing_on_ordinary_routes() -> None:
    policy = f"{{ordinary: enforce, {TRUST}}}"
    for path in (CHAT, MESSAGES):
        found = send(policy, b'{"a":1}', "-100", path=path, client=STRANGER)
        assert (found.report, names(found), found.body) == ("none; outcome=untrusted", [], b'{"a":1}')
    assert send(policy, b'{"priority":-9}', path=CHAT, client=STRANGER).body == b'{"priority":0}'


TENANTS = """
range: {min: -5, max: 20}
default: 5
classes: {fast: -5}
tenants:
  header: x-tenant
  rules:
    batch-team: {range: {min: 0}, default: 10, classes: {fast: 0}}
    plain: {default: null}
"""


@pytest.mark.parametrize(
    ("tenant", "value", "report"),
    [
        (None, "-5", "-5; source=header; outcome=inserted"),
        (None, None, "5; source=default; outcome=inserted"),
        ("batch-team", "-5", "none; outcome=out_of_range"),
        ("batch-team", "500", "500; source=header; outcome=inserted"),
        ("batch-team", "fast", "0; source=class; outcome=inserted"),
        ("batch-team", None, "10; source=default; outcome=inserted"),
        ("plain", None, "none; outcome=absent"),
        ("plain", "fast", "-5; source=class; outcome=inserted"),
        ("other", None, "5; source=default; outcome=inserted"),
        ("batch-team,plain", None, "5; source=default; outcome=inserted"),
    ],
)
def test_a_tenant_has_its_own_range_classes_and_default(tenant: str | None, value: str | None, report: str) -> None:
    headers = [JSON, *([("x-tenant", tenant)] if tenant else [])]
    assert send(TENANTS, b"{}", value, headers=headers).report == report


def test_a_client_that_is_not_trusted_does_not_choose_its_tenant() -> None:
    policy = TENANTS + f"{TRUST}\n"
    found = send(policy, b"{}", headers=[JSON, ("x-tenant", "batch-team")], client=STRANGER)
    assert found.report == "5; source=default; outcome=inserted; untrusted"


def read_by(reader: Callable[[bytes], Any], body: bytes) -> list[Any]:
    """The priorities that a reader may find: none where it rejects the body."""
    try:
        document = reader(body)
    except (ValueError, RecursionError):
        return []
    return [document["priority"]] if isinstance(document, dict) and "priority" in document else []


def test_no_generated_document_carries_a_priority_past_a_rule() -> None:
    allowed: dict[str, Callable[[Any], bool]] = {
        CLAMP: lambda value: type(value) is int and -5 <= value <= 20,
        IGNORE: lambda value: value == 0,
        IGNORE_DEFAULT: lambda value: value == 3,
        REJECT: lambda value: False,
    }
    documents, passed = Generator(7), 0
    for number in range(6000):
        sent = documents.request(number).sent
        policy = list(allowed)[number % 4]
        body = b"".join(sent.chunks)
        found = send(policy, body, chunks=sent.chunks or [b""], length=sent.framing == "length")
        passed += found.rejection is None
        if found.rejection is None:
            for reader in (json.loads, pydantic_core.from_json):
                assert all(map(allowed[policy], read_by(reader, found.body))), (number, policy, body, found.body)
    assert passed > 500
