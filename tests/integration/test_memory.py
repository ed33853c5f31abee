"""Large bodies pass in memory that does not grow with them, and what is held stays within the memory limit."""

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from h2.exceptions import StreamClosedError

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.render.placement import Placement

from .conftest import RENDER, SidecarFactory
from .sidecars import RunningSidecar, load
from .upstream import WAIT, RecordingUpstream
from .wire import Answer, Closed, Http1, Http2, call, connect, head_bytes, priority

MEBIBYTE = 1 << 20
AT_A_TIME = 8
BOUND = 64 * MEBIBYTE
"""Bytes that Envoy may hold beyond an idle one."""

START = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,'
BLOCK = (b"iVBORw0KGgoAAAANSUhEUgAA" * 43691)[:MEBIBYTE]
END = b'"}}]}],"priority":2}'
JSON = (b"Content-Type", b"application/json")
PRIORITY = (b"X-Vllm-Priority", b"5")


def _upload(front: RunningSidecar, transport: str, blocks: int, ready: threading.Barrier | None) -> int:
    """Sends one body block by block; where there is a barrier, the last one once all have begun."""
    length = b"%d" % (len(START) + blocks * MEBIBYTE + len(END))
    framed = [(b"Content-Length", length)] if transport.endswith("length") else [(b"Transfer-Encoding", b"chunked")]
    with connect(front.address, transport) as client:
        client.sock.settimeout(60)
        if isinstance(client, Http2):
            stream = client.open("POST", RENDER, [JSON, PRIORITY, *(framed if transport == "h2c-length" else [])])

            def send(piece: bytes) -> None:
                client.data(stream, piece)
        else:
            client.send(head_bytes("POST", RENDER, [(b"Host", b"h"), JSON, PRIORITY, *framed]))

            def send(piece: bytes) -> None:
                client.send(piece if transport == "h1-length" else b"%x\r\n%b\r\n" % (len(piece), piece))

        send(START)
        for number in range(blocks):
            if ready and number == blocks - 1:
                ready.wait(60)
            send(BLOCK)
        send(END)
        if isinstance(client, Http1):
            if transport == "h1-chunked":
                client.send(b"0\r\n\r\n")
            return client.answer().status
        client.data(stream, b"", end=True)
        return client.answer(stream).status


@pytest.mark.parametrize("transport", ["h1-length", "h2c-length"])
def test_a_body_of_20_mb_passes_on_either_protocol(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str
) -> None:
    front = sidecar(fresh=True)
    idle = front.peak_memory()
    assert _upload(front, transport, 20, None) == 200
    assert upstream.only.body == START + BLOCK * 20 + END.replace(b":2}", b":5}")
    assert front.peak_memory() - idle <= BOUND


@pytest.mark.parametrize("transport", ["h1-chunked", "h2c"])
def test_a_body_of_unknown_length_is_held_whole_where_envoy_can(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str
) -> None:
    front = sidecar(fresh=True)
    assert _upload(front, transport, 20, None) == 200
    assert upstream.only.framing == "chunked"
    assert upstream.only.body == START + BLOCK * 20 + END.replace(b":2}", b":5}")


