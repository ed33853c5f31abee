"""Decides everything about one pod's sidecar, or why the pod is not injected. Pure: nothing is changed here."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from control_plane.address import Address
from control_plane.injector.annotations import LISTEN_PORT, MODE, NATIVE, POLICY, InjectionRequest, Mode
from control_plane.injector.commands import Edit
from control_plane.injector.envoy_config import container_argument
from control_plane.injector.pod import Pod, Spec
from control_plane.injector.reasons import NotInjectedError, Reason, WarningCode, Warnings, warn
from control_plane.injector.resources import Quantity, ResourceRequirements, guaranteed
from control_plane.injector.server import Server, ServerTls, find_server
from control_plane.injector.settings import NATIVE_FROM, NATIVE_NAMES_FROM, SLEEP_FROM, InjectorSettings
from control_plane.injector.traffic import Services, Traffic, direct_traffic, reachability_warnings
from control_plane.policy.model import Policies, Policy
from control_plane.render.filter import environment
from control_plane.render.placement import DEFAULT_ADMIN, DEFAULT_LISTEN, MAX_LABELS, Drain, Placement
from control_plane.tls import ListenerTls, ServerTrust
from control_plane.vllm import Role

CONTAINER = "vllm-priority"
"""The name of the sidecar's container."""
REDIRECT_CONTAINER = "vllm-priority-redirect"
"""The name of the init container that loads the nftables rules."""

TOKEN_VOLUME = "vllm-priority-token"
"""The name of the volume with the token that the sidecar's polls carry."""
TOKEN_FOLDER = "/var/run/secrets/vllm-priority"
"""Where the sidecar's container has that volume."""

CERTIFICATE_VOLUME = "vllm-priority-certificate"
"""The name of the volume with the value of the annotation `certificate`, which Envoy needs as a file."""
CERTIFICATE_FILE = "/etc/vllm-priority/certificate.json"
"""Where the sidecar's container has that value."""

HEALTH_PORT = 19002
"""The port of the sidecar's health listener, or the next free one."""
DEFAULT_GRACE_SECONDS = 30
"""Kubernetes' default for terminationGracePeriodSeconds."""
IDLE_SECONDS, IDLE_DRAIN_SECONDS = 3, 1
"""Envoy closes a client's connection that was idle for the sum. vLLM accepts connections for 5 s after its pod began to
stop, and idle ones must be closed by then."""
UVICORN_KEEP_ALIVE_SECONDS = 5
"""After how long vLLM closes an idle connection by default (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)."""

_DRAIN_TOKEN = "vllm-priority-drain-token-000000"
"""Stands for the token in configurations, so that pods that differ only in it share a memoized one. As long as that."""


@dataclass(frozen=True)
class Plan:
    """All that was decided about one pod.

    server_index: of the vLLM container. upstream, listen, health: ports of vLLM and of the sidecar. port_before: vLLM's
    port in the manifest. edits: the changes to vLLM's command line, in mode swap. port_name: of the sidecar's port.
    taken_name: the port name that moves to the sidecar, None where none does. config: the Envoy bootstrap as a
    container's argument. environment: what it reads of its environment. server_sleep_seconds: vLLM's preStop sleep, 0
    for none. drain_path: what the sidecar's preStop hook requests of the health listener. token_audience: of the token
    for its polls, None for none. tls: with what the sidecar serves HTTPS, None if vLLM serves plain HTTP.
    """

    server_index: int
    role: Role
    mode: Mode
    native: bool
    upstream: int
    listen: int
    health: int
    port_before: int
    edits: Sequence[Edit]
    port_name: str
    taken_name: str | None
    config: str
    environment: Mapping[str, str]
    image: str
    redirect_image: str
    uid: int | None
    concurrency: int
    resources: ResourceRequirements
    server_sleep_seconds: int
    drain_path: str
    token_audience: str | None
    tls: ServerTls | None


