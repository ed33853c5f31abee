"""The playground of the console: it shows what the filter does, and no request can hold the control plane up."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.errors import BadInput
from control_plane.policy.load import parse_policies
from control_plane.server.app import create_app
from control_plane.server.console.explain_one import differences
from control_plane.server.console.playground import MAX_BODY_BYTES, OUTCOMES, Playground, Result, Typed
from control_plane.server.settings import ServeSettings

ROOT = Path(__file__).resolve().parents[2]
GENERATE, MESSAGES = "/inference/v1/generate", "/v1/messages/render"

POLICIES = parse_policies(
    """
classes: {batch: 9}
default: batch
trust: {peers: [10.0.0.0/8]}
tenants: {header: x-tenant, rules: {red: {classes: {batch: 50}}, blue: {default: null}}}
policies: [{name: open, selector: {}, policy: {trust: null, tenants: null, default: null}}]
"""
)


def run(**typed: str) -> Result:
    return asyncio.run(Playground(seconds=60).run(Typed(**typed), POLICIES))


def shown(result: Result, *kinds: str) -> str:
    return "".join(part.text for part in result.body if part.kind in ("same", *kinds))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    (tmp_path / "policy.yaml").write_text("default: 5\n")
    app = create_app(ServeSettings(tmp_path / "policy.yaml", reload_seconds=3600))
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 5)) as running:
        yield running


def test_a_change_of_the_body_is_shown_where_it_is() -> None:
    result = run(policy="open", headers="X-Vllm-Priority: -10\nX-Other: a", body='{"priority":5,\r\n"a":"\u00e9"}')
    assert result.outcome == "replaced"
    assert shown(result, "removed") == '{"priority":5,\n"a":"\u00e9"}'
    assert shown(result, "inserted") == '{"priority":-10,\n"a":"\u00e9"}'
    assert [tuple(change) for change in result.changes] == [(12, "5", "-10")]
    assert (result.sent_bytes, result.received_bytes) == (24, 26)
    assert ("removed", "x-vllm-priority: -10") in result.headers
    assert ("inserted", "content-length: 26") in result.headers
    assert ("same", "x-other: a") in result.headers


def test_a_rejection_is_shown_as_the_client_gets_it() -> None:
    result = run(policy="open", headers="X-Vllm-Priority: high")
    assert result.rejection is not None
    assert result.rejection[0] == 400
    assert "x-vllm-priority: 'high' is not an integer" in result.rejection[1]
    assert [rule.text for rule in result.rules] == ["on_invalid: reject"]


def test_an_edited_response_is_shown() -> None:
    assert run(policy="open", path=MESSAGES, headers="X-Vllm-Priority: 7").response == '{"priority":7}'


def test_a_route_that_is_not_edited_passes_through() -> None:
    result = run(policy="open", path="/health", headers="X-Vllm-Priority: 7")
    assert (result.outcome, result.changes) == (None, [])


@pytest.mark.parametrize(
    ("typed", "value", "keys"),
    [
        ({"peer": "10.1.2.3", "headers": "x-vllm-priority: batch"}, "9", ["classes", "trust"]),
        ({"peer": "10.1.2.3", "headers": "x-vllm-priority: batch\nx-tenant: red"}, "50", ["classes", "trust"]),
        ({"peer": "10.1.2.3", "headers": "x-tenant: red"}, "50", ["default", "trust"]),
        ({"peer": "10.1.2.3", "headers": "x-tenant: blue"}, None, ["default", "trust"]),
        ({"peer": "192.0.2.1", "headers": "x-vllm-priority: 1"}, "9", ["default", "trust"]),
        ({"peer": "192.0.2.1", "policy": "open"}, "-10", ["header"]),
    ],
)
def test_the_rules_of_the_policy_that_decide_are_shown(
    typed: dict[str, str], value: str | None, keys: list[str]
) -> None:
    result = run(**typed)
    assert (result.value, [rule.key for rule in result.rules]) == (value, keys)


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ({"policy": "closed"}, "policy: 'closed' is not a policy of the file."),
        ({"role": "<b>"}, "role: '<b>' is not a role. It must be one of: render, engine."),
        ({"path": "no slash"}, "path: 'no slash' is not a valid request target."),
        ({"path": "/\u00e9"}, "path: Use ASCII only"),
        ({"method": "P OST"}, "method: 'P OST' is not a valid method."),
        ({"peer": "localhost"}, "peer: 'localhost' is not an IP address."),
        ({"headers": "no colon"}, "headers: 'no colon' is not a valid header."),
        ({"headers": "x: \u20ac"}, "headers: 'x: \u20ac' is not a valid header."),
        ({"headers": "x: y\n" * 101}, "headers: Use at most 100 headers"),
        ({"body": "x" * (MAX_BODY_BYTES + 1)}, "body: Too large for this page: at most 65536 bytes."),
    ],
)
def test_what_cannot_be_a_request_is_named(typed: dict[str, str], problem: str) -> None:
    with pytest.raises(BadInput, match=f"^{re.escape(problem)}"):
        run(**typed)


def test_a_request_that_takes_too_long_is_stopped_and_the_next_one_runs() -> None:
    async def both() -> str:
        playground = Playground(seconds=0.001)
        with pytest.raises(BadInput, match=r"^The request took longer than 0\.001 seconds, so it was stopped\."):
            await playground.run(Typed(), POLICIES)
        playground._seconds = 60
        return (await playground.run(Typed(policy="open"), POLICIES)).outcome or ""

    assert asyncio.run(both()) == "inserted"


def test_more_requests_than_may_wait_are_rejected() -> None:
    async def many() -> list[object]:
        playground = Playground(seconds=60)
        runs = [playground.run(Typed(policy="open"), POLICIES) for _ in range(7)]
        return [*await asyncio.gather(*runs, return_exceptions=True)]

    ended = asyncio.run(many())
    assert sum(isinstance(end, Result) for end in ended) == 5
    assert sum(str(end).startswith("Other requests wait for the playground.") for end in ended) == 2


def test_the_form_works_and_escapes_what_was_typed(client: TestClient) -> None:
    nasty = '{"a":"</textarea><script>alert(1)</script>\u202e"}'
    found = client.post(
        "/console/playground", data={"headers": "X-Vllm-Priority: <b>", "body": nasty, "path": GENERATE}
    )
    assert found.status_code == 200
    assert "<strong>invalid</strong>" in found.text
    found = client.post("/console/playground", data={"headers": "X-Vllm-Priority: 3", "body": nasty})
    assert "<strong>inserted</strong>" in found.text
    assert "<ins>,&#34;priority&#34;:3</ins>" in found.text
    assert "<script>alert" not in found.text
    assert "<b>" not in found.text
    assert "\\u202e" in found.text


def test_bytes_that_are_not_utf8_reach_the_filter(client: TestClient) -> None:
    form = b"headers=X-Vllm-Priority%3A+3&body=%7B%22a%22%3A%22%FF%22%7D"
    found = client.post("/console/playground", content=form)
    assert "The client's has 9." in found.text


@pytest.mark.parametrize("form", [b"\xff", b"a=1&" * 21, b"other=" + b"x" * 300_000], ids=["bytes", "fields", "large"])
def test_a_form_that_is_not_valid_is_an_error_in_one_line(client: TestClient, form: bytes) -> None:
    found = client.post("/console/playground", content=form)
    assert found.status_code == 400
    assert 'role="alert"' in found.text


def test_other_web_sites_cannot_run_requests(client: TestClient) -> None:
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}):
        assert client.post("/console/playground", data={"body": "{}"}, headers=headers).status_code == 403


def test_a_large_body_gives_a_small_result(client: TestClient) -> None:
    body = '{"a":"' + "x" * 60_000 + '"}'
    found = client.post("/console/playground", data={"headers": "X-Vllm-Priority: 3", "body": body})
    result = found.text.partition("<h2>Request</h2>")[0]
    assert "<ins>,&#34;priority&#34;:3</ins>" in result
    assert "bytes …]" in result
    assert len(result) < 10_000


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
@example(b"aa", b"", b"", b"")
@example(b"", b"a", b"aa", b"a")
def test_the_parts_of_a_difference_make_both_bodies(start: bytes, old: bytes, new: bytes, end: bytes) -> None:
    before, after = start + old + end, start + new + end
    pieces = list(differences(before, after))
    assert b"".join(piece.data for piece in pieces if piece.kind != "inserted") == before
    assert b"".join(piece.data for piece in pieces if piece.kind != "removed") == after
    assert all(piece.data for piece in pieces)


def test_every_outcome_of_the_reference_has_a_meaning() -> None:
    reference = (ROOT / "docs/reference/outcomes.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", reference, re.MULTILINE))
    assert documented - {"source", "outcome", "clamped"} == set(OUTCOMES)
