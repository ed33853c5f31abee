"""`make soak`: mixed requests at a moderate rate through real Envoys, each of them checked at the upstream.

It sends bodies of 100 B to 4 MB with and without a priority, of known and unknown length, over HTTP/1.1 and HTTP/2, on
new and kept connections, on render and generate routes, under a policy with a default and one without, and malformed
ones in between. It exits with 1 if a request is lost or arrives with another priority or another body than it should,
or if the filter raises an error.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.conftest import GENERATE, RENDER
from tests.integration.sidecars import RunningSidecar, find_envoy, load
from tests.integration.test_control_plane import open_files, resident
from tests.integration.upstream import Connection, RecordingUpstream, Request, pairs_of, response
from tests.integration.wire import TRANSPORTS, Closed, Header, Http1, Http2, connect

EXAMPLE = "example: python -m tests.reliability.soak --seconds 600 --rate 20 --seed 1"
JSON: Header = (b"Content-Type", b"application/json")
CLASSES = {"urgent": -50, "batch": 100}
POLICIES = {
    "with a default": "default: 3\nclasses: {urgent: -50, batch: 100}\nrange: {min: -1000, max: 1000}\n",
    "without a default": "classes: {urgent: -50, batch: 100}\nrange: {min: -1000, max: 1000}\n",
}
DEFAULTS = {"with a default": 3, "without a default": None}
TIMEOUT = 120.0
"""Seconds after which a request counts as lost."""
SAMPLE_SECONDS = 5.0


@dataclass(frozen=True)
class Plan:
    """One request, and what must become of it. `priorities` are the values in the body that arrives; None: 400."""

    number: int
    policy: str
    kind: str
    target: str
    transport: str
    keep: bool
    headers: list[Header]
    body: bytes
    cuts: list[int]
    priorities: list[int] | None


@dataclass
class Counts:
    """What the clients have seen. `messages` has the first ten problems."""

    sent: int = 0
    bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    wrong_count: int = 0
    lost_count: int = 0
    messages: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, plan: Plan, wrong: str = "", lost: str = "") -> None:
        with self.lock:
            self.sent += 1
            self.bytes += len(plan.body)
            self.kinds[plan.kind] += 1
            self.wrong_count += bool(wrong)
            self.lost_count += bool(lost)
            if (wrong or lost) and len(self.messages) < 10:
                what = f"wrong: {wrong}" if wrong else f"lost: {lost}"
                described = f"{plan.kind}, {plan.target}, {plan.transport}, {len(plan.body)} B, {plan.headers}"
                self.messages.append(f"request {plan.number} ({described}): {what}"[:500])


class Recorder:
    """The upstream's handler. It keeps each request until the client that sent it takes it."""

    def __init__(self, upstream: RecordingUpstream) -> None:
        self._upstream = upstream
        self._lock = threading.Lock()
        self._arrived: dict[int, list[Request]] = {}

    def __call__(self, request: Request, connection: Connection) -> None:
        connection.read_body(request)
        with self._lock:
            self._arrived.setdefault(int(request.all("x-soak")[0]), []).append(request)
        with self._upstream.arrived:
            self._upstream.requests = []
        connection.send(response(b'{"ok":true}'))

    def take(self, number: int) -> list[Request]:
        with self._lock:
            return self._arrived.pop(number, [])


