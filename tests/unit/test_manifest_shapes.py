"""The shapes of manifests that people have, each small and written by hand, and what the injector does with them."""

import base64
import json
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
import yaml

from control_plane.errors import CheckFailed
from control_plane.injector.admission import decide, read_review, review
from control_plane.injector.commands import invocations
from control_plane.injector.manifests import inject_stream, templates, uninject_stream
from control_plane.injector.reasons import Reason
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies

FOLDER = Path(__file__).parents[1] / "manifests"

# file -> for each sidecar its mode, role, vLLM's port and vLLM's port before; or the reasons why there is none
EXPECTED: Mapping[str, Sequence[tuple[str, str, int, int | None] | str]] = {
    "aibrix-storm-service": [("swap", "engine", 18001, 8000), ("swap", "engine", 18001, 8000)],
    "argo-rollout": [("swap", "engine", 18001, 8000)],
    "batch-beside-deployment": [("swap", "engine", 18001, 8000)],
    "cron-job": [("swap", "engine", 18001, 9000)],
    "custom-kinds-without-template": ["NoPodTemplate", "NoPodTemplate"],
    "frontend-module": [("swap", "engine", 18001, 8000)],
    "grpc-module": ["NotHttp"],
    "grpc-option": ["NotHttp"],
    "headless-worker": ["ServesNothing"],
    "host-network": ["HostNetwork"],
    "host-port": [("swap", "engine", 18001, 8000)],
    "https-probe": ["UpstreamTls"],
    "kserve-inference-service-pod": [("swap", "engine", 18001, 8080)],
    "kserve-llm-inference-service-tls": [("swap", "engine", 18001, 8000)],
    "kuberay-cluster": [("swap", "engine", 18001, 8000)],
    "launch-render": [("swap", "render", 18000, 8000)],
    "launch-tokens": [("swap", "engine", 18001, 8000)],
    "leader-worker-set": [("swap", "engine", 18001, 8080)],
    "leader-worker-set-one-template": ["LeaderUnknown"],
    "llm-d-modelservice": [("swap", "engine", 18001, 8200)],
    "low-port": [("takeover", "engine", 80, None)],
    "metrics-first": [("swap", "engine", 18001, 8000)],
    "metrics-first-without-option": [("swap", "engine", 18001, 8000)],
    "numeric-targets": [("swap", "engine", 18001, 8000)],
    "port-by-probe": [("swap", "engine", 18001, 8100)],
    "port-by-variable": [("swap", "engine", 18001, 8081)],
    "port-not-declared": ["PortUnknown"],
    "port-twice": [("swap", "engine", 18001, 8000)],
    "port-unknown": ["PortUnknown"],
    "positional-parameters": [("swap", "engine", 18001, 8000)],
    "production-stack-engine": [("swap", "engine", 18002, 8000)],
    "rust-frontend": [("swap", "engine", 18001, 8000)],
    "schemas-and-data": [],
    "serving-job": [("swap", "engine", 18001, 8000)],
    "several-ports-per-server": [("takeover", "engine", 8000, None)],
    "sglang": [("swap", "engine", 18001, 30000)],
    "shell-nested": [("takeover", "engine", 8000, None)],
    "shell-wrapped": [("swap", "engine", 18001, 8080)],
    "stateful-set": [("swap", "engine", 18001, 8000)],
    "tls-group": [("swap", "engine", 18001, 8000)],
    "tls-in-image": ["UpstreamTls"],
    "tls-items": [("swap", "engine", 18001, 8000)],
    "tls-mutual": ["UpstreamTls"],
    "tls-one-file": [("swap", "engine", 18001, 8000)],
    "tls-root-only": ["UpstreamTls"],
    "tls-secret": [("swap", "engine", 18001, 8000)],
    "tls-sub-path": [("swap", "engine", 18001, 8000)],
    "tls-two-folders": ["UpstreamTls"],
    "two-servers": ["PortUnknown"],
    "unix-socket": ["NotHttp"],
    "unknown-command": [("takeover", "engine", 8080, None)],
    "unknown-command-without-name": ["Unreachable"],
    "vllm-docs-deployment": [("swap", "engine", 18001, 8000)],
}


