"""A plan for a pod -> the pod with its sidecar. plan.py does the deciding."""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from control_plane.injector.annotations import CERTIFICATE, INJECTED, CommandEdit, InjectionRecord
from control_plane.injector.commands import apply_edits
from control_plane.injector.envoy_config import verbatim
from control_plane.injector.plan import (
    CERTIFICATE_FILE,
    CERTIFICATE_VOLUME,
    CONTAINER,
    REDIRECT_CONTAINER,
    TOKEN_FOLDER,
    TOKEN_VOLUME,
    Plan,
)
from control_plane.injector.pod import Pod
from control_plane.tls import certificate_files_secret

CONFIG_OPTION = "--config-yaml"
"""Envoy's option whose value is the sidecar's whole configuration."""
READY_PORT_NAME = "priority-ready"
"""The name of the port of the sidecar's health listener."""

_TCP = (None, "", "TCP")

PORT_PATHS = (
    *(
        (probe, action)
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
        for action in ("httpGet", "tcpSocket")
    ),
    *(("lifecycle", hook, action) for hook in ("postStart", "preStop") for action in ("httpGet", "tcpSocket")),
)
"""Where a container may refer to a port by its name: the keys that lead to the mapping with `port`."""


def with_sidecar(pod: Mapping[str, Any], typed: Pod, plan: Plan) -> dict[str, Any]:
    """Return a copy of the pod with the sidecar. It shares with the original what did not change."""
    metadata, spec = pod.get("metadata") or {}, pod["spec"]
    containers, init = list(spec["containers"]), list(spec.get("initContainers") or ())
    containers[plan.server_index], record = _changed_server(containers[plan.server_index], typed, plan)
    if plan.mode == "redirect":
        init.append(_redirect_container(plan))
    if plan.native:
        init.append({**_sidecar_container(plan), "restartPolicy": "Always"})
    else:
        containers.append(_sidecar_container(plan))
    volumes = list(spec.get("volumes") or ())
    if plan.token_audience:
        volumes.append(_token_volume(plan.token_audience))
    if plan.tls:
        volumes.append(_certificate_volume())
    edited = {edit.field for edit in plan.edits}
    created = [
        *(["metadata"] if pod.get("metadata") is None else []),
        *(["annotations"] if metadata.get("annotations") is None else []),
        *(["initContainers"] if init and spec.get("initContainers") is None else []),
        *(["volumes"] if volumes and spec.get("volumes") is None else []),
        *(["args"] if spec["containers"][plan.server_index].get("args") is None and "args" in edited else []),
    ]
    written = {INJECTED: record.model_copy(update={"created": tuple(created)}).to_json()}
    if plan.tls:
        secret = certificate_files_secret(plan.tls.certificate, plan.tls.key, plan.tls.folder)
        written[CERTIFICATE] = json.dumps(secret, separators=(",", ":"))
    return {
        **pod,
        "metadata": {**metadata, "annotations": {**(metadata.get("annotations") or {}), **written}},
        "spec": {
            **spec,
            "containers": containers,
            **({"initContainers": init} if init else {}),
            **({"volumes": volumes} if volumes else {}),
        },
    }


def _changed_server(server: Mapping[str, Any], typed: Pod, plan: Plan) -> tuple[dict[str, Any], InjectionRecord]:
    """The vLLM container as it should be, and what was done to it."""
    record: dict[str, Any] = {}
    changed = dict(server)
    swapped = plan.mode == "swap"
    renamed = _unused_port_name(typed, f"app-{plan.upstream}") if plan.taken_name else None
    named = []
    for path in PORT_PATHS:
        port = (_reach(server, path) or {}).get("port")
        if plan.taken_name and port == plan.taken_name:
            named.append("/".join(path))
        # What asks for vLLM's own health must not depend on the sidecar.
        if port in (plan.taken_name, plan.port_before) and port is not None:
            changed = _with_port(changed, path, plan.upstream)
    if renamed or swapped:
        changed |= _changed_ports(server, plan, renamed)
    if renamed:
        record |= {"port_name": plan.taken_name, "port_renamed_to": renamed, "numbered": tuple(named)}
    if swapped:
        for field in {edit.field for edit in plan.edits}:
            changed[field] = apply_edits(server.get(field) or [], field, plan.edits)
        edits = tuple(CommandEdit(field=e.field, index=e.index, now=e.now, was=e.was) for e in plan.edits)
        record |= {"port_before": plan.port_before, "edits": edits}
    lifecycle = changed.get("lifecycle")
    has_no_hook = lifecycle is None or (isinstance(lifecycle, dict) and lifecycle.get("preStop") is None)
    if plan.server_sleep_seconds and has_no_hook:
        changed["lifecycle"] = {**(lifecycle or {}), "preStop": {"sleep": {"seconds": plan.server_sleep_seconds}}}
        record["added_hook"] = "lifecycle" if lifecycle is None else "preStop"
    return changed, InjectionRecord(
        container=server["name"], role=plan.role, mode=plan.mode, upstream_port=plan.upstream, **record
    )


