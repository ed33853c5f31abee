"""The control plane's benchmark: how fast it answers, how many sidecars it carries, what a change does to requests.

    python tests/bench/serve.py               all of it, about 5 minutes
    python tests/bench/serve.py --quick       a look, about a minute; its figures are not for quoting
    python tests/bench/serve.py --only fleet  parts by name

Parts: answers (beside `sovereign`, a control plane from PyPI, in turns), fleet (10,000 simulated sidecars against one
process), change (a policy change under load through a real Envoy), webhook (16 reviews at a time, over TLS).
Prints a table, and writes it with results.json to the output folder.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
import venv
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import BenchError, Cores, Process, find_envoy, free_port, pinned, start_envoy

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]

PARTS = ("answers", "fleet", "change", "webhook")
SOVEREIGN = "sovereign==0.32"
ECDS = "/v3/discovery:extension_configs"
LDS = "/v3/discovery:listeners"
LISTENER = "type.googleapis.com/envoy.config.listener.v3.Listener"

ROUNDS, SECONDS = 3, 2.0
"""Of the answers part: rounds in turn, and seconds of each."""

SIDECARS, PERIOD = 10_000, 5.0
WARM_SECONDS, STEADY_SECONDS, CHANGE_SECONDS = 25.0, 30.0, 20.0
CHANGES = 3
REVIEWS, AT_ONCE = 3000, 16

Results = dict[str, Any]


class Run:
    """Folders, cores and the request that a real Envoy makes."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder = folder
        self.quick = quick
        self.cores = Cores()
        self.envoy = find_envoy()
        folder.mkdir(parents=True, exist_ok=True)
        self.policy = folder / "policy.yaml"
        self.set_default(1)
        say("capturing what Envoy sends in a poll")
        self.poll = captured_poll(self)

    def set_default(self, value: int) -> None:
        """Change the policy at once, as a mounted ConfigMap changes."""
        new = self.policy.with_suffix(".new")
        new.write_text(f"default: {value}\n")
        new.rename(self.policy)

    @contextmanager
    def control_plane(self, **settings: object) -> Iterator[tuple[Process, int]]:
        """Ours, in a process of its own on the proxy's core; gives it and its port."""
        port = free_port()
        code = (
            "from pathlib import Path, PosixPath\nfrom control_plane.server.process import serve\n"
            "from control_plane.server.settings import ServeSettings\nfrom control_plane.address import Address\n"
            f"serve(ServeSettings(policy={self.policy!r}, listen=Address('127.0.0.1', {port}), **{settings!r}))"
        )
        with Process([sys.executable, "-c", code], self.folder / "control_plane.log", self.cores.proxy) as process:
            process.wait_for_port(port, 60)
            yield process, port

    def client(self, plan: dict[str, Any], process: Process | None = None) -> dict[str, Any]:
        """Run polling.py on the load's core. With `process`, the server's CPU and memory are added to the result."""
        command = pinned(self.cores.load, [sys.executable, str(_HERE / "polling.py")])
        before = process.cpu_seconds() if process else 0.0
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(json.dumps(plan))
            client.stdin.close()
            clocks: dict[str, float] = {}
            for line in client.stdout:
                message = json.loads(line)
                if "begins" in message:
                    clocks[message["begins"]] = process.cpu_seconds() if process else 0.0
                    say(f"  {message['begins']}")
                    if message["begins"] == plan.get("change_at"):
                        self.set_default(plan["change_to"])
                else:
                    result: dict[str, Any] = message["result"]
        if process:
            after = process.cpu_seconds()
            result |= {"cpu": after - before, "memory": process.memory(), "peak_memory": process.peak_memory()}
            for name, end in zip(clocks, [*list(clocks.values())[1:], after], strict=False):
                result["parts"][name]["cpu"] = end - clocks[name]
        return result


def say(line: str) -> None:
    """Progress, on stderr: stdout is the table's."""
    print(line, file=sys.stderr, flush=True)


