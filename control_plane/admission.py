"""Puts the sidecar into a pod: AdmissionReview + policies -> response with a JSON Patch. Pure; app.py has the HTTP.

`mutate` works out the pod as it should be, and the patch is the difference of the two as data (RFC 6902), so
the webhook and `vllm-priority inject` cannot disagree. What is asked of a pod stands in its annotations:

    vllm-priority.io/role           render | engine; else guessed from the vLLM container's command, with a warning
    vllm-priority.io/upstream-port  vLLM's port; else the vLLM container's first port
    vllm-priority.io/listen-port    the sidecar's port; else 18000 (render) or 18001 (engine), or the next free one
    vllm-priority.io/image          Envoy's image; else the injector's
    vllm-priority.io/resources      Kubernetes' ResourceRequirements as JSON; else the injector's
    vllm-priority.io/policy         name of a policy; else chosen by the pod's labels
    vllm-priority.io/native         true | false: a restartable init container; else by the cluster's version
    vllm-priority.io/mode           takeover | redirect | port: how traffic reaches the sidecar

    takeover  the port NAME that the Service targets moves to the sidecar; probes and hooks get the number
    redirect  nftables in the pod send what comes in for vLLM's port to the sidecar, for targets that are numbers
    port      nothing moves: the Service is pointed at the sidecar's port by its owner
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar

import orjson

from control_plane.errors import BadInput
from control_plane.pod import (
    Container,
    Pod,
    Port,
    Review,
    Spec,
    amount,
    ascii_line,
    guaranteed,
    parse_resources,
    read,
)
from control_plane.pod_patch import (
    CONTAINER,
    INJECTED,
    ORIGINAL,
    PORT_NAME,
    PREFIX,
    Mode,
    Plan,
    injected,
    json_patch,
    verbatim,
)
from control_plane.policy import ROLES, Policies, Policy, Role
from control_plane.render import DEFAULT_ADMIN, DEFAULT_LISTEN, Address, Placement, bootstrap, check_namespace

INJECT_LABEL = PREFIX + "inject"
"""Label: "true" asks for the sidecar; "false" refuses it, offline too."""

ROLE = PREFIX + "role"
UPSTREAM_PORT = PREFIX + "upstream-port"
LISTEN_PORT = PREFIX + "listen-port"
IMAGE = PREFIX + "image"
RESOURCES = PREFIX + "resources"
POLICY = PREFIX + "policy"
NATIVE = PREFIX + "native"
MODE = PREFIX + "mode"
ANNOTATIONS = (ROLE, UPSTREAM_PORT, LISTEN_PORT, IMAGE, RESOURCES, POLICY, NATIVE, MODE)

MODES: tuple[Mode, ...] = ("takeover", "redirect", "port")

ENVOY_VERSION = "1.40.0"
"""The newest Envoy that the tests run, and the one that is pinned."""
ENVOY_IMAGE = f"docker.io/envoyproxy/envoy:distroless-v{ENVOY_VERSION}"
"""The one place that pins Envoy's image. No shell in it: only what Envoy itself can do can be a hook or a probe."""

REDIRECT_IMAGE = "registry.k8s.io/build-image/distroless-iptables:v0.9.4"
"""Holds `nft`: the base of Kubernetes' own kube-proxy image."""

MAX_CONFIG_BYTES = 128 * 1024 - 1
"""Linux takes no argument longer than MAX_ARG_STRLEN, 32 pages with the final NUL (execve(2))."""

SLEEP_FROM = (1, 30)
"""preStop.sleep: Kubernetes' KEP-3960, on by default from here."""
NATIVE_FROM = (1, 29)
"""Restartable init containers: KEP-753, on by default from here."""
NATIVE_NAMES_FROM = (1, 33)
"""From here on a Service's port name is looked up in restartable init containers too (kubernetes#127958, #128850)."""

DEFAULT_RESOURCES: Mapping[str, Any] = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    # The sidecar sheds requests before its resident set reaches this: see `_memory_limit`.
    "limits": {"memory": "1280Mi"},
}

WORKERS = range(1, 1025)
DRAIN_SECONDS = range(3601)
USER_IDS = f"allowed: 1 to {2**31 - 1}, or none"
_IMAGES = f"allowed: such as {ENVOY_IMAGE}"

_KEPT_OUT = frozenset({"kube-system", "kube-public", "kube-node-lease"})
_HEALTH_PORT = 19002
_GRACE_SECONDS = 30  # Kubernetes' default terminationGracePeriodSeconds


