"""Without the header, or on any other route or method, nobody can tell that the sidecar is there.

Each request goes to the same upstream twice, straight and through the sidecar. What the upstream saw and what the
client got must be the same: heads to the byte on HTTP/1.1, names and values on h2c.
"""

import re
import threading
import time
from collections.abc import Sequence

import pytest

from control_plane.address import Address

from .conftest import MESSAGES, RENDER, SidecarFactory
from .sidecars import RunningSidecar
from .upstream import DATE, Connection, RecordingUpstream, Request, answering, response
from .wire import Answer, Header, Http1, Http2, chunked, chunks_of, head_bytes

JSON = (b"Content-Type", b"application/json")
ADDED = (b"x-vllm-priority-applied", b"access-control-expose-headers")
BODY = b'{ "priority" : 1,"seed":9007199254740993, "prompt":"\xff\\u0000" }\n'


def _exchange(
    address: Address, upstream: RecordingUpstream, data: Sequence[bytes], method: str = "POST"
) -> tuple[Request, Answer]:
    """Sends bytes as they are; what the upstream saw and the client got."""
    handler = upstream.handler
    upstream.clear()
    upstream.handler = handler
    with Http1(address) as client:
        for piece in data:
            client.send(piece)
        answer = client.answer(to_head=method == "HEAD")
    return upstream.only, answer


def _without(head: bytes, *names: bytes) -> bytes:
    """A head without some of its lines."""
    for name in names:
        head = re.sub(rb"(?im)^" + re.escape(name) + rb":[^\r]*\r\n", b"", head)
    return head


def _compare(front: RunningSidecar, upstream: RecordingUpstream, data: Sequence[bytes], method: str = "POST") -> Answer:
    seen, got = _exchange(upstream.address, upstream, data, method)
    seen_through, got_through = _exchange(front.address, upstream, data, method)
    head = seen_through.head
    if seen.framing == "none" and seen_through.framing == "length":
        # Envoy says so where a method could have a body and none came (RFC 9110, 8.6, asks senders to).
        head = _without(head, b"content-length")
        seen_through.framing = "none"
    assert head.decode("latin-1") == seen.head.decode("latin-1")
    assert (seen_through.body, seen_through.framing) == (seen.body, seen.framing)
    # On the edited routes the answer says what was done, and lets a page read it: the two lines that are added.
    assert _without(got_through.head, *ADDED).decode("latin-1") == got.head.decode("latin-1")
    assert (got_through.status, got_through.body, got_through.framing) == (got.status, got.body, got.framing)
    return got_through


def _request(method: str, target: str, headers: Sequence[Header], body: bytes | None, framing: str) -> list[bytes]:
    lines = [(b"Host", b"vllm.example:8000"), *headers]
    if body is None:
        return [head_bytes(method, target, lines)]
    if framing == "chunked":
        head = head_bytes(method, target, [*lines, (b"Transfer-Encoding", b"chunked")])
        return [head, chunked(chunks_of(body, [3, 9]))]
    return [head_bytes(method, target, [*lines, (b"Content-Length", b"%d" % len(body))]), body]


