"""The injector offline: every kind with a pod template goes in and out again, and nothing else is touched."""

import json
import textwrap
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from control_plane.address import Address
from control_plane.errors import BadInput, CheckFailed
from control_plane.injector.manifests import inject_stream, uninject_stream
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies

SETTINGS = InjectorSettings(kubernetes_version="1.35")

DEPLOYMENT = """\
# The engines of the chat model.
apiVersion: apps/v1
kind: Deployment
metadata:
  name: engine   # as in the Service
  namespace: ml
spec:
  replicas: 2
  selector:
    matchLabels: {app: engine}
  template:
    metadata:
      labels: {app: engine}
    spec:
      # one model, one container
      containers:
      - name: vllm
        image: "vllm/vllm-openai:v0.33.0"
        command: ['vllm', "serve", tiny]
        args:
        - --enable-scale-out     # opens the routes
        - --scheduling-policy=priority
        ports:
        - containerPort: 8000
          name: http
        readinessProbe:
          httpGet: {path: /health, port: http}
        startupProbe:
          failureThreshold: 0600
          httpGet:
            path: /health
            port: http # by name

        resources:
          limits:
            nvidia.com/gpu: 1
      # the cache of the hub
      volumes:
      - name: cache
        emptyDir: {}
# the end
"""

INDENTED = """\
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: render
spec:
  serviceName: render
  selector:
    matchLabels:
      app: render
  template:
    metadata:
      annotations:
        vllm-priority.io/role: render
      labels:
        app: render
    spec:
      initContainers:
        - name: fetch
          image: x/fetch:1
      containers:
        - name: vllm
          image: x/vllm:1
          command:
            - sh
            - -c
            - |
              set -e
              exec vllm launch render tiny

          lifecycle:
            preStop:
              exec:
                command: [sleep, "3"]
"""

SERVICE = """\
apiVersion: v1
kind: Service
metadata: { name:   engine }   # odd blanks stay
spec:
    ports: [ {port: 80,targetPort: http} ]
"""

WORKLOAD = (("spec", "template"),)
TEMPLATES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Pod": ((),),
    "PodTemplate": (("template",),),
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController", "Job"), WORKLOAD),
    "Rollout": WORKLOAD,
    "CloneSet": WORKLOAD,
    "CronJob": (("spec", "jobTemplate", "spec", "template"),),
    "LeaderWorkerSet": (
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ),
    "RayCluster": (("spec", "headGroupSpec", "template"),),
    "RayService": (("spec", "rayClusterConfig", "headGroupSpec", "template"),),
    "RayClusterFleet": (("spec", "template", "spec", "headGroupSpec", "template"),),
}
"""A kind -> the paths of its pod templates. Those of KubeRay's workers and AIBrix's roles stand in lists."""

TEMPLATED = "{{- if .Values.x }}\nkind: Widget\n{{- end }}\n"


def injected(text: str, settings: InjectorSettings = SETTINGS) -> str:
    return inject_stream(text, Policies(), settings)[0]


def pod_spec() -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": 8000}]
    return {"containers": [{"name": "vllm", "image": "x/y", "command": ["vllm", "serve", "tiny"], "ports": ports}]}


def of_kind(kind: str, template: dict[str, Any]) -> dict[str, Any]:
    """An object of the kind that holds this template at all its places."""
    tree: dict[str, Any] = {"kind": kind, "metadata": {"name": "it"}}
    for path in TEMPLATES[kind]:
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        if path:
            at[path[-1]] = json.loads(json.dumps(template))
        else:
            tree.update(template)
    return tree


def sidecars(tree: object) -> int:
    """How many sidecars stand anywhere in a document."""
    if isinstance(tree, dict):
        return (tree.get("name") == "vllm-priority" and "image" in tree) + sum(map(sidecars, tree.values()))
    return sum(map(sidecars, tree)) if isinstance(tree, list) else 0


@pytest.mark.parametrize("text", [DEPLOYMENT, INDENTED], ids=["flush lists", "indented lists"])
def test_a_manifest_gets_a_sidecar_and_comes_back_byte_for_byte(text: str) -> None:
    with_sidecar = injected(text)
    document = yaml.safe_load(with_sidecar)
    assert sidecars(document) == 1
    kubernetes_validate.validate(document, "1.35", strict=True)
    assert uninject_stream(with_sidecar) == (text, [])


VOLUMES = "      volumes:\n      - name: cache\n        emptyDir: {}\n"


