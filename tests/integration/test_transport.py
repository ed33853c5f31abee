"""What must hold between the bytes of the client and those of the upstream."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from control_plane.address import Address

from .conftest import RENDER, SidecarFactory
from .oracle import assert_moved, assert_untouched
from .sidecars import RunningSidecar
from .upstream import OK, Connection, RecordingUpstream, Request, answering, response
from .waiting import until
from .wire import TRANSPORTS, Closed, Http1, Http2, call, chunked, connect, head_bytes, priority

each_transport = pytest.mark.parametrize("transport", TRANSPORTS)

JSON = (b"Content-Type", b"application/json")
HOST_LINE = (b"Host", b"vllm.example")
DOCUMENTS = (
    b'{"model":"tiny","messages":[{"role":"user","content":"a \\"b\\" \\\\"}]}',
    b' { "\\u0070riority" : "12" , "b" : { "priority" : [ ] } } ',
    b"{}",
)


def _head(framing: bytes, *, target: str = RENDER, value: bytes | None = b"5") -> bytes:
    moved = [] if value is None else [(b"X-Vllm-Priority", value)]
    name, _, text = framing.partition(b": ")
    return head_bytes("POST", target, [HOST_LINE, JSON, *moved, (name, text)])


@each_transport
@pytest.mark.parametrize("body", DOCUMENTS)
def test_one_framing_reaches_the_upstream_and_its_length_is_right(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, body: bytes
) -> None:
    for cuts in ([], range(len(body)), [1], [len(body) - 1], range(0, len(body), 3)):
        upstream.clear()
        answer = call(front.address, RENDER, body, priority("5"), transport=transport, cuts=list(cuts))
        assert answer.status == 200
        # The recording upstream itself fails on two framings, and on bytes short of or past the length.
        assert upstream.only.framing == ("length" if transport.endswith("length") else "chunked")
        assert_moved(upstream.only, body, 5)


LONG = 1_500_000
"""Bytes of a body that streams."""


@pytest.mark.parametrize("pause", [0.0, 0.003])
def test_one_byte_a_chunk_over_time(front: RunningSidecar, upstream: RecordingUpstream, pause: float) -> None:
    body = DOCUMENTS[1]
    with Http1(front.address) as client:
        client.send(_head(b"Transfer-Encoding: chunked"))
        for at in range(len(body)):
            client.send(b"1\r\n%b\r\n" % body[at : at + 1])
            time.sleep(pause)
        client.send(b"0\r\n\r\n")
        assert client.answer().status == 200
    assert_moved(upstream.only, body, 5)


def test_requests_on_one_connection_do_not_run_into_each_other(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    bodies = [b'{"a":%d}' % number for number in range(5)]
    with Http1(front.address) as client:
        client.send(b"".join(_head(b"Content-Length: %d" % len(body)) + body for body in bodies))
        assert [client.answer().status for _ in bodies] == [200] * 5
    for request, body in zip(upstream.wait(5), bodies, strict=True):
        assert_moved(request, body, 5)


def test_streams_of_one_connection_do_not_mix(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    bodies = [b'{"number":%d,"priority":0}' % number for number in range(20)]
    with Http2(front.address) as client:
        streams = [client.open("POST", RENDER, [JSON, priority(str(number))]) for number in range(len(bodies))]
        for at in range(max(map(len, bodies))):
            for stream, body in zip(streams, bodies, strict=True):
                client.data(stream, body[at : at + 1])
        for stream in streams:
            client.data(stream, b"", end=True)
        for request in upstream.wait(len(bodies)):
            assert request.complete.wait(5)
            assert_moved(request, bodies[request.json()["number"]], request.json()["number"])  # type: ignore[index]


@pytest.mark.parametrize("target", [RENDER, "/v1/models"])
@pytest.mark.parametrize(
    "framing",
    [
        [(b"Content-Length", b"2"), (b"Transfer-Encoding", b"chunked")],
        [(b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"7")],
        [(b"Content-Length", b"2"), (b"Content-Length", b"3")],
        [(b"Content-Length", b"+2")],
        [(b"Content-Length", b"2, 3")],
        [(b"Transfer-Encoding", b"xchunked")],
    ],
)
def test_an_ambiguous_framing_is_rejected_and_nothing_reaches_the_upstream(
    front: RunningSidecar, upstream: RecordingUpstream, target: str, framing: list[tuple[bytes, bytes]]
) -> None:
    with Http1(front.address) as client:
        client.send(head_bytes("POST", target, [HOST_LINE, JSON, priority("5"), *framing]) + b"2\r\n{}\r\n0\r\n\r\n")
        assert client.answer().status in (400, 501)
    assert upstream.requests == []


def test_both_lengths_are_a_400(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    with Http1(front.address) as client:
        client.send(
            head_bytes("POST", RENDER, [HOST_LINE, JSON, (b"Content-Length", b"2"), (b"Transfer-Encoding", b"chunked")])
            + b"2\r\n{}\r\n0\r\n\r\n"
        )
        assert client.answer().status == 400
    assert upstream.requests == []


def test_the_config_never_allows_a_chunked_body_with_a_length(front: RunningSidecar) -> None:
    for manager in front.config("HttpConnectionManager"):
        assert manager.get("http_protocol_options", {}).get("allow_chunked_length", False) is False


@pytest.fixture(scope="module")
def image() -> bytes:
    """1.5 MB of a request with a base64 image."""
    url = b"data:image/png;base64," + b"iVBORw0KGgoAAAANSUhEUgAA" * 65536
    return b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"' + url + b'"}}]}]}'


@each_transport
def test_a_body_past_every_default_buffer_passes(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, image: bytes
) -> None:
    assert call(front.address, RENDER, image, priority("5"), transport=transport).status == 200
    assert upstream.only.body.rstrip(b" ") == image[:-1] + b',"priority":5}'


LIMITED = "limits: {max_body_bytes: 1000}"


@each_transport
def test_a_body_past_the_configured_limit_is_a_413(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str
) -> None:
    body = b'{"prompt":"' + b"x" * 5000 + b'"}'
    front = sidecar(policy=LIMITED)
    answer = call(front.address, RENDER, body, priority("5"), transport=transport, cuts=[500, 900, 4000])
    assert answer.status == 413
    assert answer.header("content-type") == "application/json"
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("Payload Too Large", 413)
    assert "1000" in error["message"]
    assert upstream.requests == []


@each_transport
@pytest.mark.parametrize("size", [999, 1000])
def test_a_body_up_to_the_limit_passes(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, size: int
) -> None:
    body = b'{"prompt":"' + b"x" * (size - 13) + b'"}'
    assert len(body) == size
    answer = call(sidecar(policy=LIMITED).address, RENDER, body, priority("5"), transport=transport, cuts=[10, 600])
    assert answer.status == 200
    assert_moved(upstream.only, body, 5)


@each_transport
def test_the_limit_applies_to_the_edited_routes_only(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str
) -> None:
    body = b'{"prompt":"' + b"x" * 5000 + b'"}'
    assert call(sidecar(policy=LIMITED).address, "/v1/completions", body, transport=transport).status == 200
    assert upstream.only.body == body


@pytest.mark.parametrize(
    ("target", "value", "framing"),
    [
        (RENDER, None, "length"), (RENDER, None, "chunked"), ("/v1/chat/completions", b"5", "length"),
        ("/v1/chat/completions", b"5", "chunked"), ("/v1/files", None, "chunked"),
    ],
)  # fmt: skip
def test_the_upstream_has_the_first_bytes_before_the_client_has_sent_the_last(
    front: RunningSidecar, upstream: RecordingUpstream, target: str, value: bytes | None, framing: str
) -> None:
    body = b'{"prompt":"' + b"x" * LONG + b'"}'
    first, last = body[: LONG // 2], body[LONG // 2 :]
    line = b"Transfer-Encoding: chunked" if framing == "chunked" else b"Content-Length: %d" % len(body)
    with Http1(front.address) as client:
        client.send(_head(line, target=target, value=value))
        client.send(b"%x\r\n%b\r\n" % (len(first), first) if framing == "chunked" else first)
        request = upstream.wait(1)[0]
        assert request.began.wait(5), "nothing of the body came before its end"
        assert not request.complete.is_set()
        client.send(chunked([last]) if framing == "chunked" else last)
        assert client.answer().status == 200
    assert upstream.only.body == body


def _continuing(request: Request, connection: Connection) -> None:
    """A server that asks for the body, as uvicorn does when its application reads."""
    if request.all("expect"):
        connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    OK(request, connection)


@pytest.mark.parametrize("target", [RENDER, "/v1/chat/completions"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("server", ["recording", "uvicorn"])
def test_a_client_that_holds_its_body_back_gets_one_100_then_the_response(
    sidecar: SidecarFactory, upstream: RecordingUpstream, uvicorn_echo: Address, target: str, framing: str, server: str
) -> None:
    upstream.handler = _continuing
    front = sidecar(to=uvicorn_echo if server == "uvicorn" else None)
    body = b'{"a":1}'
    line = (b"Transfer-Encoding", b"chunked") if framing == "chunked" else (b"Content-Length", b"%d" % len(body))
    with Http1(front.address) as client:
        client.send(head_bytes("POST", target, [HOST_LINE, JSON, priority("5"), line, (b"Expect", b"100-continue")]))
        raw, first, _ = client.reader.head()
        assert first.split()[1] == b"100", raw
        client.send(chunked([body]) if framing == "chunked" else body)
        answer = client.answer()
    assert (answer.status, answer.interim) == (200, [])
    if server == "uvicorn":
        assert json.loads(answer.body) == ({"a": 1, "priority": 5} if target == RENDER else {"a": 1})
    elif target == RENDER:
        assert_moved(upstream.only, body, 5)


def test_a_client_that_expects_a_100_gets_the_rejection(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    with Http1(front.address) as client:
        client.send(
            head_bytes(
                "POST",
                RENDER,
                [HOST_LINE, JSON, priority("x"), (b"Content-Length", b"100"), (b"Expect", b"100-continue")],
            )
        )
        client.send(b"x" * 100)  # after the 100, which Envoy has sent before the filter sees the request
        answer = client.answer()
    assert answer.status == 400
    assert len(answer.interim) <= 1
    assert upstream.requests == []


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("target", "value"), [("/v1/completions", None), ("/v1/completions", b"5"), (RENDER, b"5"), (RENDER, None)]
)
def test_each_token_comes_when_it_is_sent(
    front: RunningSidecar, upstream: RecordingUpstream, target: str, value: bytes | None
) -> None:
    go = threading.Semaphore(0)

    def handler(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.send(SSE_HEAD + _chunk(b"data: one\n\n"))
        for last in (b"data: two\n\n", b"data: [DONE]\n\n"):
            assert go.acquire(timeout=10)
            connection.send(_chunk(last))
        connection.send(b"0\r\n\r\n")

    upstream.handler = handler
    with Http1(front.address) as client:
        client.send(_head(b"Content-Length: 2", target=target, value=value) + b"{}")
        assert client.start().status == 200
        assert client.reader.chunk() == b"data: one\n\n", "the first token is here before the second is sent"
        time.sleep(2.5 if value is None else 0)
        go.release()
        assert client.reader.chunk() == b"data: two\n\n"
        go.release()
        assert client.reader.chunk() == b"data: [DONE]\n\n"
        assert client.reader.chunk() == b""


def _seconds(text: str | None) -> float:
    return float((text or "0s").rstrip("s"))


def test_no_timeout_is_shorter_than_a_long_queue(front: RunningSidecar) -> None:
    """A gap of six minutes, in short: none of Envoy's clocks that end a silent response runs out within an hour.

    `request_timeout` is not one of them: it stops when the request is complete (test_clients.py).
    """
    managers = [m for m in front.config("HttpConnectionManager") if m["stat_prefix"] != "health"]
    assert managers
    for manager in managers:
        idle = manager["stream_idle_timeout"]  # left out, it is five minutes
        assert _seconds(idle) == 0 or _seconds(idle) >= 3600
        assert _seconds(manager.get("common_http_protocol_options", {}).get("max_stream_duration")) == 0
        routes = [route for host in manager["route_config"]["virtual_hosts"] for route in host["routes"]]
        assert routes
        for route in routes:
            assert route["route"]["timeout"] == "0s"  # left out, it is 15 s
            assert "idle_timeout" not in route["route"] or _seconds(route["route"]["idle_timeout"]) >= 3600


def test_no_route_retries_a_request(front: RunningSidecar) -> None:
    for manager in front.config("HttpConnectionManager"):
        routes = [route for host in manager["route_config"]["virtual_hosts"] for route in host["routes"]]
        assert all("retry_policy" not in route.get("route", {}) for route in routes)


def _streaming(request: Request, connection: Connection) -> None:
    """Starts an answer and then stays silent until the peer goes."""
    connection.read_body(request)
    connection.send(SSE_HEAD + _chunk(b"data: one\n\n"))
    connection.wait_until_gone(request)


LEAVE_BOUND = 1.0
"""Seconds: the table's bound on how late the upstream may learn that a client left."""


