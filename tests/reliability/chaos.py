"""`make chaos`: bad days of a sidecar and its control plane, on real Envoy, each with the figure that it prints.

It exits with 1 if a day ends otherwise than docs/reliability.md says.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from control_plane.address import Address
from control_plane.render.templates import Resource
from control_plane.server.app import create_app
from control_plane.server.settings import ServeSettings
from tests.integration import test_memory, test_start_stop
from tests.integration.conftest import RENDER
from tests.integration.sidecars import RunningSidecar, find_envoy, load
from tests.integration.test_control_plane import (
    ControlPlane,
    Load,
    applied,
    echo,
    free_port,
    in_thread,
    open_files,
    resident,
    set_default,
    sidecars_that_poll,
)
from tests.integration.test_run import Running, post
from tests.integration.test_start_stop import Balancer, two_milliseconds
from tests.integration.upstream import WAIT, Connection, RecordingUpstream, Request, response
from tests.integration.waiting import until
from tests.integration.wire import Answer, Closed, Header, Http1, call, head_bytes, priority

EXAMPLE = "example: python -m tests.reliability.chaos --only upstream-down --only policy-changes"
CLIENTS = 100
STREAMS = 1000
JSON: Header = (b"Content-Type", b"application/json")
HOST: Header = (b"Host", b"vllm.example")
FIVE: Header = priority("5")
EVENT = b"b\r\ndata: one\n\n\r\n"


@dataclass(frozen=True)
class Place:
    """What each day starts with: the Envoy to run, an upstream, and an empty folder."""

    envoy: Path
    upstream: RecordingUpstream
    folder: Path

    @contextlib.contextmanager
    def sidecar(self, policy: str = "{}", to: Address | None = None) -> Iterator[RunningSidecar]:
        """A sidecar in front of the upstream, whose filter must not raise an error."""
        front = RunningSidecar(self.envoy, self.folder, "render", load(policy), to or self.upstream.address)
        try:
            yield front
            assert front.process.poll() is None, f"Envoy ended by itself:\n{front.messages()}"
            assert not any(front.lua_errors().values()), f"Lua errors: {front.lua_errors()}"
        finally:
            front.stop()


Day = Callable[[Place], str]
DAYS: dict[str, Day] = {}


def day(name: str) -> Callable[[Day], Day]:
    """Add a function to the days. Its first line of documentation is what `--list` shows; it returns a figure."""

    def add(function: Day) -> Day:
        DAYS[name] = function
        return function

    return add


def printed(run: Callable[[], None]) -> str:
    """Run an integration test, and return the figure that it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run()
    return "; ".join(output.getvalue().splitlines())


def small(front: RunningSidecar) -> Answer:
    return call(front.address, RENDER, b'{"a":1}', FIVE)


def at_once(count: int, do: Callable[[int], Any]) -> list[Any]:
    """Call `do` in as many threads, and return the results."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(do, range(count)))


def active(front: RunningSidecar) -> int:
    return sum(value for name, value in front.stats().items() if name.endswith("vllm_priority.downstream_rq_active"))


def heap(front: RunningSidecar) -> float:
    """MiB that Envoy has allocated, without what its allocator keeps for later."""
    found = json.loads(front.get("/memory"))
    return (int(found["heap_size"]) - int(found["pageheap_free"]) - int(found["pageheap_unmapped"])) / 2**20


def lost_or_status(do: Callable[[], Answer]) -> str:
    """Return the status of a response, or "cut off" if the connection ended first."""
    try:
        return str(do().status)
    except (Closed, OSError):
        return "cut off"


# ----- the upstream


@day("upstream-down")
def upstream_down(place: Place) -> str:
    """vLLM does not listen, and then it does."""
    port = free_port()
    with place.sidecar(to=Address("127.0.0.1", port)) as front:
        answers = [small(front) for _ in range(CLIENTS)]
        assert {answer.status for answer in answers} == {503}
        assert all(json.loads(answer.body)["error"]["code"] == 503 for answer in answers)
        upstream = RecordingUpstream(port=port)
        began = time.monotonic()
        until(lambda: small(front).status == 200, "a response once vLLM is up")
        seconds = time.monotonic() - began
        upstream.stop()
    return f"{CLIENTS} of {CLIENTS} requests got 503 in vLLM's error shape; served {seconds:.2f} s after vLLM was back"


@day("upstream-slow")
def upstream_slow(place: Place) -> str:
    """vLLM takes 5 s for each of 100 requests, while others are fast."""

    def slow(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        if request.body.startswith(b'{"slow"'):
            time.sleep(5)
        connection.send(response(b'{"ok":true}'))

    place.upstream.handler = slow
    with place.sidecar() as front, ThreadPoolExecutor(CLIENTS) as pool:
        waiting = [pool.submit(call, front.address, RENDER, b'{"slow":1}', FIVE) for _ in range(CLIENTS)]
        until(lambda: len(place.upstream.requests) >= CLIENTS, "the slow requests at the upstream")
        others = 0
        while not any(one.done() for one in waiting):
            assert small(front).status == 200
            others += 1
        statuses = Counter(one.result().status for one in waiting)
    assert statuses == {200: CLIENTS}
    assert others
    return f"{CLIENTS} of {CLIENTS} slow requests got 200, and so did {others} fast ones meanwhile"


@day("upstream-resets-in-request")
def upstream_resets_in_request(place: Place) -> str:
    """vLLM's process dies while it reads a body."""

    def dies(request: Request, connection: Connection) -> None:
        connection.reader.some(1000)
        connection.reset()

    place.upstream.handler = dies
    body = b'{"prompt":"' + b"x" * 2_000_000 + b'"}'
    with place.sidecar() as front:
        results = Counter(at_once(CLIENTS, lambda _: lost_or_status(lambda: call(front.address, RENDER, body, FIVE))))
        sent = len(place.upstream.requests)
        place.upstream.clear()
        assert small(front).status == 200
    assert set(results) <= {"502", "503"}, results
    assert sent == CLIENTS, f"{sent} requests reached the upstream"
    return f"{CLIENTS} requests: {described(results)}; each sent once; the next got 200"


