"""Where a priority goes, and what it means there."""

import json
import threading

import pytest

from .conftest import GENERATE, MESSAGES, RENDER, SidecarFactory
from .oracle import assert_moved, assert_untouched
from .sidecars import RunningSidecar
from .upstream import Connection, RecordingUpstream, Request, answering, response
from .wire import TRANSPORTS, Http1, call, priority

each_transport = pytest.mark.parametrize("transport", TRANSPORTS)

GENERATE_REQUEST = (
    b'{"request_id":"r","token_ids":[1,2],"sampling_params":{"n":1,"priority":9},"priority":0,"x":9007199254740993}'
)
EDITED = GENERATE_REQUEST.replace(b'"priority":0', b'"priority":7')
ASKED = b'{"model":"tiny","max_tokens":4,"priority":2,"messages":[{"role":"user","content":"hi"}]}'


@each_transport
@pytest.mark.parametrize("role", ["render", "engine"])
def test_the_response_of_messages_render_carries_the_priority(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, role: str
) -> None:
    upstream.handler = answering(response(GENERATE_REQUEST))
    answer = call(sidecar(role).address, MESSAGES, ASKED, priority("7"), transport=transport)
    assert answer.status == 200
    assert answer.applied == "7; source=header; outcome=response_edited"
    assert answer.body.rstrip() == EDITED
    assert upstream.only.body == ASKED, "its request cannot carry a priority, so it is left alone"


@each_transport
@pytest.mark.parametrize("cuts", [1, 2, 7, 1000])
def test_a_response_in_pieces_is_edited_too(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, cuts: int
) -> None:
    pieces = [GENERATE_REQUEST[at : at + cuts] for at in range(0, len(GENERATE_REQUEST), cuts)]
    upstream.handler = answering(response(b"", chunks=pieces))
    answer = call(front.address, MESSAGES, ASKED, priority("7"), transport=transport)
    assert (answer.status, answer.body.rstrip()) == (200, EDITED)


@each_transport
@pytest.mark.parametrize("value", ["-9223372036854775808", "9223372036854775807", "0"])
def test_a_response_keeps_every_digit(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, value: str
) -> None:
    upstream.handler = answering(response(GENERATE_REQUEST))
    answer = call(front.address, MESSAGES, ASKED, priority(value), transport=transport)
    assert json.loads(answer.body) == json.loads(GENERATE_REQUEST) | {"priority": int(value)}