@pytest.mark.parametrize("protocol", ["h1", "h2c", "h2c-reset"])
@pytest.mark.parametrize(("target", "value"), [("/v1/completions", None), (RENDER, b"5")])
def test_a_client_that_leaves_closes_the_upstream_connection(
    front: RunningSidecar, upstream: RecordingUpstream, protocol: str, target: str, value: bytes | None
) -> None:
    waits = []
    for _ in range(3):  # the best of three: a busy machine may hold up any one
        upstream.clear()
        upstream.handler = _streaming
        headers = [JSON] if value is None else [JSON, (b"X-Vllm-Priority", value)]
        with connect(front.address, protocol) as client:
            if isinstance(client, Http1):
                client.send(head_bytes("POST", target, [HOST_LINE, *headers, (b"Content-Length", b"2")]) + b"{}")
                assert client.start().status == 200
            else:
                stream = client.open("POST", target, headers)
                client.data(stream, b"{}", end=True)
                while type(client.event()).__name__ != "DataReceived":
                    pass
                if protocol == "h2c-reset":
                    client.h2.reset_stream(stream)
                    client.flush()
            left = time.monotonic()
            if protocol != "h2c-reset":
                client.sock.close()
            assert upstream.only.gone.wait(10), "the upstream goes on working for nobody"
            waits.append(time.monotonic() - left)
        if waits[-1] <= LEAVE_BOUND:
            return
    raise AssertionError(f"the upstream learnt it after {waits} s")


