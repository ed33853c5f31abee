"""The control plane as a process, with real Envoys that poll it: policy changes, rejections, and failures."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import uvicorn

from control_plane.address import Address
from control_plane.proxy import Sidecar
from control_plane.render.bootstrap import bootstrap
from control_plane.render.filter import filter_config
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource
from control_plane.server.app import create_app
from control_plane.server.fast_path import MAX_BODY_BYTES
from control_plane.server.settings import ServeSettings
from tests.pem import write_pair

from .sidecars import load
from .upstream import WAIT, Connection, RecordingUpstream, Request, response
from .waiting import until

RENDER = "/v1/chat/completions/render"
ECDS = "/v3/discovery:extension_configs"
POLL_SECONDS = 0.2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ControlPlane:
    """`serve` in its own process, which can be killed and started again on the same port."""

    def __init__(self, policy: Path, port: int | None = None, setup: str = "", **settings: object) -> None:
        self.address = Address("127.0.0.1", port or free_port())
        given = {"policy": policy, "listen": self.address, "reload_seconds": 0.1, **settings}
        self._code = (
            "from pathlib import Path, PosixPath\nfrom control_plane.server import process\n"
            "from control_plane.server.settings import ServeSettings\nfrom control_plane.address import Address\n"
            f"{setup}\nprocess.serve(ServeSettings(**{given!r}))\n"
        )
        self.process: subprocess.Popen[bytes] | None = None
        # A pipe that nobody reads would fill with the log and stop the process.
        self._log = tempfile.TemporaryFile()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()

    def start(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", self._code], stderr=self._log)
        self.process = process

        def answers() -> bool:
            assert process.poll() is None, self._log.seek(0) or self._log.read().decode()
            with contextlib.suppress(httpx.HTTPError):
                return self.get("/healthz").status_code == 200
            return False

        until(answers, "the control plane's first response")

    def kill(self, number: int = signal.SIGKILL) -> int:
        """The exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(WAIT)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://{self.address}{path}", timeout=WAIT, trust_env=False)

    def status(self, node: str) -> str:
        """Return the status of a sidecar, or the empty string if it has not polled."""
        rows = self.get("/api/sidecars").json()["sidecars"]
        return next((str(row["status"]) for row in rows if row["node_id"] == node), "")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The file that the control plane serves."""
    path = tmp_path / "policy.yaml"
    set_default(path, 1)
    return path


def set_default(path: Path, value: int) -> None:
    """Change the file by a rename, as Kubernetes changes a mounted ConfigMap."""
    new = path.with_suffix(".new")
    new.write_text(f"default: {value}\n")
    new.rename(path)


@pytest.fixture(name="start_sidecar")
def _start_sidecar(envoy: Path, upstream: RecordingUpstream) -> Iterator[Callable[..., Address]]:
    with sidecars_that_poll(envoy, upstream) as start:
        yield start


@contextlib.contextmanager
def sidecars_that_poll(envoy: Path, upstream: RecordingUpstream) -> Iterator[Callable[..., Address]]:
    """Starts a sidecar with `default: 0` that polls `control_plane`, and returns the address that it listens on."""
    with contextlib.ExitStack() as stack:

        def start(
            control_plane: Address,
            node: str = "pod-1",
            change: Callable[[Resource], None] = lambda bootstrap: None,
        ) -> Address:
            listen, admin = Address("127.0.0.1", free_port()), Address("127.0.0.1", free_port())
            placement = Placement(
                "render", listen, upstream.address, admin, control_plane=control_plane, node_id=node,
                access_log="/dev/null", refresh_seconds=POLL_SECONDS,
            )  # fmt: skip
            config = bootstrap(load("default: 0"), placement)
            change(config)
            stack.enter_context(Sidecar(config, envoy))
            return listen

        yield start


def applied(sidecar: Address) -> str:
    """Return the priority that a request without one gets."""
    reply = httpx.post(f"http://{sidecar}{RENDER}", json={"messages": []}, timeout=WAIT, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-vllm-priority-applied"].partition(";")[0]


def echo(request: Request, connection: Connection) -> None:
    """Respond with the id and the priority that reached the upstream."""
    connection.read_body(request)
    body = json.loads(request.body)
    connection.send(response(json.dumps({"id": body["id"], "priority": body["priority"]}).encode()))


class Load:
    """Clients that send requests through a sidecar on keep-alive connections until the end of the block."""

    def __init__(self, sidecar: Address, clients: int = 4) -> None:
        self._sidecar = sidecar
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        self.wrong: list[str] = []
        self.priorities: Counter[int] = Counter()
        self.last: dict[int, int] = {}

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: sum(self.priorities.values()) > 20 or self.wrong, "the load's first requests")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT)

    def sent(self) -> int:
        return sum(self.priorities.values())

    def some_more(self, count: int = 50) -> None:
        """Wait until `count` more requests have a response."""
        goal = self.sent() + count
        until(lambda: self.sent() >= goal or self.wrong, "more responses under load")

    def _run(self, number: int) -> None:
        connection = http.client.HTTPConnection(self._sidecar.host, self._sidecar.port, timeout=WAIT)
        count = 0
        while not self._stop.is_set():
            count += 1
            name = f"{number}-{count}"
            try:
                connection.request(
                    "POST", RENDER, json.dumps({"id": name}), {"content-type": "application/json"},
                )  # fmt: skip
                reply = connection.getresponse()
                text = reply.read()
                body = json.loads(text)
                if reply.status != 200 or body["id"] != name:
                    self.wrong.append(f"{name}: {reply.status} {text!r}")
                else:
                    self.priorities[body["priority"]] += 1
                    self.last[number] = body["priority"]
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.wrong.append(f"{name}: {error!r}")
                connection.close()
        connection.close()


def test_a_policy_change_reaches_a_running_sidecar_and_changes_its_requests(
    policy: Path, start_sidecar: Callable[..., Address]
) -> None:
    with ControlPlane(policy) as plane:
        sidecar = start_sidecar(plane.address)
        until(lambda: plane.status("pod-1") == "SYNCED", "the sidecar on the first policy")
        assert applied(sidecar) == "1"
        set_default(policy, 2)
        until(lambda: applied(sidecar) == "2", "the new policy in the sidecar")
        until(lambda: plane.status("pod-1") == "SYNCED", "the sidecar on the new policy")
        text = plane.get("/metrics").text
        assert 'requests_total{result="found",type="extension_configs"} 2.0' in text, "one response for each policy"


def test_the_metrics_of_a_sidecar_outlast_a_policy_change(policy: Path, start_sidecar: Callable[..., Address]) -> None:
    configurations: list[Any] = []
    with ControlPlane(policy) as plane:
        sidecar = start_sidecar(plane.address, change=configurations.append)
        admin = configurations[0]["admin"]["address"]["socket_address"]

        def counted() -> float:
            url = f"http://{admin['address']}:{admin['port_value']}/stats/prometheus"
            text = httpx.get(url, trust_env=False).text
            return sum(float(value) for value in re.findall(r"(?m)^envoy_vllm_priority_requests\{.*\} (.*)$", text))

        until(lambda: applied(sidecar) == "1", "the first policy in the sidecar")
        until(lambda: counted() >= 1, "the count of a request")
        before = counted()
        set_default(policy, 2)
        until(lambda: applied(sidecar) == "2", "the new policy in the sidecar")
        until(lambda: counted() > before, "the count of a request under the new policy")


def test_a_policy_change_renames_and_removes_the_report_header_of_a_running_sidecar(
    policy: Path, start_sidecar: Callable[..., Address]
) -> None:
    def said(sidecar: Address) -> dict[str, str]:
        reply = httpx.post(f"http://{sidecar}{RENDER}", json={"messages": []}, timeout=WAIT, trust_env=False)
        return {name: reply.headers[name] for name in ("x-vllm-priority-applied", "x-told") if name in reply.headers}

    report = "1; source=default; outcome=inserted"
    with ControlPlane(policy) as plane:
        sidecar = start_sidecar(plane.address)
        until(lambda: said(sidecar) == {"x-vllm-priority-applied": report}, "the usual header")
        for header, expected in (("x-told", {"x-told": report}), ("null", {})):
            policy.write_text(f"default: 1\nreport_header: {header}\n")
            until(lambda wanted=expected: said(sidecar) == wanted, f"report_header: {header}")  # type: ignore[misc]
        set_default(policy, 1)
        until(lambda: said(sidecar) == {"x-vllm-priority-applied": report}, "the usual header again")


def test_a_sidecar_that_starts_without_a_control_plane_uses_the_policy_of_its_bootstrap(
    policy: Path, start_sidecar: Callable[..., Address]
) -> None:
    plane = ControlPlane(policy)
    sidecar = start_sidecar(plane.address)
    assert applied(sidecar) == "0"
    with plane:
        until(lambda: applied(sidecar) == "1", "the control plane's policy, once the control plane runs")


def test_no_request_is_lost_while_the_control_plane_restarts(
    policy: Path, start_sidecar: Callable[..., Address], upstream: RecordingUpstream
) -> None:
    upstream.handler = echo
    with ControlPlane(policy) as plane:
        sidecar = start_sidecar(plane.address)
        until(lambda: plane.status("pod-1") == "SYNCED", "the sidecar on the first policy")
        with Load(sidecar) as running:
            plane.kill()
            running.some_more()
            set_default(policy, 2)
            plane.start()
            until(lambda: running.wrong or set(running.last.values()) == {2}, "the policy of the new process")
    assert running.wrong == []
    assert set(running.priorities) == {1, 2}, "the last policy stays in force while the control plane is down"


def test_a_policy_change_under_load_fails_and_misroutes_no_request(
    policy: Path, start_sidecar: Callable[..., Address], upstream: RecordingUpstream
) -> None:
    upstream.handler = echo
    with ControlPlane(policy) as plane:
        sidecar = start_sidecar(plane.address)
        until(lambda: plane.status("pod-1") == "SYNCED", "the sidecar on the first policy")
        connections = upstream.connections
        with Load(sidecar) as running:
            for value in (2, 3, 4):
                set_default(policy, value)
                until(lambda value=value: running.wrong or set(running.last.values()) == {value}, "the new policy")  # type: ignore[misc]
                running.some_more(20)
    assert running.wrong == []
    assert set(running.priorities) == {1, 2, 3, 4}
    assert upstream.connections - connections <= 8, "a change must not touch connections"


def test_an_envoy_that_rejects_a_configuration_keeps_the_old_one_and_is_reported(
    policy: Path, start_sidecar: Callable[..., Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(ServeSettings(policy, reload_seconds=3600))
    with in_thread(app) as address:
        sidecar = start_sidecar(address)

        def status() -> str:
            rows = httpx.get(f"http://{address}/api/sidecars", trust_env=False).json()["sidecars"]
            return str(rows[0]["status"]) if rows else ""

        until(lambda: status() == "SYNCED", "the sidecar on the first policy")
        with monkeypatch.context() as broken:
            broken.setattr("control_plane.server.xds.filter_config", lambda *asked: with_script("function (", *asked))
            set_default(policy, 2)
            assert app.state.policy.reload() is True
        until(lambda: status() == "ERROR", "the rejection")
        assert applied(sidecar) == "1"
        set_default(policy, 3)
        assert app.state.policy.reload() is True
        until(lambda: status() == "SYNCED", "the sidecar on the corrected policy")
        assert applied(sidecar) == "3"


def with_script(script: str, *asked: Any) -> Resource:
    return {**filter_config(*asked), "default_source_code": {"inline_string": script}}


@contextlib.contextmanager
def in_thread(app: Any) -> Iterator[Address]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started, "the server's start")
    try:
        yield Address("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(WAIT)


def test_a_sidecar_that_polls_two_replicas_stays_on_the_new_policy_once_both_have_it(
    policy: Path, tmp_path: Path, start_sidecar: Callable[..., Address]
) -> None:
    other_file = tmp_path / "other.yaml"
    set_default(other_file, 2)
    with ControlPlane(policy) as one, ControlPlane(other_file) as two:

        def both(bootstrap: Resource) -> None:
            """Send polls to both in turn, as through a Service without keep-alive connections."""
            [cluster] = [c for c in bootstrap["static_resources"]["clusters"] if c["name"] == "control_plane"]
            endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
            second = json.loads(json.dumps(endpoints[0]))
            second["endpoint"]["address"]["socket_address"]["port_value"] = two.address.port
            endpoints.append(second)

        sidecar = start_sidecar(one.address, change=both)
        seen: set[str] = set()
        until(lambda: seen.add(applied(sidecar)) or seen >= {"1", "2"}, "both policies, in turn")  # type: ignore[func-returns-value]
        set_default(policy, 2)
        until(lambda: {plane.status("pod-1") for plane in (one, two)} == {"SYNCED"}, "both agree on the sidecar")

        def found() -> list[str]:
            return [
                line
                for plane in (one, two)
                for line in plane.get("/metrics").text.splitlines()
                if "requests_total{" in line and "not_modified" not in line
            ]

        def polls() -> int:
            name = 'requests_total{result="not_modified",type="extension_configs"} '
            return sum(int(float(plane.get("/metrics").text.partition(name)[2].split()[0])) for plane in (one, two))

        before, count = found(), polls()
        until(lambda: polls() >= count + 6, "six more polls")
        assert found() == before, "no more resources are sent once the replicas agree"
        assert applied(sidecar) == "2"


# The process and its sockets.


def exchange(address: Address, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send the pieces on one connection, and return what is received until the server closes it."""
    with socket.create_connection((address.host, address.port), WAIT) as sock:
        for piece in pieces:
            with contextlib.suppress(OSError):
                sock.sendall(piece)
            time.sleep(pause)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65536):
                received += piece
        return received


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that waits half a second for a head, for a body, and for a client to read its response."""
    path = tmp_path_factory.mktemp("impatient") / "policy.yaml"
    set_default(path, 1)
    with ControlPlane(path, setup="process.HEAD_SECONDS = process.SEND_SECONDS = 0.5", body_seconds=0.5) as plane:
        yield plane


@pytest.mark.parametrize("path", [ECDS, "/inject", "/healthz", "/nowhere"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_of_50_mb_is_rejected_on_any_path_and_not_buffered(
    impatient: ControlPlane, path: str, framing: str
) -> None:
    assert impatient.process is not None
    memory = resident(impatient.process.pid)
    whole = 50 * 2**20
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n"
    if framing == "length":
        pieces = [f"{head}content-length: {whole}\r\n\r\n".encode(), *[b"x" * 2**20] * 50]
    else:
        pieces = [f"{head}transfer-encoding: chunked\r\n\r\n".encode(), *[b"100000\r\n" + b"x" * 2**20 + b"\r\n"] * 50]
    reply = exchange(impatient.address, *pieces)
    assert reply.startswith(b"HTTP/1.1 413 "), reply[:200]
    assert b"The limit is 4194304 bytes." in reply
    assert resident(impatient.process.pid) - memory < 6 * MAX_BODY_BYTES
    assert impatient.get("/healthz").status_code == 200


def resident(pid: int) -> int:
    """Return the resident memory in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("pieces", "reply"),
    [
        ([b""], b""),
        ([b"POST /inject HT"], b""),
        ([b"POST /inject HTTP/1.1\r\nhost: x\r\nx-a: "], b""),
        ([b"POST /inject HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n{"], b"HTTP/1.1 408 Request Timeout"),
        ([b"POST /inject HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"], b"HTTP/1.1 408 "),
        ([b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /healthz HTT"], b"HTTP/1.1 200 OK"),
    ],
)
def test_the_connection_of_a_slow_client_is_closed(impatient: ControlPlane, pieces: list[bytes], reply: bytes) -> None:
    received = exchange(impatient.address, *pieces, pause=0.1)
    assert received.startswith(reply)
    assert bool(received) == bool(reply)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /inject HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_a_request_that_is_not_valid_http_is_rejected(impatient: ControlPlane, request_: bytes) -> None:
    received = exchange(impatient.address, request_)
    assert received.startswith(b"HTTP/1.1 4"), received


def test_the_connection_of_an_endless_head_is_closed(impatient: ControlPlane) -> None:
    assert impatient.process is not None
    memory = resident(impatient.process.pid)
    lines = (b"x-a: " + b"y" * 1000 + b"\r\n") * 1000
    assert exchange(impatient.address, b"GET / HTTP/1.1\r\n", *[lines] * 100) == b""
    assert exchange(impatient.address, b"GET / HTTP/1.1\r\nx-a: ", *[b"y" * 2**20] * 100) == b""
    assert resident(impatient.process.pid) - memory < 6 * MAX_BODY_BYTES


def test_the_connection_of_a_client_that_reads_nothing_is_closed(impatient: ControlPlane) -> None:
    assert impatient.process is not None
    connections = open_files(impatient.process.pid)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((impatient.address.host, impatient.address.port))
        sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 1500)
        until(lambda: open_files(impatient.process.pid) <= connections, "the end of the connection")  # type: ignore[union-attr]


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_endless_trailers_are_not_buffered(impatient: ControlPlane) -> None:
    assert impatient.process is not None
    memory = resident(impatient.process.pid)
    head = b"POST /inject HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    reply = exchange(impatient.address, head, *[(b"x-a: " + b"y" * 1000 + b"\r\n") * 1000] * 50)
    assert reply[:13] in {b"HTTP/1.1 408 ", b""}
    assert resident(impatient.process.pid) - memory < 6 * MAX_BODY_BYTES