def test_each_object_of_a_response_that_is_a_list_is_edited(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    items = [{"token_ids": [1], "priority": 0}, {"token_ids": [[{"priority": 1}]], "priority": 0}]
    upstream.handler = answering(response(json.dumps(items).encode()))
    answer = call(front.address, MESSAGES, ASKED, priority("-7"))
    assert json.loads(answer.body) == [item | {"priority": -7} for item in items]


@each_transport
@pytest.mark.parametrize(
    "status", [b"400 Bad Request", b"401 Unauthorized", b"403 Forbidden", b"404 Not Found", b"500 Internal Error"]
)
def test_an_error_of_messages_render_is_not_edited(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, status: bytes
) -> None:
    error = b'{"error":{"message":"m","type":"t","param":null,"code":1}}'
    upstream.handler = answering(response(error, status))
    answer = call(front.address, MESSAGES, ASKED, priority("7"), transport=transport)
    assert (answer.status, answer.body) == (int(status[:3]), error)
    assert answer.applied is None or answer.applied.startswith("none")


@pytest.mark.parametrize(
    ("content_type", "more"), [(b"text/plain", ()), (b"application/json", ((b"content-encoding", b"gzip"),))]
)
def test_a_response_that_cannot_be_edited_passes_through(
    front: RunningSidecar, upstream: RecordingUpstream, content_type: bytes, more: tuple[tuple[bytes, bytes], ...]
) -> None:
    upstream.handler = answering(response(GENERATE_REQUEST, headers=more, content_type=content_type))
    answer = call(front.address, MESSAGES, ASKED, priority("7"))
    assert (answer.status, answer.body) == (200, GENERATE_REQUEST)
    assert answer.applied is not None
    assert answer.applied.startswith("none"), "what was not applied is not reported as applied"


@pytest.mark.parametrize("answer_body", [b"", b"null", b"[]", b"{", b'{"priority":0', b'"priority"'])
def test_an_unusual_response_of_messages_render_still_comes_back(
    front: RunningSidecar, upstream: RecordingUpstream, answer_body: bytes
) -> None:
    for data in (response(answer_body), response(b"", chunks=[answer_body] if answer_body else [])):
        upstream.clear()
        upstream.handler = answering(data)
        answer = call(front.address, MESSAGES, ASKED, priority("7"))
        assert answer.status == 200
        assert answer.body.startswith(answer_body[:12])


def test_without_the_header_the_response_of_messages_render_is_left_alone(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    upstream.handler = answering(response(GENERATE_REQUEST))
    answer = call(front.address, MESSAGES, ASKED)
    assert (answer.status, answer.body, answer.applied) == (200, GENERATE_REQUEST, "none; outcome=absent")


def test_a_response_streams_back_before_it_is_complete(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    seen = threading.Event()

    def handler(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        first = b'{"token_ids":[' + b"1," * 5000
        connection.send(head + b"%x\r\n%b\r\n" % (len(first), first))
        assert seen.wait(5)
        last = b'1],"priority":0}'
        connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))

    upstream.handler = handler
    with Http1(front.address) as client:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(ASKED), ASKED)
        client.send(
            b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nX-Vllm-Priority: 7\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n%b" % (MESSAGES.encode(), body)
        )
        answer = client.start()
        assert answer.status == 200
        piece = client.reader.chunk()
        seen.set()
        while more := client.reader.chunk():
            piece += more
    assert json.loads(piece) == {"token_ids": [1] * 5001, "priority": 7}


SCALE_OUT_OFF = (
    b'{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable '
    b'them.","type":"PermissionDeniedError","param":null,"code":403}}'
)


@each_transport
@pytest.mark.parametrize("target", [RENDER, MESSAGES, GENERATE])
def test_the_403_of_a_server_without_scale_out_passes_through(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, target: str
) -> None:
    upstream.handler = answering(response(SCALE_OUT_OFF, b"403 Forbidden"))
    answer = call(sidecar("engine").address, target, ASKED, priority("7"), transport=transport)
    assert (answer.status, answer.body) == (403, SCALE_OUT_OFF)
    assert answer.all("content-length") == [str(len(SCALE_OUT_OFF))]


def test_a_response_that_comes_before_the_end_of_the_body_gets_through(
    front: RunningSidecar, upstream: RecordingUpstream
) -> None:
    def handler(request: Request, connection: Connection) -> None:
        connection.send(response(SCALE_OUT_OFF, b"403 Forbidden"))
        connection.read_body(request)

    upstream.handler = handler
    with Http1(front.address) as client:
        client.send(
            b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1500000\r\n\r\n" % RENDER.encode() + b'{"a":1'
        )
        answer = client.answer()
    assert (answer.status, answer.body) == (403, SCALE_OUT_OFF)


@each_transport
@pytest.mark.parametrize(
    ("engine", "value", "moved"),
    [
        ("sglang", "5", -5), ("sglang", "-5", 5), ("sglang", "0", 0), ("sglang", "-0", 0), ("sglang", "+7", -7),
        ("sglang", "9223372036854775807", -(2**63) + 1), ("vllm", "5", 5), ("vllm", "-5", -5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("body", [b'{"n":2,"best_of":3}', b'{"priority":1,"n":2}'])
def test_only_sglang_gets_the_negated_value_and_n_is_never_touched(
    sidecar: SidecarFactory,
    upstream: RecordingUpstream,
    transport: str,
    engine: str,
    value: str,
    moved: int,
    body: bytes,
) -> None:
    answer = call(sidecar(policy=f"engine: {engine}").address, RENDER, body, priority(value), transport=transport)
    assert answer.status == 200
    assert_moved(upstream.only, body, moved)
    assert json.loads(upstream.only.body)["n"] == 2


def test_a_value_that_cannot_be_negated_is_out_of_range(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar(policy="engine: sglang")
    answer = call(front.address, RENDER, b"{}", priority("-9223372036854775808"))
    assert (answer.status, answer.applied) == (400, "none; outcome=out_of_range")
    assert upstream.requests == []


ROUTES_WITHOUT_HEADER = {
    "render": ["/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render"],
    "engine": [
        "/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render", "/inference/v1/generate",
        "/cohere/v2/chat/render",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("role", "target"), [(role, path) for role, paths in ROUTES_WITHOUT_HEADER.items() for path in paths]
)
def test_each_route_that_ignores_the_header_gets_the_member(
    sidecar: SidecarFactory, upstream: RecordingUpstream, role: str, target: str
) -> None:
    assert call(sidecar(role).address, target, b'{"a":1}', priority("-3")).status == 200
    assert_moved(upstream.only, b'{"a":1}', -3)
    assert upstream.only.all("x-vllm-priority") == []


@pytest.mark.parametrize("role", ["render", "engine"])
@pytest.mark.parametrize(
    "target",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/decisions", "/v1/embeddings"],
)
def test_the_header_stays_where_vllm_reads_it_and_nothing_goes_into_the_body(
    sidecar: SidecarFactory, upstream: RecordingUpstream, role: str, target: str
) -> None:
    answer = call(sidecar(role).address, target, b'{"a":1}', priority("-3"))
    assert (answer.status, answer.applied) == (200, None)
    assert upstream.only.body == b'{"a":1}'
    assert upstream.only.all("x-vllm-priority") == ["-3"]


def test_generate_is_not_a_route_of_the_render_server(front: RunningSidecar, upstream: RecordingUpstream) -> None:
    answer = call(front.address, GENERATE, b'{"a":1}', priority("-3"))
    assert answer.applied is None
    assert_untouched(upstream.only, b'{"a":1}')