@dataclass(frozen=True)
class InjectorSettings:
    """How the injector was set up, for all pods alike.

    native: None lets `kubernetes_version` ("1.33", "v1.33.2-gke.1") decide; where that is None too, a plain container.
    numeric_services: what to do where a Service is known to target vLLM's port by number.
    uninjectable: what becomes of a pod that asked for a sidecar and cannot have one.
    uid: the sidecar's user; None leaves it to the cluster (OpenShift), and then there is no redirect.
    listen_host: "::" for IPv6 as well, on nodes that have it.
    drain_seconds: how long vLLM goes on serving after its pod began to stop, while endpoints are still passed round.

    BadInput, which names the option of the commands, where no pod could be set up so: else each pod would fail.
    """

    image: str = ENVOY_IMAGE
    redirect_image: str = REDIRECT_IMAGE
    resources: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_RESOURCES)
    native: bool | None = None
    kubernetes_version: str | None = None
    control_plane: Address | None = None
    numeric_services: Literal["warn", "redirect"] = "warn"
    uninjectable: Literal["refuse", "skip"] = "refuse"
    own_namespace: str | None = None
    uid: int | None = 65532
    listen_host: str = "0.0.0.0"
    concurrency: int = 2
    drain_seconds: int = 5

    def __post_init__(self) -> None:
        version = self.kubernetes_version
        checks: tuple[tuple[str, object, bool, str], ...] = (
            ("--sidecar-image", self.image, _is_image(self.image), f"no image; {_IMAGES}"),
            ("--redirect-image", self.redirect_image, _is_image(self.redirect_image), f"no image; {_IMAGES}"),
            (
                "--kubernetes-version", version, version is None or bool(_VERSION.fullmatch(version)),
                "no version; allowed: such as 1.33 or v1.33.2",
            ),
            ("--sidecar-uid", self.uid, self.uid is None or 0 < self.uid < 2**31, f"no user id; {USER_IDS}"),
            (
                # Another address is one pod's, and the loopback nobody's: Services and probes come from outside.
                "--sidecar-listen-host", self.listen_host, self.listen_host in ("0.0.0.0", "::"),
                "not where a pod can be reached; allowed: 0.0.0.0, or :: for IPv6 as well",
            ),
            (
                "--sidecar-concurrency", self.concurrency, self.concurrency in WORKERS,
                f"out of range; allowed: {WORKERS[0]} to {WORKERS[-1]}",
            ),
            (
                "--drain-seconds", self.drain_seconds, self.drain_seconds in DRAIN_SECONDS,
                f"out of range; allowed: {DRAIN_SECONDS[0]} to {DRAIN_SECONDS[-1]}",
            ),
        )  # fmt: skip
        for option, value, fine, why in checks:
            if not fine:
                raise BadInput(f"{option}: {str(value)[:60]!r} is {why}")
        if self.own_namespace is not None:
            check_namespace(self.own_namespace, "--own-namespace")

    @property
    def version(self) -> tuple[int, int] | None:
        """The cluster's (major, minor), None where it is not known."""
        found = _VERSION.fullmatch(self.kubernetes_version or "")
        return (int(found[1]), int(found[2])) if found else None


# As /version has it: v1.33.2, v1.33.2-gke.100; a minor may be "33+" there.
_VERSION = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,3})(?:[.+-][0-9A-Za-z.+-]*)?")

# distribution/reference's grammar: [HOST[:PORT]/]PATH[:TAG][@DIGEST].
_IMAGE_PATH = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    r"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?/)?"
    rf"{_IMAGE_PATH}(?:/{_IMAGE_PATH})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9+._-]*:[0-9a-fA-F]{32,})?"
)


def _is_image(text: str) -> bool:
    return len(text) < 512 and _IMAGE.fullmatch(text) is not None


@dataclass(frozen=True)
class Mutation:
    """The pod as it should be, and how to get there.

    skipped: why nothing was done, None where something was. refused: the pod must not be let in as it is.
    """

    pod: Mapping[str, Any]
    patch: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skipped: str | None = None
    refused: bool = False


