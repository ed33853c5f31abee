"""Finds the vLLM server in a pod: its container, its role and its port."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from control_plane.injector.annotations import ROLE, UPSTREAM_PORT, InjectionRequest
from control_plane.injector.commands import Invocation
from control_plane.injector.pod import Container, Mount, Pod, Port, Spec
from control_plane.injector.reasons import NotInjectedError, Reason, WarningCode, Warnings, warn
from control_plane.vllm import DEFAULT_PORT, Role

WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""LeaderWorkerSet's label on its pods. The leader has "0"."""

_ROLE_IN_WORDS: Mapping[Role, str] = {"render": "a render server", "engine": "an engine"}


@dataclass(frozen=True)
class ServerTls:
    """With what a vLLM server serves HTTPS.

    certificate, key: the paths of the files, in one folder. The certificate's may contain the key, too. mounts: the
    volumes of vLLM's container that contain them. folder: into which a new version of them is moved.
    """

    certificate: str
    key: str
    mounts: tuple[Mount, ...]
    folder: str


@dataclass(frozen=True)
class Server:
    """The vLLM server of a pod.

    index: of its container in `spec.containers`. declared: the port that the container declares for it, None where it
    declares none. port: the port on which vLLM listens. invocations: the parts of the command line that start it, empty
    where they are not known. tls: None if it serves plain HTTP.
    """

    index: int
    container: Container
    role: Role
    declared: Port | None
    port: int
    invocations: Sequence[Invocation]
    tls: ServerTls | None

    @property
    def root_path(self) -> str | None:
        """The prefix of the server's routes that its command sets (--root-path)."""
        found = {(start.value("root-path") or "").rstrip("/") for start in self.container.servers}
        path = found.pop() if len(found) == 1 else ""
        return path if re.fullmatch(r"(/[^/?#%\s]+)+", path) else None


def find_server(pod: Pod, request: InjectionRequest) -> tuple[Server, Warnings]:
    """Return the pod's vLLM server, and what had to be guessed.

    Raises:
        NotInjectedError: no container, or more than one, can be meant, or the server is not one for a sidecar.
    """
    containers = pod.spec.containers
    index = _server_index(containers, request.upstream_port)
    container = containers[index]
    _check_kind(container, pod.labels)
    role, role_warnings = _role(container, request.role)
    port, port_warnings = _port(container, request.upstream_port)
    tls, tls_warnings = _tls(container, port, pod.spec)
    declared = next((entry for entry in container.tcp_ports if entry.containerPort == port), None)
    starts = [start for start in container.servers if (_listens_on(start) or port) == port]
    server = Server(index, container, role, declared, port, starts, tls)
    return server, role_warnings + port_warnings + tls_warnings


def _server_index(containers: Sequence[Container], requested_port: int | None) -> int:
    """The container that declares the requested port; else the one whose command runs vLLM; else the only one."""
    if requested_port is not None:
        owners = [
            index
            for index, container in enumerate(containers)
            if any(port.containerPort == requested_port for port in container.ports or ())
            or any(start.port == requested_port for start in container.servers)
        ]
        if len(owners) == 1:
            return owners[0]
    servers = [index for index, container in enumerate(containers) if container.servers]
    if len(servers) == 1:
        return servers[0]
    others = [index for index, container in enumerate(containers) if container.starts]
    if others and not servers:
        return others[0]
    if len(containers) == 1:
        return 0
    names = ", ".join(containers[index].name for index in servers or range(len(containers)))
    cure = f"Set the annotation {UPSTREAM_PORT} to a port that only the vLLM container declares."
    if servers:
        detail = f"{len(servers)} containers run vLLM ({names}), and one is needed. {cure}"
        raise NotInjectedError(Reason.SEVERAL_VLLM_CONTAINERS, detail)
    raise NotInjectedError(Reason.NO_VLLM_CONTAINER, f"no container's command runs vLLM ({names}). {cure}")


def _check_kind(container: Container, labels: Mapping[str, str]) -> None:
    """Raise if what the container starts is known, and is not an HTTP server in this pod."""
    kinds = {start.kind for start in container.starts}
    name = f"container {container.name!r}"
    headless = NotInjectedError(Reason.SERVES_NOTHING, f"{name} is a headless worker, which serves no HTTP.")
    if any(start.has("uds") for start in container.servers):
        detail = f"{name} listens on a Unix socket (--uds). Let it listen on a port."
        raise NotInjectedError(Reason.NOT_HTTP, detail)
    if "http" in kinds:
        if "headless" not in kinds or labels.get(WORKER_INDEX) == "0":
            return
        if WORKER_INDEX in labels:
            raise headless
        raise NotInjectedError(
            Reason.LEADER_UNKNOWN,
            f"{name} starts a server in one pod and headless workers in others. Give the server a pod template of its"
            f" own. In a LeaderWorkerSet, you can let the webhook inject the leader instead.",
        )
    if "headless" in kinds:
        raise headless
    if "batch" in kinds:
        raise NotInjectedError(Reason.SERVES_NOTHING, f"{name} runs a batch, which serves no HTTP.")
    if "grpc" in kinds:
        raise NotInjectedError(Reason.NOT_HTTP, f"{name} serves gRPC, and the sidecar edits HTTP requests only.")


# ---- HTTPS ---------------------------------------------------------------------------------------------------------


