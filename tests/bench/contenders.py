"""What is compared: seven ways to put a header's priority into a body, each started on one core."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import configs
from bodies import HEADER
from configs import Filter
from processes import BenchError, Config, Cores, Process, free_port, start_envoy

_HERE = Path(__file__).resolve().parent
_TYPES = "type.googleapis.com/envoy.extensions"


@dataclass(frozen=True)
class Bench:
    """What a contender needs to start. `base` is the product's bootstrap, `python` the one with grpcio and FastAPI."""

    envoy: str
    base: Config
    python: Path | None
    cores: Cores
    folder: Path


@dataclass
class Running:
    """A started contender: its port, and the processes whose CPU and memory are its own."""

    port: int
    processes: list[Process] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        return sum(process.cpu_seconds() for process in self.processes)

    def memory(self) -> int:
        return sum(process.memory() for process in self.processes)

    def peak_memory(self) -> int:
        return sum(process.peak_memory() for process in self.processes)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.close()


@dataclass(frozen=True)
class Contender:
    """One way. `letter` is what the issue calls it; `edits` is false for the two that only show what Envoy costs."""

    letter: str
    name: str
    edits: bool
    start: Callable[[Bench, int, str], Running]
    """(bench, upstream's port, name of the log) -> the running contender."""
    needs_python: bool = False


def _envoy(replacement: Callable[[], list[Filter]] | None) -> Callable[..., Running]:
    """A contender that is the sidecar's own Envoy, with another filter in its filter's place (None: with its own)."""

    def start(bench: Bench, upstream: int, log: str) -> Running:
        config = bench.base if replacement is None else configs.with_filter(bench.base, replacement())
        return _started(bench, config, upstream, log)

    return start


def _started(bench: Bench, config: Config, upstream: int, log: str) -> Running:
    port = free_port()
    config = configs.placed(config, port, upstream)
    return Running(port, [start_envoy(bench.envoy, config, log, port, bench.folder, bench.cores.proxy)])


def _python(bench: Bench, script: str, port: int, arguments: list[str], log: str) -> Process:
    if bench.python is None:
        raise BenchError(f"{script} needs the benchmark's own Python packages, which are not installed")
    command = [str(bench.python), str(_HERE / script), str(port), *arguments]
    process = Process(command, bench.folder / f"{log}.log", bench.cores.proxy)
    try:
        process.wait_for_port(port)
    except BenchError:
        process.close()
        raise
    return process


def _ext_proc(bench: Bench, upstream: int, log: str) -> Running:
    server_port = free_port()
    server = _python(bench, "ext_proc_server.py", server_port, [], f"{log}-server")
    ext_proc: Filter = {
        "name": "ext_proc",
        "typed_config": {
            "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "ext_proc"}, "timeout": "300s"},
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": "BUFFERED",
                "response_header_mode": "SKIP",
            },
            "message_timeout": "60s",
        },
    }
    protocol = {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    address = {"socket_address": {"address": "127.0.0.1", "port_value": server_port}}
    cluster: dict[str, Any] = {
        "name": "ext_proc",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "ext_proc",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol},
    }
    try:
        config = configs.with_filter(bench.base, [ext_proc], [cluster])
        running = _started(bench, config, upstream, log)
    except BenchError:
        server.close()
        raise
    return Running(running.port, [*running.processes, server])


def _reverse_proxy(bench: Bench, upstream: int, log: str) -> Running:
    port = free_port()
    return Running(port, [_python(bench, "reverse_proxy.py", port, [str(upstream)], log)])


def _transform() -> list[Filter]:
    request = {
        "headers_mutations": [{"remove": HEADER}],
        "body_transformation": {"body_format": {"json_format": {"priority": f"%REQ({HEADER})%"}}, "action": "MERGE"},
    }
    return [
        {
            "name": "envoy.filters.http.transform",
            "typed_config": {
                "@type": f"{_TYPES}.filters.http.transform.v3.TransformConfig",
                "request_transformation": request,
            },
        }
    ]


CONTENDERS: tuple[Contender, ...] = (
    Contender("a", "no filter", False, _envoy(lambda: [])),
    Contender("b", "header-only Lua", False, _envoy(lambda: [configs.lua_filter(configs.HEADER_ONLY)])),
    Contender("c", "vllm-priority", True, _envoy(None)),
    Contender("d", "Envoy transform", True, _envoy(_transform)),
    Contender(
        "e",
        "Lua decode/encode",
        True,
        _envoy(lambda: [configs.lua_filter((_HERE / "decode_encode.lua").read_text())]),
    ),
    Contender("f", "ext_proc, Python", True, _ext_proc, needs_python=True),
    Contender("g", "FastAPI + httpx", True, _reverse_proxy, needs_python=True),
)