def captured_poll(run: Run) -> str:
    """The body of a poll of Envoy's for its filter, with `@node@` in place of the node id."""
    from control_plane.address import Address
    from control_plane.policy.model import Policy
    from control_plane.render.bootstrap import bootstrap
    from control_plane.render.placement import Placement

    with socket.create_server(("127.0.0.1", 0)) as server:
        listen, admin = Address("127.0.0.1", free_port()), Address("127.0.0.1", free_port())
        placement = Placement(
            "render", listen, Address("127.0.0.1", 9), admin, node_id="@node@", labels={"app": "vllm"},
            control_plane=Address("127.0.0.1", server.getsockname()[1]), refresh_seconds=0.2,
        )  # fmt: skip
        config = bootstrap(Policy(), placement)
        with start_envoy(run.envoy, config, "captured", listen.port, run.folder, None):
            server.settimeout(10)
            connection, _ = server.accept()
            with connection:
                connection.settimeout(10)
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(65536)
                head, _, body = data.partition(b"\r\n\r\n")
                length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
                while len(body) < length:
                    body += connection.recv(65536)
    text = body.decode()
    if text.count("@node@") != 1:
        raise BenchError("Envoy's poll does not name its node once: the benchmark has to be brought up to date")
    return text


def small_poll(type_url: str) -> str:
    """The least that both control planes take."""
    node = {
        "id": "@node@", "cluster": "c", "metadata": {"role": "render", "labels": {"app": "vllm"}},
        "user_agent_build_version": {"version": {"major_number": 1, "minor_number": 40}},
    }  # fmt: skip
    return json.dumps({"node": node, "type_url": type_url}, separators=(",", ":"))


# answers


