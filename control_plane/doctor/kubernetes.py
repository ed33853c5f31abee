"""Examines what runs in a cluster: whether the traffic of pods, workloads, Services and InferencePools passes sidecars.

It only reads objects of the Kubernetes API, and sends nothing to the pods.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.table import Table
from rich.text import Text

from control_plane.doctor.report import STYLES, Verdict
from control_plane.errors import CheckFailed
from control_plane.injector.annotations import INJECT_LABEL, INJECTED, MODE, STATUS, InjectionRecord
from control_plane.injector.manifests import templates
from control_plane.injector.plan import CONTAINER
from control_plane.injector.pod_patch import READY_PORT_NAME
from control_plane.kubernetes_api import FAILURES, ApiAccess, reason

Manifest = Mapping[str, Any]
"""An object as the Kubernetes API returns it."""

RESOURCES = {
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "DaemonSet": ("/apis/apps/v1", "daemonsets"),
    "Job": ("/apis/batch/v1", "jobs"),
    "CronJob": ("/apis/batch/v1", "cronjobs"),
    "LeaderWorkerSet": ("/apis/leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "Rollout": ("/apis/argoproj.io/v1alpha1", "rollouts"),
    "InferencePool": ("/apis/inference.networking.k8s.io/v1", "inferencepools"),
    "InferencePool (alpha)": ("/apis/inference.networking.x-k8s.io/v1alpha2", "inferencepools"),
}
"""What it lists: kind -> path of the API group, plural name."""
_WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob", "LeaderWorkerSet", "Rollout")
_LEADER_WORKER_SET = "leaderworkerset.sigs.k8s.io"
_RESTARTABLE = frozenset({"Deployment", "StatefulSet", "DaemonSet"})
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Finding:
    """Whether the traffic of one object passes a sidecar.

    verdict: `ok`, `lost` if requests bypass the sidecar, `warn` if that depends on the clients, `unknown` if it cannot
    be told. seen, next_step: full sentences; there is nothing to do where next_step is empty.
    """

    kind: str
    namespace: str
    name: str
    verdict: Verdict
    seen: str
    next_step: str = ""


@dataclass(frozen=True)
class ClusterReport:
    """The findings, and the URL of the API server."""

    cluster: str
    findings: Sequence[Finding]

    @property
    def exit_status(self) -> int:
        """1 if a priority is lost, or if nothing in the cluster has the label, else 0."""
        return int(not self.findings or any(finding.verdict == "lost" for finding in self.findings))

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        if not self.findings:
            return f"No pod and no workload has the label {INJECT_LABEL}, so no request passes a sidecar."
        lost = [f"{f.kind} {f.namespace}/{f.name}" for f in self.findings if f.verdict == "lost"]
        return f"Priorities are lost at: {', '.join(lost)}." if lost else "No request is known to bypass a sidecar."

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values: {exit_status, summary, cluster, findings: [...]}."""
        findings = [{**vars(finding), "next_step": finding.next_step or None} for finding in self.findings]
        return {
            "exit_status": self.exit_status, "summary": self.summary, "cluster": self.cluster, "findings": findings
        }  # fmt: skip


async def examine_cluster(access: ApiAccess, namespace: str | None = None) -> ClusterReport:
    """Examine a cluster.

    Args:
        access: how to reach its API server.
        namespace: the namespace to look at. None: all of them.

    Raises:
        CheckFailed: the API server cannot be reached, or does not let this user list pods.
    """
    objects: dict[str, list[Manifest]] = {}
    findings: list[Finding] = []
    async with access.client(_TIMEOUT_SECONDS) as client:
        listed = await asyncio.gather(*(_list(client, kind, namespace) for kind in RESOURCES), return_exceptions=True)
    for kind, found in zip(RESOURCES, listed, strict=True):
        if isinstance(found, list):
            objects[kind] = found
        elif kind != "Pod" and isinstance(found, httpx.HTTPStatusError) and found.response.status_code == 403:
            findings.append(
                Finding(kind, namespace or "", "*", "unknown", f"This user may not list {RESOURCES[kind][1]}.")
            )
        elif isinstance(found, FAILURES):
            raise CheckFailed(f"{access.url}: cannot list {RESOURCES[kind][1]}: {reason(found)}")
        else:
            raise found
    examined = examine_objects(objects)
    return ClusterReport(access.url, [*examined, *findings] if examined else [])