def plan(number: int, seed: int) -> Plan:
    """Return the request of that number. It depends on nothing else than the number and the seed."""
    chance = random.Random(f"{seed}/{number}")
    policy = chance.choice(list(POLICIES))
    kind = chance.choices(["plain", "body", "header", "class", "both", "malformed", "invalid"], [3, 3, 5, 3, 3, 1, 1])[
        0
    ]
    size = 100 if kind == "invalid" else int(100 * 40_000 ** chance.random())
    text = f"{chance.getrandbits(64):016x}" * (max(0, size - 70) // 16 + 1)
    members = ['"model":"m"', f'"prompt":"{text}"', f'"nested":{{"priority":{number % 7}}}']
    value, inside = chance.randint(-1000, 1000), chance.randint(-(2**40), 2**40)
    if kind in ("body", "both"):
        members.insert(chance.randrange(4), f'"priority":{inside}')
    body = "{" + chance.choice([",", ", ", ",\n  "]).join(members) + "}"
    if kind == "malformed":
        body = body[: chance.randrange(1, len(body) - 1)]
    headers = [JSON, (b"X-Soak", b"%d" % number)]
    expected: list[int] | None = {
        "plain": [default] if (default := DEFAULTS[policy]) is not None else [],
        "body": [inside],
        "class": [CLASSES[name := chance.choice(list(CLASSES))]],
        "invalid": None,
    }.get(kind, [value])
    given = {"class": name, "invalid": "high", "plain": "", "body": ""}.get(kind, str(value))
    if given:
        headers.insert(chance.randrange(3), (b"X-Vllm-Priority", given.encode()))
    return Plan(
        number,
        policy,
        kind,
        chance.choice([RENDER, "/v1/completions/render", GENERATE]),
        chance.choice(TRANSPORTS),
        chance.random() < 0.7,
        headers,
        body.encode(),
        sorted(chance.randrange(len(body)) for _ in range(chance.choice([0, 0, 1, 5]))),
        expected,
    )


def problem(plan: Plan, status: int, found: list[Request]) -> str:
    """Return what is wrong with what became of a request, or the empty string."""
    if plan.priorities is None:
        return "" if (status, found) == (400, []) else f"status {status}, {len(found)} reached the upstream"
    if status != 200 or len(found) != 1:
        return f"status {status}, {len(found)} reached the upstream"
    (request,) = found
    if request.surplus:
        return f"{len(request.surplus)} bytes more than the length"
    if request.all("x-vllm-priority"):
        return "the header was sent on"
    if plan.kind == "malformed":
        return "" if request.body == plan.body else "a malformed body was changed"
    sent, got = pairs_of(plan.body), pairs_of(request.body)
    priorities = [value for name, value in got if name == "priority"]
    if priorities != plan.priorities:
        return f"priority {priorities} instead of {plan.priorities}"
    same = [pair for pair in sent if pair[0] != "priority"] == [pair for pair in got if pair[0] != "priority"]
    return "" if same else "another member than priority was changed"


class Clients:
    """Threads that together send `rate` requests a second until they are stopped."""

    def __init__(self, fronts: dict[str, RunningSidecar], recorder: Recorder, rate: float, seed: int) -> None:
        self.counts = Counts()
        self._fronts, self._recorder, self._rate, self._seed = fronts, recorder, rate, seed
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(4)]
        self._began = time.monotonic()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT)

    def _run(self, thread: int) -> None:
        kept: dict[tuple[str, str], Http1 | Http2] = {}
        number = thread
        while not self._stop.wait(max(0.0, self._began + number / self._rate - time.monotonic())):
            self._send(plan(number, self._seed), kept)
            number += len(self._threads)
        for client in kept.values():
            client.sock.close()

    def _send(self, plan: Plan, kept: dict[tuple[str, str], Http1 | Http2]) -> None:
        place = plan.policy, plan.transport[:2]
        client = kept.pop(place, None)
        try:
            client = client or connect(self._fronts[plan.policy].address, plan.transport)
            client.sock.settimeout(TIMEOUT)
            framing = "length" if plan.transport.endswith("length") else "chunked"
            answer = client.post(plan.target, plan.headers, plan.body, framing=framing, cuts=plan.cuts)
        except (Closed, OSError) as error:
            self._recorder.take(plan.number)
            self.counts.note(plan, lost=repr(error))
            if client:
                client.sock.close()
            return
        self.counts.note(plan, wrong=problem(plan, answer.status, self._recorder.take(plan.number)))
        if plan.keep and answer.status == 200 and answer.header("connection") != "close":
            kept[place] = client
        else:
            client.sock.close()