@contextmanager
def sovereign(run: Run, name: str, resources: list[dict[str, Any]]) -> Iterator[tuple[Process, int]]:
    """The peer on one worker, with the resources as a ready Python object: its fastest kind of template."""
    python = _ROOT / ".cache" / "sovereign" / "bin" / "python"
    if not (python.parent / "sovereign").exists():
        say(f"installing {SOVEREIGN} into .cache/sovereign")
        venv.create(python.parents[1], with_pip=True)
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", SOVEREIGN])
        if done.returncode:
            raise BenchError(f"{SOVEREIGN} cannot be installed: see pip's message above")
    template = run.folder / f"sovereign_{name}.py"
    template.write_text(
        f"import json\n_RESOURCES = json.loads({json.dumps(resources)!r})\ndef call(**kwargs):\n    return _RESOURCES\n"
    )
    config = run.folder / f"sovereign_{name}.yaml"
    spec = {"type": "listeners", "spec": {"protocol": "python", "path": str(template)}}
    config.write_text(json.dumps({"templates": {"default": [spec]}}))
    port = free_port()
    environment = {
        **os.environ, "SOVEREIGN_CONFIG": f"file://{config}", "SOVEREIGN_PORT": str(port), "SOVEREIGN_WORKERS": "1",
        "SOVEREIGN_HOST": "127.0.0.1",
    }  # fmt: skip
    log = run.folder / f"sovereign_{name}.log"
    with Process([str(python.parent / "sovereign")], log, run.cores.proxy, env=environment) as process:
        process.wait_for_port(port, 60)
        # gunicorn's child is the one that answers.
        end = time.monotonic() + 30
        while not (children := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
            if time.monotonic() > end:
                raise BenchError("sovereign has started no worker: see its log in the output folder")
            time.sleep(0.1)
        group, process.pid = process.pid, int(children[0])
        try:
            yield process, port
        finally:
            process.pid = group


def answers(run: Run) -> Results:
    """Answers per second of one core, changed and unchanged, to Envoy's own poll and to a small one."""
    from control_plane.policy.load import load_policies
    from control_plane.render.listener import listeners
    from control_plane.render.placement import Placement

    policy = load_policies(run.policy).default
    ours_as_served = [{"@type": LISTENER, **resource} for resource in listeners(policy, Placement.default("render"))]
    tiny = [{"@type": LISTENER, "name": "tiny", "address": {"socket_address": {"address": "::", "port_value": 80}}}]
    lds_poll = run.poll.replace("envoy.config.core.v3.TypedExtensionConfig", "envoy.config.listener.v3.Listener")
    lds_poll = lds_poll.replace('"resource_names":["vllm_priority"],', "")
    polls = {"envoy": (lds_poll, run.poll), "small": (small_poll(LISTENER), small_poll(""))}
    rounds, seconds = (1, 1.0) if run.quick else (ROUNDS, SECONDS)
    rates: dict[str, list[float]] = {}
    walls: dict[str, list[float]] = {}
    with (
        run.control_plane() as ours,
        sovereign(run, "same", ours_as_served) as same,
        sovereign(run, "tiny", tiny) as least,
    ):
        servers = {
            "ours": (*ours, LDS),
            "sovereign": (*same, LDS),
            "sovereign_tiny": (*least, LDS),
            "ecds": (*ours, ECDS),
        }
        for number in range(rounds):
            for poll, (lds, ecds) in polls.items():
                for name, (process, port, path) in servers.items():
                    body = ecds if path == ECDS else lds
                    version = asked_version(port, path, body)
                    for case, held in (("unchanged", version), ("changed", "")):
                        say(f"answers: round {number + 1} of {rounds}, {poll} poll, {case}, {name}")
                        plan = {"port": port, "path": path, "body": body, "version": held, "connections": 8}
                        result = run.client(plan | {"seconds": seconds}, process)
                        wanted = {"unchanged": "304", "changed": "200"}[case]
                        if result["failed"] or set(result["statuses"]) != {wanted}:
                            raise BenchError(f"{name} answers {result['statuses']} where {wanted} is right")
                        key = f"{poll}/{case}/{name}"
                        rates.setdefault(key, []).append(result["answered"] / result["cpu"])
                        walls.setdefault(key, []).append(result["answered"] / result["elapsed"])
        say("answers: sidecars that were never seen before")
        plan = {
            "port": ours[1],
            "path": ECDS,
            "body": run.poll,
            "connections": 8,
            "requests": 500 if run.quick else 4000,
        }
        first = run.client(plan, ours[0])
    median = {key: statistics.median(values) for key, values in rates.items()}
    return {
        "per_core_second": median,
        "per_second": {key: statistics.median(values) for key, values in walls.items()},
        "rounds": rates,
        "first_sight": first["answered"] / first["cpu"],
        "poll_bytes": {name: len(pair[0]) for name, pair in polls.items()},
        "ratio": {
            f"{poll}/{case}/{peer}": median[f"{poll}/{case}/ours"] / median[f"{poll}/{case}/{peer}"]
            for poll in polls
            for case in ("unchanged", "changed")
            for peer in ("sovereign", "sovereign_tiny")
        },
    }


def asked_version(port: int, path: str, body: str) -> str:
    """The version that a server gives to a sidecar that has none."""
    import httpx

    answer = httpx.post(
        f"http://127.0.0.1:{port}{path}", content=body.replace("@node@", "n"), timeout=30, trust_env=False,
        headers={"content-type": "application/json"},
    )  # fmt: skip
    if answer.status_code != 200:
        raise BenchError(f"port {port} answers {answer.status_code} to a poll: {answer.text[:200]}")
    return str(answer.json()["version_info"])


# fleet


def fleet(run: Run) -> Results:
    """Sidecars with connections of their own, each polling at its own time; then a change of policy."""
    count = 1000 if run.quick else SIDECARS
    warm, steady, change = (6, 6, 8) if run.quick else (WARM_SECONDS, STEADY_SECONDS, CHANGE_SECONDS)
    run.set_default(1)
    say(f"fleet: {count} sidecars, each polling every {PERIOD:g} s")
    with run.control_plane() as (process, port):
        plan = {
            "port": port, "path": ECDS, "body": run.poll, "connections": count, "period": PERIOD,
            "parts": [("first polls", warm), ("steady", steady), ("change", change)],
            "change_at": "change", "change_to": 2,
        }  # fmt: skip
        result = run.client(plan, process)
    for part in result["parts"].values():
        part["cpu_share"] = part["cpu"] / part["elapsed"]
    taken = result["parts"]["change"].pop("taken")
    for part in result["parts"].values():
        part.pop("taken", None)
    result["change_reached"] = len(taken)
    result["change_seconds"] = {"half": taken[len(taken) // 2], "all": taken[-1]} if taken else {}
    return result | {"sidecars": count, "period": PERIOD}


# change


class Echo:
    """An upstream that answers with the id and the priority of what it got."""

    def __init__(self) -> None:
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
                body = json.loads(await reader.readexactly(length))
                answer = json.dumps({"id": body["id"], "priority": body.get("priority")}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(answer), answer)
                )
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()


def change(run: Run) -> Results:
    """Changes under load through a real Envoy that polls every 5 s, the default."""
    return asyncio.run(_change(run))


async def _change(run: Run) -> Results:
    from control_plane.address import Address
    from control_plane.policy.model import Policy
    from control_plane.render.bootstrap import bootstrap
    from control_plane.render.placement import Placement

    changes = 1 if run.quick else CHANGES
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    upstream = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    listen, admin = Address("127.0.0.1", free_port()), Address("127.0.0.1", free_port())
    run.set_default(1)
    wrong: list[str] = []
    priorities: Counter[int | None] = Counter()
    newest, stop = [0.0, 0], False

    async def client(number: int) -> None:
        """Requests one after another on one connection; each answer must be its own."""
        reader, writer = await asyncio.open_connection(listen.host, listen.port)
        count = 0
        while not stop:
            count += 1
            name = f"{number}-{count}"
            body = json.dumps({"id": name}).encode()
            writer.write(
                b"POST /v1/chat/completions/render HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
                length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
                answer = json.loads(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError, TypeError) as error:
                wrong.append(f"{name}: {error!r}")
                reader, writer = await asyncio.open_connection(listen.host, listen.port)
                continue
            if not head.startswith(b"HTTP/1.1 200 ") or answer.get("id") != name:
                wrong.append(f"{name}: {head[:40]!r} {answer}")
                continue
            priorities[answer["priority"]] += 1
            if answer["priority"] is not None and answer["priority"] > newest[1]:
                newest[:] = time.monotonic(), answer["priority"]
            await asyncio.sleep(0.01)
        writer.close()

    def polls(port: int) -> int:
        import httpx

        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        found = re.findall(r'requests_total\{result="[a-z_]+",type="extension_configs"\} (\d+)', text)
        return sum(int(count) for count in found)

    times: list[float] = []
    polled: list[int] = []
    with run.control_plane() as (_, port):
        placement = Placement(
            "render", listen, upstream, admin, node_id="bench", control_plane=Address("127.0.0.1", port),
            access_log="/dev/null",
        )  # fmt: skip
        config = bootstrap(Policy(), placement)
        with start_envoy(run.envoy, config, "change", listen.port, run.folder, run.cores.proxy):
            clients = [asyncio.create_task(client(number)) for number in range(16)]
            await _until(lambda: newest[1] == 1, 30)
            connections = echo.connections
            for value in range(2, 2 + changes):
                say(f"change: {value - 1} of {changes}, {sum(priorities.values())} requests so far, {len(wrong)} wrong")
                await asyncio.sleep(1)
                before, began = await asyncio.to_thread(polls, port), time.monotonic()
                run.set_default(value)
                await _until(lambda value=value: newest[1] == value, 60)
                times.append(newest[0] - began)
                polled.append(await asyncio.to_thread(polls, port) - before)
            stop = True
            await asyncio.gather(*clients)
    server.close()
    return {
        "changes": changes,
        "requests": sum(priorities.values()),
        "failed_or_misrouted": len(wrong),
        "wrong": wrong[:10],
        "by_priority": {str(priority): count for priority, count in sorted(priorities.items(), key=str)},
        "in_force_seconds": times,
        "in_force_polls": polled,
        "new_upstream_connections": echo.connections - connections,
        "refresh_seconds": placement.refresh_seconds,
    }


async def _until(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise BenchError("the new policy does not come into force: see the logs in the output folder")
        await asyncio.sleep(0.005)


# webhook


def webhook(run: Run) -> Results:
    """Admission reviews over TLS on kept connections, as the API server sends them."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=bench", "-keyout", run.folder / "tls.key", "-out", run.folder / "tls.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = free_port()
    code_settings = {"tls_cert": run.folder / "tls.crt", "tls_key": run.folder / "tls.key"}
    say(f"webhook: {AT_ONCE} reviews at a time")
    with run.control_plane(**code_settings, tls_listen=_Literal(f"Address('127.0.0.1', {tls})")) as (process, _):
        process.wait_for_port(tls)
        plan: dict[str, Any] = {
            "port": tls, "tls": True, "path": "/inject", "body": json.dumps(_review()), "connections": AT_ONCE,
            "requests": 300 if run.quick else REVIEWS,
        }  # fmt: skip
        run.client(plan | {"requests": 200})
        result = run.client(plan, process)
    if set(result["statuses"]) != {"200"} or result["failed"]:
        raise BenchError(f"the webhook answers {result['statuses']}: see the logs in the output folder")
    return result | {"at_once": AT_ONCE, "review_bytes": len(plan["body"])}


class _Literal:
    """Stands for itself in the code of the control plane's process."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __repr__(self) -> str:
        return self._code


def _review() -> dict[str, Any]:
    """The review of a pod of a Deployment, with what a cluster adds to it."""
    mounts = [{"name": f"volume-{number}", "mountPath": f"/mnt/{number}"} for number in range(6)]
    environment = [{"name": f"VLLM_SETTING_{number}", "value": "x" * 40} for number in range(30)]
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
    container = {
        "name": "vllm", "image": "vllm/vllm-openai:v0.33.0",
        "command": ["vllm", "launch", "render", "model", "--port", "8000"],
        "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
        "env": environment, "volumeMounts": mounts, "readinessProbe": probe, "livenessProbe": probe,
        "resources": {"limits": {"cpu": "4", "memory": "8Gi"}},
    }  # fmt: skip
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "generateName": "vllm-render-6d4cf56db6-",
            "labels": {"app": "vllm", "pod-template-hash": "6d4cf56db6", "vllm-priority.io/inject": "true"},
        },
        "spec": {
            "containers": [container], "volumes": [{"name": m["name"], "emptyDir": {}} for m in mounts],
            "serviceAccountName": "default", "terminationGracePeriodSeconds": 30, "restartPolicy": "Always",
        },
    }  # fmt: skip
    request = {
        "uid": "@node@", "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"}, "operation": "CREATE", "namespace": "ml",
        "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"}, "object": pod,
        "dryRun": False, "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }  # fmt: skip
    return {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}


# the table


def table(results: Results) -> str:
    """All that was measured, as Markdown."""
    parts = [
        f"{results['machine']}; {results['envoy']}; {results['python']}; {results['cores']}; "
        f"load average {results['load_before'][0]:.1f} before, {results['load_after'][0]:.1f} after"
    ]
    if found := results.get("answers"):
        rows = []
        for poll in ("envoy", "small"):
            for case in ("unchanged", "changed"):
                rate = {name: found["per_core_second"][f"{poll}/{case}/{name}"] for name in _NAMES}
                ratio = found["ratio"]
                size = f"{poll}, {found['poll_bytes'][poll]:,} bytes"
                rows.append(
                    [
                        size, case, *(f"{rate[name]:,.0f}" for name in _NAMES),
                        f"{ratio[f'{poll}/{case}/sovereign']:.1f}", f"{ratio[f'{poll}/{case}/sovereign_tiny']:.1f}",
                    ]
                )  # fmt: skip
        head = ["poll", "answer", *_NAMES.values(), "times sovereign", "times sovereign, tiny"]
        parts.append("Answers per second of one core, medians of rounds in turn:\n\n" + _markdown(head, rows))
        parts.append(f"Sidecars never seen before: {found['first_sight']:,.0f} answers per second of one core.")
    if found := results.get("fleet"):
        rows = [
            [
                name, f"{part['answered']:,}", f"{part['answered'] / part['elapsed']:,.0f}",
                str(part["failed"] + part["late"]), f"{part['p50_ms']:.1f}", f"{part['p99_ms']:.1f}",
                f"{part['max_ms']:.1f}", f"{part['cpu_share']:.0%}",
            ]
            for name, part in found["parts"].items()
        ]  # fmt: skip
        head = ["part", "answers", "per second", "failed or late", "p50 ms", "p99 ms", "max ms", "CPU of one core"]
        parts.append(
            f"{found['sidecars']:,} sidecars, each polling every {found['period']:g} s, one process, "
            f"{found['peak_memory'] / 2**20:.0f} MiB at most:\n\n{_markdown(head, rows)}"
        )
        if reached := found["change_seconds"]:
            parts.append(
                f"The change reached half of them after {reached['half']:.1f} s and all {found['change_reached']:,} "
                f"after {reached['all']:.1f} s."
            )
    if found := results.get("change"):
        times = ", ".join(f"{seconds:.1f} s" for seconds in found["in_force_seconds"])
        polls = ", ".join(str(count) for count in found["in_force_polls"])
        parts.append(
            f"{found['changes']} changes under load through Envoy, which polls every {found['refresh_seconds']:g} s "
            f"and up to as much again: {found['requests']:,} requests, {found['failed_or_misrouted']} failed or "
            f"misrouted, {found['new_upstream_connections']} connections opened anew. In force after {times}; "
            f"polls: {polls}."
        )
    if found := results.get("webhook"):
        parts.append(
            f"Webhook over TLS, {found['at_once']} at once, {found['answered']:,} reviews of {found['review_bytes']:,} "
            f"bytes: p50 {found['p50_ms']:.1f} ms, p99 {found['p99_ms']:.1f} ms, max {found['max_ms']:.1f} ms, "
            f"{found['answered'] / found['elapsed']:,.0f} per second."
        )
    return "\n\n".join(parts) + "\n"


_NAMES = {
    "ours": "vllm-priority, listener",
    "ecds": "vllm-priority, filter",
    "sovereign": "sovereign, same listener",
    "sovereign_tiny": "sovereign, tiny listener",
}


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> int:
    """0, or 2 where the benchmark cannot run."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="a look; its figures are not for quoting")
    arguments.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    arguments.add_argument("-o", "--output", type=Path, default=_ROOT / ".cache" / "bench-control-plane")
    options = arguments.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        print(f"serve.py: --only: {unknown.pop()!r} is unknown; allowed: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        run = Run(options.output, options.quick)
        version = subprocess.run([run.envoy, "--version"], capture_output=True, text=True).stdout
        results: Results = {
            "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.machine()}",
            "python": f"Python {platform.python_version()}",
            "envoy": f"Envoy {found[1]}" if (found := re.search(r"/(\d+\.\d+\.\d+)/", version)) else "Envoy",
            "cores": str(run.cores),
            "quick": options.quick,
            "load_before": os.getloadavg(),
        }
        for name in chosen:
            results[name] = {"answers": answers, "fleet": fleet, "change": change, "webhook": webhook}[name](run)
    except BenchError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    results["load_after"] = os.getloadavg()
    (options.output / "results.json").write_text(json.dumps(results, indent=1))
    text = table(results)
    (options.output / "table.md").write_text(text)
    print(text)
    say(f"{time.monotonic() - began:.0f} s; results.json and table.md are in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
