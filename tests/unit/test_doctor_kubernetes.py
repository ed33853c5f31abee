"""The doctor's examination of a cluster, against a server that responds like the Kubernetes API.

The pods are injected by the injector itself. As in a real list, items have neither kind nor apiVersion.
"""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.cli import main
from control_plane.doctor.kubernetes import Finding, examine_objects
from control_plane.injector.admission import decide, read_review
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.load import parse_policies
from tests.kubernetes_api import Api, running_api, write_certificate

LABEL = {"vllm-priority.io/inject": "true"}
POLICIES, SETTINGS = parse_policies("{}"), InjectorSettings(kubernetes_version="1.35")
LISTS = {
    "Pod": "/api/v1/pods", "Service": "/api/v1/services",
    "Deployment": "/apis/apps/v1/deployments", "StatefulSet": "/apis/apps/v1/statefulsets",
    "DaemonSet": "/apis/apps/v1/daemonsets", "Job": "/apis/batch/v1/jobs", "CronJob": "/apis/batch/v1/cronjobs",
    "LeaderWorkerSet": "/apis/leaderworkerset.x-k8s.io/v1/leaderworkersets",
    "InferencePool": "/apis/inference.networking.k8s.io/v1/inferencepools",
    "InferencePool (alpha)": "/apis/inference.networking.x-k8s.io/v1alpha2/inferencepools",
}  # fmt: skip


def bare_pod(name: str = "llm-1", labels: Any = LABEL, annotations: Any = None, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "vllm", "image": "vllm/vllm-openai", "command": ["vllm", "serve", "m"],
        "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
    }  # fmt: skip
    metadata = {"name": name, "namespace": "ml", "labels": {"app": "llm", **labels}, "annotations": annotations or {}}
    return {"metadata": metadata, "spec": {"containers": [container], **spec}, "status": {"phase": "Running"}}


def pod(name: str = "llm-1", mode: str = "takeover", **changes: Any) -> dict[str, Any]:
    """A pod as it runs after the webhook has reviewed it."""
    asked = bare_pod(name, annotations={"vllm-priority.io/mode": mode, "vllm-priority.io/role": "engine"}, **changes)
    request = {
        "uid": "1", "kind": {"kind": "Pod"}, "namespace": "ml", "operation": "CREATE", "object": copy.deepcopy(asked),
    }  # fmt: skip
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    mutation = decide(read_review(review), POLICIES, SETTINGS)
    assert mutation
    return dict(mutation.pod)


def service(*ports: Any, name: str = "llm", **spec: Any) -> dict[str, Any]:
    entries = [{"name": f"p{n}", "port": 80, "protocol": "TCP", "targetPort": port} for n, port in enumerate(ports)]
    return {
        "metadata": {"name": name, "namespace": "ml"},
        "spec": {"selector": {"app": "llm"}, "clusterIP": "10.0.0.1", "ports": entries, **spec},
    }


def deployment(labels: Any = LABEL, own_labels: Any = None) -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": "llm", **labels}}, "spec": bare_pod()["spec"]}
    return {
        "metadata": {"name": "llm", "namespace": "ml", "labels": own_labels or {}},
        "spec": {"selector": {"matchLabels": {"app": "llm"}}, "template": template},
    }


def found(kind: str, *pods: Any, **objects: Any) -> Finding:
    """The one finding about this kind."""
    (finding,) = (f for f in examine_objects({"Pod": pods, **objects}) if f.kind == kind)
    return finding


# ---- Services and InferencePools -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "target", "verdict", "seen"),
    [
        ("takeover", "http", "ok", "Requests pass the sidecar."),
        ("takeover", 18001, "ok", "Requests pass the sidecar."),
        ("takeover", 8000, "lost", "It targets 8000, which is vLLM's own port"),
        ("takeover", "app-8000", "lost", "It targets app-8000, which is vLLM's own port"),
        ("takeover", 9090, "warn", "It targets 9090, which is neither vLLM's port nor the sidecar's."),
        ("takeover", "metrics", "warn", "It targets metrics, which is neither vLLM's port nor the sidecar's."),
        ("takeover", "priority-ready", "warn", "It targets priority-ready, which is neither"),
        ("redirect", 8000, "ok", "Requests pass the sidecar."),
        ("redirect", "http", "ok", "Requests pass the sidecar."),
        ("port", "http", "lost", "It targets http, which is vLLM's own port"),
        ("port", "vllm-priority", "ok", "Requests pass the sidecar."),
    ],
)
def test_a_service_is_examined_by_its_target_port(mode: str, target: Any, verdict: str, seen: str) -> None:
    finding = found("Service", pod(mode=mode), Service=[service(target)])
    assert (finding.verdict, finding.seen[: len(seen)]) == (verdict, seen)
    assert bool(finding.next_step) == (verdict == "lost")


