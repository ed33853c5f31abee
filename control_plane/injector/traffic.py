"""How traffic reaches the sidecar.

swap      vLLM gets another port, and the sidecar takes vLLM's: its number and its name
takeover  the port name that the Service targets moves to the sidecar; probes and hooks of vLLM get the number
redirect  nftables in the pod send what arrives for vLLM's port to the sidecar: for targets that are numbers
port      nothing moves: the user points the Service at the sidecar's port

Mode auto is swap if vLLM's command is understood, else takeover.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.injector.annotations import LISTEN_PORT, MIN_LISTEN_PORT, MODE, InjectionRequest, Mode
from control_plane.injector.pod import Pod
from control_plane.injector.reasons import NotInjectedError, Reason, WarningCode, Warnings, warn
from control_plane.injector.server import Server
from control_plane.injector.settings import InjectorSettings

PORT_NAME = "vllm-priority"
"""The name of the sidecar's port, unless it takes over the name of vLLM's."""

Services = Iterable[Mapping[str, Any]]
"""Services as Kubernetes' API lists them."""


@dataclass(frozen=True)
class Traffic:
    """How traffic reaches the sidecar of one pod.

    mode: never auto. taken_name: the port name that moves from vLLM to the sidecar, None where none does.
    numeric_services: the names of the Services that are known to target vLLM's port by number, None where Services are
    not known.
    """

    mode: Mode
    taken_name: str | None
    numeric_services: Sequence[str] | None

    @property
    def port_name(self) -> str:
        """The name of the sidecar's port."""
        return self.taken_name or PORT_NAME

    @property
    def needs_port_names(self) -> bool:
        """Whether a Service finds the sidecar's port by its name."""
        return self.mode != "redirect"


def direct_traffic(
    pod: Pod, request: InjectionRequest, server: Server, settings: InjectorSettings, services: Services | None
) -> tuple[Traffic, Warnings]:
    """Return how traffic reaches the sidecar.

    Args:
        services: the Services of the pod's namespace. None: they are not known.

    Raises:
        NotInjectedError: the mode cannot work for this pod.
    """
    numeric = None if services is None else _numeric_services(services, pod.labels, server.port)
    mode: Mode = request.mode or "auto"
    obstacle = _obstacle_to_swap(request, server)
    warnings: Warnings = ()
    if mode == "swap" and obstacle:
        raise NotInjectedError(Reason.SWAP_UNAVAILABLE, f"{MODE} swap is not possible: {obstacle}")
    if mode == "auto" and not obstacle:
        mode = "swap"
    elif mode == "auto" and numeric and settings.numeric_services == "redirect":
        mode = "redirect"
        warnings = warn(
            WarningCode.REDIRECT_CHOSEN,
            f"{MODE} redirect is used, because {_targeting(numeric)} the number {server.port}.",
        )
    elif mode == "auto" and not (server.declared and server.declared.name):
        raise NotInjectedError(
            Reason.UNREACHABLE,
            f"{obstacle} Its port {server.port} has no name that the sidecar could take over, either. Give the port a"
            f" name that the Service targets, or set {MODE} to redirect or port.",
        )
    elif mode == "auto":
        mode = "takeover"
    if mode == "redirect" and settings.uid is None:
        raise NotInjectedError(
            Reason.REDIRECT_UNAVAILABLE,
            f"{MODE} redirect needs a fixed user id for the sidecar, and the injector is set up without one.",
        )
    taken_name = server.declared.name if server.declared and mode in ("swap", "takeover") else None
    if taken_name and (rival := _rival(pod, server, taken_name)):
        raise NotInjectedError(
            Reason.PORT_NAME_NOT_UNIQUE,
            f"the port name {taken_name!r} is also that of container {rival!r}, so a Service would find that one."
            f" Give vLLM's port a name of its own, or set {MODE}: redirect.",
        )
    return Traffic(mode, taken_name, numeric), warnings


_REACHED_BY_LOOPBACK = ("0.0.0.0", "::", "127.0.0.1", "localhost", "")
"""Values of vLLM's --host with which it accepts what the sidecar sends."""


