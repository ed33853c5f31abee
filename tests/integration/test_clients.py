"""Clients as they are: each sends something that servers are expected to cope with.

Raw sockets throughout, since an ordinary client library would not send most of it.
"""

import http.client
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.datastructures import Headers

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Placement

from .conftest import GENERATE, MESSAGES, RENDER, SidecarFactory
from .sidecars import RunningSidecar, load
from .upstream import WAIT, Connection, RecordingUpstream, Request, answering, response
from .wire import TRANSPORTS, Answer, Closed, Header, Http1, Http2, call, connect, priority

ORDINARY = "/v1/chat/completions"
JSON = (b"Content-Type", b"application/json")
ORIGIN = (b"Origin", b"https://page.example")
BODY = b'{"prompt":"x"}'


def _ask(address: Address, data: bytes) -> Answer:
    with Http1(address) as client:
        client.send(data)
        return client.answer()


# A repeated content-type.


async def _first_content_type(scope: dict, receive: Callable, send: Callable) -> None:  # type: ignore[type-arg]
    """An application that responds with the content-type as vLLM reads it."""
    if scope["type"] != "http":
        return
    found = Headers(scope=scope).get("content-type", "none").encode()
    headers = [(b"content-length", b"%d" % len(found))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": found})


@pytest.fixture(scope="module")
def starlette() -> Iterator[Address]:
    """A real uvicorn, with Starlette's reading of headers."""
    config = uvicorn.Config(_first_content_type, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + WAIT
    while not server.started:
        assert time.monotonic() < until, "uvicorn does not start"
        time.sleep(0.01)
    yield Address("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join(5)


@pytest.mark.parametrize(
    "value", [b"application/json", b"application/json; charset=utf-8", b"multipart/form-data; b=1"]
)
@pytest.mark.parametrize("target", [ORDINARY, RENDER, MESSAGES, "/tokenize", "/v1/chat%2Fcompletions"])
def test_equal_lines_of_content_type_mean_the_same_as_straight_at_the_server(
    sidecar: SidecarFactory, starlette: Address, target: str, value: bytes
) -> None:
    for address in (starlette, sidecar(to=starlette).address):
        for copies in (1, 2, 3):
            lines = [(b"Content-Type", value)] * copies
            answer = call(address, target, BODY, *lines, content_type=None)
            assert (answer.status, answer.body) == (200, value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("target", [ORDINARY, RENDER, GENERATE])
def test_a_priority_is_moved_and_the_rest_arrives_under_equal_lines_of_content_type(
    sidecar: SidecarFactory, upstream: RecordingUpstream, target: str, transport: str
) -> None:
    lines = [JSON, (b"content-type", b"application/json"), priority("5")]
    answer = call(sidecar("engine").address, target, BODY, *lines, transport=transport, content_type=None)
    assert answer.status == 200
    assert upstream.only.all("content-type") == ["application/json"]
    assert upstream.only.body == (BODY if target == ORDINARY else b'{"prompt":"x","priority":5}')
    assert upstream.only.all("x-vllm-priority") == (["5"] if target == ORDINARY else [])


@pytest.mark.parametrize("method", ["PUT", "DELETE", "GET"])
def test_equal_lines_of_content_type_are_one_with_every_method(
    front: RunningSidecar, upstream: RecordingUpstream, method: str
) -> None:
    assert call(front.address, "/x", BODY, JSON, JSON, method=method, content_type=None).status == 200
    assert upstream.only.all("content-type") == ["application/json"]


@pytest.mark.parametrize("target", [ORDINARY, RENDER])
def test_different_lines_of_content_type_are_not_made_one_of_them(
    front: RunningSidecar, upstream: RecordingUpstream, target: str
) -> None:
    """vLLM would read the first. Joined, no media type is left, so vLLM rejects what could be read in two ways."""
    lines = [JSON, (b"Content-Type", b"text/plain")]
    assert call(front.address, target, BODY, *lines, content_type=None).status == 200
    assert upstream.only.all("content-type") == ["application/json,text/plain"]
    assert call(front.address, RENDER, BODY, *lines, priority("5"), content_type=None).status == 415


# Upgrades.


@pytest.mark.parametrize("target", [ORDINARY, RENDER])
@pytest.mark.parametrize(
    "upgrade",
    ["TLS/1.2", "TLS/1.3, TLS/1.2", "h2c", "foo", "WebSocke", "websockets", "w", "web", "TLS/1.0,HTTP/2.0", ""],
)
def test_an_upgrade_that_the_server_does_not_know_is_ignored(
    front: RunningSidecar, upstream: RecordingUpstream, upgrade: str, target: str
) -> None:
    lines = [(b"Connection", b"Upgrade"), (b"Upgrade", upgrade.encode()), priority("5")]
    answer = call(front.address, target, BODY, *lines)
    assert answer.status == 200
    assert upstream.only.all("upgrade") == []
    expected = b'{"prompt":"x","priority":5}' if target == RENDER else BODY
    assert upstream.only.body == expected


def test_an_ignored_upgrade_leaves_the_connection_and_its_other_options_alone(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: TLS/1.2\r\n\r\n"
    with Http1(front.address) as client:
        for _ in range(2):
            client.send(head)
            assert client.answer().status == 200
    assert len(upstream.wait(2)) == 2


@pytest.mark.parametrize("upgrade", ["websocket", "WebSocket", "WEBSOCKET"])
def test_a_websocket_is_still_upgraded(front: RunningSidecar, upstream: RecordingUpstream, upgrade: str) -> None:
    upstream.handler = _echo_websocket
    with Http1(front.address) as client:
        client.send(_websocket(upgrade))
        assert client.start().status == 101
        client.send(b"\x81\x00one")
        assert client.reader.take(5) == b"\x81\x00ONE"


def _websocket(upgrade: str) -> bytes:
    return (
        b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: %b\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n" % upgrade.encode()
    )


def _echo_websocket(request: Request, connection: Connection) -> None:
    request.complete.set()
    connection.send(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
    )
    while data := connection.sock.recv(1000):
        connection.send(data.upper())
    connection.close()


# HTTP/1.0.


@pytest.mark.parametrize("line", [b"GET /health HTTP/1.0\r\n\r\n", b"OPTIONS / HTTP/1.0\r\n\r\n"])
def test_a_health_check_of_http_1_0_needs_no_host(
    front: RunningSidecar, upstream: RecordingUpstream, line: bytes
) -> None:
    """HAProxy's check. The upstream is addressed by HTTP/1.1, which requires a Host: its own address."""
    assert _ask(front.address, line).status == 200
    assert upstream.only.all("host") == [str(upstream.address)]


def test_a_priority_is_moved_for_http_1_0_without_host(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    head = b"POST %b HTTP/1.0\r\nContent-Type: application/json\r\nX-Vllm-Priority: -3\r\nContent-Length: 2\r\n\r\n{}"
    assert _ask(front.address, head % RENDER.encode()).status == 200
    assert upstream.only.json() == {"priority": -3}


def test_http_1_1_still_needs_a_host(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    """RFC 9112, 3.2: a server must respond with 400."""
    assert _ask(front.address, b"GET /health HTTP/1.1\r\n\r\n").status == 400
    assert not upstream.requests


# HTTP/2.

MALFORMED: dict[str, tuple[list[Header], bytes]] = {
    "an upper-case name": ([(b"X-Upper", b"1")], BODY),
    "a space in a name": ([(b"x y", b"1")], BODY),
    "a line feed in a value": ([(b"x-a", b"1\nx-b: 2")], BODY),
    "a carriage return in a value": ([(b"x-a", b"1\rx-b: 2")], BODY),
    "a NUL in a value": ([(b"x-a", b"1\x002")], BODY),
    "a header of the connection": ([(b"connection", b"keep-alive")], BODY),
    "a framing of HTTP/1": ([(b"transfer-encoding", b"chunked")], BODY),
    "an unknown pseudo-header": ([(b":unknown", b"1")], BODY),
    "two paths": ([(b":path", b"/other")], BODY),
    "a length that is no number": ([(b"content-length", b"1x")], BODY),
    "a body longer than its length": ([(b"content-length", b"3")], BODY),
    "a body shorter than its length": ([(b"content-length", b"300")], BODY),
}


@pytest.mark.parametrize("target", [ORDINARY, RENDER])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_on_http_2_ends_its_own_stream_only(
    front: RunningSidecar, upstream: RecordingUpstream, name: str, target: str
) -> None:
    headers, body = MALFORMED[name]
    with Http2(front.address) as client:
        before = client.open("POST", target, [JSON])
        client.data(before, BODY[:5])
        bad = _open_as_it_is(client, target, headers)
        try:
            client.data(bad, body, end=True)
            status = client.answer(bad).status
        except Closed:
            status = 0  # the stream was reset
        assert status in (0, 400)
        # A connection that was given up would fail both.
        client.data(before, BODY[5:], end=True)
        assert client.answer(before).status == 200
        assert client.post(target, [JSON], BODY).status == 200
    whole = [request for request in upstream.requests if request.complete.is_set()]
    assert [request.body for request in whole] == [BODY, BODY]


def _open_as_it_is(client: Http2, target: str, headers: list[Header]) -> int:
    """Opens a stream with header names in the case they are given in; Http2.open() makes them lower case."""
    stream = client.h2.get_next_available_stream_id()
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", target.encode())]
    client.h2.send_headers(stream, [*pseudo, *headers])
    client.flush()
    return stream


# Headers that are not well-formed.

_ODD_LINES: dict[str, bytes] = {
    "a folded value": b"X-A: 1\r\n folded\r\n",
    "a value folded by a tab": b"X-A: 1\r\n\tfolded\r\n",
    "a fold of white space": b"X-A: 1\r\n  \r\n",
    "a fold that names a length": b"X-A: 1\r\n Content-Length: 5\r\n",
    "a fold that names a framing": b"X-A: 1\r\n Transfer-Encoding: chunked\r\n",
    "a folded length": b"Content-Length:\r\n 3\r\n",
    "a folded framing": b"Transfer-Encoding:\r\n chunked\r\n",
    "a length folded into two": b"Content-Length: 1\r\n 0\r\n",
    "a framing folded into two": b"Transfer-Encoding: chunked\r\n , identity\r\n",
    "a folded name": b"Content-Length\r\n : 3\r\n",
    "a carriage return in a value": b"X-A: 1\rX-B: 2\r\n",
    "a carriage return before a length": b"X-A: 1\rContent-Length: 5\r\n",
    "a carriage return before a framing": b"X-A: 1\rTransfer-Encoding: chunked\r\n",
    "a carriage return in a name": b"X\r-A: 1\r\n",
    "a carriage return at a line's start": b"\rX-A: 1\r\n",
    "two carriage returns": b"X-A: 1\r\r\n",
    "carriage returns for an end": b"X-A: 1\r\r",
    "a carriage return in a length": b"Content-Length: 1\r0\r\n",
    "a carriage return in a framing": b"Transfer-Encoding: chun\rked\r\n",
    "a carriage return after a framing": b"Transfer-Encoding: chunked\r\r\n",
    "a line feed alone": b"X-A: 1\nX-B: 2\r\n",
    "a length after a line feed alone": b"X-A: 1\nContent-Length: 3\r\n",
    "a framing after a line feed alone": b"X-A: 1\nTransfer-Encoding: chunked\n",
    "two line feeds": b"X-A: 1\n\n",
    "a NUL": b"X-A: 1\x002\r\n",
    "a space before the colon": b"Content-Length : 3\r\n",
    "no colon": b"Content-Length\r\n",
}

_REST = b"3\r\nabc\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("name", _ODD_LINES)
def test_a_header_that_is_not_well_formed_is_rejected_or_reaches_the_upstream_in_a_form_that_is(
    front: RunningSidecar, upstream: RecordingUpstream, name: str
) -> None:
    """Envoy's parser accepts folded lines, lines that end in a line feed alone and carriage returns within a value. No
    setting of 1.37 to 1.40 rejects them. What it forwards has none of them, in one framing that agrees with the body,
    so the upstream cannot read another request than Envoy did.
    """
    with Http1(front.address) as client:
        client.send(b"POST /odd HTTP/1.1\r\nHost: a\r\n" + _ODD_LINES[name] + b"\r\n" + _REST)
        statuses = []
        while True:
            try:
                statuses.append(client.answer().status)
            except (Closed, ConnectionResetError):
                break
            if statuses[-1] != 200 or len(statuses) == len(upstream.requests) > 1:
                break
    assert set(statuses) <= {200, 400, 501}
    seen = list(upstream.requests)
    # A victim on the same pooled connection gets its own response.
    victim = call(front.address, "/victim", b"", method="GET", content_type=None)
    assert victim.status == 200
    assert [request.target for request in upstream.requests[len(seen) :]] == ["/victim"]
    for request in upstream.requests:
        lines = request.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        assert all(re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[^\r\n\0]*", line) for line in lines[1:])
        assert sum(re.match(rb"(?i)(content-length|transfer-encoding):", line) is not None for line in lines) <= 1
        assert not request.surplus
    # What Envoy took for the first request's body is what the upstream takes for it: the rest is read by both or none.
    for request in seen:
        assert request.body in (b"", b"abc", _REST[:3], _REST[:5])


@pytest.mark.parametrize(
    "line", [b"X-Vllm-Priority: -1\r\n 0\r\n", b"X-Vllm-Priority\r\n : 5\r\n", b"X-Vllm-Priority: 1\x000\r\n"]
)
def test_a_priority_that_is_folded_into_two_numbers_is_rejected(
    front: RunningSidecar, upstream: RecordingUpstream, line: bytes
) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" % RENDER.encode() + line
    assert _ask(front.address, head + b"Content-Length: 2\r\n\r\n{}").status == 400
    assert not upstream.requests


_LONG = [(b"x-long-%d" % number, b"v" * 8000) for number in range(11)]


def test_headers_over_96_kib_are_rejected(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    assert call(front.address, ORDINARY, BODY, *_LONG).status == 200
    upstream.clear()
    assert call(front.address, ORDINARY, BODY, *_LONG, (b"x-more", b"v" * 12000)).status == 431
    assert not upstream.requests


def test_more_than_a_thousand_header_lines_are_rejected(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    lines = [(b"x-%d" % number, b"1") for number in range(1001)]
    assert call(front.address, ORDINARY, BODY, *lines[:900]).status == 200
    upstream.clear()
    assert call(front.address, ORDINARY, BODY, *lines).status == 431
    assert not upstream.requests


def test_headers_over_96_kib_end_their_own_stream_only_on_http_2(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    with Http2(front.address) as client:
        with pytest.raises(Closed):
            client.post(ORDINARY, [JSON, *_LONG, (b"x-more", b"v" * 12000)], BODY)
        assert client.post(ORDINARY, [JSON, *_LONG], BODY).status == 200
    assert len(upstream.requests) == 1


# A request that does not arrive.


class _Impatient(RunningSidecar):
    """Allows a second for a request to arrive."""

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        return bootstrap(policy, replace(placement, request_timeout_seconds=1))


@pytest.fixture(scope="module")
def impatient(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSidecar]:
    started = _Impatient(envoy, tmp_path_factory.mktemp("impatient"), "engine", load("{}"), _upstream.address)
    yield started
    try:
        assert not any(started.lua_errors().values())
    finally:
        started.stop()


@pytest.mark.parametrize("target", [ORDINARY, RENDER, GENERATE])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_that_stops_arriving_is_rejected_after_the_bound(
    impatient: RunningSidecar, upstream: RecordingUpstream, target: str, framing: str
) -> None:
    framed = b"Content-Length: 100\r\n\r\n{" if framing == "length" else b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nX-Vllm-Priority: 5\r\n" % target.encode()
    answer = _ask(impatient.address, head + framed)
    _assert_is_the_time_out(answer)
    for request in upstream.requests:  # an ordinary body streams, so the upstream may have seen its beginning
        assert request.gone.wait(WAIT)
        assert not request.complete.is_set()


def _assert_is_the_time_out(answer: Answer) -> None:
    assert answer.status == 408
    assert answer.header("content-type") == "application/json"
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("Request Timeout", None, 408)
    assert "the sidecar's request timeout of 1 s" in error["message"]


def test_a_body_that_arrives_too_slowly_is_rejected_after_the_bound(
    impatient: RunningSidecar, upstream: RecordingUpstream
) -> None:
    with Http1(impatient.address) as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
        client.sock.settimeout(0.1)
        with pytest.raises((BrokenPipeError, ConnectionResetError, AssertionError)):
            for _ in range(int(WAIT / 0.1)):
                client.send(b"{")
                try:
                    _assert_is_the_time_out(client.answer())
                except TimeoutError:
                    continue
                raise AssertionError
    assert len(upstream.requests) == 1


def test_a_stream_that_stops_arriving_leaves_the_others_of_its_connection_alone(
    impatient: RunningSidecar, upstream: RecordingUpstream
) -> None:
    with Http2(impatient.address) as client:
        stopped = client.open("POST", RENDER, [JSON, priority("5")])
        client.data(stopped, b"{")
        _assert_is_the_time_out(client.answer(stopped))
        assert client.post(RENDER, [JSON, priority("5")], b"{}").status == 200
    assert upstream.only.json() == {"priority": 5}


@pytest.mark.parametrize("target", [ORDINARY, RENDER, MESSAGES])
def test_a_response_is_not_bound_by_the_time_for_the_request(
    impatient: RunningSidecar, upstream: RecordingUpstream, target: str
) -> None:
    """Silent for longer than the bound before its head, and again before its body's end."""

    def slow(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        head, _, body = response(b'{"a":1}').partition(b"\r\n\r\n")
        time.sleep(1.5)
        connection.send(head + b"\r\n\r\n" + body[:3])
        time.sleep(1.5)
        connection.send(body[3:])

    upstream.handler = slow
    assert call(impatient.address, target, BODY, JSON).status == 200


def test_a_request_whose_response_has_begun_is_not_bound(
    impatient: RunningSidecar, upstream: RecordingUpstream
) -> None:
    """A client may speak on while it is answered, as over a websocket that is tunnelled by hand."""
    began = []

    def early(request: Request, connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        began.append(request)
        connection.read_body(request)
        connection.send(b"1\r\nb\r\n0\r\n\r\n")

    upstream.handler = early
    with Http1(impatient.address) as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{")
        assert client.start().status == 200
        assert client.reader.chunk() == b"a"
        time.sleep(1.5)
        client.send(b"}")
        assert client.reader.chunk() == b"b"
    assert upstream.only.body == b"{}"


def test_a_websocket_outlives_the_bound(impatient: RunningSidecar, upstream: RecordingUpstream) -> None:
    upstream.handler = _echo_websocket
    with Http1(impatient.address) as client:
        client.send(_websocket("websocket"))
        assert client.start().status == 101
        time.sleep(1.5)
        client.send(b"still here")
        assert client.reader.take(10) == b"STILL HERE"


# Pages in a browser.

VLLM_CORS = [
    (b"access-control-allow-origin", b"*"), (b"access-control-allow-credentials", b"true"),
    (b"access-control-expose-headers", b"x-request-id"), (b"vary", b"Origin"),
]  # fmt: skip


def test_a_page_can_read_what_was_done_beside_what_vllm_exposes(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    upstream.handler = answering(response(b"{}", headers=VLLM_CORS))
    answer = call(front.address, RENDER, BODY, ORIGIN, priority("5"))
    assert answer.applied == "5; source=header; outcome=inserted"
    exposed = re.split(", *", ",".join(answer.all("access-control-expose-headers")))
    assert exposed == ["x-request-id", "x-vllm-priority-applied"]
    for name, value in VLLM_CORS:
        if name != b"access-control-expose-headers":
            assert answer.all(name.decode()) == [value.decode()]


@pytest.mark.parametrize(("target", "headers"), [(RENDER, []), (ORDINARY, [ORIGIN]), ("/tokenize", [ORIGIN])])
def test_nothing_is_exposed_without_a_page_or_without_a_report(
    front: RunningSidecar, upstream: RecordingUpstream, target: str, headers: list[Header]
) -> None:
    answer = call(front.address, target, BODY, *headers, priority("5"))
    assert answer.status == 200
    assert [name for name, _ in answer.headers if name.lower().startswith(b"access-control")] == []


def test_another_name_of_the_report_is_exposed_and_none_is_not(
    sidecar: SidecarFactory, upstream: RecordingUpstream
) -> None:
    named = call(sidecar(policy="report_header: X-Done").address, RENDER, BODY, ORIGIN, priority("5"))
    assert (named.header("x-done"), named.header("access-control-expose-headers")) == (
        "5; source=header; outcome=inserted",
        "x-done",
    )
    odd = call(sidecar(policy="report_header: x-it's-100%").address, RENDER, BODY, ORIGIN, priority("5"))
    assert odd.header("access-control-expose-headers") == "x-it's-100%"
    none = call(sidecar(policy="report_header: null").address, RENDER, BODY, ORIGIN, priority("5"))
    assert none.header("access-control-expose-headers") is None


def test_a_page_can_read_a_rejection_by_the_filter(front: RunningSidecar) -> None:
    answer = call(front.address, RENDER, BODY, ORIGIN, priority("high"))
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["param"] == "x-vllm-priority"
    assert answer.header("access-control-allow-origin") == "*"
    assert answer.header("access-control-expose-headers") == "x-vllm-priority-applied"


def test_a_page_can_read_that_its_request_did_not_arrive(impatient: RunningSidecar) -> None:
    with connect(impatient.address, "h2c") as client:
        assert isinstance(client, Http2)
        stopped = client.open("POST", RENDER, [JSON, ORIGIN])
        client.data(stopped, b"{")
        answer = client.answer(stopped)
    _assert_is_the_time_out(answer)
    assert answer.header("access-control-allow-origin") == "*"


@pytest.mark.parametrize("target", [ORDINARY, RENDER])
@pytest.mark.parametrize("page", [True, False])
def test_a_page_can_read_that_the_server_is_away(
    sidecar: SidecarFactory, upstream: RecordingUpstream, target: str, page: bool
) -> None:
    away = sidecar(to=Address("127.0.0.1", 1))
    answer = call(away.address, target, BODY, *([ORIGIN] if page else []))
    assert answer.status == 503
    assert answer.header("access-control-allow-origin") == ("*" if page else None)


class _Slow(io.RawIOBase):
    """A body of 10 MB that a client sends in pieces, so that it is still sending when it is rejected."""

    def __init__(self) -> None:
        self._left = 10_000_000

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = min(size, self._left, 65_536) if size >= 0 else self._left
        self._left -= size
        time.sleep(0.0005)
        return b"x" * size


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Vllm-Priority": "high", "Content-Type": "application/json"}, 400),
        ({"X-Vllm-Priority": "5", "Content-Type": "text/plain"}, 415),
        ({"X-Vllm-Priority": "5", "Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
    ],
)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_client_that_is_still_sending_can_read_its_rejection(
    front: RunningSidecar, upstream: RecordingUpstream, headers: dict[str, str], status: int, chunked: bool
) -> None:
    """Envoy closes a connection on which it responds early, and http.client then sees a reset and no response."""
    connection = http.client.HTTPConnection(front.address.host, front.address.port, timeout=WAIT)
    framing = {} if chunked else {"Content-Length": "10000000"}
    connection.request("POST", RENDER, _Slow(), {**headers, **framing}, encode_chunked=chunked)
    response = connection.getresponse()
    assert response.status == status
    assert json.loads(response.read())["error"]["code"] == status
    assert upstream.requests == []
    connection.close()