def test_a_too_large_body_is_rejected_before_an_expect_continue_client_sends_it(impatient: ControlPlane) -> None:
    head = b"POST /inject HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 99999999\r\n\r\n"
    assert exchange(impatient.address, head).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_status_0(policy: Path, number: int) -> None:
    plane = ControlPlane(policy, setup="process.DRAIN_ACCEPT_SECONDS = 0.5")
    plane.start()
    assert plane.kill(number) == 0


def test_an_idle_connection_is_served_and_then_closed_after_sigterm(policy: Path) -> None:
    with ControlPlane(policy) as plane:
        assert plane.process is not None
        connection = http.client.HTTPConnection(plane.address.host, plane.address.port, timeout=WAIT)
        connection.request("GET", "/healthz")
        first = connection.getresponse()
        assert (first.status, first.read(), first.will_close) == (200, b'{"status":"ok"}', False)
        plane.process.send_signal(signal.SIGTERM)
        until(lambda: plane.get("/healthz").headers.get("connection") == "close", "the begin of the drain")
        connection.request("GET", "/healthz")
        second = connection.getresponse()
        assert (second.status, second.read(), second.will_close) == (200, b'{"status":"ok"}', True)
        assert connection.sock is None
        connection.close()


def test_a_request_whose_head_arrives_during_the_shutdown_is_served(policy: Path) -> None:
    with ControlPlane(policy, setup="process.DRAIN_ACCEPT_SECONDS = 0.5") as plane:
        assert plane.process is not None
        with socket.create_connection((plane.address.host, plane.address.port), WAIT) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\n")
            plane.process.send_signal(signal.SIGTERM)
            until(lambda: not accepts(plane.address), "the end of the drain")
            sock.sendall(b"host: x\r\n\r\n")
            received = sock.makefile("rb").read()
        assert received.startswith(b"HTTP/1.1 200 OK"), received
        assert plane.process.wait(WAIT) == 0