def test_a_service_port_without_a_target_targets_its_own_number() -> None:
    assert found("Service", pod(), Service=[service(ports=[{"port": 8000}])]).verdict == "lost"


def test_all_reasons_why_a_service_loses_priorities_are_named() -> None:
    finding = found("Service", pod("a"), bare_pod("b"), Service=[service(8000)])
    assert finding.seen.startswith("1 of the 2 pods that it selects have no sidecar. It targets 8000, ")
    assert finding.next_step.startswith("Restart the pods that have none. Set targetPort to 'http', ")


def test_one_port_that_bypasses_is_enough() -> None:
    finding = found("Service", pod(), Service=[service("http", 8000)])
    assert finding.seen.startswith("It targets 8000,")
    assert finding.next_step == (
        "Set targetPort to 'http', or restart the pods with the annotation vllm-priority.io/mode: redirect."
    )


def test_a_service_that_selects_a_pod_without_a_sidecar_loses_priorities() -> None:
    finding = found("Service", pod("a"), bare_pod("b", labels={}), Service=[service("http")])
    assert (finding.verdict, finding.seen) == ("lost", "1 of the 2 pods that it selects have no sidecar.")


@pytest.mark.parametrize(("mode", "verdict"), [("takeover", "warn"), ("swap", "ok"), ("redirect", "ok")])
def test_clients_of_a_headless_service_choose_the_port(mode: str, verdict: str) -> None:
    finding = found("Service", pod(mode=mode), Service=[service("http", clusterIP="None")])
    assert finding.verdict == verdict
    assert ("Let the clients use port 18001." in finding.next_step) == (verdict == "warn")


@pytest.mark.parametrize(
    "other",
    [
        service("http", selector={"app": "web"}),
        service("http", selector=None),
        {**service("http"), "metadata": {"name": "llm", "namespace": "other"}},
    ],
)
def test_services_of_other_pods_are_left_out(other: Any) -> None:
    assert [finding.kind for finding in examine_objects({"Pod": [pod()], "Service": [other]})] == ["Pod"]


@pytest.mark.parametrize(("number", "verdict"), [(8000, "lost"), (18001, "ok")])
def test_an_inference_pool_targets_numbers(number: int, verdict: str) -> None:
    metadata = {"name": "llm", "namespace": "ml"}
    v1 = {"selector": {"matchLabels": {"app": "llm"}}, "targetPorts": [{"number": number}]}
    alpha = {"selector": {"app": "llm"}, "targetPortNumber": number}
    for kind, spec in (("InferencePool", v1), ("InferencePool (alpha)", alpha)):
        finding = found("InferencePool", pod(), **{kind: [{"metadata": metadata, "spec": spec}]})
        assert finding.verdict == verdict
        assert ("Use port 18001" in finding.next_step) == (verdict == "lost")


# ---- Pods and workloads --------------------------------------------------------------------------------------------


def test_a_pod_with_a_sidecar_says_its_mode_and_port() -> None:
    assert found("Pod", pod()).seen == "The pod has the sidecar on port 18001, in mode takeover."


def test_a_pod_without_the_sidecar_that_it_wants_says_what_the_webhook_wrote() -> None:
    finding = found("Pod", pod(hostNetwork=True))
    assert finding.verdict == "lost"
    assert finding.seen.startswith("The pod has no sidecar: not injected (HostNetwork): hostNetwork is true")


def test_a_pod_that_the_webhook_never_saw_is_named() -> None:
    finding = found("Pod", bare_pod())
    assert finding.verdict == "lost"
    assert "older than the label, or the webhook did not respond" in finding.seen


@pytest.mark.parametrize("change", [{"status": {"phase": "Succeeded"}}, {"metadata": {"deletionTimestamp": "x"}}])
def test_pods_that_have_ended_are_left_out(change: dict[str, Any]) -> None:
    ended = bare_pod()
    for key, value in change.items():
        ended[key] = {**ended[key], **value}
    assert examine_objects({"Pod": [ended]}) == []