@pytest.mark.parametrize("volumes", [VOLUMES, ""])
def test_a_sidecar_with_a_token_comes_out_again_with_its_volume(volumes: str) -> None:
    settings = InjectorSettings(control_plane=Address("control", 443), token_audience="vllm-priority")
    assert VOLUMES in DEPLOYMENT
    text = DEPLOYMENT.replace(VOLUMES, volumes)
    with_sidecar, _ = inject_stream(text, Policies(), settings)
    kubernetes_validate.validate(yaml.safe_load(with_sidecar), "1.35", strict=True)
    assert "serviceAccountToken" in with_sidecar
    assert uninject_stream(with_sidecar) == (text, [])


def test_all_that_need_not_change_keeps_its_layout() -> None:
    lines = injected(DEPLOYMENT).splitlines()
    moved = {
        "        - containerPort: 8000",
        "          name: http",
        "          httpGet: {path: /health, port: http}",
        "            port: http # by name",
    }
    missing = [line for line in DEPLOYMENT.splitlines() if line not in lines and line not in moved]
    assert missing == []
    assert "            port: 18001 # by name" in lines
    assert "          httpGet: {path: /health, port: 18001}" in lines


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_kind_with_a_pod_template_is_injected_and_restored(kind: str) -> None:
    text = yaml.safe_dump(of_kind(kind, {"spec": pod_spec()}), sort_keys=False)
    with_sidecar = injected(text)
    assert sidecars(yaml.safe_load(with_sidecar)) == len(TEMPLATES[kind])
    assert uninject_stream(with_sidecar)[0] == text


def test_a_leader_is_injected_and_its_workers_are_not() -> None:
    group = of_kind("LeaderWorkerSet", {"spec": pod_spec()})
    worker = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    worker["command"] = ["sh", "-c", "ray start --address=$LWS_LEADER_ADDRESS:6379 --block"]
    out, notes = inject_stream(yaml.safe_dump(group), Policies(), SETTINGS)
    assert sidecars(yaml.safe_load(out)["spec"]["leaderWorkerTemplate"]["leaderTemplate"]) == 1
    assert sidecars(yaml.safe_load(out)) == 1
    assert "LeaderWorkerSet/it workerTemplate: not injected (NoVllmContainer): no container runs vLLM." in notes


@pytest.mark.parametrize("kind", ["List", "DeploymentList"])
def test_the_items_of_a_list_are_injected(kind: str) -> None:
    items = [of_kind("Deployment", {"spec": pod_spec()}), {"kind": "ConfigMap", "data": {"x": "y"}}]
    text = yaml.safe_dump({"apiVersion": "v1", "kind": kind, "items": items})
    assert sidecars(yaml.safe_load(injected(text))) == 1
    assert uninject_stream(injected(text))[0] == text


def test_documents_without_vllm_pass_byte_for_byte() -> None:
    redis = DEPLOYMENT.replace("vllm/vllm-openai:v0.33.0", "redis:8").replace("'vllm', \"serve\", tiny", "redis-server")
    text = f"# first\n---\n{SERVICE}---  # templated\n{TEMPLATED}---\n{redis}---\n{DEPLOYMENT}---\n\n...\n"
    out, notes = inject_stream(text, Policies(), SETTINGS)
    before, after = out.split(DEPLOYMENT[:40] + DEPLOYMENT[40:100])[0], out.split("---")[-1]
    assert text.startswith(before.rpartition("---\n")[0])
    assert SERVICE in out and TEMPLATED in out and redis in out
    assert after == "\n\n...\n"
    assert sum(sidecars(document) for document in yaml.safe_load_all(out.replace(TEMPLATED, ""))) == 1
    assert "Deployment/engine: not injected (NoVllmContainer): no container runs vLLM." in notes
    assert uninject_stream(out)[0] == text


