"""A client of the control plane in one process: many kept connections, each request timed. Run by serve.py.

    python tests/bench/polling.py < plan.json > result.json

plan: port, tls, path, body (the text of one request, with the node id `@node@`), version, connections, and either
    seconds    closed loop: each connection sends its next request as soon as it has an answer, for so long
    requests   closed loop, until so many were answered; each has a node id of its own
    period     open loop: each connection polls every `period` seconds, spread evenly, as sidecars do; for `seconds`,
               after `warm_seconds` that are reported apart. A version that is answered is taken over, as Envoy does
result: answered, failed, by status, and the latencies in milliseconds as percentiles.
"""

import asyncio
import json
import random
import re
import resource
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import uvloop

_VERSION = re.compile(rb'"version_info":"([^"]*)"')


class Connection(asyncio.Protocol):
    """One kept HTTP/1.1 connection: one request at a time, its answer handed to `answered`."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.buffer = bytearray()
        self.status, self.whole = 0, 0  # of the answer that comes in; `whole` is its length, 0 until its head is there
        self.answered: Callable[[int, bytes], None] = lambda status, body: None
        self.lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.lost()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.whole:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self.status, self.whole = int(self.buffer[9:12]), end + 4
            if self.status != 304:
                at = self.buffer[: end + 2].lower().find(b"content-length:")
                self.whole += int(self.buffer[at + 15 : self.buffer.find(b"\r", at)])
        if len(self.buffer) >= self.whole:
            answer = bytes(self.buffer[: self.whole])
            self.buffer.clear()
            self.whole = 0
            self.answered(self.status, answer)


class Run:
    """The counts of one run."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.statuses: Counter[int] = Counter()
        self.failed = 0
        self.latencies: list[float] = []
        head, tail = plan["body"].split("@node@")
        self._head: bytes = head.encode()
        self._tail: bytes = tail.encode()
        self._start = f"POST {plan['path']} HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n".encode()

    def request(self, node: str, version: str) -> bytes:
        """One request; the version stands first, as Envoy writes it."""
        front = b'{"version_info":"' + version.encode() + b'",' + self._head[1:] if version else self._head
        body = front + node.encode() + self._tail
        return self._start + b"content-length: %d\r\n\r\n" % len(body) + body

    async def connect(self) -> Connection:
        context = None
        if self.plan.get("tls"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(Connection, "127.0.0.1", self.plan["port"], ssl=context)
        return protocol

    async def closed(self) -> dict[str, Any]:
        """As fast as it is answered."""
        end = time.perf_counter() + self.plan.get("seconds", 3600)
        left = self.plan.get("requests", sys.maxsize)
        # Written before the clock starts, so that the client's own work is small.
        nodes = min(left, 200)
        ready = [self.request(f"node-{number}", self.plan.get("version", "")) for number in range(nodes)]
        sent = 0

        async def drive() -> None:
            nonlocal sent
            connection = await self.connect()
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            began = 0.0

            def send() -> None:
                nonlocal began, sent
                if sent >= left or time.perf_counter() >= end:
                    if not done.done():
                        done.set_result(None)
                    return
                own = "requests" in self.plan
                data = self.request(f"own-{sent}", self.plan.get("version", "")) if own else ready[sent % nodes]
                sent += 1
                began = time.perf_counter()
                connection.transport.write(data)

            def answered(status: int, body: bytes) -> None:
                self.latencies.append(time.perf_counter() - began)
                self.statuses[status] += 1
                send()

            def lost() -> None:
                if not done.done():
                    self.failed += 1
                    done.set_result(None)

            connection.answered, connection.lost = answered, lost
            send()
            await done
            connection.transport.close()

        started = time.perf_counter()
        await asyncio.gather(*(drive() for _ in range(self.plan["connections"])))
        return self.result() | {"elapsed": time.perf_counter() - started}

    async def open(self) -> dict[str, Any]:
        """At the times that the sidecars' own clocks say."""
        count, period = self.plan["connections"], self.plan["period"]
        versions = [self.plan.get("version", "")] * count
        loop = asyncio.get_running_loop()
        connections: list[Connection] = []
        for number in range(0, count, 100):
            connections += await asyncio.gather(*(self.connect() for _ in range(min(100, count - number))))
            print(f"\r  {len(connections)} of {count} connected", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        began = [0.0] * count
        late = 0
        taken: list[float] = []

        def send(index: int, due: float) -> None:
            nonlocal late
            if began[index]:
                late += 1  # the last answer is not there yet: a sidecar would not ask again either
            else:
                began[index] = time.perf_counter()
                connections[index].transport.write(self.request(f"node-{index}", versions[index]))
            if not stopped:
                # From when it was due, not from when it was sent: a late client would gather its polls into bursts.
                loop.call_at(due + period, send, index, due + period)

        def answered(index: int, status: int, body: bytes) -> None:
            self.latencies.append(time.perf_counter() - began[index])
            began[index] = 0.0
            self.statuses[status] += 1
            if status == 200 and (found := _VERSION.search(body)):
                versions[index] = found[1].decode()
                taken.append(time.time())

        def lost() -> None:
            if not stopped:
                self.failed += 1

        stopped = False
        for index, connection in enumerate(connections):
            connection.answered = lambda status, body, index=index: answered(index, status, body)  # type: ignore[misc]
            connection.lost = lost
            due = loop.time() + 0.5 + period * index / count + random.random() * 0.01
            loop.call_at(due, send, index, due)
        parts: dict[str, Any] = {}
        for name, seconds in self.plan["parts"]:
            # Each part begins on a line of its own on stdout, so that the other side can read the server's clocks.
            print(json.dumps({"begins": name}), flush=True)
            began_part = time.time()
            await asyncio.sleep(seconds)
            parts[name] = self.result() | {
                "elapsed": time.time() - began_part, "late": late, "taken": [at - began_part for at in sorted(taken)],
            }  # fmt: skip
            self.latencies, self.statuses, self.failed, late = [], Counter(), 0, 0
            taken.clear()
        stopped = True
        return {"parts": parts, "versions": dict(Counter(versions))}

    def result(self) -> dict[str, Any]:
        """Counts, and latencies in milliseconds."""
        ordered = sorted(self.latencies)

        def percentile(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000 if ordered else 0.0

        return {
            "answered": sum(self.statuses.values()),
            "failed": self.failed,
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "p50_ms": percentile(0.5),
            "p99_ms": percentile(0.99),
            "max_ms": percentile(1.0),
        }


def main() -> None:
    """One plan from stdin, one result to stdout."""
    plan = json.load(sys.stdin)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    run = Run(plan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps({"result": runner.run(run.open() if "period" in plan else run.closed())}))


if __name__ == "__main__":
    main()