HEADER_SETS: dict[str, list[Header]] = {
    "plain": [JSON],
    "none": [],
    "case, order and repeats": [
        (b"ACCEPT", b"a/b"), JSON, (b"x-Zeta", b"1"), (b"X-alpha", b"2"), (b"x-Zeta", b"3"), (b"x-Zeta", b"1"),
    ],
    "what vLLM reads": [
        JSON, (b"Authorization", b"Bearer k"), (b"X-data-parallel-rank", b"1"), (b"X-Session-ID", b"s"),
        (b"X-Request-Id", b"mine"), (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"),
        (b"tracestate", b"a=b"), (b"Endpoint-Load-Metrics-Format", b"TEXT"), (b"Origin", b"http://o"),
        (b"X-Amzn-SageMaker-Session-Id", b"NEW_SESSION"),
    ],
    "what proxies add, sent by the client": [
        JSON, (b"X-Forwarded-For", b"10.0.0.9, 10.0.0.8"), (b"X-Forwarded-Proto", b"https"),
        (b"X-Forwarded-Host", b"h"), (b"X-Forwarded-Port", b"1"), (b"Forwarded", b"for=a"), (b"Via", b"1.1 other"),
    ],
    "X-Forwarded-Proto of another kind": [JSON, (b"X-Forwarded-Proto", b"wss")],
    "X-Forwarded-Proto as a list": [JSON, (b"X-Forwarded-Proto", b"https,http")],
    "what an outer Envoy tells": [
        JSON, (b"X-Envoy-Attempt-Count", b"1"), (b"X-Envoy-External-Address", b"10.0.0.9"),
        (b"X-Envoy-Original-Path", b"/x"), (b"X-Envoy-Decorator-Operation", b"o"),
        (b"X-Envoy-Peer-Metadata", b"CgA="), (b"X-Envoy-Peer-Metadata-Id", b"sidecar~10.0.0.9"),
    ],
    "user agent and encodings": [
        JSON, (b"User-Agent", b"curl/8"), (b"Accept-Encoding", b"gzip, br"), (b"TE", b"trailers"),
        (b"Range", b"bytes=0-"),
    ],
    "empty and odd values": [JSON, (b"X-Empty", b""), (b"X-Odd", b"\xe9 \x80 \"';,"), (b"X-Long", b"v" * 8000)],
    "many": [JSON, *((b"X-Many-%d" % number, b"v") for number in range(150))],
    "an underscore": [JSON, (b"X_Under_Score", b"1")],
    "the sidecar's own report header": [JSON, (b"X-Vllm-Priority-Applied", b"9")],
    "names that begin like the header": [JSON, (b"X-Vllm-Priority-Class", b"9"), (b"X-Vllm-Priorit", b"9")],
}  # fmt: skip


@pytest.mark.parametrize("headers", HEADER_SETS.values(), ids=HEADER_SETS)
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("target", [RENDER, MESSAGES, "/v1/chat/completions"])
def test_a_post_without_the_header_reaches_the_upstream_as_it_was_sent(
    front: RunningSidecar, upstream: RecordingUpstream, headers: list[Header], framing: str, target: str
) -> None:
    _compare(front, upstream, _request("POST", target, headers, BODY, framing))


def test_envoy_joins_repeats_of_its_best_known_headers_and_gives_them_one_case(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    """The two things that its header map does not keep; they mean the same (RFC 9110, 5.1 and 5.3; RFC 6265, 5.4)."""
    headers = [(b"ACCEPT", b"a/b"), (b"Cookie", b"a=1"), (b"accept", b"c/d"), (b"x-Zeta", b"1"), (b"X-ZETA", b"2")]
    data = _request("POST", RENDER, [JSON, *headers, (b"cookie", b"b=2")], BODY, "length")
    seen, _ = _exchange(front.address, upstream, data)
    assert seen.all("accept") == ["a/b,c/d"]
    assert "; ".join(seen.all("cookie")) == "a=1; b=2"
    assert seen.all("x-zeta") == ["1", "2"]
    assert seen.body == BODY


COMMANDS = [
    (b"x-envoy-retry-on", b"5xx,reset,connect-failure,refused-stream"), (b"x-envoy-max-retries", b"4"),
    (b"x-envoy-upstream-rq-timeout-ms", b"50"), (b"x-envoy-upstream-rq-per-try-timeout-ms", b"50"),
    (b"x-envoy-hedge-on-per-try-timeout", b"true"), (b"x-envoy-expected-rq-timeout-ms", b"50"),
    (b"x-envoy-internal", b"true"), (b"x-envoy-force-trace", b"true"), (b"x-envoy-retriable-status-codes", b"500"),
]  # fmt: skip


@pytest.mark.parametrize("outer", [[], [(b"X-Forwarded-For", b"10.0.0.1")], [(b"X-Forwarded-For", b"127.0.0.1")]])
@pytest.mark.parametrize("target", [RENDER, "/v1/completions"])
def test_a_client_cannot_command_envoy_to_repeat_or_to_cut_short(
    front: RunningSidecar, upstream: RecordingUpstream, outer: list[Header], target: str
) -> None:
    """Headers that command an Envoy are the only ones of a client's that it takes out. vLLM reads none of them."""

    def slow(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        time.sleep(0.3)
        connection.send(response(b"Internal Server Error", b"500 Internal Server Error"))

    upstream.handler = slow
    _, got = _exchange(front.address, upstream, _request("POST", target, [JSON, *outer, *COMMANDS], BODY, "length"))
    assert (got.status, got.body) == (500, b"Internal Server Error")
    time.sleep(0.1)  # a replay would come after a back-off of 25 ms
    assert len(upstream.requests) == 1
    assert upstream.only.body == BODY


def test_a_client_cannot_forge_the_note_that_the_config_makes_for_itself(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    forged = [JSON, (b"X-Vllm-Priority-Forwarded-Proto", b"https")]
    seen, _ = _exchange(front.address, upstream, _request("POST", "/v1/completions", forged, BODY, "length"))
    assert seen.all("x-forwarded-proto") == []


@pytest.mark.parametrize("role", ["render", "engine"])
@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/v1/models", None), ("GET", "/health", None), ("GET", "/metrics?name[]=a", None), ("HEAD", "/", None),
        ("GET", RENDER, None), ("PUT", RENDER, BODY), ("DELETE", "/v1/responses/r_1", None),
        ("OPTIONS", "/v1/models", None),
        ("PATCH", "/x", BODY), ("POST", "/v1/chat/completions", BODY), ("POST", "/v1/messages", BODY),
        ("POST", "/v1/decisions", BODY), ("POST", "/v1/audio/transcriptions", BODY),
        ("POST", "//v1/x%2F..%2f/./a/../b;c", b""),
        ("POST", "/v1/chat/completions/render/", BODY), ("POST", "/tokenize", None), ("PURGE", "/x", None),
        ("POST", "/" + "p" * 3000 + "?" + "q" * 3000, BODY),
    ],
)  # fmt: skip
def test_with_the_header_every_other_route_and_method_is_left_alone(
    sidecar: SidecarFactory, upstream: RecordingUpstream, role: str, method: str, target: str, body: bytes | None
) -> None:
    if method == "HEAD":
        upstream.handler = answering(b"HTTP/1.1 200 OK\r\ndate: " + DATE + b"\r\ncontent-length: 5\r\n\r\n")
    headers = [JSON, (b"X-VLLM-Priority", b"not a number"), (b"X-VLLM-Priority", b"7")]
    answer = _compare(sidecar(role), upstream, _request(method, target, headers, body, "length"), method)
    assert answer.applied is None


ERROR = b'{"error":{"message":"m","type":"Bad Request","param":"body.priority","code":400}}'
SSE = [b"data: one\n\n", b"data: two\n\n", b": comment\n\n", b"data: [DONE]\n\n"]

ANSWERS: dict[str, bytes] = {
    "json": response(b'{"priority":0}'),
    "chunked json": response(b"", chunks=[b'{"pri', b'ority":0}']),
    "sse": response(b"", chunks=SSE, content_type=b"text/event-stream; charset=utf-8"),
    "400": response(ERROR, b"400 Bad Request"),
    "401": response(b'{"error":"Unauthorized"}', b"401 Unauthorized", [(b"www-authenticate", b"Bearer")]),
    "403": response(ERROR, b"403 Forbidden"),
    "404": response(b'{"detail":"Not Found"}', b"404 Not Found"),
    "429": response(b"", b"429 Too Many Requests", [(b"retry-after", b"1")]),
    "500": response(b"Internal Server Error", b"500 Internal Server Error", content_type=b"text/plain"),
    "503": response(b"", b"503 Service Unavailable", [(b"x-envoy-overloaded", b"true")]),
    "504": response(b"late", b"504 Gateway Timeout"),
    "307": response(b"", b"307 Temporary Redirect", [(b"location", b"http://vllm.example/x")]),
    "304": b"HTTP/1.1 304 Not Modified\r\ndate: " + DATE + b'\r\netag: "a"\r\n\r\n',
    "204": b"HTTP/1.1 204 No Content\r\ndate: " + DATE + b"\r\n\r\n",
    "case, order and repeats": response(
        b"{}",
        headers=[
            (b"X-Zeta", b"1"), (b"x-alpha", b"2"), (b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2"), (b"X-Zeta", b"3"),
        ],
    ),
    "what proxies add": response(
        b"{}",
        headers=[
            (b"x-request-id", b"theirs"), (b"x-envoy-upstream-service-time", b"5"), (b"via", b"1.1 x"),
            (b"x-powered-by", b"p"),
            (b"x-envoy-decorator-operation", b"o"), (b"access-control-allow-origin", b"*"), (b"alt-svc", b"clear"),
        ],
    ),
    "no date, no server": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "gzip": response(b"\x1f\x8b not really", headers=[(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]),
    "empty": response(b""),
}  # fmt: skip


# Envoy stamps a date on an answer that has none, as RFC 9110, 6.6.1 asks of proxies. uvicorn always sends one.
STAMPED = {"no date, no server"}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("target", [RENDER, MESSAGES, "/v1/completions"])
def test_every_answer_comes_back_as_the_upstream_sent_it(
    front: RunningSidecar, upstream: RecordingUpstream, name: str, target: str
) -> None:
    upstream.handler = answering(ANSWERS[name])
    if name in STAMPED:
        _, got = _exchange(front.address, upstream, _request("POST", target, [JSON], BODY, "length"))
        assert _without(got.head, b"date", b"x-vllm-priority-applied") == ANSWERS[name].removesuffix(b"{}")
        return
    _compare(front, upstream, _request("POST", target, [JSON], BODY, "length"))


def test_an_answer_that_ends_with_its_connection_is_whole(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    def handler(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.send(b"HTTP/1.1 200 OK\r\ndate: " + DATE + b"\r\ncontent-type: text/plain\r\n\r\nuntil the end")
        connection.close()

    upstream.handler = handler
    _, got = _exchange(front.address, upstream, _request("GET", "/x", [], None, ""))
    assert (got.status, got.body) == (200, b"until the end")


def test_events_that_come_one_by_one_are_not_joined(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    go = threading.Semaphore(0)

    def handler(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in SSE:
            connection.send(b"%x\r\n%b\r\n" % (len(event), event))
            assert go.acquire(timeout=10)
        connection.send(b"0\r\n\r\n")

    upstream.handler = handler
    with Http1(front.address) as client:
        client.send(b"".join(_request("POST", "/v1/completions", [JSON], BODY, "length")))
        client.start()
        for event in SSE:
            assert client.reader.chunk() == event
            go.release()
        assert client.reader.chunk() == b""


# Names that only frame a message, and those that HTTP/2 cannot carry.
_FRAMING = {b"transfer-encoding", b"content-length", b"host", b"connection"}


def _plain(headers: Sequence[Header]) -> list[Header]:
    """Headers as HTTP/2 has them: lower case, without what frames the message."""
    lowered = [(name.lower(), value) for name, value in headers if name.lower() not in _FRAMING]
    cookies = [value for name, value in lowered if name == b"cookie"]
    others = sorted(header for header in lowered if header[0] != b"cookie")
    return [*others, *([(b"cookie", b"; ".join(cookies))] if cookies else [])]


@pytest.mark.parametrize("headers", HEADER_SETS.values(), ids=HEADER_SETS)
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("target", [RENDER, "/v1/chat/completions?x=%2F"])
def test_h2c_reaches_the_upstream_as_http_1_would(
    front: RunningSidecar, upstream: RecordingUpstream, headers: list[Header], framing: str, target: str
) -> None:
    straight, _ = _exchange(upstream.address, upstream, _request("POST", target, headers, BODY, framing))
    upstream.clear()
    with Http2(front.address) as client:
        client.post(target, headers, BODY, framing=framing, cuts=[3, 9])
    through = upstream.only
    assert (through.method, through.target, through.version) == (straight.method, straight.target, straight.version)
    assert _plain(through.headers) == _plain(straight.headers)
    assert through.all("host") == ["vllm.example"]
    assert (through.body, through.framing) == (straight.body, straight.framing)


@pytest.mark.parametrize("name", ANSWERS)
def test_h2c_gets_every_answer_as_http_1_would(front: RunningSidecar, upstream: RecordingUpstream, name: str) -> None:
    upstream.handler = answering(ANSWERS[name])
    _, straight = _exchange(upstream.address, upstream, _request("POST", "/v1/completions", [JSON], BODY, "length"))
    with Http2(front.address) as client:
        through = client.post("/v1/completions", [JSON], BODY)
    dated = [header for header in through.headers if name not in STAMPED or header[0] != b"date"]
    assert (through.status, through.body) == (straight.status, straight.body)
    assert _plain(dated) == _plain(straight.headers)


def test_a_host_line_that_is_not_first_is_the_only_line_that_moves(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    """Envoy writes Host first, which RFC 9110, 7.2 recommends to every sender."""
    data = [b"GET /x HTTP/1.1\r\nA: 1\r\nHost: vllm.example\r\nB: 2\r\n\r\n"]
    seen, _ = _exchange(front.address, upstream, data)
    assert seen.head == b"GET /x HTTP/1.1\r\nHost: vllm.example\r\nA: 1\r\nB: 2\r\n\r\n"


@pytest.mark.parametrize("target", ["/v1/models", RENDER])
def test_http_1_0_is_served(front: RunningSidecar, upstream: RecordingUpstream, target: str) -> None:
    with Http1(front.address) as client:
        client.send(
            b"POST %b HTTP/1.0\r\nHost: vllm.example\r\nContent-Type: application/json\r\n"
            b"Content-Length: 2\r\n\r\n{}" % target.encode()
        )
        answer = client.answer()
    assert (answer.status, answer.body) == (200, b'{"ok":true}')
    assert upstream.only.body == b"{}"


def test_a_websocket_is_upgraded_and_carries_bytes_both_ways(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    def handler(request: Request, connection: Connection) -> None:
        request.complete.set()
        connection.send(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
        )
        while data := connection.sock.recv(1000):
            connection.send(data.upper())
        connection.close()

    upstream.handler = handler
    with Http1(front.address) as client:
        client.send(
            b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: vllm.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nX-Vllm-Priority: 5\r\n\r\n"
        )
        assert client.start().status == 101
        for word in (b"\x81\x00one", b"two\xff"):
            client.send(word)
            assert client.reader.take(len(word)) == word.upper()
    assert upstream.only.all("x-vllm-priority") == ["5"]
    assert upstream.only.all("upgrade") == ["websocket"]
    assert upstream.only.all("sec-websocket-key") == ["dGhlIHNhbXBsZSBub25jZQ=="]


def test_with_the_header_nothing_but_the_priority_and_the_length_changes(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    for name, headers in HEADER_SETS.items():
        if not any(header == JSON for header in headers):
            continue
        for framing in ("length", "chunked"):
            plain = _request("POST", RENDER, headers, BODY, framing)
            straight, got = _exchange(upstream.address, upstream, plain)
            marked = _request("POST", RENDER, [(b"X-Vllm-Priority", b"5"), *headers], BODY, framing)
            through, got_through = _exchange(front.address, upstream, marked)
            assert _without(through.head, b"content-length") == _without(straight.head, b"content-length"), name
            assert _without(got_through.head, *ADDED) == got.head