def make_plan(
    pod: Pod,
    policies: Policies,
    settings: InjectorSettings,
    services: Services | None = None,
    drain_token: str | None = None,
) -> tuple[Plan, Warnings]:
    """Return the plan for a pod's sidecar, and what its user should know.

    Args:
        services: the Services of the pod's namespace. None: they are not known.
        drain_token: a secret that makes up the path of the sidecar's preStop hook. None: one that follows from the
            sidecar's configuration, so that the same pod always gets the same sidecar.

    Raises:
        NotInjectedError: the pod cannot have a sidecar.
    """
    spec = pod.spec
    if spec.hostNetwork:
        raise NotInjectedError(Reason.HOST_NETWORK, "hostNetwork is true, so the pod's ports are those of the node.")
    if spec.os and spec.os.name == "windows":
        raise NotInjectedError(Reason.WINDOWS, "spec.os.name is windows, and the image of Envoy is for Linux.")
    request = InjectionRequest.parse(pod.annotations, settings.forbidden_annotations)
    server, server_warnings = find_server(pod, request)
    traffic, mode_warnings = direct_traffic(pod, request, server, settings, services)
    native, native_warnings = _native(request, settings, traffic, spec)
    ports, port_warnings = _ports(request, server, traffic, spec)
    can_sleep = settings.version is None or settings.version >= SLEEP_FROM
    grace_seconds = spec.terminationGracePeriodSeconds
    grace_seconds = DEFAULT_GRACE_SECONDS if grace_seconds is None else grace_seconds
    resources = _resources(request, settings, spec)
    # Kubernetes stops a native sidecar after the other containers. It stops a plain one together with them, and Envoy
    # exits at once, so a plain sidecar's hook lasts as long as vLLM may take: the grace period but its end.
    drain = Drain(_DRAIN_TOKEN, 0 if native else max(grace_seconds - 2, 0))
    policy = policies.choose(pod.labels, request.policy)
    if policy is None:
        raise NotInjectedError(
            Reason.UNKNOWN_POLICY,
            f"annotation {POLICY}: there is no policy {request.policy!r}."
            f" It must be one of: {', '.join(policies.by_name)}.",
        )
    config = _config(pod, policy, settings, request, server, ports, resources, drain)
    token = drain_token or hashlib.sha256(config.encode()).hexdigest()[:32]
    plan = Plan(
        server_index=server.index,
        role=server.role,
        mode=traffic.mode,
        native=native,
        upstream=ports.upstream,
        listen=ports.listen,
        health=ports.health,
        port_before=server.port,
        edits=_edits(server, ports.upstream) if traffic.mode == "swap" else [],
        port_name=traffic.port_name,
        taken_name=traffic.taken_name,
        config=config.replace(drain.path, Drain(token).path),
        environment=environment(policy),
        image=request.image or settings.image,
        redirect_image=settings.redirect_image,
        uid=settings.uid,
        concurrency=settings.concurrency,
        resources=resources,
        server_sleep_seconds=settings.drain_seconds if can_sleep and 0 < settings.drain_seconds < grace_seconds else 0,
        drain_path=Drain(token).path,
        token_audience=settings.token_audience,
        tls=server.tls,
    )
    sleep_warnings: Warnings = ()
    if not can_sleep:
        message = "this Kubernetes has no preStop sleep, which 1.30 has: requests may be lost when the pod stops."
        sleep_warnings = warn(WarningCode.NO_SLEEP_HOOK, message)
    reach_warnings = reachability_warnings(traffic, pod, server, ports.listen)
    return plan, (
        *server_warnings, *mode_warnings, *native_warnings, *port_warnings, *sleep_warnings, *reach_warnings,
    )  # fmt: skip


def _native(
    request: InjectionRequest, settings: InjectorSettings, traffic: Traffic, spec: Spec
) -> tuple[bool, Warnings]:
    """Whether the sidecar is a restartable init container."""
    version = settings.version
    warnings: Warnings = ()
    native = settings.native if request.native is None else request.native
    if native is None:
        native = version is not None and version >= (NATIVE_NAMES_FROM if traffic.needs_port_names else NATIVE_FROM)
    elif native and version is not None and version < NATIVE_FROM:
        raise NotInjectedError(
            Reason.NATIVE_UNSUPPORTED,
            f"native sidecars need Kubernetes 1.29 or later, and this is {settings.kubernetes_version}.",
        )
    elif native and traffic.needs_port_names and version is not None and version < NATIVE_NAMES_FROM:
        raise NotInjectedError(
            Reason.NATIVE_UNSUPPORTED,
            "a Service finds a native sidecar's port by name from Kubernetes 1.33 on, and this is"
            f" {settings.kubernetes_version}. Set {NATIVE}: 'false', or {MODE}: redirect.",
        )
    elif native and traffic.needs_port_names and version is None:
        message = "a Service finds a native sidecar's port by name only from Kubernetes 1.33 on."
        warnings = warn(WarningCode.NATIVE_MAY_BE_UNSUPPORTED, message)
    if not native and spec.restartPolicy in ("Never", "OnFailure"):
        raise NotInjectedError(
            Reason.WOULD_NOT_COMPLETE,
            f"restartPolicy is {spec.restartPolicy}, and a plain sidecar would keep the pod from completing."
            f" Set {NATIVE}: 'true'.",
        )
    return native, warnings