@pytest.mark.parametrize(
    "text",
    [
        DEPLOYMENT.replace("\n", "\r\n"),
        "\ufeff" + DEPLOYMENT,
        "---\n" + DEPLOYMENT,
        "--- # head\n" + DEPLOYMENT + "...\n",
        "%YAML 1.1\n---\n" + DEPLOYMENT,
        "--- {kind: Pod, spec: {containers: [{name: vllm, command: [vllm, serve, x]}]}}\n",
        "kind:   Pod\nspec:\n    containers:\n     - {name:  vllm,   command: [vllm, serve]}\n",
        "kind: Pod\nspec: {containers: [{name: vllm, command: [vllm, serve]}]}",
        "kind: Pod\nspec:\n  containers: &c\n  - name: vllm\n    command: [vllm, serve]\n"
        "    livenessProbe: &p {httpGet: {port: http, path: /}}\n"
        "    readinessProbe: *p\n    ports: [{name: http, containerPort: 8000}]\n",
        'kind: Pod\nmetadata:\n  annotations:\n'
        '    note: >-\n      folded text\n      goes on\n    other: "a\\u00e9"\nspec:\n'
        "  containers:\n  - name: vllm\n    command: [vllm, serve]\n    env: [{name: A, value: '1e3'}]\n",
        "kind: Pod\nmetadata:\nspec:\n  initContainers: []\n"
        "  containers:\n  - name: vllm\n    command: [vllm, serve]\n    lifecycle: {}\n",
    ],
)  # fmt: skip
def test_odd_layouts_come_back_byte_for_byte(text: str) -> None:
    with_sidecar = injected(text)
    body = with_sidecar.replace("%YAML 1.1\n", "").lstrip("\ufeff")
    assert sum(map(sidecars, yaml.safe_load_all(body))) == 1
    assert uninject_stream(with_sidecar)[0] == text


@pytest.mark.parametrize("indent", [None, 2, 4, "\t", 3])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_json_stays_json_and_comes_back_byte_for_byte(indent: Any, end: str) -> None:
    text = json.dumps(of_kind("Deployment", {"spec": pod_spec()}), indent=indent) + end
    with_sidecar = injected(text)
    assert sidecars(json.loads(with_sidecar)) == 1
    assert uninject_stream(with_sidecar)[0] == text


def test_injecting_twice_changes_nothing() -> None:
    once = injected(DEPLOYMENT)
    out, notes = inject_stream(once, Policies(), SETTINGS)
    assert out == once
    assert notes == ["Deployment/engine: not injected (AlreadyInjected): the pod has the sidecar already."]


def test_a_list_of_which_one_item_has_the_sidecar_gets_the_other_one() -> None:
    first, second = (of_kind("Deployment", {"spec": pod_spec()}) for _ in range(2))
    second["metadata"]["name"] = "second"
    once = injected(yaml.safe_dump({"kind": "List", "items": [first]}, sort_keys=False))
    alone = yaml.safe_load(once)["items"][0]
    out = injected(once + yaml.safe_dump([second]))
    one, two = yaml.safe_load(out)["items"]
    assert one == alone
    assert two["spec"]["template"]["spec"] == alone["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "args",
    [
        '[--config-yaml, "{\\"node\\": {}}"]',
        "[--config-yaml, '{\"node\":{}}']",
        "[--config-yaml, plain]",
        "\n    - --config-yaml\n    - |\n      node: {}\n      admin: {}",
        '\n    - --config-yaml\n    - "{\\"node\\":{\\"id\\":\\"x\\"}}"',
    ],
)
def test_the_envoy_of_another_container_keeps_its_layout(args: str) -> None:
    text = (
        "kind: Pod\nspec:\n  containers:\n  - name: vllm\n    command: [vllm, serve]\n"
        f"  - name: proxy\n    image: envoy\n    args: {args}\n".replace("args: \n", "args:\n")
    )
    with_sidecar = injected(text)
    assert args.lstrip() in with_sidecar
    assert "vllm-priority.io/original" not in with_sidecar
    assert yaml.safe_load(with_sidecar)["spec"]["containers"][1] == yaml.safe_load(text)["spec"]["containers"][1]
    assert uninject_stream(with_sidecar)[0] == text


def test_edits_since_the_injection_are_kept() -> None:
    edited = injected(DEPLOYMENT).replace("replicas: 2", "replicas: 7").replace("v0.33.0", "v0.34.0")
    back = uninject_stream(edited)[0]
    assert back == DEPLOYMENT.replace("replicas: 2", "replicas: 7").replace("v0.33.0", "v0.34.0")


def test_edits_are_kept_if_the_original_travels_along() -> None:
    text = "kind:   Pod\nspec:\n    containers:\n     - {name:  vllm,   image: a, command: [vllm, serve]}\n"
    back, notes = uninject_stream(injected(text).replace("image: a", "image: b"))
    assert yaml.safe_load(back) == yaml.safe_load(text.replace("image: a", "image: b"))
    assert "the edits are kept" in notes[0]