def _obstacle_to_swap(request: InjectionRequest, server: Server) -> str:
    """Why vLLM cannot be given another port, as a sentence. Empty: it can."""
    name = f"container {server.container.name!r}"
    if not server.invocations or not all(start.understood for start in server.invocations):
        return f"the command of {name} does not show where vLLM's --port belongs."
    if any(start.has("host") and start.value("host") not in _REACHED_BY_LOOPBACK for start in server.invocations):
        return f"{name} listens on one address only (--host), and the sidecar sends to loopback."
    if server.port < MIN_LISTEN_PORT:
        return f"the sidecar has no privileges, so it cannot listen on port {server.port} in place of {name}."
    if request.listen_port is not None:
        return f"the annotation {LISTEN_PORT} is set, but the sidecar takes the port of {name}."
    return ""


def reachability_warnings(traffic: Traffic, pod: Pod, server: Server, listen_port: int) -> Warnings:
    """Return what bypasses the sidecar, and what the user has to change so that traffic reaches it."""
    numeric, port = traffic.numeric_services, server.port
    known = f" At present {_targeting(numeric)} the number {port}." if numeric else ""
    if traffic.mode == "swap":
        return ()
    if traffic.mode == "redirect":
        return warn(
            WarningCode.REDIRECT_NEEDS_NET_ADMIN,
            "redirect adds an init container with NET_ADMIN, which Pod Security baseline and restricted reject.",
        )
    if traffic.mode == "port":
        message = f"nothing was moved. Set the Service's targetPort to {PORT_NAME!r} or {listen_port}.{known}"
        return warn(WarningCode.NOT_REACHED, message)
    warnings: Warnings = ()
    if traffic.taken_name is None:
        warnings = warn(
            WarningCode.NOT_REACHED,
            f"port {port} has no name to take over, so nothing reaches the sidecar yet."
            f" Set the Service's targetPort to {PORT_NAME!r}, or set {MODE}: redirect.{known}",
        )
    elif numeric is None or numeric:
        warnings = warn(
            WarningCode.NUMERIC_TARGETS_BYPASS,
            f"only what targets the port name {traffic.taken_name!r} reaches the sidecar. A Service or InferencePool"
            f" that targets the number {port} bypasses it, unless you set {MODE}: redirect.{known}",
        )
    if server.declared and server.declared.hostPort:
        warnings += warn(
            WarningCode.HOST_PORT_BYPASSES,
            f"what arrives at hostPort {server.declared.hostPort} bypasses the sidecar. Set {MODE}: redirect.",
        )
    if neighbors := _neighbors(pod, server):
        warnings += warn(
            WarningCode.NEIGHBOR_BYPASSES,
            f"container {neighbors[0]!r} of the same pod uses vLLM's port {port}, so what it sends there bypasses the"
            f" sidecar. Set {MODE}: redirect.",
        )
    return warnings


def _neighbors(pod: Pod, server: Server) -> list[str]:
    """The names of the pod's other containers whose command or variables name vLLM's port, as in-pod proxies do."""
    port = re.compile(rf"(?:localhost|127\.0\.0\.1|\[::1\]):{server.port}\b|\b[\w-]*port[= ]{server.port}\b")
    found = []
    for container in pod.spec.all_containers:
        values = "\n".join(value for value in container.environment.values() if value)
        if container is not server.container and port.search(f"{container.command_line}\n{values}"):
            found.append(container.name)
    return found


def _numeric_services(services: Services, labels: Mapping[str, str], port: int) -> list[str]:
    """The names of the Services that select the pod and target its port by number."""
    found = []
    for service in services:
        spec = service.get("spec") or {}
        selector = spec.get("selector") or {}
        if not selector or any(labels.get(key) != value for key, value in selector.items()):
            continue
        # A Service's port without a targetPort targets its own number.
        if port in [entry.get("targetPort") or entry.get("port") for entry in spec.get("ports") or ()]:
            found.append(str((service.get("metadata") or {}).get("name")))
    return found


def _targeting(services: Sequence[str]) -> str:
    return f"Service {services[0]} targets" if len(services) == 1 else f"Services {', '.join(services)} target"


def _rival(pod: Pod, server: Server, name: str) -> str | None:
    """Another container with a port of that name: a Service finds the first one in the pod."""
    for container in pod.spec.all_containers:
        if container is not server.container and any(port.name == name for port in container.tcp_ports):
            return container.name
    return None
