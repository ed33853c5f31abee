"""What a sidecar shows the pod network beside its own port: whether it is ready, and its metrics."""

import contextlib
import json
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Drain, Placement

from .upstream import RecordingUpstream
from .wire import Http1


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def sidecar(envoy: Path, folder: Path, upstream: int, drain: Drain | None = None) -> Iterator[tuple[str, str]]:
    """The URLs of a sidecar's own listener and of its health listener."""
    listen, health, admin = (Address("127.0.0.1", port) for port in free_ports(3))
    log = str(folder / "access.log")
    placement = Placement(
        "render", listen, Address("127.0.0.1", upstream), admin, health=health, access_log=log, drain=drain
    )
    (folder / "envoy.json").write_text(json.dumps(bootstrap(Policy(), placement)))
    command = [
        str(envoy),
        "-c",
        str(folder / "envoy.json"),
        "--concurrency",
        "1",
        "--disable-hot-restart",
        "-l",
        "error",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://{health}/ready", trust_env=False)
                break
            time.sleep(0.05)
        yield f"http://{listen}", f"http://{health}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def urls(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    with sidecar(envoy, tmp_path_factory.mktemp("health"), _upstream.address.port) as found:
        yield found


def becomes(url: str, status: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if httpx.get(url, trust_env=False).status_code == status:
            return True
        time.sleep(0.1)
    return False


def test_it_is_ready_while_the_upstream_accepts(urls: tuple[str, str]) -> None:
    assert becomes(f"{urls[1]}/ready", 200)


def test_a_check_of_http_1_0_needs_no_host(urls: tuple[str, str]) -> None:
    assert becomes(f"{urls[1]}/ready", 200)
    host, port = urls[1].removeprefix("http://").split(":")
    with Http1(Address(host, int(port))) as client:
        client.send(b"GET /ready HTTP/1.0\r\n\r\n")
        assert client.answer().status == 200


def test_it_is_not_ready_while_nothing_listens_upstream(envoy: Path, tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    with sidecar(envoy, tmp_path, nobody) as (_, health):
        assert becomes(f"{health}/ready", 503)


def test_the_outcomes_are_counted_where_prometheus_looks(urls: tuple[str, str]) -> None:
    listen, health = urls
    body = {"messages": [{"role": "user", "content": "x"}]}
    httpx.post(f"{listen}/v1/chat/completions/render", json=body, headers={"x-vllm-priority": "5"}, trust_env=False)
    answer = httpx.get(f"{health}/stats/prometheus", trust_env=False)
    assert answer.status_code == 200
    assert 'envoy_vllm_priority_requests{route="/v1/chat/completions/render",outcome="inserted"' in answer.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/quitquitquit"),
        ("POST", "/stats/prometheus"),
        ("GET", "/config_dump"),
        ("GET", "/stats"),
        ("GET", "/stats/prometheus/../../config_dump"),
        ("POST", "/drain_listeners"),
        ("GET", "/"),
    ],
)
def test_nothing_else_of_the_admin_is_let_through(urls: tuple[str, str], method: str, path: str) -> None:
    with socket.create_connection(("127.0.0.1", int(urls[1].rpartition(":")[2])), 10) as client:
        client.sendall(
            f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        )
        assert client.recv(12) == b"HTTP/1.1 404"


def test_only_the_path_with_the_token_drains(envoy: Path, _upstream: RecordingUpstream, tmp_path: Path) -> None:
    """Draining, the sidecar still serves and lives, but it is not ready, and its responses close their connections."""
    with sidecar(envoy, tmp_path, _upstream.address.port, Drain("a1b2")) as (listen, health):
        assert becomes(f"{health}/ready", 200)
        for method, path in (
            ("POST", "/drain/a1b2"),
            *(
                ("GET", path)
                for path in ("/drain", "/drain/", "/drain/a1b", "/drain/a1b2c", "/drain/A1B2", "//drain/a1b2")
            ),
        ):
            assert httpx.request(method, f"{health}{path}", trust_env=False).status_code == 404
        assert httpx.get(f"{health}/ready", trust_env=False).status_code == 200
        assert "connection" not in httpx.get(f"{listen}/x", trust_env=False).headers
        assert httpx.get(f"{health}/drain/a1b2", trust_env=False).status_code == 200
        answer = httpx.get(f"{listen}/x", trust_env=False)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert httpx.get(f"{health}/ready", trust_env=False).status_code == 503
        with socket.create_connection(("127.0.0.1", int(health.rpartition(":")[2])), 10):
            pass  # The liveness probe only connects.


def test_a_delayed_response_does_not_delay_the_draining(
    envoy: Path, _upstream: RecordingUpstream, tmp_path: Path
) -> None:
    """For longer than any timeout of the health listener, which is 10 seconds."""
    with sidecar(envoy, tmp_path, _upstream.address.port, Drain("a1b2", 12)) as (_, health):
        assert becomes(f"{health}/ready", 200)
        with Http1(Address.parse(health.removeprefix("http://"), "health"), timeout=60) as client:
            client.send(b"GET /drain/a1b2 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert becomes(f"{health}/ready", 503)
            assert select.select([client.sock], [], [], 0)[0] == [], "the response is still to come"
            assert client.answer().status == 200