def _tls(container: Container, port: int, spec: Spec) -> tuple[ServerTls | None, Warnings]:
    """With what the server serves HTTPS, so that the sidecar can do the same.

    vLLM's options are those of uvicorn (vllm/entrypoints/openai/cli_args.py).
    """
    name = f"container {container.name!r}"
    has_key = any(start.has("ssl-keyfile") for start in container.servers)
    if not any(start.has("ssl-certfile") for start in container.servers):
        if has_key or any(probed == port and https for probed, https in container.http_probes):
            raise _no_tls(
                f"{name} serves HTTPS, and its command does not say with which certificate.",
                "Name it in the container's command or args, with --ssl-certfile and --ssl-keyfile",
            )
        return None, ()
    for start in container.servers:
        if start.has("ssl-cert-reqs") and start.value("ssl-cert-reqs") != "0":
            cure = "Let vLLM accept clients without one"
            raise _no_tls(f"{name} requires client certificates (--ssl-cert-reqs), and the sidecar has none.", cure)
    found = {(start.value("ssl-certfile"), start.value("ssl-keyfile")) for start in container.servers}
    certificate, key = found.pop()
    if found or certificate is None or (key is None and has_key):
        cure = "Write the path into the command"
        raise _no_tls(f"the value of --ssl-certfile or --ssl-keyfile of {name} is not certain.", cure)
    key = certificate if key is None else key
    if PurePosixPath(certificate).parent != PurePosixPath(key).parent:
        # Envoy watches one folder. With two, it could see a new certificate before its key.
        raise _no_tls(f"{name} has its certificate and its key in two folders.", "Use one folder for both")
    mounts = tuple(dict.fromkeys(_mount_of(path, container, spec) for path in (certificate, key)))
    message = (
        f"{name} serves HTTPS, so the sidecar does, too, with the same certificate."
        " Inside the pod it does not verify vLLM's certificate."
    )
    folder = str(PurePosixPath(certificate).parent)
    if spec.is_projected(mounts[0].name) and not mounts[0].subPath:
        folder = mounts[0].mountPath  # There the kubelet moves a new version of the volume.
    return ServerTls(certificate, key, mounts, folder), warn(WarningCode.LOOPBACK_TLS, message)


def _mount_of(path: str, container: Container, spec: Spec) -> Mount:
    """The mount that contains a file of vLLM's container. Raise if the sidecar cannot have it."""
    name = f"container {container.name!r}"
    parents = (PurePosixPath(path), *PurePosixPath(path).parents)
    mounts = [mount for mount in container.volumeMounts or () if PurePosixPath(mount.mountPath) in parents]
    if not mounts or ".." in parents[0].parts:
        raise _no_tls(f"the file {path} of {name} is not in a volume.", "Mount it from one")
    mount = max(mounts, key=lambda mount: len(PurePosixPath(mount.mountPath).parts))
    if mount.subPathExpr:
        raise _no_tls(f"the volume with {path} is mounted with a subPathExpr in {name}.", "Mount it without one")
    if not spec.can_read(mount.name):
        cure = (
            f"Set fsGroup in the pod's securityContext, or a defaultMode that others can read in volume {mount.name!r}"
        )
        raise _no_tls(f"only root can read {path} in {name}, and the sidecar is not root.", cure)
    return mount


def _no_tls(why: str, cure: str) -> NotInjectedError:
    return NotInjectedError(Reason.UPSTREAM_TLS, f"{why} {cure}, or let vLLM serve plain HTTP.")


# ---- Role and port -------------------------------------------------------------------------------------------------


def _role(container: Container, requested: Role | None) -> tuple[Role, Warnings]:
    if requested is not None:
        return requested, ()
    servers = container.servers
    role: Role = servers[0].role if servers else "engine"
    why = "because of its command" if servers else "because its command does not say"
    return role, warn(
        WarningCode.ROLE_GUESSED,
        f"container {container.name!r} is taken for {_ROLE_IN_WORDS[role]}, {why}. Set {ROLE} to make sure.",
    )


def _listens_on(start: Invocation) -> int | None:
    """The port on which a server listens. None: it is not certain, because of a variable or a configuration file."""
    if start.has("port"):
        return start.port
    return None if start.has("config") or start.default_port != DEFAULT_PORT else DEFAULT_PORT


def _port(container: Container, requested: int | None) -> tuple[int, Warnings]:
    """The port on which vLLM listens, and the warnings.

    It is the one that the command names; else the one that a probe requests; else vLLM's usual port, if the container
    declares it, or declares none.
    """
    if requested is not None:
        return requested, ()
    name, servers = f"container {container.name!r}", container.servers
    declared = {port.containerPort for port in container.tcp_ports}
    ports = {_listens_on(start) for start in servers}
    if len(ports) > 1:
        raise _port_unknown(f"{name} starts servers on several ports.")
    port = next(iter(ports)) if ports else None
    if port and any(start.has("port") for start in servers):
        if port in declared or not declared:
            return port, ()
        message = f"{name} has --port {port} in its command, and declares other ports only."
        return port, warn(WarningCode.PORT_DIFFERS, message)
    probed = {number for number, _ in container.http_probes}
    if len(probed) == 1:
        return probed.pop(), ()
    usual = servers[0].default_port if servers else DEFAULT_PORT
    if usual in declared:
        return usual, ()
    if port is None and len(declared) == 1:
        usual = declared.pop()  # The command does not say, so the only port is the likely one.
    elif declared or any(start.has("port", "config") for start in servers):
        raise _port_unknown(f"neither the command nor a probe of {name} says on which port vLLM listens.")
    message = f"neither the command nor a probe of {name} names vLLM's port, so {usual} is expected."
    return usual, warn(WarningCode.PORT_GUESSED, message)


def _port_unknown(detail: str) -> NotInjectedError:
    return NotInjectedError(Reason.PORT_UNKNOWN, f"{detail} Set the annotation {UPSTREAM_PORT}.")
