"""The fixed cases and generated documents of tests/fuzz through real Envoy, and what the wire makes of them.

After each document comes a victim: an ordinary request on the same connection, which must be whole and get its own
response. The seed is fixed, so that a failure can be repeated; FUZZ_SEED and FUZZ_ROUNDS change the run.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.campaign import as_source
from tests.fuzz.cases import CASES
from tests.fuzz.documents import Generator, cut
from tests.fuzz.expected import expected
from tests.fuzz.filter_driver import Sent
from tests.fuzz.properties import names_an_unclear_priority, problems
from tests.fuzz.readers import READERS, accepts

from .conftest import MESSAGES, RENDER, SidecarFactory
from .sidecars import RunningSidecar
from .upstream import WAIT, Connection, RecordingUpstream, Request, answering, response
from .wire import (
    HOST,
    TRANSPORTS,
    Answer,
    Closed,
    Header,
    Http1,
    Http2,
    call,
    chunked,
    connect,
    head_bytes,
    priority,
)  # fmt: skip

SEED = int(os.environ.get("FUZZ_SEED", "20261130"))
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "150"))

JSON = (b"Content-Type", b"application/json")
ORDINARY = "/v1/chat/completions"


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _echo(request: Request, connection: Connection) -> None:
    """Read the request, and respond with its target and the name that it carries."""
    connection.read_body(request)
    connection.send(response(json.dumps([request.target, *request.all("x-name")]).encode()))


class Clients:
    """One connection to a sidecar, opened again where it was closed."""

    def __init__(self, front: RunningSidecar, upstream: RecordingUpstream, transport: str) -> None:
        self.front, self.upstream, self.transport = front, upstream, transport
        self.client: Http1 | Http2 | None = None
        self.count = 0

    def check(self, sent: Sent) -> list[str]:
        """Send a document and a victim; return the properties that do not hold."""
        self.upstream.clear()
        self.upstream.handler = _echo
        self.count += 1
        name = f"{self.transport}-{self.count}"
        headers = [JSON, (b"X-Name", name.encode())] + ([] if sent.is_default else [priority(sent.value)])
        secret = b"Bearer " + name.encode()
        victim: list[Header] = [JSON, (b"X-Name", b"victim-" + name.encode()), (b"Authorization", secret)]
        try:
            document, after = self._send(headers, sent.chunks, victim)
        except (Closed, OSError) as error:
            self.client = None
            return [f"connection: it ended: {error!r}"]
        found = []
        if (after.status, json.loads(after.body)) != (200, [ORDINARY, f"victim-{name}"]):
            found.append(f"victim: it got {after.status} {after.body[:80]!r}")
        passed = document.status == 200
        with self.upstream.arrived:
            self.upstream.arrived.wait_for(lambda: len(self.upstream.requests) >= 1 + passed, WAIT)
            requests = list(self.upstream.requests)
        if [request.all("x-name") for request in requests] != [[name]] * passed + [[f"victim-{name}"]]:
            seen = [(request.method, request.target, request.all("x-name")) for request in requests]
            return [*found, f"smuggling: after a {document.status} the upstream got {seen}"]
        for request in requests:
            if not request.complete.wait(WAIT) or request.surplus:
                found.append(f"length: {request.framing} {request.declared}, {request.surplus!r} is left")
        if requests[-1].body != b'{"v":1}' or requests[-1].all("authorization") != [secret.decode()]:
            found.append(f"victim: it arrived as {requests[-1].head!r} {requests[-1].body!r}")
        if not passed:
            return found + problems(
                sent.body, sent.value, document.status, b"", applied=None, is_default=sent.is_default
            )
        if json.loads(document.body) != [RENDER, name]:
            found.append(f"response: it got {document.body[:80]!r}")
        applied = (document.applied or "none").partition(";")[0]
        return found + problems(
            sent.body,
            sent.value,
            None,
            requests[0].body,
            applied=None if applied == "none" else applied,
            declared=requests[0].declared if requests[0].framing == "length" else None,
            is_default=sent.is_default,
        )

    def _send(
        self, headers: Sequence[Header], chunks: Sequence[bytes], victim: Sequence[Header]
    ) -> tuple[Answer, Answer]:
        if self.client is None:
            self.client = connect(self.front.address, self.transport)
        length = self.transport.endswith("length")
        body = b"".join(chunks)
        if isinstance(self.client, Http2):
            cuts = [sum(map(len, chunks[: i + 1])) for i in range(len(chunks))]
            framing = "length" if length else "chunked"
            document = self.client.post(RENDER, headers, body, framing=framing, cuts=cuts)
            return document, self.client.post(ORDINARY, victim, b'{"v":1}')
        framed = (b"Content-Length", b"%d" % len(body)) if length else (b"Transfer-Encoding", b"chunked")
        pieces = list(chunks) if length else [chunked([piece]).removesuffix(b"0\r\n\r\n") for piece in chunks if piece]
        next_head = head_bytes("POST", ORDINARY, [(b"Host", HOST), *victim, (b"Content-Length", b"7")])
        last = (b"" if length else b"0\r\n\r\n") + next_head + b'{"v":1}'
        try:
            self.client.send(head_bytes("POST", RENDER, [(b"Host", HOST), *headers, framed]))
            for piece in pieces:
                self.client.send(piece)
            self.client.send(last)
            document = self.client.answer()
        except (Closed, OSError):
            self.client = None
            raise
        try:
            return document, self.client.answer()
        except (Closed, OSError):
            # A rejection may close the connection, once it has been read.
            if document.status == 200:
                raise
        self.client = connect(self.front.address, self.transport)
        return document, self.client.post(ORDINARY, victim, b'{"v":1}')


def test_a_fixed_case_keeps_every_property(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str
) -> None:
    clients = Clients(sidecar(), upstream, transport)
    failed = [(as_source(sent), found) for sent in CASES if not sent.is_default and (found := clients.check(sent))]
    assert not failed, _listed(failed)


def test_a_generated_document_keeps_every_property(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str
) -> None:
    generator = Generator(SEED)
    ordinary, default = (Clients(sidecar(policy=policy), upstream, transport) for policy in ("{}", "default: -1"))
    failed = []
    first = 1_000_000 + ROUNDS * TRANSPORTS.index(transport)  # others than those that run in process
    for number in range(first, first + ROUNDS):
        sent = generator.request(number).sent
        if sent.is_default:
            sent = replace(sent, value="-1")
        if found := (default if sent.is_default else ordinary).check(sent):
            failed.append((f"# seed {SEED}, document {number}\n{as_source(sent)}", found))
    assert not failed, _listed(failed)


def _listed(failed: list[tuple[str, list[str]]]) -> str:
    shortest = sorted(failed, key=lambda row: len(row[0]))[:15]
    return f"{len(failed)} failed, among them:\n" + "\n".join(
        f"{source[:600]}\n    {found}" for source, found in shortest
    )


# A scalar that is cut in two, at the end of a long body. An editor that had replaced its start by white space, and then
# wrote all of it back, sent the last 22 bytes after the promised length: a request line that the attacker had chosen.
ATTACK = b'{"pad":"' + b"x" * 900_000 + b'","priority":' + b"9" * 62 + b"vv" + b" " * 60 + b"GET /docs HTTP/1.1\r\nX:"
CUT = ATTACK.index(b"9" * 62) + 32 + len(b"GET /docs HTTP/1.1\r\nX:")


@pytest.mark.parametrize("value", ["5", "-1", "-9223372036854775808"])
def test_no_request_is_smuggled_by_a_scalar_that_is_cut_in_two(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, value: str
) -> None:
    front = sidecar(fresh=True)
    upstream.handler = _echo
    headers = [JSON, priority(value), (b"X-Name", b"attacker")]
    with connect(front.address, transport) as attacker:
        if isinstance(attacker, Http2):
            length = [(b"content-length", b"%d" % len(ATTACK))] if transport.endswith("length") else []
            stream = attacker.open("POST", RENDER, [*headers, *length])
            attacker.data(stream, ATTACK[:CUT])
            time.sleep(0.1)
            attacker.data(stream, ATTACK[CUT:], end=True)
            attacker.answer(stream)
        else:
            pieces = [ATTACK[:CUT], ATTACK[CUT:]]
            framed = (b"Content-Length", b"%d" % len(ATTACK))
            if transport == "h1-chunked":
                framed = (b"Transfer-Encoding", b"chunked")
                pieces = [chunked(pieces[:1]).removesuffix(b"0\r\n\r\n"), chunked(pieces[1:])]
            attacker.send(head_bytes("POST", RENDER, [(b"Host", HOST), *headers, framed]) + pieces[0])
            time.sleep(0.1)
            attacker.send(pieces[1])
            attacker.answer()
    answers = []
    for number in range(10):
        name = b"victim-%d" % number
        answer = call(front.address, ORDINARY, b'{"v":1}', (b"X-Name", name), (b"Authorization", b"Bearer " + name))
        answers.append((answer.status, json.loads(answer.body)))
    assert answers == [(200, [ORDINARY, f"victim-{number}"]) for number in range(10)]
    assert [request.target for request in upstream.requests] == [RENDER] + [ORDINARY] * 10
    assert upstream.requests[0].body == ATTACK
    assert not any(request.surplus for request in upstream.requests)


def _cpu(front: RunningSidecar) -> int:
    """Nanoseconds of CPU that an Envoy's threads have used."""
    threads = Path(f"/proc/{front.process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


@pytest.mark.parametrize("framing", ["length", "none"])
def test_white_space_in_single_bytes_takes_cpu_in_proportion_to_its_length(
    sidecar: SidecarFactory, upstream: RecordingUpstream, framing: str
) -> None:
    front = sidecar(fresh=True)
    start = b'{"pad":"' + b"x" * 900_000 + b'","priority":1,'
    used = []
    for size in (2000, 15_000, 60_000):  # the first warms up
        length = [(b"content-length", b"%d" % (len(start) + size + 6))] if framing == "length" else []
        with Http2(front.address) as client:
            stream = client.open("POST", RENDER, [JSON, priority("-9223372036854775808"), *length])
            client.data(stream, start)
            time.sleep(0.2)
            before, room = _cpu(front), 0
            for _ in range(size):
                while room <= 0:
                    client.flush()
                    room = client.h2.local_flow_control_window(stream)
                    if room <= 0:
                        client.event()
                client.h2.send_data(stream, b" ")
                room -= 1
            client.flush()
            client.data(stream, b'"a":2}', end=True)
            assert client.answer(stream).status == 200
            used.append(_cpu(front) - before)
    assert used[2] < 8 * used[1], f"four times the bytes took {used[2] / used[1]:.1f} times the CPU"


def _valid_objects(seed: str) -> Iterator[bytes]:
    generator, number = Generator(SEED), 2_000_000 + TRANSPORTS.index(seed) * 100_000
    while True:
        body = generator.request(number).sent.body
        number += 1
        if len(body) < 20_000 and all(accepts(name, body) for name in READERS) and body.lstrip()[:1] == b"{":
            yield body


def test_a_response_keeps_its_bytes_and_gets_the_priority(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str
) -> None:
    bodies = _valid_objects(transport)
    with connect(front.address, transport) as client:
        for number in range(ROUNDS // 10):
            upstream.clear()
            body = next(bodies)
            if names_an_unclear_priority(body):
                continue  # it stays as it is: no server responds so
            pieces = cut(body, [number, len(body) // 2, len(body) - 1]) if number % 2 else None
            upstream.handler = answering(response(body, chunks=pieces))
            framing = "length" if transport.endswith("length") else "chunked"
            answer = client.post(MESSAGES, [JSON, priority("-3")], b"{}", framing=framing)
            assert (answer.status, answer.body) == (200, expected(body, "-3")), body
    assert not any(front.lua_errors().values())