@dataclass(frozen=True)
class Sample:
    """Of one Envoy at one time: bytes of resident memory, and open descriptors."""

    memory: int
    files: int


def sample(front: RunningSidecar) -> Sample:
    return Sample(resident(front.process.pid), open_files(front.process.pid))


def thirds(samples: list[Sample]) -> tuple[float, float]:
    """Return the mean memory in MiB in the first third of a run, and in the last."""
    count = max(1, len(samples) // 3)
    first, last = (sum(one.memory for one in part) / len(part) / 2**20 for part in (samples[:count], samples[-count:]))
    return first, last


def soak(seconds: float, rate: float, seed: int, envoy: Path, folder: Path) -> int:
    """Run it, print the table, and return the exit status."""
    upstream = RecordingUpstream()
    upstream.handler = recorder = Recorder(upstream)
    with contextlib.ExitStack() as stack:
        stack.callback(upstream.stop)
        fronts: dict[str, RunningSidecar] = {}
        for name, policy in POLICIES.items():
            place = folder / str(len(fronts))
            place.mkdir()
            fronts[name] = RunningSidecar(envoy, place, "engine", load(policy), upstream.address)
            stack.callback(fronts[name].stop)
        print(f"seed {seed}, {rate:g} requests a second for {seconds:g} s, Envoy {envoy}", flush=True)
        clients = Clients(fronts, recorder, rate, seed)
        clients.start()
        stack.callback(clients.stop)
        samples: dict[str, list[Sample]] = {name: [] for name in fronts}
        began, told = time.monotonic(), 0.0
        while (passed := time.monotonic() - began) < seconds and all(f.process.poll() is None for f in fronts.values()):
            time.sleep(min(SAMPLE_SECONDS, max(0.0, seconds - passed)))
            for name, front in fronts.items():
                with contextlib.suppress(OSError):
                    samples[name].append(sample(front))
            if passed - told >= 60:
                told = passed
                counts = clients.counts
                print(
                    f"  {passed:.0f} s: {counts.sent} requests, {counts.wrong_count} wrong, {counts.lost_count} lost",
                    flush=True,
                )
        clients.stop()
        seconds = time.monotonic() - began
        counts = clients.counts
        died = [name for name, front in fronts.items() if front.process.poll() is not None]
        errors = sum(sum(front.lua_errors().values()) for name, front in fronts.items() if name not in died)
        rows = [
            ("requests", f"{counts.sent} in {seconds:.0f} s, {counts.bytes / 2**20:.0f} MiB"),
            ("of them", ", ".join(f"{count} {kind}" for kind, count in counts.kinds.most_common())),
            ("wrong", str(counts.wrong_count)),
            ("lost", str(counts.lost_count)),
            ("Lua errors", str(errors)),
            ("Envoys that ended", str(len(died))),
        ]
        for name, taken in samples.items():
            first, last = thirds(taken)
            peak = fronts[name].peak_memory() / 2**20 if name not in died else 0
            rows.append(
                (f"memory, {name}", f"{first:.0f} MiB in the first third, {last:.0f} in the last, peak {peak:.0f}")
            )
            files = [one.files for one in taken]
            rows.append((f"descriptors, {name}", f"{files[0]} at first, {max(files)} at most, {files[-1]} at last"))
        for what, figure in rows:
            print(f"{what:<32} {figure}")
        for message in counts.messages:
            print(message)
        failed = not counts.sent or counts.wrong_count or counts.lost_count or errors or died
        print("FAILED" if failed else "ok", flush=True)
        return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.soak", description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--seconds", type=float, default=1800, help="how long to send (default: 1800)")
    parser.add_argument("--rate", type=float, default=20, help="requests a second (default: 20)")
    parser.add_argument("--seed", type=int, help="repeat a run (default: another seed each time)")
    options = parser.parse_args(arguments)
    envoy, reason = find_envoy()
    if envoy is None:
        print(f"soak: {reason}", file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    with tempfile.TemporaryDirectory() as folder:
        return soak(options.seconds, options.rate, seed, envoy, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