@day("upstream-resets-in-response")
def upstream_resets_in_response(place: Place) -> str:
    """vLLM's process dies in the middle of a response."""

    def dies(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        time.sleep(0.05)
        connection.reset()

    place.upstream.handler = dies
    with place.sidecar() as front:
        results = Counter(at_once(CLIENTS, lambda _: lost_or_status(lambda: small(front))))
        sent = len(place.upstream.requests)
        place.upstream.clear()
        assert small(front).status == 200
    # A response that is cut off must not look complete.
    assert set(results) <= {"cut off", "502", "503"}, results
    assert sent == CLIENTS, f"{sent} requests reached the upstream"
    return f"{CLIENTS} requests: {described(results)}, none looked complete; each sent once; the next got 200"


# ----- clients


@day("client-gone-in-request")
def client_gone_in_request(place: Place) -> str:
    """Clients leave in the middle of a body that the sidecar holds."""
    with place.sidecar() as front:
        small(front)
        place.upstream.clear()
        idle = open_files(front.process.pid)

        def leave(_: int) -> None:
            with Http1(front.address) as client:
                client.send(head_bytes("POST", RENDER, [HOST, JSON, FIVE, (b"Content-Length", b"500000")]))
                client.send(b'{"a":"' + b"x" * 250_000)

        heaps = []
        for _ in range(5):
            for _ in range(10):
                at_once(CLIENTS, leave)
            until(lambda: open_files(front.process.pid) <= idle and active(front) == 0, "the end of the requests")
            heaps.append(heap(front))
        reached = len(place.upstream.requests)
        assert reached == 0, f"{reached} requests reached the upstream"
        assert small(front).status == 200
    # What Envoy and its allocator keep once is not a leak.
    left = f"{50 * CLIENTS} clients left: 0 requests reached vLLM, 0 descriptors stayed"
    return f"{left}, heap {heaps[2]:.0f} MiB after {30 * CLIENTS} and {heaps[4]:.0f} MiB after all; the next got 200"


@day("client-gone-in-stream")
def client_gone_in_stream(place: Place) -> str:
    """Clients leave in the middle of a streamed response."""
    place.upstream.handler = streaming
    with place.sidecar() as front:

        def leave(_: int) -> None:
            with Http1(front.address) as client:
                client.send(head_bytes("POST", RENDER, [HOST, JSON, FIVE, (b"Content-Length", b"2")]) + b"{}")
                assert client.start().status == 200

        at_once(CLIENTS, leave)
        began = time.monotonic()
        requests = place.upstream.wait(CLIENTS)
        assert all(request.gone.wait(WAIT) for request in requests), "the upstream works on for nobody"
        seconds = time.monotonic() - began
        until(lambda: active(front) == 0, "the end of the requests")
    return f"{CLIENTS} of {CLIENTS} requests were ended at vLLM, the last within {seconds:.2f} s"


def streaming(request: Request, connection: Connection) -> None:
    """Start a stream, and then stay silent until the peer leaves."""
    connection.read_body(request)
    connection.send(STREAM_HEAD + EVENT)
    connection.wait_until_gone(request)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@day("slow-streams")
def slow_streams(place: Place) -> str:
    """1,000 slow streams are open at the same time."""
    end = threading.Event()

    def slow(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        if request.all("x-stream"):
            connection.send(STREAM_HEAD + EVENT)
            assert end.wait(120)
            connection.send(EVENT + b"0\r\n\r\n")
        else:
            connection.send(response(b'{"ok":true}'))

    place.upstream.handler = slow
    with place.sidecar() as front, contextlib.ExitStack() as stack:
        memory = resident(front.process.pid)
        clients = []
        for _ in range(STREAMS):
            client = stack.enter_context(Http1(front.address, 60))
            head = [HOST, JSON, FIVE, (b"X-Stream", b"1"), (b"Content-Length", b"2")]
            client.send(head_bytes("POST", RENDER, head) + b"{}")
            assert client.start().status == 200
            clients.append(client)
        assert active(front) >= STREAMS
        assert [small(front).status for _ in range(CLIENTS)] == [200] * CLIENTS
        memory = resident(front.process.pid) - memory
        end.set()
        for client in clients:
            assert client.reader.chunk() == client.reader.chunk() == b"data: one\n\n"
            assert client.reader.chunk() == b""
    others = f"{CLIENTS} of {CLIENTS} other requests got 200"
    return f"{STREAMS} streams open, {memory / 2**20:.0f} MiB more memory; {others}; all streams ended complete"


# ----- limits


@day("descriptors")
def descriptors(place: Place) -> str:
    """Clients open more connections than the limit on open files allows."""
    test = test_start_stop.test_connections_beyond_the_limit_on_open_files_are_refused_at_once
    return printed(lambda: test(place.envoy, place.upstream, place.folder))


@day("memory")
def memory(place: Place) -> str:
    """Clients send more bodies than the memory limit allows."""
    test = test_memory.test_bodies_that_grow_together_are_shed_with_503_within_the_memory_limit
    return printed(lambda: test(place.envoy, place.upstream, place.folder, "h1-chunked"))


# ----- Envoy


@day("envoy-killed")
def envoy_killed(place: Place) -> str:
    """Envoy is killed under `run`, and a supervisor starts `run` again."""
    running = Running(place.envoy, place.folder, place.upstream.address)
    try:
        running.said("listens on")
        assert post(running.listen)[0] == 200
        (envoy,) = running.envoys()
        began = time.monotonic()
        os.kill(envoy, signal.SIGKILL)
        status = running.ended()
        ended = time.monotonic() - began
        running.said("Envoy ended with status")
    finally:
        running.stop()
    assert status != 0
    began = time.monotonic()
    again = Running(place.envoy, place.folder, place.upstream.address)
    try:
        again.said("listens on")
        assert post(again.listen)[0] == 200
        seconds = time.monotonic() - began
    finally:
        again.stop()
    said = f"`run` said so and ended with status {status} after {ended:.2f} s"
    return f"{said}; started again, it served after {seconds:.2f} s"


@day("sigterm")
def sigterm(place: Place) -> str:
    """`run` gets SIGTERM while a balancer still sends 200 requests a second."""
    place.upstream.handler = two_milliseconds
    sent, lost = 0, []
    for keep_alive in (True, False):
        folder = place.folder / str(keep_alive)
        folder.mkdir()
        running = Running(place.envoy, folder, place.upstream.address)
        try:
            running.said("listens on")
            with Balancer(running.listen, keep_alive) as balancer:
                running.process.send_signal(signal.SIGTERM)
                running.said("Draining")
                time.sleep(2)
                balancer.stop()
            assert running.ended() == 0
        finally:
            running.stop()
        sent += balancer.sent
        lost += balancer.lost
    assert lost == []
    return f"{sent} requests, {len(lost)} lost"


# ----- the control plane


@day("policy-changes")
def policy_changes(place: Place) -> str:
    """The policy changes 20 times under load."""
    place.upstream.handler = echo
    with polling(place) as (plane, policy, sidecar), Load(sidecar) as running:
        for value in range(2, 22):
            set_default(policy, value)
            until(lambda value=value: running.wrong or set(running.last.values()) == {value}, "the new policy")  # type: ignore[misc]
        status = plane.status("pod-1")
    assert running.wrong == []
    assert set(running.priorities) == set(range(1, 22)), running.priorities
    assert status in ("SYNCED", "STALE")
    return f"20 changes, {running.sent()} requests: each with one of the policies, {len(running.wrong)} lost"


@day("control-plane-killed")
def control_plane_killed(place: Place) -> str:
    """The control plane is killed under load, and comes back with another policy."""
    place.upstream.handler = echo
    with polling(place) as (plane, policy, sidecar), Load(sidecar) as running:
        for value in (2, 3, 4):
            plane.kill()
            running.some_more(300)
            assert set(running.last.values()) == {value - 1}, "the last policy stays"
            set_default(policy, value)
            plane.start()
            until(lambda value=value: running.wrong or set(running.last.values()) == {value}, "the new policy")  # type: ignore[misc]
    assert running.wrong == []
    return f"killed 3 times, {running.sent()} requests: {len(running.wrong)} lost, the last policy stayed in force"


@day("control-plane-replaced")
def control_plane_replaced(place: Place) -> str:
    """The control plane is replaced under load by another one, with another policy, on the same port."""
    place.upstream.handler = echo
    with polling(place) as (plane, policy, sidecar), Load(sidecar) as running:
        for value in (2, 3, 4):
            assert plane.kill(signal.SIGTERM) == 0
            set_default(policy, value)
            plane.start()
            until(lambda value=value: running.wrong or set(running.last.values()) == {value}, "the new policy")  # type: ignore[misc]
        until(lambda: plane.status("pod-1") == "SYNCED", "the sidecar at the last control plane")
    assert running.wrong == []
    assert set(running.priorities) == {1, 2, 3, 4}
    return f"replaced 3 times, {running.sent()} requests: {len(running.wrong)} lost, each with the old or the new value"


@contextlib.contextmanager
def polling(place: Place) -> Iterator[tuple[ControlPlane, Path, Address]]:
    """A control plane with `default: 1`, its policy file, and the address of a sidecar that has the policy."""
    policy = place.folder / "policy.yaml"
    set_default(policy, 1)
    with ControlPlane(policy) as plane, sidecars_that_poll(place.envoy, place.upstream) as start:
        sidecar = start(plane.address)
        until(lambda: plane.status("pod-1") == "SYNCED", "the sidecar on the first policy")
        yield plane, policy, sidecar


Lie = Callable[[bytes], Iterable[bytes]]
"""Returns the pieces of an HTTP response, instead of one with this body. An empty piece closes the connection."""

ENDLESS_MEBIBYTES = 300


def _of_resource(change: Callable[[dict[str, Any]], None]) -> Lie:
    def lie(body: bytes) -> bytes:
        document = json.loads(body)
        document["version_info"] = "a-lie"
        change(document)
        return json.dumps(document).encode()

    return _in_200(lie)


def _script(text: str) -> Lie:
    def change(document: dict[str, Any]) -> None:
        document["resources"][0]["typed_config"]["default_source_code"] = {"inline_string": text}

    return _of_resource(change)


def _kind(document: dict[str, Any]) -> None:
    document["resources"][0]["typed_config"]["@type"] = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.No"


def _in_200(lie: Callable[[bytes], bytes]) -> Lie:
    return lambda body: [response(lie(body))]


def _endless(body: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    for _ in range(ENDLESS_MEBIBYTES):
        yield b"%x\r\n%b\r\n" % (2**20, b" " * 2**20)


LIES: dict[str, Lie] = {
    "status 500": lambda body: [response(body, b"500 Internal Server Error")],
    "a redirect": lambda body: [response(body, b"307 Temporary Redirect", [(b"location", b"http://127.0.0.1:9/")])],
    "an endless response": _endless,
    "an end in the middle": lambda body: [response(body)[:-1000], b""],
    "not JSON": _in_200(lambda body: b"<html>"),
    "half of the JSON": _in_200(lambda body: body[: len(body) // 2]),
    "empty": _in_200(lambda body: b""),
    "JSON of another shape": _in_200(lambda body: b"[1]"),
    "no resources": _of_resource(lambda document: document.update(resources=[])),
    "a resource of another type": _of_resource(
        lambda document: document["resources"][0].update(
            {"@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster"}
        )
    ),
    "a resource of another name": _of_resource(lambda document: document["resources"][0].update(name="other")),
    "a filter of an unknown type": _of_resource(_kind),
    "a script that does not compile": _script("function ("),
    "a script that fails when it is loaded": _script("error('no')"),
}


class Liar:
    """A control plane that forwards polls to a real one, and passes its responses through `lie`."""

    def __init__(self, real: Address) -> None:
        self._real = real
        self.lie: Lie | None = None
        self.told = 0
        self.server = RecordingUpstream()
        self.server.handler = self._respond

    def _respond(self, request: Request, connection: Connection) -> None:
        connection.read_body(request)
        url, lie = f"http://{self._real}{request.target}", self.lie
        if lie is None:
            reply = httpx.post(url, content=request.body, trust_env=False, timeout=WAIT)
            if reply.status_code == 304:
                connection.send(b"HTTP/1.1 304 Not Modified\r\n\r\n")
            else:
                connection.send(response(reply.content))
            return
        poll = json.loads(request.body)
        poll.pop("version_info", None)
        reply = httpx.post(url, json=poll, trust_env=False, timeout=WAIT)
        self.told += 1
        for piece in lie(reply.content):
            connection.send(piece)
            if not piece:
                connection.close()


def _children() -> set[int]:
    """The processes that this one has started. In a run of the tests, other Envoys are among them."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@day("control-plane-lies")
def control_plane_lies(place: Place) -> str:
    """The control plane responds with malformed JSON, other types, and scripts that do not compile."""
    policy = place.folder / "policy.yaml"
    set_default(policy, 1)
    app = create_app(ServeSettings(policy, reload_seconds=3600))
    found: list[Resource] = []
    with in_thread(app) as real, sidecars_that_poll(place.envoy, place.upstream) as start:
        liar = Liar(real)
        others = _children()
        sidecar = start(liar.server.address, change=found.append)
        (envoy,) = _children() - others
        admin = found[0]["admin"]["address"]["socket_address"]

        def failures() -> int:
            """Polls whose response Envoy counts as failed or rejected, which the alerts and `/stats` show."""
            url = f"http://{admin['address']}:{admin['port_value']}/stats?filter=extension_config_discovery"
            lines = httpx.get(url, trust_env=False).text.splitlines()
            counts = {
                name: int(value) for name, _, value in (line.partition(": ") for line in lines) if value.isdigit()
            }
            return sum(
                counts[name] for name in counts if name.endswith(("update_rejected", "update_failure", "config_fail"))
            )

        value, memory = 1, resident(envoy)
        for name, lie in LIES.items():
            until(lambda value=value: applied(sidecar) == str(value), f"the policy before: {name}")  # type: ignore[misc]
            before, told, liar.lie = failures(), liar.told, lie
            until(lambda told=told: liar.told >= told + 3, f"polls that get: {name}")  # type: ignore[misc]
            assert applied(sidecar) == str(value), f"{name}: the policy is {applied(sidecar)} instead of {value}"
            until(lambda before=before: failures() > before, f"{name}: a failure that Envoy counts")  # type: ignore[misc]
            value += 1
            set_default(policy, value)
            assert app.state.policy.reload() is True
            liar.lie = None
        until(lambda: applied(sidecar) == str(value), "the policy after the last lie")
        memory = resident(envoy) - memory
        liar.server.stop()
    stayed = "the last policy stayed each time, Envoy counted each kind as a failure, and the next policy was taken"
    return f"{len(LIES)} kinds of lies, {liar.told} responses: {stayed}; {memory / 2**20:.0f} MiB more memory"


# ----- the command


def described(results: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in results.most_common())


def run(name: str, envoy: Path) -> bool:
    """Run one day, print its row, and return whether it passed."""
    print(f"{name:<28} ", end="", flush=True)
    upstream = RecordingUpstream()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            figure = DAYS[name](Place(envoy, upstream, Path(folder)))
        except Exception as error:
            problem = " ".join(str(error).split())[:400] or type(error).__name__
            print(f"FAILED  {problem} ({time.monotonic() - began:.0f} s)", flush=True)
            traceback.print_exc()
            return False
        finally:
            upstream.stop()
    print(f"ok      {figure} ({time.monotonic() - began:.0f} s)", flush=True)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.chaos", description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--only", metavar="NAME", action="append", choices=DAYS, help="run this day; repeatable")
    parser.add_argument("--list", action="store_true", help="list the days")
    options = parser.parse_args(arguments)
    if options.list:
        for name, function in DAYS.items():
            print(f"{name:<28} {(function.__doc__ or '').splitlines()[0]}")
        return 0
    envoy, reason = find_envoy()
    if envoy is None:
        print(f"chaos: {reason}", file=sys.stderr)
        return 2
    names = options.only or list(DAYS)
    # 1,000 streams have two descriptors each in this process, and in Envoy.
    usual, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit if 0 < limit < 65536 else 65536, limit))
    try:
        failed = [name for name in names if not run(name, envoy)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, limit))
    print(f"{len(names) - len(failed)} of {len(names)} ok" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
