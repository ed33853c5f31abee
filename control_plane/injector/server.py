"""Finds the vLLM server in a pod: its container, its role and its port."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from control_plane.injector.annotations import ROLE, UPSTREAM_PORT, InjectionRequest
from control_plane.injector.pod import Container, Port
from control_plane.injector.reasons import NotInjectedError, Reason, WarningCode, Warnings, warn
from control_plane.vllm import DEFAULT_PORT, Role

_ROLE_IN_WORDS: Mapping[Role, str] = {"render": "a render server", "engine": "an engine"}


@dataclass(frozen=True)
class Server:
    """The vLLM server of a pod.

    index: of its container in `spec.containers`. declared: the port that the container declares for it, None where it
    declares none. port: the port on which vLLM listens.
    """

    index: int
    container: Container
    role: Role
    declared: Port | None
    port: int


def find_server(containers: Sequence[Container], request: InjectionRequest) -> tuple[Server, Warnings]:
    """Return the pod's vLLM server, and what had to be guessed.

    Raises:
        NotInjectedError: no container, or more than one, can be meant.
    """
    index = _server_index(containers, request.upstream_port)
    container = containers[index]
    role, role_warnings = _role(container, request.role)
    declared, port, port_warnings = _port(container, request.upstream_port)
    return Server(index, container, role, declared, port), role_warnings + port_warnings


def _server_index(containers: Sequence[Container], requested_port: int | None) -> int:
    """The container that declares the requested port; else the one whose command runs vLLM; else the only one."""
    if requested_port is not None:
        owners = [
            index
            for index, container in enumerate(containers)
            if any(port.containerPort == requested_port for port in container.ports or ())
        ]
        if len(owners) == 1:
            return owners[0]
    servers = [index for index, container in enumerate(containers) if container.role]
    if len(servers) == 1:
        return servers[0]
    if len(containers) == 1:
        return 0
    names = ", ".join(containers[index].name for index in servers or range(len(containers)))
    cure = f"Set the annotation {UPSTREAM_PORT} to a port that only the vLLM container declares."
    if servers:
        detail = f"{len(servers)} containers run vLLM ({names}), and one is needed. {cure}"
        raise NotInjectedError(Reason.SEVERAL_VLLM_CONTAINERS, detail)
    raise NotInjectedError(Reason.NO_VLLM_CONTAINER, f"no container's command runs vLLM ({names}). {cure}")


def _role(container: Container, requested: Role | None) -> tuple[Role, Warnings]:
    if requested is not None:
        return requested, ()
    role: Role = container.role or "engine"
    why = "because of its command" if container.role else "because its command does not say"
    return role, warn(
        WarningCode.ROLE_GUESSED,
        f"container {container.name!r} is taken for {_ROLE_IN_WORDS[role]}, {why}. Set {ROLE} to make sure.",
    )


def _port(container: Container, requested: int | None) -> tuple[Port | None, int, Warnings]:
    """The declared port, the port on which vLLM listens, and the warnings."""
    if requested is not None:
        declared = next((port for port in container.tcp_ports if port.containerPort == requested), None)
        return declared, requested, ()
    option = container.port_option
    if not container.tcp_ports:
        port = option or DEFAULT_PORT
        message = f"container {container.name!r} declares no TCP port, so vLLM is expected to listen on {port}."
        return None, port, warn(WarningCode.PORT_GUESSED, message)
    declared = container.tcp_ports[0]
    port = declared.containerPort
    if option in (None, port):
        return declared, port, ()
    message = (
        f"container {container.name!r} declares port {port}, but its command has --port {option}."
        f" The sidecar uses {port}. Set {UPSTREAM_PORT} if that is wrong."
    )
    return declared, port, warn(WarningCode.PORT_DIFFERS, message)