def accepts(address: Address) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), WAIT):
        return True
    return False


def test_a_rolling_restart_loses_no_webhook_call(policy: Path) -> None:
    review = {
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE", "namespace": "ml",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": {"metadata": {"name": "bare"}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
        },
    }  # fmt: skip
    lost: list[str] = []
    served: Counter[Address] = Counter()
    done = threading.Event()

    def call(replica: Callable[[], Address]) -> None:
        """Keep a connection open until its response says close, as the API server does."""
        connection, address = None, replica()
        while not done.is_set():
            try:
                if connection is None:
                    address = replica()
                    connection = http.client.HTTPConnection(address.host, address.port, timeout=WAIT)
                connection.request("POST", "/inject", json.dumps(review))
                received = connection.getresponse()
                body = json.loads(received.read())
                if received.status != 200 or body["response"]["allowed"] is not True:
                    lost.append(f"{received.status} {body}")
                served[address] += 1
                if received.will_close:
                    connection = None
            except (OSError, http.client.HTTPException) as error:
                lost.append(repr(error))
                connection = None

    with ControlPlane(policy, setup="process.DRAIN_ACCEPT_SECONDS = 2.0") as old, ControlPlane(policy) as new:
        assert old.process is not None
        endpoints = [old.address]
        threads = [threading.Thread(target=call, args=(lambda: endpoints[0],)) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: served[old.address] > 50 or lost, "calls of the old replica")
        old.process.send_signal(signal.SIGTERM)
        before = served[old.address]
        until(lambda: served[old.address] > before + 20 or lost, "new connections to the old replica, which drains")
        endpoints[0] = new.address
        assert old.process.wait(WAIT) == 0
        until(lambda: served[new.address] > 50 or lost, "calls of the new replica")
        done.set()
        for thread in threads:
            thread.join(WAIT)
    assert lost == []


