"""Clients and routers that people use with vLLM, with real Envoys: what docs/guides/works-with.md says of them."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from control_plane.address import Address

from .conftest import GENERATE, RENDER, SidecarFactory
from .test_health_listener import free_ports
from .upstream import RecordingUpstream
from .wire import call, priority

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "works-with.md"


def policy_of(section: str) -> str:
    """The policy in a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    return str(found)


def test_objectives_of_the_inference_extension_are_classes(
    sidecar: SidecarFactory, upstream: RecordingUpstream
) -> None:
    front = sidecar("engine", policy_of("llm-d and the Gateway API inference extension"))
    call(front.address, GENERATE, b'{"token_ids":[1]}', (b"x-gateway-inference-objective", b"interactive"))
    (request,) = upstream.wait(1)
    assert yaml.safe_load(request.body)["priority"] == -10


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Callable[[Address], Address]]:
    """router(worker): a running vllm-router in front of that server."""
    program = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("vllm-router has no wheel for this machine")
    started: list[subprocess.Popen[bytes]] = []

    def start(worker: Address) -> Address:
        port, metrics = free_ports(2)
        command = [
            program, "--worker-urls", f"http://{worker}", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(metrics), "--policy", "round_robin",
        ]  # fmt: skip
        with (tmp_path / "router.log").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert started[-1].poll() is None, (tmp_path / "router.log").read_text()[-2000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    return Address("127.0.0.1", port)
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError((tmp_path / "router.log").read_text()[-2000:])

    yield start
    for process in started:
        process.terminate()
        process.wait(10)


def last_post(upstream: RecordingUpstream) -> dict[str, object]:
    body: dict[str, object] = yaml.safe_load(
        [request for request in upstream.requests if request.method == "POST"][-1].body
    )
    return body


def test_behind_vllm_router_a_sidecar_finds_no_header_on_the_render_routes(
    sidecar: SidecarFactory, upstream: RecordingUpstream, router: Callable[[Address], Address]
) -> None:
    behind = sidecar("engine")
    front = router(behind.address)
    call(front, RENDER, b'{"messages":[]}', priority("-10"))
    assert "priority" not in last_post(upstream), "if vllm-router passes the header, the page is out of date"
    call(front, GENERATE, b'{"token_ids":[1]}', priority("-10"))
    assert last_post(upstream)["priority"] == -10


def test_in_front_of_vllm_router_a_sidecar_cures_it(
    sidecar: SidecarFactory, upstream: RecordingUpstream, router: Callable[[Address], Address]
) -> None:
    front = sidecar("engine", to=router(upstream.address))
    for route in (RENDER, GENERATE):
        call(front.address, route, b'{"messages":[],"token_ids":[1]}', priority("-10"))
        assert last_post(upstream)["priority"] == -10
