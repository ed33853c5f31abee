"""A plan for a pod -> the pod with its sidecar, and the JSON Patch that makes it. admission.py does the deciding."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from control_plane.pod import Pod
from control_plane.policy import Role

PREFIX = "vllm-priority.io/"
"""Of the labels and annotations that are ours."""

INJECTED = PREFIX + "injected"
"""Annotation that the injector writes: what it did, as JSON, so that it can be undone."""

ORIGINAL = PREFIX + "original"
"""Annotation that the offline injector writes where it had to lay a manifest out anew: what it was, for --uninject."""

CONTAINER = "vllm-priority"
REDIRECT_CONTAINER = "vllm-priority-redirect"
PORT_NAME = "vllm-priority"
"""Name of the sidecar's port where it takes over no other."""

Mode = Literal["takeover", "redirect", "port"]


@dataclass(frozen=True)
class Plan:
    """All that was decided about one pod.

    app: index of the vLLM container. port_name: of the sidecar's port. taken_name: the name that moves, None where
    none does. config: the whole Envoy bootstrap, JSON. app_sleep, sidecar_sleep: preStop, in seconds, 0 for none.
    """

    app: int
    role: Role
    mode: Mode
    native: bool
    upstream: int
    listen: int
    health: int
    port_name: str
    taken_name: str | None
    config: str
    image: str
    redirect_image: str
    uid: int | None
    concurrency: int
    resources: Mapping[str, Any]
    app_sleep: int
    sidecar_sleep: int
    warnings: list[str]


PORT_PATHS = (
    *(
        (probe, action)
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
        for action in ("httpGet", "tcpSocket")
    ),
    *(("lifecycle", hook, action) for hook in ("postStart", "preStop") for action in ("httpGet", "tcpSocket")),
)
"""Where in a container a port may be given by its name: the keys that lead to the mapping with `port`."""


def injected(pod: Mapping[str, Any], typed: Pod, plan: Plan) -> dict[str, Any]:
    """A copy of the pod with the sidecar; what is not changed is shared with the original."""
    metadata, spec = pod.get("metadata") or {}, pod["spec"]
    containers, init = list(spec["containers"]), list(spec.get("initContainers") or ())
    app, done = _changed_app(containers[plan.app], typed, plan)
    containers[plan.app] = app
    sidecar = _sidecar(plan)
    if plan.mode == "redirect":
        init.append(_redirect(plan))
    (init if plan.native else containers).append({**sidecar, "restartPolicy": "Always"} if plan.native else sidecar)
    done["made"] = [
        *(["metadata"] if pod.get("metadata") is None else []),
        *(["annotations"] if metadata.get("annotations") is None else []),
        *(["initContainers"] if init and spec.get("initContainers") is None else []),
    ]
    note = json.dumps(done, separators=(",", ":"))
    return {
        **pod,
        "metadata": {**metadata, "annotations": {**(metadata.get("annotations") or {}), INJECTED: note}},
        "spec": {**spec, "containers": containers, **({"initContainers": init} if init else {})},
    }


