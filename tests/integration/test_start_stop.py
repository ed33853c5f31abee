"""How `vllm-priority run` starts and stops where a supervisor, a resolver or the kernel makes it hard."""

import contextlib
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.proxy import Sidecar
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Placement

from .conftest import RENDER
from .dns import NameServer
from .test_run import JSON, Held, Running, command, free_address, post
from .upstream import WAIT, Connection, RecordingUpstream, Request, response
from .waiting import until
from .wire import Http1, Http2

Start = Callable[..., Running]


@pytest.fixture
def start(envoy: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a `run` in front of an upstream and waits until it listens."""
    with contextlib.ExitStack() as stack:

        def one(upstream: Address, *extra: str) -> Running:
            running = Running(envoy, tmp_path, upstream, *extra)
            stack.callback(running.stop)
            running.said("listens on")
            return running

        yield one


# ----- stop


def two_milliseconds(request: Request, connection: Connection) -> None:
    connection.read_body(request)
    time.sleep(0.002)
    connection.send(response(b'{"ok":true}'))


class Balancer:
    """Sends 200 requests a second, each on an idle connection that was left open or on a new one; counts the lost."""

    def __init__(self, to: Address, keep_alive: bool) -> None:
        self._to, self._keep_alive = to, keep_alive
        self._idle: list[http.client.HTTPConnection] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent = 0
        self.lost: list[str] = []

    def __enter__(self) -> "Balancer":
        self._thread.start()
        until(lambda: self.sent > 100, "the first requests")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(3 * WAIT)

    def _run(self) -> None:
        with ThreadPoolExecutor(16) as pool:
            due = time.monotonic()
            while not self._stop.is_set():
                pool.submit(self._request)
                self.sent += 1
                due += 0.005
                time.sleep(max(0.0, due - time.monotonic()))
        for connection in self._idle:
            connection.close()

    def _request(self) -> None:
        try:
            connection = self._idle.pop() if self._idle else http.client.HTTPConnection(self._to.host, self._to.port)
            connection.timeout = WAIT
            connection.request("POST", RENDER, b'{"a":1}', {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                self.lost.append(str(answer.status))
            if answer.will_close or not self._keep_alive:
                connection.close()
            else:
                self._idle.append(connection)
        except (OSError, http.client.HTTPException) as error:
            self.lost.append(repr(error))


@pytest.mark.parametrize("keep_alive", [True, False])
def test_no_request_is_lost_while_a_balancer_still_sends(
    keep_alive: bool, start: Start, upstream: RecordingUpstream
) -> None:
    upstream.handler = two_milliseconds
    running = start(upstream.address)
    with Balancer(running.listen, keep_alive) as balancer:
        running.process.send_signal(signal.SIGTERM)
        running.said("Draining")
        time.sleep(1)
        balancer.stop()
        assert balancer.lost == []
        assert running.process.poll() is None, "it goes on accepting for 5 s"
    assert running.ended() == 0


def test_a_drain_closes_connections_with_their_response_and_then_refuses_new_ones(
    start: Start, upstream: RecordingUpstream
) -> None:
    upstream.handler = held = Held()
    held.go.set()
    running = start(upstream.address, "--drain-seconds", "60", "--drain-accept-seconds", "2")
    kept = http.client.HTTPConnection(running.listen.host, running.listen.port, timeout=WAIT)
    kept.connect()
    running.process.send_signal(signal.SIGTERM)
    running.said("Draining")
    held.go.clear()
    with ThreadPoolExecutor(1) as pool:
        # It keeps Envoy alive until the end of this block.
        last = pool.submit(post, running.listen)
        until(lambda: upstream.requests, "the request in the drain")

        def refused() -> bool:
            try:
                socket.create_connection((running.listen.host, running.listen.port), WAIT).close()
            except ConnectionRefusedError:
                return True
            return False

        until(refused, "connections are still accepted")
        kept.request("POST", RENDER, b"{}", {"Content-Type": "application/json"})
        held.go.set()
        answer = kept.getresponse()
        assert (answer.status, answer.getheader("connection")) == (200, "close")
        assert last.result()[0] == 200
    assert running.ended() == 0


def frames_until_the_end_of(client: Http2, stream: int) -> Iterator[Frame]:
    """What comes until a response is whole. The h2 library itself would refuse a response after a GOAWAY."""
    data = b""
    while True:
        while len(data) >= 9 and len(data) >= 9 + (length := int.from_bytes(data[:3])):
            frame, _ = Frame.parse_frame_header(memoryview(data[:9]))
            frame.parse_body(memoryview(data[9 : 9 + length]))
            data = data[9 + length :]
            yield frame
            if frame.stream_id == stream and "END_STREAM" in frame.flags:
                return
        data += client.sock.recv(1 << 16)


def test_an_http2_client_is_told_to_leave_and_loses_no_request(start: Start, upstream: RecordingUpstream) -> None:
    running = start(upstream.address)
    with Http2(running.listen) as client:
        assert client.post(RENDER, [JSON], b"{}").status == 200
        running.process.send_signal(signal.SIGTERM)
        running.said("Draining")
        seen: list[Frame] = []
        while not any(isinstance(frame, GoAwayFrame) for frame in seen):
            stream = client.open("POST", RENDER, [JSON])
            client.data(stream, b"{}", end=True)
            seen = list(frames_until_the_end_of(client, stream))
            (head,) = (frame for frame in seen if isinstance(frame, HeadersFrame))
            (status, *_) = client.h2.decoder.decode(head.data)
            assert tuple(map(str, status)) == (":status", "200")
    assert running.ended() == 0


def test_a_second_signal_ends_it_while_it_accepts(start: Start, upstream: RecordingUpstream) -> None:
    running = start(upstream.address, "--drain-accept-seconds", "3600", "--drain-seconds", "3600")
    running.process.send_signal(signal.SIGTERM)
    running.said("Draining")
    running.process.send_signal(signal.SIGTERM)
    assert running.ended() == 0


def test_it_drains_though_nobody_reads_what_it_says(envoy: Path, upstream: RecordingUpstream) -> None:
    upstream.handler = held = Held()
    listen = free_address()
    process = subprocess.Popen(run_command(envoy, upstream.address, listen), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        assert "listens on" in process.stderr.readline()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, listen)
            until(lambda: upstream.requests, "the request")
            process.stderr.close()
            process.terminate()
            time.sleep(0.5)
            held.go.set()
            assert answer.result()[0] == 200
        assert process.wait(2 * WAIT) == 0
    finally:
        process.kill()


# ----- under systemd


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Receives what a service tells systemd (Type=notify). The empty string: nothing within the time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def message() -> str:
            notify.settimeout(3 * WAIT)
            return notify.recv(4096).decode()

        yield message


def test_systemd_is_told_when_it_listens_and_how_long_a_drain_may_take(
    told: Callable[[], str], start: Start, upstream: RecordingUpstream
) -> None:
    running = start(upstream.address, "--drain-seconds", "120", "--drain-accept-seconds", "0")
    assert told() == "READY=1"
    assert post(running.listen)[0] == 200
    running.process.send_signal(signal.SIGTERM)
    assert told() == "STOPPING=1\nEXTEND_TIMEOUT_USEC=130000000"
    assert running.ended() == 0


def test_systemd_is_not_told_that_it_is_ready_where_it_cannot_start(
    told: Callable[[], str], envoy: Path, upstream: RecordingUpstream
) -> None:
    done = subprocess.run(
        run_command(envoy, upstream.address, upstream.address), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2, "one address for both is a configuration that can never work"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = Address("127.0.0.1", server.getsockname()[1])
        done = subprocess.run(run_command(envoy, upstream.address, taken), capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
        last.sendto(b"nothing came before", os.environ["NOTIFY_SOCKET"])
    assert told() == "nothing came before"


def test_a_reload_under_load_applies_the_new_policy_and_loses_no_request(
    told: Callable[[], str], start: Start, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    upstream.handler = two_milliseconds
    policy = tmp_path / "policy.yaml"
    policy.write_text("classes: {batch: 10}\n")
    running = start(upstream.address, "--policy", str(policy))
    assert told() == "READY=1"
    (child,) = running.envoys()

    def moved(name: str) -> str | None:
        with Http1(running.listen) as client:
            return client.post(RENDER, [JSON, (b"X-Vllm-Priority", name.encode())], b"{}").applied

    with Balancer(running.listen, True) as balancer:
        assert moved("batch") == "10; source=class; outcome=inserted"
        policy.write_text("classes: {batch: 20}\n")
        running.process.send_signal(signal.SIGHUP)
        assert told() == f"STATUS=loaded {policy}; new requests follow it within 2 s"
        until(lambda: moved("batch") == "20; source=class; outcome=inserted", "the new policy")

        policy.write_text("classes: {batch: high}\n")
        running.process.send_signal(signal.SIGHUP)
        rejected = told()
        assert "batch" in rejected
        assert rejected.endswith("The sidecar keeps its last policy.")
        time.sleep(2)
        assert moved("batch") == "20; source=class; outcome=inserted"

        policy.write_text("{ordinary: enforce, limits: {max_body_bytes: null}}\n")
        running.process.send_signal(signal.SIGHUP)
        assert told().endswith("within 2 s. Restart the sidecar for ordinary and limits.max_body_bytes")
        balancer.stop()
        assert balancer.lost == []
    assert running.envoys() == [child]
    assert rejected.removeprefix("STATUS=") in running.log.read_text()


def test_it_runs_where_its_files_are_for_its_own_user_alone(
    start: Start, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: 3\n")
    before = os.umask(0o077)
    try:
        running = start(upstream.address, "--policy", str(policy))
    finally:
        os.umask(before)
    assert post(running.listen)[0] == 200


# ----- names


@pytest.fixture(params=["127.0.0.1", "::1"])
def one_family(request: pytest.FixtureRequest) -> Iterator[RecordingUpstream]:
    """An upstream on one of the two addresses of localhost."""
    server = RecordingUpstream(request.param)
    yield server
    server.stop()


def test_a_name_with_two_addresses_reaches_the_one_where_the_server_listens(
    start: Start, one_family: RecordingUpstream
) -> None:
    running = start(Address("localhost", one_family.address.port), "--concurrency", "2")
    # Each on a connection of its own, so on either worker.
    assert [post(running.listen)[0] for _ in range(20)] == [200] * 20


def test_a_control_plane_with_two_addresses_is_reached_at_each_poll(envoy: Path, upstream: RecordingUpstream) -> None:
    placement = Placement(
        "render", free_address(), upstream.address, free_address(), access_log="/dev/null",
        control_plane=Address("localhost", upstream.address.port), refresh_seconds=0.2,
    )  # fmt: skip
    with Sidecar(bootstrap(Policy(), placement), envoy) as sidecar:
        until(lambda: len(upstream.requests) > 10, "polls")
        failures = sidecar.stats(r"^extension_config_discovery\..*\.update_failure$")
        assert sidecar.stats("^cluster.control_plane.upstream_cx_connect_fail$").popitem()[1] == 0
        # The recording upstream answers what no control plane does: only connections are looked at.
        assert failures


@pytest.mark.parametrize("spread", [True, False])
def test_a_name_of_several_servers_is_spread_over_only_when_told(envoy: Path, spread: bool) -> None:
    servers = [RecordingUpstream("127.0.0.2")]
    servers += [RecordingUpstream(f"127.0.0.{number}", servers[0].address.port) for number in (3, 4)]
    placement = Placement(
        "render", free_address(), Address("pods.test", servers[0].address.port), free_address(),
        access_log="/dev/null", spread=spread,
    )  # fmt: skip
    config = bootstrap(Policy(), placement)
    with NameServer({"pods.test": ["127.0.0.2", "127.0.0.3", "127.0.0.4"]}) as names:
        config["static_resources"]["clusters"][0]["typed_dns_resolver_config"] = names.resolver
        with Sidecar(config, envoy):
            assert [post(placement.listen)[0] for _ in range(30)] == [200] * 30
    reached = [len(server.requests) for server in servers]
    for server in servers:
        server.stop()
    assert sum(reached) == 30
    assert (0 not in reached) if spread else sorted(reached) == [0, 0, 30]


# ----- where it runs


def run_command(envoy: Path, upstream: Address, listen: Address, *extra: str) -> list[str]:
    return command(
        "run", "--role", "render", "--upstream", str(upstream), "--listen", str(listen), "--admin",
        str(free_address()), "--envoy", str(envoy), "--concurrency", "1", "--drain-accept-seconds", "0", *extra,
    )  # fmt: skip


def test_its_access_log_arrives_where_standard_output_is_a_socket(envoy: Path, upstream: RecordingUpstream) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(3 * WAIT)
    listen, text = free_address(), b""
    arguments = run_command(envoy, upstream.address, listen)
    with ours, subprocess.Popen(arguments, stdout=theirs.fileno(), stderr=theirs.fileno()) as process:
        theirs.close()
        try:
            while b"listens on" not in text:
                assert (piece := ours.recv(1 << 16)), text
                text += piece
            assert post(listen)[0] == 200
            while b'"status":200' not in text:
                assert (piece := ours.recv(1 << 16)), text
                text += piece
        finally:
            process.terminate()
    line = next(line for line in text.decode().splitlines() if line.startswith("{"))
    assert json.loads(line)["report"] == "5; source=header; outcome=inserted"
    assert process.returncode == 0


def test_it_runs_without_a_folder_that_can_be_written(envoy: Path, upstream: RecordingUpstream) -> None:
    folders = [folder for folder in ("/tmp", "/var/tmp", "/usr/tmp", "/dev/shm") if Path(folder).is_dir()]
    shut = "; ".join(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}" for folder in folders)
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        assert "CI" not in os.environ, "CI can make a mount namespace"
        pytest.skip("a mount namespace cannot be made here")
    listen = free_address()
    environment = {name: value for name, value in os.environ.items() if name not in {"TMPDIR", "TEMP", "TMP"}}
    with subprocess.Popen(
        [
            *namespace, "sh", "-euc", f'{shut}; cd /tmp; umask 077; touch x 2>&- && exit 9; exec "$@"', "sh",
            *run_command(envoy, upstream.address, listen),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stderr
        try:
            assert "listens on" in process.stderr.readline()
            assert post(listen)[0] == 200
        finally:
            process.terminate()
    assert process.returncode == 0


def test_envoy_has_no_shared_memory_that_would_stay(start: Start, upstream: RecordingUpstream) -> None:
    running = start(upstream.address)
    (child,) = running.envoys()
    assert "/dev/shm" not in Path(f"/proc/{child}/maps").read_text()


# ----- the limit on open files


FILES = 400


def test_connections_beyond_the_limit_on_open_files_are_refused_at_once(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES // 2, FILES))

    listen, log = free_address(), tmp_path / "log"
    with (
        log.open("wb") as said,
        subprocess.Popen(
            run_command(envoy, upstream.address, listen, "--access-log", "/dev/null"), stderr=said, preexec_fn=limit
        ) as process,
        contextlib.ExitStack() as held,
    ):
        held.callback(process.terminate)
        until(lambda: "listens on" in log.read_text(), "listens")
        bound = int(log.read_text().partition("accepts ")[2].partition(" ")[0])
        assert 100 < bound < FILES // 2
        # As many as are allowed, each with a request in flight, so with a connection to the upstream as well.
        upstream.handler = waiting = Held()
        clients = []
        for _ in range(bound):
            client = http.client.HTTPConnection(listen.host, listen.port, timeout=3 * WAIT)
            client.request("POST", RENDER, b"{}", {"Content-Type": "application/json"})
            clients.append(client)
            held.callback(client.close)
        upstream.wait(bound, 3 * WAIT)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for _ in range(FILES):
            with socket.create_connection((listen.host, listen.port), WAIT) as beyond:
                with contextlib.suppress(ConnectionResetError):
                    assert beyond.recv(1) == b"", "refused"
        assert len(list(Path(f"/proc/{child}/fd").iterdir())) < FILES
        before = cpu_ticks(child)
        time.sleep(1)
        assert cpu_ticks(child) - before < os.sysconf("SC_CLK_TCK") / 2, "it spins"
        waiting.go.set()
        assert [client.getresponse().status for client in clients] == [200] * bound
        print(f"limit of {FILES} descriptors: {bound} connections served, {FILES} more closed at once")
        clients.pop().close()
        until(lambda: accepted(listen), "a connection after one has ended")


def cpu_ticks(process: str) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def accepted(listen: Address) -> bool:
    with contextlib.suppress(OSError, AssertionError):
        return post(listen)[0] == 200
    return False


# ----- the control plane


def not_modified(request: Request, connection: Connection) -> None:
    connection.read_body(request)
    connection.send(b"HTTP/1.1 304 Not Modified\r\nconnection: close\r\n\r\n")
    connection.close()


def test_it_says_once_that_the_control_plane_is_away_and_once_that_it_is_back(
    start: Start, upstream: RecordingUpstream
) -> None:
    away = free_address()
    running = start(upstream.address, "--control-plane", f"http://{away}")
    running.said(f"The control plane {away} does not respond. The sidecar keeps its last policy.")
    time.sleep(11)  # two more polls
    control_plane = RecordingUpstream(away.host, away.port)
    control_plane.handler = not_modified
    said = running.said(f"The control plane {away} responds again.")
    control_plane.stop()
    assert len(said.splitlines()) == 4, "the start, with a warning, and nothing else from Envoy or from `run`"


def test_an_envoy_without_run_logs_once_that_the_control_plane_is_away_and_once_that_it_is_back(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    """As in a pod, but for the intervals."""
    server = RecordingUpstream()
    server.handler = not_modified
    placement = Placement(
        "render", free_address(), upstream.address, free_address(), health=free_address(),
        control_plane=server.address, refresh_seconds=0.2,
    )  # fmt: skip
    config = bootstrap(Policy(), placement)
    (cluster,) = (each for each in config["static_resources"]["clusters"] if each["name"] == "control_plane")
    for interval in ("interval", "no_traffic_interval", "unhealthy_interval"):
        cluster["health_checks"][0][interval] = "0.1s"
    file, log = tmp_path / "bootstrap.json", tmp_path / "log"
    file.write_text(json.dumps(config))

    def events() -> list[str]:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return [name for line in lines for name in line if name.endswith("_event")]

    with log.open("ab") as output:
        process = subprocess.Popen(
            [envoy, "-c", file, "--disable-hot-restart", "--concurrency", "1", "--file-flush-interval-msec", "20",
             "--log-level", "warning", "--component-log-level", "config:error"],
            stdout=output, stderr=output,
        )  # fmt: skip
    try:
        until(lambda: events() == ["add_healthy_event"], "the first check")
        server.stop()
        until(lambda: len(events()) == 2, "the control plane is away")
        time.sleep(1)
        server = RecordingUpstream(port=server.address.port)
        server.handler = not_modified
        until(lambda: len(events()) == 3, "the control plane is back")
        polls = len(server.requests)
        until(lambda: len(server.requests) > polls, "it polls again")
        assert events() == ["add_healthy_event", "eject_unhealthy_event", "add_healthy_event"]
        assert "[warning][config]" not in log.read_text()
    finally:
        process.terminate()
        process.wait(WAIT)
        server.stop()
