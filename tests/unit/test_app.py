"""The control plane as an ASGI app, in process: its responses, and the effect of a broken file or request."""

import asyncio
import base64
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from control_plane.errors import BadInput, PolicyError
from control_plane.injector.admission import decide, read_review
from control_plane.injector.settings import InjectorSettings
from control_plane.kubernetes_api import ApiAccess, in_cluster, trust
from control_plane.policy.load import parse_policies
from control_plane.render.filter import ManagedEnvoy, filter_config
from control_plane.server.app import create_app
from control_plane.server.events import Events
from control_plane.server.fast_path import MAX_BODY_BYTES
from control_plane.server.injections import MAX_NAMESPACES
from control_plane.server.settings import ServeSettings
from tests.kubernetes_api import Api, running_api, write_certificate

ECDS = "/v3/discovery:extension_configs"


def sidecar(version: str = "", node: str = "pod-1", **metadata: object) -> dict[str, object]:
    return {"version_info": version, "node": {"id": node, "metadata": {"role": "render", **metadata}}}


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text("default: 1\n")
    return path


@pytest.fixture
def client(policy_file: Path) -> Iterator[TestClient]:
    """The app. It looks at the policy file only when a test calls `reload`."""
    with TestClient(create_app(ServeSettings(policy_file, reload_seconds=3600))) as running:
        yield running


def reload(client: TestClient) -> bool | None:
    return client.app.state.policy.reload()  # type: ignore[attr-defined, no-any-return]


def test_discovery_responds_with_the_rendered_filter_and_then_with_304(client: TestClient) -> None:
    first = client.post(ECDS, json=sidecar())
    assert first.status_code == 200
    assert first.headers["content-type"] == "application/json"
    policy = client.app.state.policy.snapshot.policies.default  # type: ignore[attr-defined]
    assert first.json()["resources"][0]["typed_config"] == filter_config(policy, "render", ManagedEnvoy(""))
    again = client.post(ECDS, json=sidecar(first.json()["version_info"]))
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "line"),
    [
        ("POST", "/v3/discovery:routes", b"{}", 404, "'/v3/discovery:routes' is not a valid discovery path. Use "),
        ("POST", ECDS, b'{"node":{"metadata":{"role":"x"}}}', 404, "node.metadata.role: 'x' is not a valid role. Use "),
        ("POST", ECDS, b"{}", 400, "discovery request: node is missing"),
        ("GET", ECDS, b"", 405, "GET is not supported here. Use POST."),
        ("PUT", "/inject", b"{}", 405, "PUT is not supported here. Use POST."),
        ("POST", "/inject", b"", 400, "admission review: malformed JSON: "),
        ("POST", "/inject", b"\xff", 400, "admission review: malformed JSON: "),
        ("POST", "/inject", b"[" * 200_000, 400, "admission review: nested too deeply"),
        ("POST", "/inject", b"9" * 5000, 400, "admission review: malformed JSON: "),
        ("POST", "/inject", b"[]", 400, "AdmissionReview: "),
        ("GET", "/api/sidecars?limit=no", b"", 400, "limit: "),
        ("GET", "/api/sidecars?status=no", b"", 400, "status: "),
        ("GET", "/nowhere", b"", 404, "Not Found"),
    ],
)  # fmt: skip
def test_a_wrong_request_gets_a_clear_message_in_one_line(
    client: TestClient, method: str, path: str, body: bytes, status: int, line: str
) -> None:
    response = client.request(method, path, content=body)
    assert response.status_code == status
    assert response.json()["detail"].startswith(line)
    assert "\n" not in response.json()["detail"]