def test_a_container_added_after_the_sidecar_stays() -> None:
    document = yaml.safe_load(injected(DEPLOYMENT, InjectorSettings()))
    document["spec"]["template"]["spec"]["containers"].append({"name": "late", "image": "x"})
    back = yaml.safe_load(uninject_stream(yaml.safe_dump(document))[0])
    expected = yaml.safe_load(DEPLOYMENT)
    expected["spec"]["template"]["spec"]["containers"].append({"name": "late", "image": "x"})
    assert back == expected


def test_the_sidecar_can_be_taken_out_of_what_kubectl_returns() -> None:
    """Keys sorted, defaults added, no layout left."""
    document = yaml.safe_load(injected(DEPLOYMENT))
    document["status"] = {"replicas": 2}
    document["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    expected = {**yaml.safe_load(DEPLOYMENT), "status": {"replicas": 2}}
    expected["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    assert yaml.safe_load(uninject_stream(yaml.safe_dump(document))[0]) == expected
    assert json.loads(uninject_stream(json.dumps(document))[0]) == expected


@pytest.mark.parametrize("mode", ["auto", "swap", "takeover", "redirect", "port"])
@pytest.mark.parametrize("native", ["true", "false"])
def test_the_sidecar_can_be_taken_out_in_every_mode(mode: str, native: str) -> None:
    asked = {"vllm-priority.io/mode": mode, "vllm-priority.io/native": native}
    template = {"metadata": {"annotations": asked}, "spec": pod_spec()}
    text = yaml.safe_dump(of_kind("DaemonSet", template), sort_keys=False)
    assert sidecars(yaml.safe_load(injected(text))) == 1
    assert uninject_stream(injected(text))[0] == text


def test_the_label_declines_the_sidecar_and_asks_for_it() -> None:
    text = DEPLOYMENT.replace("labels: {app: engine}", 'labels: {vllm-priority.io/inject: "false"}')
    assert injected(text) == text
    other = DEPLOYMENT.replace("vllm/vllm-openai:v0.33.0", "corp/llm").replace("'vllm', \"serve\", tiny", "/start.sh")
    assert injected(other) == other
    assert injected(other.replace("labels: {app: engine}", 'labels: {vllm-priority.io/inject: "true"}')) != other


def test_a_warning_names_the_object() -> None:
    notes = inject_stream(DEPLOYMENT, Policies(), SETTINGS)[1]
    assert any(note.startswith("Deployment/engine: container 'vllm' is taken for an engine") for note in notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: b\n---\nkind: Pod\nspec: [\n", "line 5: malformed YAML"),
        ("kind: Pod\nspec:\n  a: 1\n  a: 2\n", "line 4: malformed YAML"),
        ("kind: Pod\nspec: {}\n", "Pod/?: pod: spec.containers"),
        (DEPLOYMENT.replace("      labels: {", "      annotations: {vllm-priority.io/role: boss}\n      labels: {"),
         "Deployment/engine: not injected (InvalidAnnotation): annotation vllm-priority.io/role: 'boss' must be"),
        ("kind: Pod\nspec: &s\n  containers: [*s]\n", "Pod/?"),
        ("kind: Pod\nx: &p {httpGet: {port: http}}\nspec:\n  containers:\n  - {name: a, image: i, livenessProbe: *p}\n"
         "  - {name: v, command: [vllm, serve], ports: [{name: http, containerPort: 1}], livenessProbe: *p}\n",
         "shares a YAML anchor"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_says_where_it_is(text: str, said: str) -> None:
    text = text.replace("    spec: [", "spec: [")
    with pytest.raises((BadInput, CheckFailed)) as caught:
        inject_stream(textwrap.dedent(text), Policies(), SETTINGS)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_edited_record_is_bad_input() -> None:
    with pytest.raises(BadInput, match="injected was edited"):
        uninject_stream("kind: Pod\nmetadata: {annotations: {vllm-priority.io/injected: x}}\nspec: {containers: []}\n")


@given(st.text(alphabet="---\n: kindPodspec{}[]\"'#&*|>\t\r\ufeff", max_size=60))
def test_any_text_passes_through_or_is_bad_input(text: str) -> None:
    for change in (lambda t: inject_stream(t, Policies(), SETTINGS), uninject_stream):
        try:
            assert change(text)[0] == text
        except BadInput as error:
            assert "\n" not in str(error)
