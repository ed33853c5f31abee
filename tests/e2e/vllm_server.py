"""Runs a real vLLM server as a child process, for as long as a `with` block lasts."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

MODEL_NAME = "tiny"
START_SECONDS = 600
"""How long a server may take to come up: 20 to 60 s where two cores do little else, minutes where they are busy."""

# vLLM's engine waits by os.sched_yield in a loop. With two cores that starves every other process for seconds, so that
# what a test sends arrives in another order than it was sent in. A short sleep there costs the tests nothing. It is
# in the harness alone: it changes nothing about how vLLM schedules.
SITECUSTOMIZE = """\
import os
import time

os.sched_yield = lambda: time.sleep(2e-5)
"""


def render_arguments(model: Path) -> tuple[str, ...]:
    """A render server: it tokenizes, and has no engine."""
    return ("launch", "render", str(model))


def engine_arguments(model: Path, *, scale_out: bool = True) -> tuple[str, ...]:
    """An engine with one slot, so that the order of completion is the order of its queue."""
    always = (
        "serve", str(model), "--scheduling-policy", "priority", "--max-num-seqs", "1", "--max-model-len", "4096",
        "--enforce-eager", "--dtype", "bfloat16",
    )  # fmt: skip
    return (*always, "--enable-scale-out") if scale_out else always


class VllmServer:
    """One `vllm` command; its output goes to vllm.log in `folder`. `url` answers once it is healthy."""

    def __init__(self, vllm: Path, arguments: Sequence[str], folder: Path) -> None:
        self._folder = folder
        self.log = folder / "vllm.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        own = ("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port))
        self._command = (str(vllm / "bin" / "vllm"), *arguments, *own)

    def __enter__(self) -> Self:
        (self._folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._folder),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("wb") as out:
            # A session of its own, so that the engine's worker process ends with it.
            self._child = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=15)

    def wait_until_healthy(self) -> None:
        """Returns once GET /health says 200; RuntimeError with the end of the log where it does not come to that."""
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self._child.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self._child.returncode} before it was ready:\n{self.log_tail()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"vLLM was not ready after {START_SECONDS} s:\n{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of what the server printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def running(*servers: VllmServer) -> Iterator[tuple[VllmServer, ...]]:
    """Starts all of them at once, then waits for each: start-up is mostly imports."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        for server in servers:
            server.wait_until_healthy()
        yield servers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