async def _list(client: httpx.AsyncClient, kind: str, namespace: str | None) -> list[Manifest]:
    root, resource = RESOURCES[kind]
    where = f"/namespaces/{namespace}" if namespace is not None else ""
    response = await client.get(f"{root}{where}/{resource}")
    if response.status_code == 404:
        return []  # The cluster does not have this kind.
    response.raise_for_status()
    items = response.json()["items"]
    return [item for item in items if isinstance(item, dict)]


def examine_objects(objects: Mapping[str, Sequence[Manifest]]) -> list[Finding]:
    """Return what is found about objects (kind -> objects), except those that have nothing to do with sidecars."""
    pods = [_Pod(pod) for pod in objects.get("Pod", ()) if _runs(pod)]
    findings = [
        finding
        for kind in _WORKLOADS
        for workload in objects.get(kind, ())
        for finding in _examine_workload(kind, workload, pods)
    ]
    findings += [finding for pod in pods if (finding := _examine_pod(pod))]
    findings += [finding for service in objects.get("Service", ()) if (finding := _examine_service(service, pods))]
    for kind in ("InferencePool", "InferencePool (alpha)"):
        findings += [finding for pool in objects.get(kind, ()) if (finding := _examine_pool(pool, pods))]
    return sorted(findings, key=lambda finding: finding.namespace)


def cluster_table(report: ClusterReport) -> Table:
    """Return the report as a table for a terminal of 80 columns or more, one row for each object."""
    shown = Table(show_lines=True, caption=Text(report.summary), caption_justify="left", caption_style="bold")
    shown.add_column("object", overflow="fold", max_width=36)
    shown.add_column("verdict", min_width=7)
    shown.add_column("what was seen, and what to do", overflow="fold")
    for finding in report.findings:
        text = Text(finding.seen)
        if finding.next_step:
            text.append(f"\n{finding.next_step}", "bold")
        name = f"{finding.kind}\n{finding.namespace}/{finding.name}"
        shown.add_row(Text(name), Text(finding.verdict, STYLES[finding.verdict]), text)
    return shown


# ---- Pods ----------------------------------------------------------------------------------------------------------