@pytest.mark.parametrize("wrong", ["policy", "port"])
def test_a_policy_or_port_that_cannot_be_used_is_rejected_with_one_line(policy: Path, wrong: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if wrong == "policy":
            policy.write_text("default: no number\n")
        plane = ControlPlane(policy, port=taken.getsockname()[1] if wrong == "port" else None)
        done = subprocess.run([sys.executable, "-c", plane._code], capture_output=True, text=True, timeout=3 * WAIT)
    last = done.stderr.strip().splitlines()[-1]
    assert "PolicyError: " in last if wrong == "policy" else "InvalidField: listen: cannot listen on 127.0.0.1:" in last


def test_tls_is_served_beside_http_and_a_new_certificate_is_used_without_a_restart(
    policy: Path, tmp_path: Path
) -> None:
    cert, key = write_pair(tmp_path, "old", days=-1)
    tls = Address("127.0.0.1", free_port())
    with ControlPlane(policy, tls_listen=tls, tls_cert=cert, tls_key=key) as plane:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        reply = httpx.post(f"https://{tls}/inject", content=b"{", verify=client, trust_env=False)
        assert reply.status_code == 400
        assert "expired on" in plane.get("/readyz").json()["certificate"]["problem"]
        before = ssl.get_server_certificate((tls.host, tls.port))
        write_pair(tmp_path, "new")
        until(lambda: ssl.get_server_certificate((tls.host, tls.port)) != before, "the new certificate")
        until(lambda: plane.get("/readyz").json()["status"] == "ready", "the end of the problem")
        cert.write_text("nothing")
        until(lambda: plane.get("/readyz").json()["status"] == "degraded", "the new problem")
        assert "cannot be read" in plane.get("/readyz").json()["problems"][0]


def test_the_policy_file_is_watched(policy: Path) -> None:
    with ControlPlane(policy) as plane:
        policy.write_text("default: [")
        until(lambda: plane.get("/readyz").json()["problems"], "the broken edit at /readyz")
        assert 'policy_reloads_total{result="rejected"} 1.0' in plane.get("/metrics").text
        set_default(policy, 7)
        until(lambda: plane.get("/readyz").json()["status"] == "ready", "the corrected edit")
        assert plane.get("/api/policy").json()["policies"][0]["policy"]["default"] == 7