@dataclass(frozen=True)
class _Ports:
    """upstream: vLLM's. The others are the sidecar's."""

    upstream: int
    listen: int
    health: int
    admin: int


def _ports(request: InjectionRequest, server: Server, traffic: Traffic, spec: Spec) -> tuple[_Ports, Warnings]:
    """Ports for the sidecar, and in mode swap for vLLM, that nothing else in the pod uses, as far as the pod says."""
    used = {server.port}.union(*(container.named_ports for container in spec.all_containers))
    default = DEFAULT_LISTEN[server.role].port
    warnings: Warnings = ()
    upstream, listen = server.port, request.listen_port
    if traffic.mode == "swap":
        # `--uninject` looks for the number in the command line, so it must not be there already.
        written = server.container.command_line
        listen, upstream = (
            server.port,
            _free(default, used | {n for n in range(default, default + 100) if str(n) in written}),
        )
    elif listen is None:
        listen = _free(default, used)
        if listen != default:
            message = f"port {default} is in use in this pod, so the sidecar listens on {listen}."
            warnings = warn(WarningCode.LISTEN_PORT_MOVED, message)
    elif listen in used:
        raise NotInjectedError(
            Reason.PORT_IN_USE,
            f"annotation {LISTEN_PORT}: port {listen} is in use in this pod. Use a free port.",
        )
    used |= {upstream, listen}
    health = _free(HEALTH_PORT, used)
    return _Ports(upstream, listen, health, _free(DEFAULT_ADMIN[server.role].port, used | {health})), warnings


def _edits(server: Server, port: int) -> list[Edit]:
    """What gives vLLM another port. Words that two servers of a script share, as with "$@", change once."""
    by_server = dict.fromkeys(tuple(start.with_port(port)) for start in server.invocations)
    return [edit for edits in by_server for edit in edits]


def _free(wanted: int, used: set[int]) -> int:
    return next(port for port in range(wanted, 65536) if port not in used)


def _config(
    pod: Pod,
    policy: Policy,
    settings: InjectorSettings,
    request: InjectionRequest,
    server: Server,
    ports: _Ports,
    resources: ResourceRequirements,
    drain: Drain,
) -> str:
    if len(pod.labels) > MAX_LABELS:
        raise NotInjectedError(
            Reason.CONFIGURATION_TOO_LARGE,
            f"the pod has {len(pod.labels)} labels, and a sidecar can send {MAX_LABELS}. Use fewer labels.",
        )
    keep_alive = pod.spec.containers[server.index].keep_alive_seconds or 0
    placement = Placement(
        role=server.role,
        listen=Address(settings.listen_host, ports.listen),
        upstream=Address("127.0.0.1", ports.upstream),
        # On the loopback interface, only vLLM or another container of the pod can respond.
        upstream_trust=ServerTrust(None, "127.0.0.1") if server.tls else None,
        listen_tls=ListenerTls(CERTIFICATE_FILE, None) if server.tls else None,
        admin=Address("127.0.0.1", ports.admin),
        health=Address(settings.listen_host, ports.health),
        control_plane=settings.control_plane,
        control_plane_trust=settings.control_plane_trust,
        token_file=f"{TOKEN_FOLDER}/token" if settings.token_audience else None,
        policy_name=request.policy,
        root_path=server.root_path,
        memory_limit_bytes=_memory_limit(resources),
        # Whoever raises vLLM's own timeout has, for example, a load balancer that keeps connections for longer.
        idle_timeout_seconds=keep_alive if keep_alive > UVICORN_KEEP_ALIVE_SECONDS else IDLE_SECONDS,
        drain_timeout_seconds=IDLE_DRAIN_SECONDS,
        drain=drain,
        logged_requests=settings.logged_requests,
        tracing=settings.tracing,
        shares_script=True,
    )
    return container_argument(policy.below(server.root_path), placement, pod.labels)


def _resources(request: InjectionRequest, settings: InjectorSettings, spec: Spec) -> ResourceRequirements:
    if request.resources is not None:
        return request.resources
    return guaranteed(settings.resources) if spec.is_guaranteed else settings.resources


def _memory_limit(resources: ResourceRequirements) -> int:
    """What the sidecar's container may use, in bytes; the built-in limit where it has none."""
    text = resources.get("limits", {}).get("memory")
    limit = int(Quantity.parse(text).value) if text is not None else 0
    return limit or Placement.memory_limit_bytes
