"""Requests that were made to break the sidecar, and did."""

import json

import pytest

from control_plane import render

from .conftest import MESSAGES, RENDER, SidecarFactory
from .sidecars import RunningSidecar
from .upstream import Connection, RecordingUpstream, Request, response
from .wire import HOST, Header, Http1, call, chunked, head_bytes, priority

JSON = (b"Content-Type", b"application/json")
FLOOD = b" " * 90_000
STREAMS = b"%d" % (render._STREAM_ABOVE + 1)


@pytest.mark.parametrize("value", [b"x" + FLOOD + b"x", b"5" + FLOOD + b"5", FLOOD + b"5" + FLOOD[:10]])
def test_white_space_in_the_header_keeps_no_other_request_waiting(front: RunningSidecar, value: bytes) -> None:
    # Trimmed with a pattern that backtracks, it took a worker a minute: longer than this client waits.
    answer = call(front.address, RENDER, b"{}", priority(value))
    assert answer.applied in {"none; outcome=invalid", "5; source=header; outcome=inserted"}


@pytest.mark.parametrize("transport", ["h1-length", "h2c-length"])
def test_white_space_in_the_content_type_keeps_no_other_request_waiting(front: RunningSidecar, transport: str) -> None:
    answer = call(front.address, RENDER, b"{}", priority("5"), transport=transport, content_type=FLOOD[:40_000])
    assert (answer.status, answer.applied) == (415, "none; outcome=not_json")


@pytest.mark.parametrize("policy", ["{}", "limits: {max_body_bytes: 1000}"])
@pytest.mark.parametrize("framing", [[], [(b"Content-Length", b"2")]], ids=["no length", "length"])
def test_a_post_that_asks_for_an_upgrade_is_answered(
    sidecar: SidecarFactory, upstream: RecordingUpstream, policy: str, framing: list[Header]
) -> None:
    upgrade = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    with Http1(sidecar(policy=policy).address) as client:
        client.send(head_bytes("POST", RENDER, [(b"Host", HOST), JSON, priority("5"), *upgrade, *framing]) + b"{}")
        assert client.answer().applied == "none; outcome=not_json"
    assert not upstream.requests


@pytest.mark.parametrize("path", [RENDER, MESSAGES])
def test_an_answer_that_waits_for_no_byte_of_a_long_body_says_what_was_to_come(
    front: RunningSidecar, upstream: RecordingUpstream, path: str
) -> None:
    def early(request: Request, connection: Connection) -> None:
        connection.send(response(b'{"error":{}}', status=b"403 Forbidden"))
        connection.wait_until_gone(request)

    upstream.handler = early
    name = b"early" + path.encode()
    head = [(b"Host", HOST), JSON, priority("5"), (b"X-Request-Id", name), (b"Content-Length", STREAMS)]
    with Http1(front.address) as client:
        client.send(head_bytes("POST", path, head))
        answer = client.answer()
    expected = "5; source=header; outcome=pending" if path == RENDER else "none; outcome=not_json"
    assert (answer.status, answer.body, answer.applied) == (403, b'{"error":{}}', expected)
    assert front.logged_of(name.decode())["priority"] == expected


def test_a_body_that_is_too_large_to_be_held_is_refused_with_a_report(
    sidecar: SidecarFactory, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "_HELD_BODY", 1_000_000)
    limited = sidecar(fresh=True)
    head = [(b"Host", HOST), JSON, priority("5"), (b"X-Request-Id", b"held"), (b"Transfer-Encoding", b"chunked")]
    with Http1(limited.address) as client:
        client.send(head_bytes("POST", RENDER, head))
        client.send(chunked([json.dumps({"prompt": "x" * 2_000_000}).encode()]))
        answer = client.answer()
    assert (answer.status, answer.applied) == (413, "5; source=header; outcome=pending")
    assert limited.logged_of("held")["priority"] == "5; source=header; outcome=pending"
    assert not upstream.requests


def test_a_body_of_known_length_that_cannot_be_held_is_refused_with_a_report(
    sidecar: SidecarFactory, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "_HELD_BODY", render._CONNECTION_BUFFER)  # which is what Envoy 1.36 holds
    limited = sidecar(fresh=True)
    body = json.dumps({"prompt": "x" * 300_000}).encode()
    answer = call(limited.address, RENDER, body, priority("5"), (b"X-Request-Id", b"known"))
    assert (answer.status, answer.applied) == (413, "5; source=header; outcome=pending")
    assert limited.logged_of("known")["priority"] == "5; source=header; outcome=pending"
    assert not upstream.requests


@pytest.mark.parametrize(
    ("path", "content_type", "moved", "expected"),
    [
        (RENDER, b"application/json", [], "none; outcome=pending"),
        (RENDER, b"text/plain", [priority("5")], "none; outcome=pending"),
        (MESSAGES, b"application/json", [priority("5")], "none; outcome=not_json"),
    ],
)
def test_a_body_that_cannot_be_held_to_the_policys_limit_is_refused_with_a_report(
    sidecar: SidecarFactory,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    content_type: bytes,
    moved: list[Header],
    expected: str,
) -> None:
    monkeypatch.setattr(render, "_HELD_BODY", render._CONNECTION_BUFFER)
    limited = sidecar(policy="{limits: {max_body_bytes: 1000}, on_unmovable: forward}", fresh=True)
    head = [
        (b"Host", HOST),
        (b"Content-Type", content_type),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Request-Id", b"l"),
    ]
    with Http1(limited.address) as client:
        client.send(head_bytes("POST", path, [*head, *moved]) + chunked([b"x" * 300_000]))
        answer = client.answer()
    assert (answer.status, answer.applied) == (413, expected)
    assert limited.logged_of("l")["priority"] == expected