def _changed_ports(server: Mapping[str, Any], plan: Plan, renamed: str | None) -> dict[str, Any]:
    """The vLLM container's `ports`, if it has any, with the name and the number that vLLM has now."""
    ports = [dict(port) for port in server.get("ports") or ()]
    for port in ports:
        if renamed and port.get("name") == plan.taken_name:
            port["name"] = renamed
        # The kubelet maps the host's port to this number, and the sidecar must get what arrives there.
        if port.get("containerPort") == plan.port_before and not port.get("hostPort") and port.get("protocol") in _TCP:
            port["containerPort"] = plan.upstream
    return {"ports": ports} if ports else {}


def _unused_port_name(pod: Pod, wanted: str) -> str:
    names = {port.name for container in pod.spec.all_containers for port in container.ports or ()}
    name, number = wanted, 0
    while name in names:
        name, number = f"{wanted}-{number}", number + 1
    return name


def _reach(at: Any, path: Sequence[str]) -> Mapping[str, Any] | None:
    for key in path:
        at = at.get(key) if isinstance(at, dict) else None
    return at if isinstance(at, dict) else None


def _with_port(at: Mapping[str, Any], path: Sequence[str], port: int) -> dict[str, Any]:
    if not path:
        return {**at, "port": port}
    return {**at, path[0]: _with_port(at[path[0]], path[1:], port)}


def _sidecar_container(plan: Plan) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": plan.image,
        "args": [
            CONFIG_OPTION,
            plan.config,
            "--service-node",
            "$(POD_NAMESPACE)/$(POD_NAME)",
            "--concurrency",
            str(plan.concurrency),
            "--log-level",
            "warning",
            # It would warn at each poll that the control plane does not respond: the health check's log says so once.
            # It would also warn of a field of its metrics, which Envoy 1.37 requires and 1.40 wants by another name.
            "--component-log-level",
            "config:error,misc:error",
            # Otherwise it would share memory and a socket with any other Envoy in the pod, for example Istio's.
            "--disable-hot-restart",
        ],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.{key}"}}}
            for name, key in (("POD_NAME", "name"), ("POD_NAMESPACE", "namespace"))
        ]
        + [{"name": name, "value": verbatim(text)} for name, text in plan.environment.items()],
        "ports": [
            {"name": plan.port_name, "containerPort": plan.listen, "protocol": "TCP"},
            {"name": READY_PORT_NAME, "containerPort": plan.health, "protocol": "TCP"},
        ],
        # Ready only while vLLM's port accepts, too. Alive even if vLLM is not: it may load its model for minutes.
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
    if mounts := _mounts(plan):
        container["volumeMounts"] = mounts
    # The kubelet runs this hook, native sidecars' too, as soon as the pod begins to stop, beside vLLM's own.
    container["lifecycle"] = {"preStop": {"httpGet": {"path": plan.drain_path, "port": plan.health}}}
    return container


def _mounts(plan: Plan) -> list[dict[str, Any]]:
    mounts = [{"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER}] if plan.token_audience else []
    if plan.tls:
        mounts.append({"name": CERTIFICATE_VOLUME, "mountPath": str(PurePosixPath(CERTIFICATE_FILE).parent)})
    for mount in plan.tls.mounts if plan.tls else ():
        sub_path = {"subPath": mount.subPath} if mount.subPath else {}
        mounts.append({"name": mount.name, "mountPath": mount.mountPath, **sub_path})
    return [{**mount, "readOnly": True} for mount in mounts]


def _certificate_volume() -> dict[str, Any]:
    """Envoy reads a listener's certificate again after a change only if a file names the certificate's files."""
    field = {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{CERTIFICATE}']"}
    item = {"path": PurePosixPath(CERTIFICATE_FILE).name, "fieldRef": field}
    return {"name": CERTIFICATE_VOLUME, "downwardAPI": {"items": [item]}}


def _token_volume(audience: str) -> dict[str, Any]:
    """A token of the pod's service account that only the control plane accepts. The kubelet renews it."""
    source = {"audience": audience, "expirationSeconds": 3600, "path": "token"}
    return {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": source}]}}


def _redirect_container(plan: Plan) -> dict[str, Any]:
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
    """Return the commands for nft that send what arrives for port `upstream` to port `listen`.

    That is traffic from outside and from the pod's own containers, over IPv4 and IPv6 (Linux 5.2 or later), except for
    what user `uid`, Envoy, sends. The commands can run again with the same outcome, because Kubernetes may run an init
    container again.
    """
    return (
        "add table inet vllm_priority; delete table inet vllm_priority; add table inet vllm_priority; "
        "add chain inet vllm_priority prerouting { type nat hook prerouting priority -100 ; }; "
        "add chain inet vllm_priority output { type nat hook output priority -100 ; }; "
        f"add rule inet vllm_priority prerouting tcp dport {upstream} redirect to :{listen}; "
        f"add rule inet vllm_priority output oifname lo tcp dport {upstream} meta skuid != {uid} redirect to :{listen}"
    )