@pytest.mark.parametrize("path", [ECDS, "/inject", "/healthz", "/nowhere"])
def test_a_body_over_the_limit_is_rejected_on_any_path(client: TestClient, path: str) -> None:
    response = client.post(path, content=b" " * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    assert response.json() == {"detail": f"The request body is too large. The limit is {MAX_BODY_BYTES} bytes."}
    assert response.headers["connection"] == "close"


def streamed(policy_file: Path, chunks: AsyncIterator[bytes], **timing: float) -> tuple[int, bytes]:
    """Send a POST to /inject in these chunks, as a server passes them on, and return the response's status and body."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": await anext(chunks), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/inject", "headers": [], "query_string": b""}
    asyncio.run(create_app(ServeSettings(policy_file, **timing))(scope, receive, send))  # type: ignore[arg-type]
    assert [message.get("more_body") for message in sent][-2:] == [True, None], "the response is sent before it ends"
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_an_endless_body_is_rejected_at_the_limit_and_its_sender_can_read_the_response(policy_file: Path) -> None:
    megabytes = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal megabytes
        while True:
            await asyncio.sleep(0.01)
            megabytes += 1
            yield b"x" * 2**20

    status, body = streamed(policy_file, endless())
    assert (status, b"too large" in body) == (413, True)
    assert megabytes > 5, "closing at once, with bytes unread, resets the connection and loses the response"


def test_a_body_that_does_not_arrive_in_time_is_rejected(policy_file: Path) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    status, body = streamed(policy_file, slow(), body_seconds=0.05)
    assert (status, b"did not arrive within 0.05 seconds" in body) == (408, True)


def review(pod: dict[str, Any]) -> dict[str, Any]:
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": kind,
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": "CREATE",
            "namespace": "ml",
            "userInfo": {},
            "object": pod,
        },
    }


POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"generateName": "m-", "labels": {"vllm-priority.io/inject": "true"}},
    "spec": {
        "containers": [
            {
                "name": "vllm",
                "image": "vllm/vllm-openai:v0.33.0",
                "command": ["vllm", "launch", "render", "m"],
                "ports": [{"name": "http", "containerPort": 8000}],
            }
        ]
    },
}


def test_inject_responds_to_a_review_with_a_patch(client: TestClient) -> None:
    response = client.post("/inject", json=review(POD))
    assert response.status_code == 200
    body = response.json()
    assert body["kind"] == "AdmissionReview"
    assert body["response"]["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
    assert body["response"]["allowed"] is True
    assert body["response"]["patchType"] == "JSONPatch"


def test_inject_uses_the_policy_in_force(client: TestClient, policy_file: Path) -> None:
    before = client.post("/inject", json=review(POD)).json()["response"]["patch"]
    policy_file.write_text("default: 2\n")
    assert reload(client) is True
    assert client.post("/inject", json=review(POD)).json()["response"]["patch"] != before


def test_services_cannot_be_read_outside_a_cluster(policy_file: Path) -> None:
    with pytest.raises(BadInput, match="only inside a cluster"):
        create_app(ServeSettings(policy_file, read_services=True))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """A server that responds like the Kubernetes API, which the app uses as if it ran in its cluster."""
    folder = tmp_path / "account"
    folder.mkdir()
    write_certificate(folder)
    (folder / "token").write_text("secret")
    with running_api(folder) as server:
        where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        monkeypatch.setattr("control_plane.server.app.in_cluster", lambda: in_cluster(where, folder))
        yield server


def eventually(probe: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := probe()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_inject_reads_the_services_of_the_pods_namespace(policy_file: Path, api: Api) -> None:
    ports = [{"port": 80, "targetPort": 8000}]
    service = {"metadata": {"name": "by-number"}, "spec": {"selector": {"app": "vllm"}, "ports": ports}}
    api.responses["/api/v1/namespaces/ml/services"] = {"items": [service]}
    with TestClient(create_app(ServeSettings(policy_file, read_services=True))) as client:
        warnings = client.post("/inject", json=review(owned_pod())).json()["response"]["warnings"]
        assert any("by-number" in warning for warning in warnings), warnings


def test_it_is_not_ready_until_the_kubernetes_api_has_accepted_a_request(policy_file: Path, api: Api) -> None:
    api.status = 401
    with TestClient(create_app(ServeSettings(policy_file, read_services=True))) as client:
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "starting"), "nothing was read yet"
        api.status = 200
        eventually(lambda: client.get("/readyz").status_code == 200)
        api.status = 403
        client.post("/inject", json=review(POD))
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        assert "namespace ml cannot be read" in ready.json()["problems"][0]


def owned_pod(**spec: Any) -> dict[str, Any]:
    """A pod that a ReplicaSet creates, with a label that a Service selects."""
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "m-5f", "uid": "u-1", "controller": True}
    labels = {**POD["metadata"]["labels"], "app": "vllm"}
    annotations = {"vllm-priority.io/mode": "takeover"}  # a mode that warns
    return {
        **POD,
        "metadata": {
            **POD["metadata"],
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [owner],
        },
        "spec": {**POD["spec"], **spec},
    }


def test_a_warning_becomes_an_event_of_the_object_that_owns_the_pod(policy_file: Path, api: Api) -> None:
    with TestClient(create_app(ServeSettings(policy_file, write_events=True))) as client:
        warned = client.post("/inject", json=review(owned_pod())).json()["response"]["warnings"]
        eventually(lambda: len(api.posted) >= 1 + len(warned))
    assert {path for path, _ in api.posted} == {"/api/v1/namespaces/ml/events"}
    events = [event for _, event in api.posted]
    for event in events:
        kubernetes_validate.validate(event, "1.35", strict=True)
        assert event["metadata"]["name"].startswith("m-5f.")
        involved = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "m-5f", "uid": "u-1", "namespace": "ml"}
        assert event["involvedObject"] == involved
    assert [(event["type"], event["reason"]) for event in events] == [
        ("Normal", "SidecarInjected"), ("Warning", "RoleGuessed"), ("Warning", "NumericTargetsBypass"),
    ]  # fmt: skip
    assert [event["message"] for event in events[1:]] == warned


def test_a_rollout_of_many_pods_writes_each_event_once(policy_file: Path, api: Api) -> None:
    with TestClient(create_app(ServeSettings(policy_file, write_events=True))) as client:
        for _ in range(50):
            client.post("/inject", json=review(owned_pod(hostNetwork=True)))
        client.post("/inject", json=review(owned_pod()))
        eventually(lambda: len(api.posted) >= 4)
    reasons = [event["reason"] for _, event in api.posted]
    assert reasons == ["HostNetwork", "SidecarInjected", "RoleGuessed", "NumericTargetsBypass"]


def test_a_dry_run_and_a_pod_without_an_owner_write_no_event(policy_file: Path, api: Api) -> None:
    with TestClient(create_app(ServeSettings(policy_file, write_events=True))) as client:
        dry = review(owned_pod())
        dry["request"]["dryRun"] = True
        client.post("/inject", json=dry)
        client.post("/inject", json=review(POD))
        client.post("/inject", json=review(owned_pod(hostNetwork=True)))
        eventually(lambda: api.posted)
    assert [event["reason"] for _, event in api.posted] == ["HostNetwork"]


@pytest.mark.parametrize("status", [403, 500, None])
def test_an_event_that_cannot_be_written_affects_no_pod_and_is_reported(
    policy_file: Path, api: Api, status: int | None
) -> None:
    if status is None:
        api.server_close()  # Nothing listens there any more.
    else:
        api.status = status
    with TestClient(create_app(ServeSettings(policy_file, write_events=True))) as client:
        response = client.post("/inject", json=review(owned_pod())).json()["response"]
        assert response["allowed"] and response["patch"]
        problems = eventually(lambda: client.get("/readyz").json()["problems"])
        assert problems[0].startswith("Events cannot be written: ")
        assert client.get("/readyz").status_code == 200


def test_events_that_wait_are_bounded() -> None:
    async def offer() -> int:
        events = Events(ApiAccess("https://127.0.0.1:1", trust(None), lambda: None))
        for number in range(10_000):
            pod = owned_pod()
            pod["metadata"]["ownerReferences"][0]["uid"] = str(number)
            request = read_review(review(pod))
            mutation = decide(request, parse_policies("{}"), InjectorSettings())
            assert mutation
            events.offer(request, mutation)
            if number > 300:
                break
        await events.close()
        return events._waiting.qsize()

    assert asyncio.run(offer()) == 200


def test_injections_are_counted_by_namespace_result_and_reason(client: TestClient) -> None:
    for pod in (owned_pod(), owned_pod(hostNetwork=True), {**POD, "metadata": {}}):
        client.post("/inject", json=review(pod))
    wrong = {**POD["metadata"], "annotations": {"vllm-priority.io/role": "x"}}
    client.post("/inject", json=review({**POD, "metadata": wrong}))
    dry = review(POD)
    dry["request"]["dryRun"] = True
    client.post("/inject", json=dry)
    counts = {
        ("ml", "injected", ""): 1,
        ("ml", "rejected", "InvalidAnnotation"): 1,
        ("ml", "skipped", "HostNetwork"): 1,
        ("ml", "skipped", "NotRequested"): 1,
        ("ml", "warned", "NumericTargetsBypass"): 1,
        ("ml", "warned", "RoleGuessed"): 1,
    }
    report = client.get("/api/injections").json()
    assert {(c["namespace"], c["result"], c["reason"]): c["count"] for c in report["counts"]} == counts
    metrics = client.get("/metrics").text
    for (namespace, result, reason), count in counts.items():
        labels = f'pod_namespace="{namespace}",reason="{reason}",result="{result}"'
        assert f"vllm_priority_control_plane_injections_total{{{labels}}} {count}.0" in metrics
    newest, *_, oldest = report["recent"]
    assert (newest["result"], newest["reason"], newest["pod"]) == ("rejected", "InvalidAnnotation", "m-*")
    assert [warning["code"] for warning in oldest["warnings"]] == ["RoleGuessed", "NumericTargetsBypass"]


def test_namespaces_in_the_metrics_and_recent_injections_are_bounded(client: TestClient) -> None:
    for number in range(MAX_NAMESPACES + 20):
        body = review({**POD, "metadata": {}})
        body["request"]["namespace"] = f"n-{number}"
        client.post("/inject", json=body)
    report = client.get("/api/injections").json()
    assert len(report["counts"]) == MAX_NAMESPACES + 1
    assert {c["namespace"]: c["count"] for c in report["counts"]}["other"] == 20
    assert len(report["recent"]) == 200


def test_each_injection_is_a_line_in_the_log(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm_priority.control_plane")
    client.post("/inject", json=review(POD))
    client.post("/inject", json=review({**POD, "metadata": {"name": "x\ny"}}))
    warned, left_alone = [record for record in caplog.records if record.getMessage().startswith("Pod ml/")]
    assert warned.levelname == "WARNING"
    assert "Pod ml/m-*: injected: mode " in warned.getMessage() and "RoleGuessed: " in warned.getMessage()
    assert left_alone.levelname == "INFO"
    assert left_alone.getMessage().startswith("Pod ml/x\\ny: not injected (NotRequested): ")


def test_a_workload_is_answered_with_the_warnings_of_its_pods_and_no_patch(client: TestClient) -> None:
    template = {"metadata": {"labels": POD["metadata"]["labels"]}, "spec": POD["spec"]}
    body = review({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "m"}})
    body["request"]["kind"] = {"group": "apps", "version": "v1", "kind": "Deployment"}
    body["request"]["object"]["spec"] = {"template": template}
    response = client.post("/validate-workload", json=body).json()["response"]
    assert set(response) == {"uid", "allowed", "warnings"}
    assert response["allowed"] is True
    assert any(warning.startswith("Deployment/m: container 'vllm' is taken for ") for warning in response["warnings"])
    assert client.get("/api/injections").json()["counts"] == []


def test_a_changed_file_is_served(client: TestClient, policy_file: Path) -> None:
    old = client.post(ECDS, json=sidecar()).json()["version_info"]
    policy_file.write_text("default: 2\n")
    assert reload(client) is True
    response = client.post(ECDS, json=sidecar(old))
    assert response.status_code == 200
    assert response.json()["version_info"] != old


def test_the_symlink_swap_of_a_mounted_configmap_is_detected(tmp_path: Path) -> None:
    for name, text in (("..2026_1", "default: 1\n"), ("..2026_2", "default: 2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.yaml").write_text(text)
        os.utime(tmp_path / name / "policy.yaml", (0, 0))
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    with TestClient(create_app(ServeSettings(tmp_path / "policy.yaml", reload_seconds=3600))) as client:
        assert reload(client) is None
        (tmp_path / "..data_tmp").symlink_to("..2026_2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        assert reload(client) is True
        assert client.get("/api/policy").json()["policies"][0]["policy"]["default"] == 2


@pytest.mark.parametrize("broken", ["default: yes please\n", "a: [", "\x00", "", None])
def test_a_broken_edit_is_rejected_and_reported_and_the_last_valid_policy_stays_in_force(
    client: TestClient, policy_file: Path, broken: str | None
) -> None:
    served = client.post(ECDS, json=sidecar()).json()
    if broken is None:
        policy_file.unlink()
    elif broken:
        policy_file.write_text(broken)
    else:
        policy_file.write_bytes(b"\xff\xfe\xff")
    assert reload(client) is False
    assert reload(client) is None, "the same broken edit is not rejected again"
    assert client.post(ECDS, json=sidecar()).json() == served
    ready = client.get("/readyz")
    assert ready.status_code == 200, "a broken edit must not remove all replicas from their Service"
    assert ready.json()["status"] == "degraded"
    assert str(policy_file) in ready.json()["policy"]["problem"]
    assert "vllm_priority_control_plane_policy_broken 1.0" in client.get("/metrics").text


def test_a_corrected_edit_is_served_and_the_problem_is_gone(client: TestClient, policy_file: Path) -> None:
    for text, loaded in (("default: nope\n", False), ("default: 1\n", True)):
        policy_file.write_text(text)
        assert reload(client) is loaded
    assert client.get("/readyz").json()["problems"] == []
    assert "vllm_priority_control_plane_policy_broken 0.0" in client.get("/metrics").text


def test_a_file_whose_name_is_not_valid_utf_8_is_served(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"policy-\xff.yaml")
    path.write_text("default: 1\n")
    with TestClient(create_app(ServeSettings(path, reload_seconds=3600))) as client:
        assert client.get("/readyz").json()["policy"]["file"] == str(path)


def test_a_policy_file_that_is_missing_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no such file"):
        create_app(ServeSettings(tmp_path / "none.yaml"))


def test_sidecars_are_listed_with_the_version_that_they_have_and_should_have(client: TestClient) -> None:
    version = client.post(ECDS, json=sidecar(node="a", labels={"app": "x"})).json()["version_info"]
    client.post(ECDS, json=sidecar(node="b"))
    client.post(ECDS, json=sidecar(version, node="a", labels={"app": "x"}))
    listed = client.get("/api/sidecars").json()
    assert {key: listed[key] for key in ("total", "SYNCED", "STALE", "ERROR", "UNKNOWN")} == {
        "total": 2, "SYNCED": 1, "STALE": 1, "ERROR": 0, "UNKNOWN": 0,
    }  # fmt: skip
    first = listed["sidecars"][0]
    assert (first["node_id"], first["status"], first["version"], first["expected_version"], first["labels"]) == (
        "a", "SYNCED", version, version, {"app": "x"},
    )  # fmt: skip
    assert [row["node_id"] for row in client.get("/api/sidecars?status=STALE").json()["sidecars"]] == ["b"]


def test_a_probe_is_served_but_not_listed_as_a_sidecar(client: TestClient) -> None:
    assert client.post(ECDS, json=sidecar(node="helm-test", probe=True)).status_code == 200
    assert client.get("/api/sidecars").json()["total"] == 0
    assert "vllm_priority_control_plane_sidecars{" not in client.get("/metrics").text


def test_metrics_count_requests_and_sidecars_by_version(client: TestClient) -> None:
    version = client.post(ECDS, json=sidecar()).json()["version_info"]
    client.post(ECDS, json=sidecar(version))
    client.post(ECDS, json=sidecar("made-up-version", node="b"))
    client.post(ECDS, content=b"{")
    text = client.get("/metrics").text
    requests = "vllm_priority_control_plane_requests_total"
    sidecars = 'vllm_priority_control_plane_sidecars{role="render",status="%s",type="extension_configs",version="%s"}'
    assert f'{requests}{{result="found",type="extension_configs"}} 2.0' in text
    assert f'{requests}{{result="not_modified",type="extension_configs"}} 1.0' in text
    assert f'{requests}{{result="bad_request",type="extension_configs"}} 1.0' in text
    assert f"{sidecars % ('SYNCED', version)} 1.0" in text
    assert f"{sidecars % ('STALE', 'other')} 1.0" in text, (
        "a version that a sidecar made up must not become a label value"
    )


def test_a_change_that_needs_a_restart_is_seen_in_the_list_the_metrics_and_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("default: 1\n")
    with TestClient(create_app(ServeSettings(path, reload_seconds=0.01))) as client:
        client.post(ECDS, json=sidecar(node="a"))
        client.post(ECDS, json=sidecar(node="b", started_with={"ordinary": "enforce"}))
        path.write_text("ordinary: enforce\n")
        deadline = time.monotonic() + 30
        while "restart_for" not in caplog.text:
            assert time.monotonic() < deadline, "nothing is logged"
            time.sleep(0.01)
        assert "Policy default: ordinary has no effect in running sidecars that started without it." in caplog.text
        listed = client.get("/api/sidecars").json()["sidecars"]
        assert {row["node_id"]: row["restart_for"] for row in listed} == {"a": ["ordinary"], "b": []}
        text = client.get("/metrics").text
        assert 'vllm_priority_control_plane_sidecars_to_restart{key="ordinary"} 1.0' in text
        assert 'vllm_priority_control_plane_sidecars_to_restart{key="routes.root_path"} 0.0' in text


def test_two_apps_in_one_process_count_separately(client: TestClient, policy_file: Path) -> None:
    client.post(ECDS, content=b"{")
    with TestClient(create_app(ServeSettings(policy_file))) as other:
        assert 'requests_total{result="bad_request",type="extension_configs"} 0.0' in other.get("/metrics").text


def test_all_replicas_give_the_same_responses(client: TestClient, policy_file: Path) -> None:
    with TestClient(create_app(ServeSettings(policy_file))) as other:
        for path in (ECDS, "/v3/discovery:listeners"):
            assert client.post(path, json=sidecar()).content == other.post(path, json=sidecar()).content
        patches = set()
        for replica in (client, other):
            patch = base64.b64decode(replica.post("/inject", json=review(POD)).json()["response"]["patch"])
            patches.add(re.sub(rb"/drain/[0-9a-f]{32}", b"/drain/TOKEN", patch))  # It is random.
        assert len(patches) == 1


# Fuzzing. Hypothesis uses one client for all examples, because no response depends on earlier requests.
_FUZZED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def replaced(document: Any, path: list[Any], value: Any) -> Any:
    """The document with the value at `path` replaced."""
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = replaced(document[path[0]], path[1:], value)
    return copy


def paths(document: Any) -> list[list[Any]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [[], *([key, *rest] for key, value in items for rest in paths(value))]


@_FUZZED
@given(path=st.sampled_from([ECDS, "/v3/discovery:listeners", "/inject"]), body=st.binary(max_size=200))
def test_random_bytes_never_cause_a_server_error(client: TestClient, path: str, body: bytes) -> None:
    assert 400 <= client.post(path, content=body).status_code < 500


@_FUZZED
@given(place=st.sampled_from(paths(review(POD))), value=_JSON)
@example(place=["request", "object", "metadata", "labels"], value={"\ud800": "\udfff"})
def test_a_review_with_any_value_anywhere_gets_a_response_or_a_message_in_one_line(
    client: TestClient, place: list[Any], value: Any
) -> None:
    check(client.post("/inject", content=json.dumps(replaced(review(POD), place, value))))


@_FUZZED
@given(
    kind=st.sampled_from(["extension_configs", "listeners", "clusters"]),
    place=st.sampled_from(paths(sidecar("v", labels={"a": "b"}, listen="1.2.3.4:5", upstream="h:6", policy="default"))),
    value=_JSON,
)
def test_a_poll_with_any_value_anywhere_gets_a_response_or_a_message_in_one_line(
    client: TestClient, kind: str, place: list[Any], value: Any
) -> None:
    whole = sidecar("v", labels={"a": "b"}, listen="1.2.3.4:5", upstream="h:6", policy="default")
    check(client.post(f"/v3/discovery:{kind}", content=json.dumps(replaced(whole, place, value))))
    assert client.get("/api/sidecars").status_code == 200
    assert client.get("/metrics").status_code == 200


def check(response: Any) -> None:
    assert response.status_code in {200, 304} or 400 <= response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["detail"]
        assert "\n" not in response.json()["detail"]