def review(
    body: object,
    policies: Policies,
    settings: InjectorSettings,
    services: Iterable[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The answer to an AdmissionReview of admission.k8s.io/v1; BadInput where `body` is none.

    services: the Services of the pod's namespace where the control plane may read them, else None.
    Nothing is changed anywhere but in the answer, so a dry run is answered like any other.
    """
    request = read(Review, body, "AdmissionReview").request
    response: dict[str, Any] = {"uid": request.uid, "allowed": True}
    if request.operation == "CREATE" and request.kind.kind == "Pod" and not request.subResource:
        assert isinstance(body, dict)
        pod = body["request"].get("object")
        mutation = _reviewed(pod, request.namespace, policies, settings, services)
        if mutation.refused:
            response["allowed"] = False
            response["status"] = {"code": 400, "reason": "BadRequest", "message": ascii_line(str(mutation.skipped))}
        if mutation.patch:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(encoded(mutation.patch)).decode()
        if mutation.warnings:
            response["warnings"] = [ascii_line(warning) for warning in mutation.warnings]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def encoded(value: object) -> bytes:
    """`value` as compact JSON. Most of a review's time is the writing of long texts, which orjson does faster.

    What it refuses (lone surrogates, integers beyond 64 bits, deep nesting) json writes, in ASCII.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _reviewed(
    pod: object,
    namespace: str,
    policies: Policies,
    settings: InjectorSettings,
    services: Iterable[Mapping[str, Any]] | None,
) -> Mutation:
    typed = read(Pod, pod, "pod")
    assert isinstance(pod, dict)
    if typed.labels.get(INJECT_LABEL) != "true":
        return Mutation(pod, skipped=f"the label {INJECT_LABEL} is not 'true'")
    # The webhook's own selector keeps these out; a selector that was edited must not lock a cluster up.
    if namespace in _KEPT_OUT or namespace == settings.own_namespace:
        return Mutation(pod, skipped=f"namespace {namespace}", warnings=[f"not injected: the namespace is {namespace}"])
    return _mutated(pod, typed, policies, settings, services)


def mutate(
    pod: Mapping[str, Any],
    policies: Policies,
    settings: InjectorSettings,
    services: Iterable[Mapping[str, Any]] | None = None,
) -> Mutation:
    """`pod` (or a pod template) with the sidecar. BadInput where it is no pod at all.

    `pod` itself is not changed. A pod that has the sidecar already is left alone: webhooks are called again.
    """
    return _mutated(pod, read(Pod, pod, "pod"), policies, settings, services)


def _mutated(
    pod: Mapping[str, Any],
    typed: Pod,
    policies: Policies,
    settings: InjectorSettings,
    services: Iterable[Mapping[str, Any]] | None,
) -> Mutation:
    if typed.labels.get(INJECT_LABEL) == "false":
        return Mutation(pod, skipped=f"the label {INJECT_LABEL} is 'false'")
    if any(container.name == CONTAINER for container in typed.spec.all_containers):
        return Mutation(pod, skipped="the sidecar is there already")
    try:
        plan = _plan(typed, policies, settings, services)
    except _UninjectableError as reason:
        text = f"not injected: {reason}"
        refused = reason.owner_can_mend and settings.uninjectable == "refuse"
        return Mutation(pod, warnings=[] if refused else [text], skipped=text, refused=refused)
    changed = injected(pod, typed, plan)
    return Mutation(changed, json_patch(pod, changed), plan.warnings)


class _UninjectableError(Exception):
    """Why a pod gets no sidecar. `owner_can_mend`: its owner asked for it in a way that cannot be done."""

    def __init__(self, reason: str, owner_can_mend: bool = True) -> None:
        super().__init__(reason)
        self.owner_can_mend = owner_can_mend


def _plan(
    pod: Pod, policies: Policies, settings: InjectorSettings, services: Iterable[Mapping[str, Any]] | None
) -> Plan:
    spec, asked, labels = pod.spec, pod.annotations, pod.labels
    if spec.hostNetwork:
        raise _UninjectableError("hostNetwork is true, so its ports are the node's", owner_can_mend=False)
    if spec.os and spec.os.name == "windows":
        raise _UninjectableError("spec.os.name is windows, and Envoy's image is for Linux", owner_can_mend=False)
    ours = (*ANNOTATIONS, INJECTED, ORIGINAL)
    if unknown := sorted(key for key in asked if key.startswith(PREFIX) and key not in ours):
        names = ", ".join(key.removeprefix(PREFIX) for key in ANNOTATIONS)
        raise _UninjectableError(f"annotation {unknown[0]} is unknown; allowed: {names}")

    warnings: list[str] = []
    asked_upstream = _port_number(asked, UPSTREAM_PORT, 1)
    index = _app_index(spec.containers, asked_upstream)
    app = spec.containers[index]
    role = _role(asked, app, warnings)
    port = _app_port(app, asked_upstream)
    upstream = port.containerPort if port else asked_upstream or app.listens_on or 8000
    if port is None and asked_upstream is None:
        warnings.append(f"container {app.name!r} declares no TCP port: vLLM is taken to listen on {upstream}")
    elif app.listens_on not in (None, upstream) and asked_upstream is None:
        warnings.append(
            f"container {app.name!r} declares port {upstream} and has --port {app.listens_on} in its command;"
            f" {upstream} is used: set {UPSTREAM_PORT} if that is wrong"
        )

    mode, numeric = _mode(asked, settings, services, labels, upstream, warnings)
    taken_name = port.name if port and mode == "takeover" else None
    if taken_name and (rival := _rival(spec, app, taken_name)):
        raise _UninjectableError(
            f"the port name {taken_name!r} is also that of container {rival!r}, so a Service would find that one;"
            f" allowed: a name of its own, or {MODE}: redirect"
        )
    native = _native(asked, settings, mode, spec, warnings)

    taken = {upstream} | {p.containerPort for c in spec.all_containers for p in c.ports or ()}
    taken |= {c.listens_on for c in spec.all_containers if c.listens_on}
    listen = _listen_port(asked, role, taken, warnings)
    health = _free(_HEALTH_PORT, taken | {listen})
    admin = _free(DEFAULT_ADMIN[role].port, taken | {listen, health})

    name = asked.get(POLICY)
    policy = policies.choose(labels, name)
    if policy is None:
        known = ", ".join(policies.by_name)
        raise _UninjectableError(f"annotation {POLICY}: {name!r} is no policy here; allowed: {known}")
    resources = _resources(asked, settings, spec)
    placement = Placement(
        role=role,
        listen=Address(settings.listen_host, listen),
        upstream=Address("127.0.0.1", upstream),
        admin=Address("127.0.0.1", admin),
        health=Address(settings.listen_host, health),
        control_plane=settings.control_plane,
        policy_name=name,
        memory_limit_bytes=_memory_limit(resources),
    )
    config = _config(policy, placement, labels)
    if len(verbatim(config)) > MAX_CONFIG_BYTES:
        raise _UninjectableError(
            f"the sidecar's configuration has {len(config)} bytes; allowed: {MAX_CONFIG_BYTES},"
            " so fewer labels, routes or classes"
        )

    grace = _GRACE_SECONDS if spec.terminationGracePeriodSeconds is None else spec.terminationGracePeriodSeconds
    can_sleep = settings.version is None or settings.version >= SLEEP_FROM
    if not can_sleep:
        warnings.append("this Kubernetes has no preStop sleep (1.30 has): requests may be cut off when the pod stops")
    if mode == "redirect" and settings.uid is None:
        raise _UninjectableError("redirect needs a fixed user for the sidecar, and the injector was set up without one")
    _say_how_it_is_reached(warnings, mode, taken_name, port, upstream, listen, numeric, services is not None)
    return Plan(
        app=index,
        role=role,
        mode=mode,
        native=native,
        upstream=upstream,
        listen=listen,
        health=health,
        port_name=taken_name or PORT_NAME,
        taken_name=taken_name,
        config=config,
        image=_image(asked, settings),
        redirect_image=settings.redirect_image,
        uid=settings.uid,
        concurrency=settings.concurrency,
        resources=resources,
        app_sleep=settings.drain_seconds if can_sleep and 0 < settings.drain_seconds < grace else 0,
        # A native sidecar is stopped once the others have ended. A plain one is stopped with them, and Envoy ends
        # at once then, so it is held back for as long as vLLM may take: all of the grace period but its end.
        sidecar_sleep=max(grace - 2, 0) if can_sleep and not native else 0,
        warnings=warnings,
    )


@dataclass(frozen=True)
class _Source:
    """What a configuration is made of, told apart by `key`: a policy holds mappings, which have no hash."""

    key: str
    policy: Policy = field(compare=False)
    placement: Placement = field(compare=False)


@lru_cache(maxsize=128)
def _rendered(source: _Source) -> tuple[Mapping[str, Any], str]:
    """The bootstrap's node, and the text of all the rest."""
    rest = bootstrap(source.policy, source.placement)
    node = rest.pop("node")
    return node, json.dumps(rest, separators=(",", ":"))


def _config(policy: Policy, placement: Placement, labels: Mapping[str, str]) -> str:
    """The bootstrap as JSON. Pods differ in their labels, which stand in its node: the rest is written once."""
    node, rest = _rendered(_Source(policy.as_json + repr(placement), policy, placement))
    node = {**node, "metadata": {**node["metadata"], "labels": dict(labels)}}
    return json.dumps({"node": node}, separators=(",", ":"))[:-1] + "," + rest[1:]


def _app_index(containers: Sequence[Container], asked_upstream: int | None) -> int:
    """Which container is vLLM: the one that declares the port asked for, or whose command says so, or the only one."""
    if asked_upstream is not None:
        owners = [i for i, c in enumerate(containers) if any(p.containerPort == asked_upstream for p in c.ports or ())]
        if len(owners) == 1:
            return owners[0]
    servers = [i for i, c in enumerate(containers) if c.role]
    if len(servers) == 1:
        return servers[0]
    if len(containers) == 1:
        return 0
    names = ", ".join(containers[i].name for i in servers or range(len(containers)))
    found = f"{len(servers)} containers run vLLM" if servers else "no container's command runs vLLM"
    raise _UninjectableError(
        f"{found} ({names}); allowed: one, or the annotation {UPSTREAM_PORT} with a port it declares"
    )


_ROLE_IN_WORDS: Mapping[Role, str] = {"render": "a render server", "engine": "an engine"}


def _role(asked: Mapping[str, str], app: Container, warnings: list[str]) -> Role:
    chosen = _one_of(asked, ROLE, ROLES)
    if chosen is not None:
        return chosen
    guess: Role = app.role or "engine"
    why = "from its command" if app.role else "its command does not tell"
    warnings.append(f"container {app.name!r} is taken for {_ROLE_IN_WORDS[guess]} ({why}): set {ROLE} to say so")
    return guess


def _app_port(app: Container, asked_upstream: int | None) -> Port | None:
    tcp = [port for port in app.ports or () if port.is_tcp]
    if asked_upstream is not None:
        tcp = [port for port in tcp if port.containerPort == asked_upstream]
    return tcp[0] if tcp else None


def _mode(
    asked: Mapping[str, str],
    settings: InjectorSettings,
    services: Iterable[Mapping[str, Any]] | None,
    labels: Mapping[str, str],
    upstream: int,
    warnings: list[str],
) -> tuple[Mode, list[str]]:
    """The mode, and the Services that are known to target vLLM's port by its number."""
    numeric = _numeric_services(services or (), labels, upstream)
    chosen = _one_of(asked, MODE, MODES)
    if chosen is None and numeric and settings.numeric_services == "redirect":
        warnings.append(
            f"{MODE}: redirect is used, as the number {upstream} is targeted by Service {', '.join(numeric)}"
        )
        return "redirect", numeric
    return chosen or "takeover", numeric


def _numeric_services(services: Iterable[Mapping[str, Any]], labels: Mapping[str, str], upstream: int) -> list[str]:
    found = []
    for service in services:
        spec = service.get("spec") or {}
        selector = spec.get("selector") or {}
        if not selector or any(labels.get(key) != value for key, value in selector.items()):
            continue
        # A port without a targetPort targets its own number.
        if upstream in [port.get("targetPort") or port.get("port") for port in spec.get("ports") or ()]:
            found.append(str((service.get("metadata") or {}).get("name")))
    return found


def _rival(spec: Spec, app: Container, name: str) -> str | None:
    """Another container with a port of that name: the first in the pod is the one that a Service finds."""
    for container in spec.all_containers:
        if container is not app and any(port.name == name and port.is_tcp for port in container.ports or ()):
            return container.name
    return None


def _native(asked: Mapping[str, str], settings: InjectorSettings, mode: Mode, spec: Spec, warnings: list[str]) -> bool:
    version = settings.version
    named = mode != "redirect"  # reached by a port's name, as far as the injector can know
    chosen = _one_of(asked, NATIVE, ("true", "false"))
    native = settings.native if chosen is None else chosen == "true"
    if native is None:
        native = version is not None and version >= (NATIVE_NAMES_FROM if named else NATIVE_FROM)
    elif native and version is not None and version < NATIVE_FROM:
        raise _UninjectableError(f"native sidecars need Kubernetes 1.29, this is {settings.kubernetes_version}")
    elif native and named and version is not None and version < NATIVE_NAMES_FROM:
        raise _UninjectableError(
            f"a Service finds a native sidecar's port by name from Kubernetes 1.33 on, this is"
            f" {settings.kubernetes_version}; allowed: {NATIVE}: 'false', or {MODE}: redirect"
        )
    elif native and named and version is None:
        warnings.append("a native sidecar's port is found by its name from Kubernetes 1.33 on only")
    if not native and spec.restartPolicy in ("Never", "OnFailure"):
        raise _UninjectableError(
            f"restartPolicy is {spec.restartPolicy}, and a plain sidecar would keep the pod from completing;"
            f" allowed: {NATIVE}: 'true'"
        )
    return native


def _listen_port(asked: Mapping[str, str], role: Role, taken: set[int], warnings: list[str]) -> int:
    chosen = _port_number(asked, LISTEN_PORT, 1024)  # below, a user without privileges may not listen
    if chosen is not None:
        if chosen in taken:
            raise _UninjectableError(f"annotation {LISTEN_PORT}: {chosen} is taken in this pod; allowed: a free port")
        return chosen
    default = DEFAULT_LISTEN[role].port
    free = _free(default, taken)
    if free != default:
        warnings.append(f"port {default} is taken in this pod: the sidecar listens on {free}")
    return free


def _free(wanted: int, taken: set[int]) -> int:
    return next(port for port in range(wanted, 65536) if port not in taken)


def _image(asked: Mapping[str, str], settings: InjectorSettings) -> str:
    image = asked.get(IMAGE)
    if image is None:
        return settings.image  # which was looked at when the settings were made
    if not _is_image(image):
        raise _UninjectableError(f"annotation {IMAGE}: {image[:60]!r} is no image; {_IMAGES}")
    return image


def _resources(asked: Mapping[str, str], settings: InjectorSettings, spec: Spec) -> Mapping[str, Any]:
    if RESOURCES in asked:
        try:
            return parse_resources(asked[RESOURCES], f"annotation {RESOURCES}")
        except BadInput as error:
            raise _UninjectableError(str(error)) from None
    return guaranteed(settings.resources) if spec.is_guaranteed else settings.resources


def _memory_limit(resources: Mapping[str, Any]) -> int:
    """What the sidecar's container may use, in bytes; the built-in limit where it has none."""
    limit = amount(resources.get("limits", {}).get("memory", ""))
    return int(limit) if limit else Placement.memory_limit_bytes


def _say_how_it_is_reached(
    warnings: list[str],
    mode: Mode,
    taken_name: str | None,
    port: Port | None,
    upstream: int,
    listen: int,
    numeric: list[str],
    services_known: bool,
) -> None:
    by_number = f"; the number {upstream} is targeted by Service {', '.join(numeric)}" if numeric else ""
    if mode == "takeover":
        if taken_name is None:
            warnings.append(
                f"port {upstream} has no name to take over, so nothing reaches the sidecar yet: let the Service's"
                f" targetPort be {PORT_NAME!r}, or set {MODE}: redirect{by_number}"
            )
        elif numeric or not services_known:
            warnings.append(
                f"only what targets the port name {taken_name!r} reaches the sidecar: a Service or InferencePool that"
                f" targets the number {upstream} passes it by (or set {MODE}: redirect){by_number}"
            )
        if port and port.hostPort:
            warnings.append(f"hostPort {port.hostPort} passes the sidecar by: set {MODE}: redirect")
    elif mode == "port":
        warnings.append(f"let the Service's targetPort be {PORT_NAME!r} or {listen}: nothing was moved{by_number}")
    else:
        warnings.append(
            "redirect adds an init container with NET_ADMIN, which Pod Security baseline and restricted refuse"
        )


_TextT = TypeVar("_TextT", bound=str)


def _one_of(asked: Mapping[str, str], key: str, allowed: Sequence[_TextT]) -> _TextT | None:
    value = asked.get(key)
    if value is None:
        return None
    for choice in allowed:
        if value == choice:
            return choice
    raise _UninjectableError(f"annotation {key}: {value[:60]!r} is not allowed; allowed: {', '.join(allowed)}")


def _port_number(asked: Mapping[str, str], key: str, low: int) -> int | None:
    value = asked.get(key)
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,5}", value) and low <= int(value) < 65536:
        return int(value)
    raise _UninjectableError(f"annotation {key}: {value[:60]!r} is no port; allowed: {low} to 65535")