class _Pod:
    """A pod as it runs, and its sidecar if it has one."""

    def __init__(self, manifest: Manifest) -> None:
        metadata, spec = manifest["metadata"], manifest["spec"]
        self.namespace, self.name = str(metadata.get("namespace", "")), str(metadata.get("name"))
        self.labels: Mapping[str, str] = metadata.get("labels") or {}
        annotations = metadata.get("annotations") or {}
        self.status = annotations.get(STATUS)
        self.wants_sidecar = self.labels.get(INJECT_LABEL) == "true"
        # Kubernetes looks a port's name up in this order. Other init containers do not count.
        restartable = [c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"]
        self._containers = [*spec["containers"], *restartable]
        self.has_sidecar = any(container["name"] == CONTAINER for container in self._containers)
        try:
            self.record = InjectionRecord.from_json(annotations[INJECTED]) if INJECTED in annotations else None
        except ValueError:
            self.record = None

    @property
    def sidecar_ports(self) -> list[Mapping[str, Any]]:
        """The ports of the sidecar for requests."""
        return [
            port
            for container in self._containers
            if container["name"] == CONTAINER
            for port in container.get("ports") or ()
            if port.get("name") != READY_PORT_NAME
        ]

    def port(self, target: int | str) -> int | None:
        """The number of a target port. None: no container has a port of that name."""
        if isinstance(target, int):
            return target
        for container in self._containers:
            for port in container.get("ports") or ():
                if port.get("name") == target and port.get("protocol", "TCP") == "TCP":
                    return int(port["containerPort"])
        return None

    def passes(self, port: int) -> bool | None:
        """Whether requests to this port pass the sidecar. None: the port is neither vLLM's nor the sidecar's."""
        if port in [entry["containerPort"] for entry in self.sidecar_ports]:
            return True
        if self.record and port == self.record.upstream_port:
            return self.record.mode == "redirect"
        return None


def _runs(pod: Manifest) -> bool:
    finished = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not finished and not pod["metadata"].get("deletionTimestamp")


def _examine_pod(pod: _Pod) -> Finding | None:
    if pod.has_sidecar:
        where = ", ".join(str(port["containerPort"]) for port in pod.sidecar_ports)
        mode = f", in mode {pod.record.mode}" if pod.record else ""
        return Finding("Pod", pod.namespace, pod.name, "ok", f"The pod has the sidecar on port {where}{mode}.")
    if not pod.wants_sidecar:
        return None
    if pod.status:
        seen, next_step = f"The pod has no sidecar: {pod.status}", "Correct the cause, and restart the pod."
    else:
        seen = "The pod has the label and no sidecar: it is older than the label, or the webhook did not respond."
        next_step = "Check that the control plane is ready, and restart the pod."
    return Finding("Pod", pod.namespace, pod.name, "lost", seen, next_step)


# ---- Workloads -----------------------------------------------------------------------------------------------------


def _examine_workload(kind: str, workload: Manifest, pods: Sequence[_Pod]) -> Iterator[Finding]:
    metadata = workload["metadata"]
    namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name"))
    found = list(templates({**workload, "kind": kind}))
    labelled = {where.partition(" ")[2] for where, template in found if _label(template) == "true"}
    if not labelled:
        if _label(workload) == "true":
            seen = "The label is on the workload itself, and its pod template does not have it."
            yield Finding(kind, namespace, name, "lost", seen, "Set the label on the pod template.")
        return
    if kind == "CronJob":
        yield Finding(kind, namespace, name, "unknown", "Its pods run only at certain times.")
        return
    own = [pod for pod in pods if pod.namespace == namespace and _is_of(kind, workload, labelled, len(found), pod)]
    bare = [pod for pod in own if not pod.has_sidecar]
    older = sum(not pod.wants_sidecar for pod in bare)
    if not own:
        yield Finding(kind, namespace, name, "unknown", "It has the label, and no pod is running.")
    elif not bare:
        yield Finding(kind, namespace, name, "ok", f"It has the label, and {_all(len(own))} the sidecar.")
    else:
        seen = f"{len(bare)} of {len(own)} pods have no sidecar."
        if older:
            seen += f" {older} of them are older than the label."
        restart = f"kubectl rollout restart {kind.lower()}/{name} -n {namespace}"
        next_step = f"Run {restart}." if kind in _RESTARTABLE else "Create its pods again."
        yield Finding(kind, namespace, name, "lost", seen, next_step)


def _is_of(kind: str, workload: Manifest, labelled: set[str], templates_found: int, pod: _Pod) -> bool:
    """Whether a pod is made from one of the workload's labelled templates."""
    if kind != "LeaderWorkerSet":
        return _selects((workload["spec"].get("selector") or {}), pod.labels)
    if pod.labels.get(f"{_LEADER_WORKER_SET}/name") != workload["metadata"].get("name"):
        return False
    is_leader = pod.labels.get(f"{_LEADER_WORKER_SET}/worker-index") == "0"
    # Without a template of its own, the leader is made from the workers' template.
    return ("leaderTemplate" if is_leader and templates_found > 1 else "workerTemplate") in labelled


def _label(tree: Manifest) -> Any:
    return ((tree.get("metadata") or {}).get("labels") or {}).get(INJECT_LABEL)


def _all(count: int) -> str:
    return "its pod has" if count == 1 else f"all of its {count} pods have"


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector with at least one requirement matches."""
    exact, expressions = selector.get("matchLabels") or {}, selector.get("matchExpressions") or ()
    tests = {
        "In": lambda value, values: value in values,
        "NotIn": lambda value, values: value not in values,
        "Exists": lambda value, values: value is not None,
        "DoesNotExist": lambda value, values: value is None,
    }
    return (
        bool(exact or expressions)
        and exact.items() <= labels.items()
        and all(tests[e["operator"]](labels.get(e["key"]), e.get("values") or ()) for e in expressions)
    )


# ---- Services and InferencePools -----------------------------------------------------------------------------------


def _examine_service(service: Manifest, pods: Sequence[_Pod]) -> Finding | None:
    spec = service["spec"]
    targets = [
        entry.get("targetPort") or entry["port"]
        for entry in spec.get("ports") or ()
        if entry.get("protocol", "TCP") == "TCP"
    ]
    headless = spec.get("clusterIP") == "None"
    return _examine_targets("Service", service, spec.get("selector") or {}, targets, pods, headless)


def _examine_pool(pool: Manifest, pods: Sequence[_Pod]) -> Finding | None:
    spec = pool["spec"]
    selector = spec.get("selector") or {}
    # v1 has targetPorts and a LabelSelector, v1alpha2 has targetPortNumber and a mapping.
    targets = [entry["number"] for entry in spec.get("targetPorts") or ()]
    if "targetPortNumber" in spec:
        targets.append(spec["targetPortNumber"])
    return _examine_targets("InferencePool", pool, selector.get("matchLabels", selector), targets, pods)


def _examine_targets(
    kind: str,
    manifest: Manifest,
    selector: Mapping[str, str],
    targets: Sequence[int | str],
    pods: Sequence[_Pod],
    headless: bool = False,
) -> Finding | None:
    """Examine what sends requests to ports of pods. None: it selects no pod that has or wants a sidecar."""
    metadata = manifest["metadata"]
    namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name"))
    selected = [pod for pod in pods if pod.namespace == namespace and selector.items() <= pod.labels.items()]
    if not selector or not any(pod.has_sidecar or pod.wants_sidecar for pod in selected):
        return None

    def finding(verdict: Verdict, seen: str, next_step: str = "") -> Finding:
        return Finding(kind, namespace, name, verdict, seen, next_step)

    injected = [pod for pod in selected if pod.has_sidecar]
    bare = len(selected) - len(injected)
    ports = [pod.sidecar_ports[0] for pod in injected if pod.sidecar_ports] or [{}]
    port_name, port = ports[0].get("name"), ports[0].get("containerPort")
    outcomes = {(target, _outcome(pod, target)) for target in targets for pod in injected}
    bypassing = sorted({str(target) for target, outcome in outcomes if outcome == "bypasses"})
    problems: list[tuple[str, str]] = []
    if bare:
        seen = f"{bare} of the {len(selected)} pods that it selects have no sidecar."
        problems.append((seen, "Restart the pods that have none."))
    if bypassing and not headless:
        seen = f"It targets {', '.join(bypassing)}, which is vLLM's own port, so requests bypass the sidecar."
        cure = f"Set targetPort to {port_name!r}" if kind == "Service" else f"Use port {port}"
        problems.append((seen, f"{cure}, or restart the pods with the annotation {MODE}: redirect."))
    if problems:
        return finding("lost", " ".join(seen for seen, _ in problems), " ".join(cure for _, cure in problems))
    if headless:
        if all(pod.record and pod.record.mode in ("swap", "redirect") for pod in injected):
            return finding("ok", "It is headless, and every request to vLLM's port passes the sidecar.")
        seen = "It is headless, so its clients choose the port. Requests to vLLM's own port bypass the sidecar."
        return finding("warn", seen, f"Let the clients use port {port}.")
    if any(outcome == "passes" for _, outcome in outcomes):
        return finding("ok", "Requests pass the sidecar.")
    names = ", ".join(dict.fromkeys(map(str, targets))) or "no TCP port"
    return finding("warn", f"It targets {names}, which is neither vLLM's port nor the sidecar's.")


def _outcome(pod: _Pod, target: int | str) -> str:
    port = pod.port(target)
    passes = None if port is None else pod.passes(port)
    return {True: "passes", False: "bypasses", None: "other"}[passes]