# file -> what its injection warns of, beside a guessed role
WARNINGS = {
    "aibrix-storm-service": ["PortGuessed"],
    "kserve-llm-inference-service-tls": ["LoopbackTls"],
    "low-port": ["NumericTargetsBypass"],
    "numeric-targets": ["PortGuessed"],
    "serving-job": ["PortGuessed"],
    "several-ports-per-server": ["NumericTargetsBypass"],
    "shell-nested": ["NumericTargetsBypass"],
    "tls-group": ["LoopbackTls"],
    "tls-items": ["LoopbackTls"],
    "tls-one-file": ["LoopbackTls"],
    "tls-secret": ["LoopbackTls"],
    "tls-sub-path": ["LoopbackTls"],
    "unknown-command": ["NumericTargetsBypass", "NeighborBypasses"],
}

SETTINGS = InjectorSettings(kubernetes_version="1.34")


def found(value: Any, key: str) -> list[Any]:
    """Every value of a key, wherever it is."""
    if isinstance(value, dict):
        below = [entry for entries in value.values() for entry in found(entries, key)]
        return ([value[key]] if key in value else []) + below
    return [entry for item in value for entry in found(item, key)] if isinstance(value, list) else []


def test_every_manifest_is_in_the_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_shape_is_injected_or_the_reason_is_named_and_uninject_gives_the_bytes_back(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    expected = EXPECTED[name]
    try:
        written, notes = inject_stream(text, Policies(), SETTINGS)
    except CheckFailed as error:
        written, notes = text, [str(error)]
    records = [json.loads(record) for record in found(list(yaml.safe_load_all(written)), "vllm-priority.io/injected")]
    sidecars = [(r["mode"], r["role"], r["upstreamPort"], r.get("portBefore")) for r in records]
    if expected and isinstance(expected[0], str):
        assert not sidecars
        assert sum(note.count(f"({reason})") for reason in set(expected) for note in notes) == len(expected), notes
    else:
        assert sidecars == expected
    assert uninject_stream(written)[0] == text


@pytest.mark.parametrize("name", [name for name, rows in EXPECTED.items() if rows and rows[0][0] == "swap"])
def test_in_mode_swap_the_sidecar_has_vllms_port_and_vllm_another_one(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    written, _ = inject_stream(text, Policies(), SETTINGS)
    documents = list(yaml.safe_load_all(written))
    records = [json.loads(record) for record in found(documents, "vllm-priority.io/injected")]
    containers = [entry for group in ("containers", "initContainers") for entries in found(documents, group)
                  for entry in entries]  # fmt: skip
    sidecars = [entry for entry in containers if entry["name"] == "vllm-priority"]
    assert len(sidecars) == len(records)
    for sidecar, record in zip(sidecars, records, strict=True):
        assert sidecar["ports"][0]["containerPort"] == record["portBefore"]
        vllm = next(entry for entry in containers if entry["name"] == record["container"])
        assert str(record["upstreamPort"]) in str(vllm.get("command", "")) + str(vllm.get("args", ""))
        # A hostPort stays where it was declared, and leads to the sidecar.
        declared = [port["containerPort"] for port in vllm.get("ports", ()) if "hostPort" not in port]
        assert record["portBefore"] not in declared
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            port = vllm.get(probe, {}).get("httpGet", {}).get("port", record["upstreamPort"])
            assert port == record["upstreamPort"], "a probe of vLLM still means vLLM"


def injected(command: str) -> str:
    text = f"""apiVersion: v1
kind: Pod
metadata: {{name: m}}
spec:
  containers:
    - name: vllm
      image: vllm/vllm-openai:v0.33.0
{command}
      ports: [{{name: http, containerPort: 8000}}]
"""
    written, _ = inject_stream(text, Policies(), InjectorSettings(kubernetes_version="1.34"))
    assert uninject_stream(written)[0] == text
    return written


def test_words_that_two_servers_share_change_once() -> None:
    script = """      command: [sh, -c, 'vllm serve "$@" || vllm serve "$@"', --]
      args: [m, --port, "8000"]"""
    (args, *_) = found(list(yaml.safe_load_all(injected(script))), "args")
    assert args[:3] == ["m", "--port", "18001"]


def test_a_server_that_loopback_does_not_reach_keeps_its_port() -> None:
    written = injected("      command: [vllm, serve, m, --host, $(POD_IP), --port, '8000']")
    (record, *_) = found(list(yaml.safe_load_all(written)), "vllm-priority.io/injected")
    assert json.loads(record)["mode"] == "takeover"


def test_the_new_port_is_not_one_that_the_pod_names_elsewhere() -> None:
    written = injected("      command: [vllm, serve, m]\n      env: [{name: KV, value: 'tcp://0.0.0.0:18001'}]")
    (record, *_) = found(list(yaml.safe_load_all(written)), "vllm-priority.io/injected")
    assert json.loads(record)["upstreamPort"] == 18002


@pytest.mark.parametrize(
    ("script", "changed"),
    [
        ("eval 'vllm serve m'", "eval 'vllm serve m --port 18001'"),
        ('eval "vllm serve "m" --port 8000"', 'eval "vllm serve "m" --port 18001"'),
        ("if true; then eval vllm serve m --port=8000; fi", "if true; then eval vllm serve m --port=18001; fi"),
        # These are words whose quotes and escapes are not understood, so nothing is replaced.
        ('eval "vllm serve m --port=\\"8000\\""', None),
        ("eval \"vllm serve m --port 80\"'00'", None),
        ('eval "vllm serve m --port \\$PORT"', None),
        # An eval that runs another is too intricate.
        ("eval eval vllm serve m", None),
        ("eval 'eval \"vllm serve m\"'", None),
        ("eval " * 3000 + "vllm serve m", None),
    ],
)
def test_a_command_that_eval_runs_is_read(script: str, changed: str | None) -> None:
    written = injected(f"      command: [bash, -c]\n      args: [{json.dumps(script)}]")
    (args, *_) = found(list(yaml.safe_load_all(written)), "args")
    (record, *_) = found(list(yaml.safe_load_all(written)), "vllm-priority.io/injected")
    assert args == [changed or script]
    assert json.loads(record)["mode"] == ("swap" if changed else "takeover")


def cpu_seconds(part: str, length: int) -> float:
    script = (part * length)[:length]
    started = time.process_time()
    for line in ((["sh", "-c"], [script]), ([script], []), (script.split(), [])):
        assert not any(server.understood for server in invocations(*line, "x", {}))
    return time.process_time() - started


@pytest.mark.parametrize(
    "part", ["eval ", "eval x;", "${", "$(a()", "if ", "<<", "vllm ", "vllm.entrypoints.", "vllm/entrypoints/", "x=1;"]
)
def test_a_hostile_script_is_read_in_a_time_that_grows_with_its_length(part: str) -> None:
    # Sixteen times the length takes sixteen times the time, or 256 times where the time grows with the square.
    short = min(cpu_seconds(part, 8_000) for _ in range(3))
    assert min(cpu_seconds(part, 128_000) for _ in range(3)) < 80 * max(short, 0.001)


def test_a_text_that_linux_would_not_start_is_not_read() -> None:
    assert invocations(["sh", "-c"], ["vllm serve m #" + "x" * 131_072], "x", {}) == ()


@pytest.mark.parametrize(
    ("command", "args", "variables"),
    [
        (["sh", "-c"], ["$@ " * 43_000, "x", *["a"] * 20_000], {}),
        (["x"], ["$(X)" * 16_000], {"X": "a" * 100_000}),
        (["sh", "-c"], ["v$X " * 30_000], {"X": "a" * 100_000}),
    ],
)
def test_what_a_small_pod_expands_to_is_bounded(command: list[str], args: list[str], variables: dict[str, str]) -> None:
    # Without a bound, each of them takes gigabytes.
    tracemalloc.start()
    try:
        assert not any(server.understood for server in invocations(command, args, "x", variables))
        assert tracemalloc.get_traced_memory()[1] < 100 * 1024**2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "chain", "key", "folder"),
    [
        ("tls-secret", "/tls/tls.crt", "/tls/tls.key", "/tls"),
        ("tls-one-file", "/data/tls/both.pem", "/data/tls/both.pem", "/data/tls"),
        ("tls-items", "/tls/server/tls.crt", "/tls/server/tls.key", "/tls"),
        ("tls-sub-path", "/tls/tls.crt", "/tls/tls.key", "/tls"),
    ],
)
def test_a_server_with_https_gets_a_sidecar_with_the_same_certificate(
    name: str, chain: str, key: str, folder: str
) -> None:
    written, _ = inject_stream((FOLDER / f"{name}.yaml").read_text(), Policies(), SETTINGS)
    pod = yaml.safe_load(written)
    sidecar = next(c for c in pod["spec"]["initContainers"] if c["name"] == "vllm-priority")
    config = yaml.safe_load(sidecar["args"][1].replace("$$", "$"))
    (resource,) = json.loads(pod["metadata"]["annotations"]["vllm-priority.io/certificate"])["resources"]
    assert resource["tls_certificate"] == {
        "certificate_chain": {"filename": chain},
        "private_key": {"filename": key},
        "watched_directory": {"path": folder},
    }
    mounted = {mount["mountPath"]: mount for mount in sidecar["volumeMounts"]}
    assert all(mount["readOnly"] for mount in mounted.values())
    (item,) = next(v for v in pod["spec"]["volumes"] if v["name"] == "vllm-priority-certificate")["downwardAPI"][
        "items"
    ]
    assert item["fieldRef"]["fieldPath"] == "metadata.annotations['vllm-priority.io/certificate']"
    (path,) = [entry["path"] for entry in found(config, "path_config_source")]
    assert path == f"/etc/vllm-priority/{item['path']}"
    assert mounted["/etc/vllm-priority"]["name"] == "vllm-priority-certificate"
    vllm = pod["spec"]["containers"][0]["volumeMounts"][0]
    assert mounted[vllm["mountPath"]] == {**vllm, "readOnly": True}
    upstream = next(c for c in config["static_resources"]["clusters"] if c["name"] == "upstream")
    assert upstream["transport_socket"]["name"] == "envoy.transport_sockets.tls"