@pytest.mark.parametrize(
    ("pods", "verdict", "seen"),
    [
        ([], "unknown", "It has the label, and no pod is running."),
        ([pod("a")], "ok", "It has the label, and its pod has the sidecar."),
        ([pod("a"), pod("b")], "ok", "It has the label, and all of its 2 pods have the sidecar."),
        ([pod("a"), bare_pod("b")], "lost", "1 of 2 pods have no sidecar."),
        (
            [bare_pod("a", labels={}), bare_pod("b")], "lost",
            "2 of 2 pods have no sidecar. 1 of them are older than the label.",
        ),
    ],
)  # fmt: skip
def test_a_workload_is_examined_by_its_pods(pods: Any, verdict: str, seen: str) -> None:
    finding = found("Deployment", *pods, Deployment=[deployment()])
    assert (finding.verdict, finding.seen) == (verdict, seen)
    restart = "Run kubectl rollout restart deployment/llm -n ml."
    assert finding.next_step == (restart if verdict == "lost" else "")


def test_a_label_on_the_workload_instead_of_its_pod_template_is_found() -> None:
    finding = found("Deployment", bare_pod(labels={}), Deployment=[deployment(labels={}, own_labels=LABEL)])
    assert (finding.verdict, finding.next_step) == ("lost", "Set the label on the pod template.")


def test_workloads_without_the_label_are_left_out() -> None:
    objects = {"Pod": [bare_pod(labels={})], "Deployment": [deployment(labels={})], "Service": [service(8000)]}
    assert examine_objects(objects) == []


def test_the_workers_of_a_leader_worker_set_may_have_no_sidecar() -> None:
    metadata = {"name": "llm", "namespace": "ml"}
    templates = {
        "leaderTemplate": {"metadata": {"labels": LABEL}, "spec": bare_pod()["spec"]},
        "workerTemplate": {"metadata": {}, "spec": bare_pod()["spec"]},
    }
    group = {"leaderworkerset.sigs.k8s.io/name": "llm"}
    leader = pod("llm-0", labels={**LABEL, **group, "leaderworkerset.sigs.k8s.io/worker-index": "0"})
    worker = bare_pod("llm-0-1", labels={**group, "leaderworkerset.sigs.k8s.io/worker-index": "1"})
    sets = [{"metadata": metadata, "spec": {"leaderWorkerTemplate": templates}}]
    assert found("LeaderWorkerSet", leader, worker, LeaderWorkerSet=sets).verdict == "ok"


# ---- The command, over HTTP ----------------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    write_certificate(tmp_path)
    with running_api(tmp_path) as server:
        for kind, path in LISTS.items():
            server.responses[path] = {"kind": f"{kind}List", "metadata": {"resourceVersion": "7"}, "items": []}
        server.status = 404  # The cluster does not have Argo's Rollouts.
        yield server


@pytest.fixture
def kubeconfig(api: Api, tmp_path: Path) -> Path:
    return write_kubeconfig(tmp_path, api, {"token": "secret"})