def _changed_app(app: Mapping[str, Any], typed: Pod, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The vLLM container as it should be, and what was done to it."""
    done: dict[str, Any] = {"container": app["name"], "mode": plan.mode, "role": plan.role, "port": plan.upstream}
    changed = dict(app)
    if plan.taken_name:
        names = {port.name for container in typed.spec.all_containers for port in container.ports or ()}
        renamed, number = f"app-{plan.upstream}", 0
        while renamed in names:
            renamed, number = f"app-{plan.upstream}-{number}", number + 1
        changed["ports"] = [
            {**port, "name": renamed} if port.get("name") == plan.taken_name else port for port in app["ports"]
        ]
        named = [path for path in PORT_PATHS if (at := _reach(app, path)) and at.get("port") == plan.taken_name]
        for path in named:
            changed = _with_port(changed, path, plan.upstream)
        done |= {"name": plan.taken_name, "renamed": renamed, "numbered": ["/".join(path) for path in named]}
    lifecycle = changed.get("lifecycle")
    if plan.app_sleep and (lifecycle is None or (isinstance(lifecycle, dict) and lifecycle.get("preStop") is None)):
        changed["lifecycle"] = {**(lifecycle or {}), "preStop": {"sleep": {"seconds": plan.app_sleep}}}
        done["slept"] = "lifecycle" if lifecycle is None else "preStop"
    return changed, done


def _reach(at: Any, path: Sequence[str]) -> Mapping[str, Any] | None:
    for key in path:
        at = at.get(key) if isinstance(at, dict) else None
    return at if isinstance(at, dict) else None


def _with_port(at: Mapping[str, Any], path: Sequence[str], port: int) -> dict[str, Any]:
    if not path:
        return {**at, "port": port}
    return {**at, path[0]: _with_port(at[path[0]], path[1:], port)}


def _sidecar(plan: Plan) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": plan.image,
        "args": [
            "--config-yaml",
            verbatim(plan.config),
            "--service-node",
            "$(POD_NAMESPACE)/$(POD_NAME)",
            "--concurrency",
            str(plan.concurrency),
            "--log-level",
            "warning",
            # It would warn at each poll that the control plane does not answer: the health check's log says so once.
            "--component-log-level",
            "config:error",
            # Its shared memory and socket would be those of any other Envoy in the pod, such as Istio's.
            "--disable-hot-restart",
        ],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.{key}"}}}
            for name, key in (("POD_NAME", "name"), ("POD_NAMESPACE", "namespace"))
        ],
        "ports": [
            {"name": plan.port_name, "containerPort": plan.listen, "protocol": "TCP"},
            {"name": "priority-ready", "containerPort": plan.health, "protocol": "TCP"},
        ],
        # Ready only while vLLM's port accepts too; alive whether or not vLLM is: it may load its model for minutes.
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": plan.health},
            "periodSeconds": 5,
            "timeoutSeconds": 3,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "tcpSocket": {"port": plan.health},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": {group: dict(amounts) for group, amounts in plan.resources.items()},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "readOnlyRootFilesystem": True,
            **({} if plan.uid is None else {"runAsUser": plan.uid, "runAsGroup": plan.uid}),
        },
    }
    if plan.sidecar_sleep:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": plan.sidecar_sleep}}}
    return container


def _redirect(plan: Plan) -> dict[str, Any]:
    amounts = {"cpu": "10m", "memory": "32Mi"}
    return {
        "name": REDIRECT_CONTAINER,
        "image": plan.redirect_image,
        "command": ["nft", redirect_rules(plan.upstream, plan.listen, plan.uid or 0)],
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def redirect_rules(upstream: int, listen: int, uid: int) -> str:
    """nft's commands: what comes for `upstream` goes to `listen`, but what user `uid` (Envoy) sends.

    From outside and from the pod's own containers, IPv4 and IPv6 (Linux 5.2 on). To be run again with the same
    outcome: an init container is, when its pod's sandbox is kept.
    """
    return (
        "add table inet vllm_priority; delete table inet vllm_priority; add table inet vllm_priority; "
        "add chain inet vllm_priority prerouting { type nat hook prerouting priority -100 ; }; "
        "add chain inet vllm_priority output { type nat hook output priority -100 ; }; "
        f"add rule inet vllm_priority prerouting tcp dport {upstream} redirect to :{listen}; "
        f"add rule inet vllm_priority output oifname lo tcp dport {upstream} meta skuid != {uid} redirect to :{listen}"
    )


def verbatim(text: str) -> str:
    """`text` as a container argument: there $(NAME) is replaced by Kubernetes, and $$ stands for $."""
    return text.replace("$", "$$")


def json_patch(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """The operations (RFC 6902) that make `new` of `old`. A parent that is missing is added whole, so first."""
    if old is new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        patch = [{"op": "remove", "path": f"{path}/{_escaped(key)}"} for key in old if key not in new]
        for key, value in new.items():
            at = f"{path}/{_escaped(key)}"
            patch += json_patch(old[key], value, at) if key in old else [{"op": "add", "path": at, "value": value}]
        return patch
    if isinstance(old, list) and isinstance(new, list):
        patch = [
            op for index, pair in enumerate(zip(old, new, strict=False)) for op in json_patch(*pair, f"{path}/{index}")
        ]
        patch += [{"op": "remove", "path": f"{path}/{index}"} for index in range(len(old) - 1, len(new) - 1, -1)]
        return patch + [
            {"op": "add", "path": f"{path}/{index}", "value": new[index]} for index in range(len(old), len(new))
        ]
    return [] if type(old) is type(new) and old == new else [{"op": "replace", "path": path, "value": new}]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