@pytest.mark.parametrize("protocol", ["h1", "h2c"])
def test_a_client_that_leaves_while_its_request_queues(
    front: RunningSidecar, upstream: RecordingUpstream, protocol: str
) -> None:
    def handler(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.wait_until_gone(request)

    upstream.handler = handler
    with connect(front.address, protocol) as client:
        if isinstance(client, Http1):
            client.send(_head(b"Content-Length: 2") + b"{}")
        else:
            client.data(client.open("POST", RENDER, [JSON, priority("5")]), b"{}", end=True)
        request = upstream.only
        client.sock.close()
        assert request.gone.wait(10)


def _active(front: RunningSidecar) -> int:
    return sum(value for name, value in front.stats().items() if name.endswith("vllm_priority.downstream_rq_active"))


def test_a_client_that_leaves_in_its_own_body(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    with Http1(front.address) as client:
        client.send(_head(b"Content-Length: %d" % LONG, value=None) + b'{"a":')
        request = upstream.wait(1)[0]
        client.sock.close()
        assert request.gone.wait(10)
    assert not request.complete.is_set()


@pytest.mark.parametrize(
    "line", [b"Content-Length: %d" % LONG, b"Transfer-Encoding: chunked"], ids=["length", "chunked"]
)
def test_nothing_of_a_held_body_leaves_when_its_client_leaves(
    front: RunningSidecar, upstream: RecordingUpstream, line: bytes
) -> None:
    with Http1(front.address) as client:
        client.send(_head(line, value=b"5") + (b"5\r\n" if b"chunked" in line else b"") + b'{"a":')
        until(lambda: _active(front) == 1, "the request arrives")
    until(lambda: _active(front) == 0, "the request ends with its client")
    assert upstream.requests == []


def test_a_connection_that_was_idle_for_five_to_six_seconds_is_safe(
    sidecar: SidecarFactory, uvicorn_echo: Address
) -> None:
    """uvicorn closes after 5 s: a pool that keeps a connection as long sends requests into the closing door."""
    front = sidecar(to=uvicorn_echo)

    def twice(gap: float) -> list[int]:
        with Http1(front.address) as client:
            found = [client.post(RENDER, [JSON, priority("5")], b"{}").status]
            time.sleep(gap)
            return [*found, client.post(RENDER, [JSON, priority("5")], b"{}").status]

    gaps = [4.9 + 0.03 * number for number in range(38)]
    with ThreadPoolExecutor(len(gaps)) as pool:
        assert list(pool.map(twice, gaps)) == [[200, 200]] * len(gaps)


def test_the_pool_closes_idle_connections_before_uvicorn_does(front: RunningSidecar) -> None:
    clusters = [c for c in front.config("Cluster") if c["name"] == "upstream"]
    assert clusters
    for cluster in clusters:
        options = cluster["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
        assert 0 < _seconds(options["common_http_protocol_options"]["idle_timeout"]) < 5


@each_transport
@pytest.mark.parametrize(("target", "value"), [("/v1/completions", None), (RENDER, "5")])
@pytest.mark.parametrize("warm", [False, True])
def test_a_post_is_never_sent_twice(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, target: str, value: str | None, warm: bool
) -> None:
    if warm:  # a reset on a connection that served before is the case that proxies retry
        call(front.address, "/v1/models", b"", method="GET")
        upstream.wait(1)
        upstream.clear()

    def handler(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.reset()

    upstream.handler = handler
    headers = [priority(value)] if value else []
    answer = call(front.address, target, b"{}", *headers, transport=transport)
    assert answer.status in (502, 503)
    time.sleep(0.1)  # a replay would come after Envoy's back-off of 25 ms
    assert len(upstream.requests) == 1


def test_a_dead_upstream_is_a_503(sidecar: SidecarFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    front = sidecar(to=Address("127.0.0.1", port))
    for answer in (
        call(front.address, RENDER, b"{}", priority("5")),
        call(front.address, "/v1/models", b"", method="GET"),
    ):
        assert answer.status == 503


def test_an_underscore_is_not_a_hyphen_and_case_does_not_matter(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    answer = call(front.address, RENDER, b'{"priority":2}', (b"X_Vllm_Priority", b"-100"))
    if answer.status == 200:
        assert_untouched(upstream.only, b'{"priority":2}')
    else:
        assert answer.status == 400
        assert upstream.requests == []
    upstream.clear()
    assert call(front.address, RENDER, b'{"priority":2}', (b"x-VLLM-priority", b"3")).status == 200
    assert_moved(upstream.only, b'{"priority":2}', 3)


@pytest.mark.parametrize("transport", ["h1-length", "h2c"])
@pytest.mark.parametrize(
    "target",
    [
        RENDER + "?x=1", RENDER + "?", RENDER + "?a=%2F&b=/v1/models", "/v1/chat/completions%2Frender",
        "/v1/chat/completions%2frender", "/v1/chat/completions/%72ender", "/%76%31/chat/completions/render?x",
    ],
)  # fmt: skip
def test_the_path_is_matched_decoded_and_without_its_query_and_sent_as_it_came(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, target: str
) -> None:
    assert call(front.address, target, b"{}", priority("5"), transport=transport).status == 200
    assert_moved(upstream.only, b"{}", 5)
    assert upstream.only.target == target


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("target", [RENDER + "%0a", RENDER + "%0A?x=1", RENDER + "%00", "/v1/files%7f"])
def test_a_path_with_a_control_character_is_rejected(
    front: RunningSidecar, upstream: RecordingUpstream, target: str, transport: str
) -> None:
    """Starlette's route regex ends in $, which also matches before a final newline."""
    answer = call(front.address, target, b"{}", priority("5"), transport=transport)
    assert (answer.status, answer.applied) == (400, "none; outcome=invalid_path")
    assert upstream.requests == []


@pytest.mark.parametrize("transport", ["h1-length", "h2c"])
@pytest.mark.parametrize(
    "target",
    [
        RENDER + "/", "/V1/chat/completions/render", "/v1/Chat/completions/render", "/" + RENDER, RENDER + "/x",
        RENDER + "%3Fx=1", RENDER + "%20", RENDER + "%", RENDER + "%2", RENDER + "%zz",
        "/v1/chat/completions%252Frender", "/v1/./chat/completions/render", "/x/../v1/chat/completions/render",
        "/v1/chat/completions//render", "/v1/models?" + RENDER, "/",
    ],
)  # fmt: skip
def test_a_path_that_only_resembles_a_route_is_left_to_vllm(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, target: str
) -> None:
    location = (b"location", b"http://vllm.example" + RENDER.encode())
    upstream.handler = answering(response(b"", b"307 Temporary Redirect", [location]))
    answer = call(front.address, target, b'{"priority":2}', priority("5"), transport=transport)
    assert (answer.status, answer.header("location")) == (307, location[1].decode())
    assert answer.applied is None
    assert upstream.only.target == target
    assert upstream.only.body == b'{"priority":2}'
    assert upstream.only.all("x-vllm-priority") == ["5"]


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("transport", ["h1-length", "h2c-length"])
def test_only_post_is_edited(front: RunningSidecar, upstream: RecordingUpstream, transport: str, method: str) -> None:
    body = b'{"priority":2}' if method in ("PUT", "PATCH", "DELETE") else b""
    if method == "HEAD":
        upstream.handler = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    answer = call(front.address, RENDER, body, priority("x"), transport=transport, method=method)
    assert (answer.status, answer.applied) == (200, None)
    assert upstream.only.body == body
    assert upstream.only.all("x-vllm-priority") == ["x"]


def test_an_absolute_form_target_is_matched_by_its_path(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    with Http1(front.address) as client:
        client.send(_head(b"Content-Length: 2", target="http://vllm.example" + RENDER + "?x=1") + b"{}")
        assert client.answer().status == 200
    assert_moved(upstream.only, b"{}", 5)


def test_a_stream_that_h2c_resets_in_its_body_leaves_the_connection_usable(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    with Http2(front.address) as client:
        stream = client.open("POST", RENDER, [JSON, priority("5"), (b"content-length", b"%d" % LONG)])
        client.data(stream, b'{"a":')
        client.h2.reset_stream(stream)
        client.flush()
        answer = client.post(RENDER, [JSON, priority("6")], b"{}")
        assert answer.status == 200
    assert_moved(upstream.only, b"{}", 6)


def test_an_upstream_that_closes_in_the_middle_of_its_response_is_not_hidden(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    def handler(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        connection.close()

    upstream.handler = handler
    with Http1(front.address) as client, pytest.raises((Closed, ConnectionResetError)):
        client.send(_head(b"Content-Length: 2") + b"{}")
        client.answer()