def write_kubeconfig(folder: Path, api: Api, user: Any, **cluster: Any) -> Path:
    cluster = {"server": f"https://127.0.0.1:{api.port}", "certificate-authority": "ca.crt", **cluster}
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }  # fmt: skip
    path = folder / "config"
    path.write_text(yaml.safe_dump(content))
    return path


Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    """Calls the command in an environment without a kubeconfig, and returns its status, its stdout and its stderr."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def call(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--kubernetes", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_a_cluster_where_all_requests_pass_exits_with_0(api: Api, kubeconfig: Path, doctor: Doctor) -> None:
    api.responses[LISTS["Pod"]]["items"] = [pod()]
    api.responses[LISTS["Service"]]["items"] = [service("http")]
    api.responses[LISTS["Deployment"]]["items"] = [deployment()]
    status, out, _ = doctor("--kubeconfig", kubeconfig)
    assert status == 0
    assert "No request is known to bypass a sidecar." in out
    assert {token for _, token in api.requests} == {"Bearer secret"}


def test_a_cluster_that_loses_priorities_exits_with_1_and_says_where(
    api: Api, kubeconfig: Path, doctor: Doctor
) -> None:
    api.responses[LISTS["Pod"]]["items"] = [pod()]
    api.responses[LISTS["Service"]]["items"] = [service(8000)]
    status, out, _ = doctor("--kubeconfig", kubeconfig, "--json")
    report = json.loads(out)
    assert (status, report["exit_status"], report["cluster"]) == (1, 1, f"https://127.0.0.1:{api.port}")
    assert report["summary"] == "Priorities are lost at: Service ml/llm."
    assert [(f["kind"], f["verdict"]) for f in report["findings"]] == [("Pod", "ok"), ("Service", "lost")]
    assert set(report["findings"][0]) == {"kind", "namespace", "name", "verdict", "seen", "next_step"}


def test_a_cluster_as_prometheus_metrics(api: Api, kubeconfig: Path, doctor: Doctor) -> None:
    api.responses[LISTS["Pod"]]["items"] = [pod(), pod()]
    api.responses[LISTS["Service"]]["items"] = [service(8000)]
    status, out, _ = doctor("--kubeconfig", kubeconfig, "--prometheus")
    assert status == 1
    assert 'vllm_priority_doctor_objects{kind="Pod",object_namespace="ml",verdict="ok"} 2.0' in out
    assert 'vllm_priority_doctor_objects{kind="Service",object_namespace="ml",verdict="lost"} 1.0' in out
    assert "\nvllm_priority_doctor_priority_lost 1.0\n" in out


def test_a_cluster_without_the_label_exits_with_1(kubeconfig: Path, doctor: Doctor) -> None:
    status, out, _ = doctor("--kubeconfig", kubeconfig, "--json")
    assert (status, json.loads(out)["findings"]) == (1, [])
    assert "No pod and no workload has the label" in out


def test_one_namespace_can_be_examined(api: Api, kubeconfig: Path, doctor: Doctor) -> None:
    api.responses["/api/v1/namespaces/ml/pods"] = {"items": [pod()]}
    assert doctor("--kubeconfig", kubeconfig, "--namespace", "ml")[0] == 0
    assert all("/namespaces/ml/" in path for path, _ in api.requests)


def test_a_kind_that_the_user_may_not_list_is_unknown(api: Api, kubeconfig: Path, doctor: Doctor) -> None:
    api.responses[LISTS["Pod"]]["items"] = [pod()]
    api.status = 403
    del api.responses[LISTS["Service"]]
    status, out, _ = doctor("--kubeconfig", kubeconfig, "--json")
    unknown = {f["kind"]: f["seen"] for f in json.loads(out)["findings"] if f["verdict"] == "unknown"}
    assert (status, unknown["Service"]) == (0, "This user may not list services.")


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_cluster_whose_pods_cannot_be_listed_exits_with_1(
    api: Api, kubeconfig: Path, doctor: Doctor, status: int
) -> None:
    del api.responses[LISTS["Pod"]]
    api.status = status
    code, out, err = doctor("--kubeconfig", kubeconfig)
    assert (code, out) == (1, "")
    assert f"cannot list pods: the API server responded with status {status}" in err


def test_an_api_server_that_cannot_be_reached_exits_with_1(api: Api, kubeconfig: Path, doctor: Doctor) -> None:
    api.server_close()
    code, _, err = doctor("--kubeconfig", kubeconfig)
    announced, problem = err.splitlines()
    assert announced.endswith(": list the pods, Services, InferencePools and workloads of all namespaces.")
    assert (code, "cannot list pods: ConnectError" in problem) == (1, True)


@pytest.mark.parametrize("option", [["--render", "http://x"], ["--engine", "http://x"]])
def test_a_cluster_and_servers_are_not_examined_together(option: list[str], doctor: Doctor) -> None:
    status, _, err = doctor(*option)
    assert status == 2
    assert "Do not use --render and --engine with it." in err


def test_options_of_a_cluster_need_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--engine", "http://127.0.0.1:1", "--namespace", "x"])
    assert ended.value.code == 2
    assert "have an effect only with --kubernetes" in capsys.readouterr().err


# ---- Kubeconfigs ---------------------------------------------------------------------------------------------------


def test_a_plugin_gives_the_token(api: Api, tmp_path: Path, doctor: Doctor) -> None:
    plugin = tmp_path / "plugin"
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    plugin.write_text(
        "#!/bin/sh\n"
        'case "$KUBERNETES_EXEC_INFO" in *client.authentication.k8s.io/v1*) ;; *) exit 1;; esac\n'
        f"echo '{json.dumps({**credential, 'status': {'token': 'TOKEN'}})}' | sed s/TOKEN/$1-$REGION/\n"
    )
    plugin.chmod(0o755)
    run = {
        "apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": ["made"],
        "env": [{"name": "REGION", "value": "eu"}], "interactiveMode": "IfAvailable",
    }  # fmt: skip
    api.responses[LISTS["Pod"]]["items"] = [pod()]
    assert doctor("--kubeconfig", write_kubeconfig(tmp_path, api, {"exec": run}))[0] == 0
    assert {token for _, token in api.requests} == {"Bearer made-eu"}


def test_a_client_certificate_is_presented(tmp_path: Path, doctor: Doctor) -> None:
    write_certificate(tmp_path)
    with running_api(tmp_path, client_ca=tmp_path / "ca.crt") as api:
        api.status = 404
        api.responses[LISTS["Pod"]] = {"items": [pod()]}
        without = doctor("--kubeconfig", write_kubeconfig(tmp_path, api, {}))
        assert without[0] == 1
        user = {"client-certificate": "tls.crt", "client-key": "key"}
        assert doctor("--kubeconfig", write_kubeconfig(tmp_path, api, user))[0] == 0


def test_a_token_file_is_read(api: Api, tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "token").write_text("from-file\n")
    doctor("--kubeconfig", write_kubeconfig(tmp_path, api, {"tokenFile": "token"}))
    assert {token for _, token in api.requests} == {"Bearer from-file"}


def test_the_files_of_kubeconfig_are_merged_and_the_first_wins(
    api: Api, kubeconfig: Path, tmp_path: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    first.write_text(yaml.safe_dump({"users": [{"name": "u", "user": {"token": "first"}}]}))
    monkeypatch.setenv("KUBECONFIG", f"{first}:{tmp_path / 'missing'}:{kubeconfig}")
    doctor()
    assert {token for _, token in api.requests} == {"Bearer first"}


@pytest.mark.parametrize(
    ("content", "arguments", "problem"),
    [
        (None, [], "config cannot be read: No such file or directory"),
        ("{", [], "config is not a kubeconfig: malformed YAML."),
        ("- x", [], "config is not a kubeconfig."),
        ("kind: Pod", [], "config is not a kubeconfig."),
        ("{}", [], "does not set current-context. Use the name of a context."),
        ("current-context: x", [], "has no context 'x'. It has: none."),
        ({}, ["--context", "other"], "has no context 'other'. It has: here."),
        ({"username": "admin", "password": "x"}, [], "has username, which is not supported."),
        ({"auth-provider": {"name": "gcp"}}, [], "has auth-provider, which is not supported."),
        ({"client-certificate-data": "%", "client-key-data": "%"}, [], "client-certificate-data is not valid base64"),
        ({"tokenFile": "missing"}, [], "No such file or directory"),
        ({"exec": {"apiVersion": "x", "command": "x"}}, [], "the exec plugin has the apiVersion 'x'"),
        (
            {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./missing"}}, [],
            "No such file or directory",
        ),
        (
            {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "false"}}, [],
            "the exec plugin false failed",
        ),
        (
            {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "true"}}, [],
            "the context 'here' cannot be used",
        ),
    ],
)  # fmt: skip
def test_a_kubeconfig_that_cannot_be_used_exits_with_2(
    api: Api, tmp_path: Path, doctor: Doctor, content: Any, arguments: list[str], problem: str
) -> None:
    path = tmp_path / "config"
    if isinstance(content, dict):
        write_kubeconfig(tmp_path, api, content)
    elif content is not None:
        path.write_text(content)
    status, out, err = doctor("--kubeconfig", path, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(("vllm-priority: --kubeconfig: ", "vllm-priority: --context: "))
    assert problem in err
    assert api.requests == []


def test_without_a_kubeconfig_it_says_where_it_looked(doctor: Doctor, tmp_path: Path) -> None:
    status, _, err = doctor()
    assert status == 2
    assert f"there is no kubeconfig at {tmp_path}/home/.kube/config. Use the path of one, or set KUBECONFIG." in err