def pods(name: str) -> list[dict[str, Any]]:
    """The pod templates of a file, with the label, as the webhook gets them from a controller."""
    documents = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
    found = [dict(pod) for document in documents for _, pod in templates(document) if "kind" in document]
    for pod in found:
        metadata = pod.get("metadata") or {}
        pod["metadata"] = {**metadata, "labels": {**metadata.get("labels", {}), "vllm-priority.io/inject": "true"}}
    return found


# The label asks for a sidecar in any container, so these files have no result of their own for the webhook.
NOT_FOR_THE_WEBHOOK = ("custom-kinds-without-template", "schemas-and-data")


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in NOT_FOR_THE_WEBHOOK])
def test_the_webhook_does_the_same_and_rejects_what_its_owner_can_change(name: str) -> None:
    results: list[Any] = []
    warned: set[str] = set()
    for pod in pods(name):
        request = {"uid": "1", "operation": "CREATE", "namespace": "ml", "kind": {"kind": "Pod"}, "object": pod}
        sent = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        mutation = decide(read_review(sent), Policies(), SETTINGS)
        assert mutation
        response = review("1", mutation)["response"]
        assert response["allowed"] is not mutation.rejected
        if mutation.reason:
            assert mutation.rejected is mutation.reason.user_error
            results.append(mutation.reason.code)
            said = [*response.get("warnings", ()), response.get("status", {}).get("message", "")]
            assert any(f"not injected ({mutation.reason.code}): " in text for text in said)
            continue
        changed = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
        record = json.loads(changed["metadata"]["annotations"]["vllm-priority.io/injected"])
        results.append((record["mode"], record["role"], record["upstreamPort"], record.get("portBefore")))
        warned |= {warning.code.value for warning in mutation.warnings if results[-1] in EXPECTED[name]}
    assert warned - {"RoleGuessed"} == set(WARNINGS.get(name, ()))
    expected = EXPECTED[name]
    # Beside vLLM, a file may have a batch run, a router, or Ray's workers.
    assert [result for result in results if result in expected] == expected
    others = [result for result in results if result not in expected]
    no_server = (Reason.SERVES_NOTHING.code, Reason.UNREACHABLE.code)
    assert all(result in no_server or result[0] == "takeover" for result in others), others


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(30, 38)])
def test_kubernetes_accepts_every_shape_of_its_own_kinds(version: str) -> None:
    for name in EXPECTED:
        try:
            written, _ = inject_stream((FOLDER / f"{name}.yaml").read_text(), Policies(), SETTINGS)
        except CheckFailed:
            continue
        for document in yaml.safe_load_all(written):
            if document["apiVersion"] in ("v1", "apps/v1", "batch/v1"):
                kubernetes_validate.validate(document, version, strict=True)
