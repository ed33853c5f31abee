"""Requests that were made to break the sidecar, and did."""

import json
import socket

import pytest

from control_plane.address import Address

from .conftest import MESSAGES, RENDER, SidecarFactory
from .sidecars import RunningSidecar
from .upstream import Connection, RecordingUpstream, Request, response
from .wire import HOST, Header, Http1, call, head_bytes, priority

JSON = (b"Content-Type", b"application/json")
FLOOD = b" " * 90_000
LONG = b"1000000"


@pytest.mark.parametrize("value", [b"x" + FLOOD + b"x", b"5" + FLOOD + b"5", FLOOD + b"5" + FLOOD[:10]])
def test_white_space_in_the_header_keeps_no_other_request_waiting(front: RunningSidecar, value: bytes) -> None:
    # Trimmed with a pattern that backtracks, it took a worker a minute: longer than this client waits.
    answer = call(front.address, RENDER, b"{}", priority(value))
    assert answer.applied in {"none; outcome=invalid", "5; source=header; outcome=inserted"}


@pytest.mark.parametrize("transport", ["h1-length", "h2c-length"])
def test_white_space_in_the_content_type_keeps_no_other_request_waiting(front: RunningSidecar, transport: str) -> None:
    answer = call(front.address, RENDER, b"{}", priority("5"), transport=transport, content_type=FLOOD[:40_000])
    assert (answer.status, answer.applied) == (415, "none; outcome=unsupported_media_type")


@pytest.mark.parametrize("policy", ["{}", "limits: {max_body_bytes: 1000}"])
@pytest.mark.parametrize("framing", [[], [(b"Content-Length", b"2")]], ids=["no length", "length"])
def test_a_post_that_asks_for_an_upgrade_is_answered(
    sidecar: SidecarFactory, upstream: RecordingUpstream, policy: str, framing: list[Header]
) -> None:
    upgrade = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    with Http1(sidecar(policy=policy).address) as client:
        client.send(head_bytes("POST", RENDER, [(b"Host", HOST), JSON, priority("5"), *upgrade, *framing]) + b"{}")
        assert client.answer().applied == "none; outcome=unsupported_media_type"
    assert not upstream.requests


@pytest.mark.parametrize(
    ("path", "moved", "report"),
    [(MESSAGES, [priority("5")], "none; outcome=upstream_error"), (RENDER, [], "none; outcome=absent")],
)
def test_an_early_response_to_a_long_body_that_streams_reaches_the_client(
    front: RunningSidecar, upstream: RecordingUpstream, path: str, moved: list[Header], report: str
) -> None:
    def early(request: Request, connection: Connection) -> None:
        connection.send(response(b'{"error":{}}', status=b"403 Forbidden"))
        connection.wait_until_gone(request)

    upstream.handler = early
    name = b"early" + path.encode()
    head = [(b"Host", HOST), JSON, *moved, (b"X-Request-Id", name), (b"Content-Length", LONG)]
    with Http1(front.address) as client:
        client.send(head_bytes("POST", path, head))
        answer = client.answer()
    assert (answer.status, answer.body, answer.applied) == (403, b'{"error":{}}', report)
    assert front.logged_of(name.decode())["report"] == report


@pytest.mark.parametrize("transport", ["h1-length", "h1-chunked", "h2c", "h2c-length"])
@pytest.mark.parametrize("size", [50_000, 2_000_000])
def test_a_body_over_the_limit_is_rejected_with_a_report_and_nothing_of_it_leaves(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, size: int
) -> None:
    limited = sidecar(policy="limits: {max_body_bytes: 40000}")
    body, name = json.dumps({"prompt": "x" * size}).encode(), f"large {transport} {size}".encode()
    answer = call(limited.address, RENDER, body, priority("5"), (b"X-Request-Id", name), transport=transport)
    assert answer.applied == limited.logged_of(name.decode())["report"] == "none; outcome=too_large"
    assert json.loads(answer.body)["error"]["code"] == 413
    assert answer.status == 413
    assert not upstream.requests


@pytest.mark.parametrize("transport", ["h1-chunked", "h2c"])
def test_the_limit_does_not_hold_a_body_that_is_not_edited(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str
) -> None:
    limited = sidecar(policy="limits: {max_body_bytes: 40000}")
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    answer = call(limited.address, RENDER, body, transport=transport)
    assert (answer.status, upstream.only.body == body) == (200, True)


@pytest.mark.parametrize("path", [RENDER, "/v1/models"])
@pytest.mark.parametrize(
    ("listens", "message"),
    [
        (False, "the sidecar cannot connect to the vLLM server. Check that the server is running."),
        (True, "the vLLM server closed the connection before it responded."),
    ],
)
def test_a_server_that_does_not_respond_is_a_503_in_vllms_shape(
    sidecar: SidecarFactory, upstream: RecordingUpstream, path: str, listens: bool, message: str
) -> None:
    def hang_up(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.reset()

    upstream.handler = hang_up
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = Address("127.0.0.1", unused.getsockname()[1])
    front = sidecar() if listens else sidecar(to=nobody)
    answer = call(front.address, path, b"{}", priority("5"))
    assert (answer.status, answer.header("content-type")) == (503, "application/json")
    error = json.loads(answer.body)["error"]
    assert error.pop("message").startswith(message)
    assert error == {"type": "Service Unavailable", "param": None, "code": 503}