def test_a_held_body_is_held_once(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar(fresh=True)
    idle = front.peak_memory()
    upstream.keep_bodies = False
    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        uploads = [pool.submit(_upload, front, "h1-chunked", 48, together) for _ in range(2)]
        assert [upload.result() for upload in uploads] == [200, 200]
    grown = front.peak_memory() - idle
    assert grown <= 96 * MEBIBYTE + BOUND, f"{grown / MEBIBYTE:.0f} MB for two bodies of 48 MB"


def test_a_held_body_of_64_mb_costs_about_its_own_size(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar(fresh=True)
    idle = front.peak_memory()
    upstream.keep_bodies = False
    assert _upload(front, "h1-chunked", 63, None) == 200
    grown = front.peak_memory() - idle
    print(f"a held body of 63 MiB: {grown / MEBIBYTE:.0f} MiB more than idle")
    assert grown <= 96 * MEBIBYTE, f"{grown / MEBIBYTE:.0f} MB for a body of 63 MB"


class Limited(RunningSidecar):
    """A sidecar with a memory limit of its own."""

    memory_limit = 256 * MEBIBYTE

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        return super().configuration(policy, replace(placement, memory_limit_bytes=self.memory_limit))


class Roomy(Limited):
    """With room for one large body above what may be held."""

    memory_limit = 768 * MEBIBYTE


class Unfiltered(Limited):
    """Where nothing is shed by the filter, so that only Envoy's own overload manager is left."""

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        found = json.dumps(super().configuration(policy, placement))
        held = str(self.memory_limit * 3 // 4)
        assert f'"held_memory": {held}' in found
        configuration: dict[str, Any] = json.loads(found.replace(f'"held_memory": {held}', f'"held_memory": {10**12}'))
        return configuration


class Starved(Limited):
    """With a limit that Envoy exceeds as soon as it runs."""

    memory_limit = 4 * MEBIBYTE


@contextlib.contextmanager
def _running(
    kind: type[Limited], envoy: Path, folder: Path, upstream: RecordingUpstream, address: Address | None = None
) -> Iterator[RunningSidecar]:
    upstream.keep_bodies = False
    front = kind(envoy, folder, "render", load("{}"), address or upstream.address)
    try:
        yield front
        assert front.process.poll() is None, f"Envoy ended by itself:\n{front.messages()}"
        assert not any(front.lua_errors().values())
    finally:
        front.stop()


def _small(front: RunningSidecar) -> int:
    """The status of a small request with a priority."""
    return call(front.address, RENDER, b'{"messages":[]}', priority("5")).status


def _grow(front: RunningSidecar, transport: str, count: int, size: int) -> tuple[list[Answer], list[int]]:
    """Uploads of `size` bytes that are opened first and then grown together: their responses, and those of small
    requests that were sent meanwhile."""
    together = threading.Barrier(count + 1)
    block = b"A" * min(262144, size)

    def upload() -> Answer:
        with connect(front.address, transport) as client:
            client.sock.settimeout(60)
            if isinstance(client, Http2):
                stream = client.open("POST", RENDER, [JSON, PRIORITY])
                client.data(stream, b'{"messages":"')
                together.wait(60)
                for _ in range(size // len(block)):
                    client.data(stream, block)
                client.data(stream, b'"}', end=True)
                return client.answer(stream)
            head = [(b"Host", b"h"), JSON, PRIORITY, (b"Transfer-Encoding", b"chunked")]
            client.send(head_bytes("POST", RENDER, head) + b'd\r\n{"messages":"\r\n')
            together.wait(60)
            for _ in range(size // len(block)):
                client.send(b"%x\r\n%b\r\n" % (len(block), block))
            client.send(b'2\r\n"}\r\n0\r\n\r\n')
            return client.answer()

    with ThreadPoolExecutor(count) as pool:
        uploads = [pool.submit(upload) for _ in range(count)]
        together.wait(60)
        small = []
        while not all(one.done() for one in uploads):
            small.append(_small(front))
            time.sleep(0.05)
        return [one.result() for one in uploads], small


def _says_overloaded(answer: Answer) -> bool:
    error = json.loads(answer.body)["error"]
    assert error.pop("message").startswith("the sidecar holds as many request bodies as its memory limit allows.")
    assert error == {"type": "Service Unavailable", "param": None, "code": 503}
    assert ("content-type", "application/json") in [(k.decode().lower(), v.decode()) for k, v in answer.headers]
    return answer.applied == "none; outcome=overloaded"


def _becomes_free(front: RunningSidecar, transport: str) -> None:
    """Waits until a large body is served. The filter looks for what clients left behind once a second."""
    until = time.monotonic() + WAIT
    while (status := _upload(front, transport, 10, None)) != 200:
        assert time.monotonic() < until, f"still {status}"
        time.sleep(0.2)


@pytest.mark.parametrize("transport", ["h1-chunked", "h2c"])
def test_bodies_that_grow_together_are_shed_with_503_within_the_memory_limit(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path, transport: str
) -> None:
    with _running(Limited, envoy, tmp_path, upstream) as front:
        for attack in (1, 2):
            answers, small = _grow(front, transport, 40, 24 * MEBIBYTE)
            shed = [answer for answer in answers if answer.status == 503]
            print(
                f"{transport}, attack {attack}: 40 bodies of 24 MiB, {len(shed)} shed, {len(small)} small requests,"
                f" peak {front.peak_memory() / MEBIBYTE:.0f} of {Limited.memory_limit / MEBIBYTE:.0f} MiB"
            )
            assert {answer.status for answer in answers} <= {200, 503}
            assert len(shed) >= 30, "what they hold does not fit"
            assert all(_says_overloaded(answer) for answer in shed)
            assert small, "no small request was sent meanwhile"
            assert set(small) == {200}
            assert front.peak_memory() < Limited.memory_limit
        assert front.counter("overloaded") >= 60
        # The memory is free again: what is held no more does not stand in the way of the next body.
        _becomes_free(front, transport)
        heap = json.loads(front.get("/memory"))
        in_use = int(heap["heap_size"]) - int(heap["pageheap_free"]) - int(heap["pageheap_unmapped"])
        print(f"{transport}: {in_use / MEBIBYTE:.0f} MiB of heap in use afterwards")
        assert in_use < 64 * MEBIBYTE


def test_very_many_bodies_of_less_than_1_mib_stay_within_the_memory_limit_too(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    with _running(Limited, envoy, tmp_path, upstream) as front:
        answers, _ = _grow(front, "h1-chunked", 500, 3 * 262144)
        shed = sum(answer.status == 503 for answer in answers)
        print(f"500 bodies of 0.75 MiB: {shed} shed, peak {front.peak_memory() / MEBIBYTE:.0f} MiB")
        assert {answer.status for answer in answers} <= {200, 503}
        assert shed >= 250
        assert front.peak_memory() < Limited.memory_limit
        assert _small(front) == 200


def test_clients_that_all_send_large_bodies_at_once_do_not_all_fail(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    with _running(Roomy, envoy, tmp_path, upstream) as front:
        answers, _ = _grow(front, "h1-chunked", 24, 48 * MEBIBYTE)
        statuses = [answer.status for answer in answers]
        print(f"24 bodies of 48 MiB: {statuses.count(200)} served, peak {front.peak_memory() / MEBIBYTE:.0f} MiB")
        assert set(statuses) == {200, 503}
        assert front.peak_memory() < Roomy.memory_limit


def test_a_client_that_leaves_gives_back_what_its_body_held(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    with _running(Limited, envoy, tmp_path, upstream) as front:
        head = [(b"Host", b"h"), JSON, PRIORITY, (b"Transfer-Encoding", b"chunked")]
        with contextlib.ExitStack() as clients:
            for _ in range(20):
                client = clients.enter_context(Http1(front.address))
                client.send(head_bytes("POST", RENDER, head) + b'd\r\n{"messages":"\r\n')
                for _ in range(20):
                    client.send(b"%x\r\n%b\r\n" % (MEBIBYTE, BLOCK))
            assert front.peak_memory() < Limited.memory_limit
        _becomes_free(front, "h1-chunked")
        assert front.peak_memory() < Limited.memory_limit


def test_bodies_that_the_server_does_not_read_stay_within_the_memory_limit(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=128) as hung,
        _running(Limited, envoy, tmp_path, upstream, Address(*hung.getsockname())) as front,
        contextlib.ExitStack() as clients,
    ):
        rejected, waiting = 0, []
        head = [(b"Host", b"h"), JSON, PRIORITY, (b"Content-Length", b"%d" % (len(START) + 8 * MEBIBYTE + len(END)))]
        for _ in range(44):
            client = clients.enter_context(Http1(front.address))
            try:
                client.send(head_bytes("POST", RENDER, head) + START + 8 * BLOCK + END)
                client.sock.settimeout(0.1)
                assert client.answer().status == 503
            except TimeoutError:
                waiting.append(client.sock)  # for the server, or for a response that is late
                continue
            except (OSError, Closed):
                pass  # Envoy rejected it before it was whole, and closed the connection.
            rejected += 1
        if rejected < 5:
            rejected += len(select.select(waiting, [], [], WAIT)[0])
        peak = front.peak_memory()
        print(f"44 bodies of 8 MiB that nobody reads: {rejected} rejected, peak {peak / MEBIBYTE:.0f} MiB")
        assert rejected >= 5
        assert peak < Limited.memory_limit


def test_envoy_resets_the_largest_http2_streams_where_the_filter_sheds_none(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    with _running(Unfiltered, envoy, tmp_path, upstream) as front:
        with pytest.raises((Closed, OSError, StreamClosedError)):
            _grow(front, "h2c", 40, 24 * MEBIBYTE)
        assert front.stats()["envoy.overload_actions.reset_high_memory_stream.count"] > 0
        print(f"Envoy alone, HTTP/2: peak {front.peak_memory() / MEBIBYTE:.0f} MiB")
        # It looks ten times a second, so a fast client gets further than with the filter; all would be 960 MiB.
        assert front.peak_memory() < Limited.memory_limit * 1.5
        until = time.monotonic() + WAIT
        while (status := _small(front)) != 200:
            assert time.monotonic() < until, f"still {status}"


def test_envoy_short_of_memory_answers_new_requests_with_503_in_vllms_shape(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    with _running(Starved, envoy, tmp_path, upstream) as front:
        until = time.monotonic() + WAIT
        while (answer := call(front.address, "/v1/models", b"", method="GET")).status == 200:
            assert time.monotonic() < until, "Envoy does not see that it is short of memory"
    assert answer.status == 503
    assert answer.header("content-type") == "application/json"
    assert json.loads(answer.body)["error"] == {
        "message": "the sidecar is short of memory and accepts no requests. Send the request again later."
        " If this happens often, raise the sidecar's memory limit.",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
