"""How the injector is set up, for all pods alike."""

import re
from dataclasses import dataclass, field
from typing import Literal

from control_plane.address import Address
from control_plane.errors import InvalidField
from control_plane.injector.resources import DEFAULT_RESOURCES, ResourceRequirements
from control_plane.render.placement import LoggedRequests, Tracing, check_namespace
from control_plane.tls import ServerTrust

ENVOY_VERSION = "1.40.0"
"""The newest Envoy that the tests run, and the one that is pinned."""
ENVOY_IMAGE = f"docker.io/envoyproxy/envoy:distroless-v{ENVOY_VERSION}"
"""The one place that pins Envoy's image. It has no shell, so a hook or a probe can only use what Envoy itself does."""

REDIRECT_IMAGE = "registry.k8s.io/build-image/distroless-iptables:v0.9.4"
"""Contains `nft`: the base of Kubernetes' own kube-proxy image."""

SLEEP_FROM = (1, 30)
"""The first Kubernetes that has preStop.sleep by default (KEP-3960)."""
NATIVE_FROM = (1, 29)
"""The first Kubernetes that has restartable init containers by default (KEP-753)."""
NATIVE_NAMES_FROM = (1, 33)
"""The first Kubernetes that looks up a Service's port name in restartable init containers (kubernetes#128850)."""

WORKERS = range(1, 1025)
"""How many worker threads a sidecar may have."""
DRAIN_SECONDS = range(3601)
"""How long vLLM may go on serving after its pod began to stop."""
MAX_UID = 2**31 - 1

EXCLUDED_NAMESPACES = frozenset({"kube-system", "kube-public", "kube-node-lease"})
"""Namespaces whose pods are never injected, whatever the webhook's selector says."""

_AUDIENCE = re.compile(r"[A-Za-z0-9./:_-]{1,253}")

# A version as Kubernetes' /version shows it: v1.33.2, v1.33.2-gke.100. The minor part may be "33+" there.
_VERSION = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,3})(?:[.+-][0-9A-Za-z.+-]*)?")

# The grammar of distribution/reference: [HOST[:PORT]/]PATH[:TAG][@DIGEST].
_IMAGE_PATH = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    r"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?/)?"
    rf"{_IMAGE_PATH}(?:/{_IMAGE_PATH})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9+._-]*:[0-9a-fA-F]{32,})?"
)


@dataclass(frozen=True)
class InjectorSettings:
    """How the injector is set up, for all pods alike.

    Raises:
        InvalidField: no pod could be injected with these settings. Found out here, it is not every pod that fails.
    """

    image: str = ENVOY_IMAGE
    """Envoy's image."""
    redirect_image: str = REDIRECT_IMAGE
    """The image that runs `nft`, in mode redirect."""
    resources: ResourceRequirements = field(default_factory=lambda: DEFAULT_RESOURCES)
    """The sidecar's resources."""
    native: bool | None = None
    """Whether the sidecar is a restartable init container. None: the version of Kubernetes decides."""
    kubernetes_version: str | None = None
    """The cluster's version: "1.33", "v1.33.2-gke.1". None: not known, so the sidecar is a plain container."""
    control_plane: Address | None = None
    """Where sidecars fetch policy changes. None: they keep the policy that they start with."""
    control_plane_trust: ServerTrust | None = None
    """How they verify the control plane. None: they use plain HTTP."""
    token_audience: str | None = None
    """The audience of the service account token that a sidecar's polls carry. None: they carry no token."""
    numeric_services: Literal["warn", "redirect"] = "warn"
    """What to do if a Service is known to target vLLM's port by number."""
    on_injection_failure: Literal["fail", "ignore"] = "fail"
    """What to do with a pod that asks for a sidecar and cannot have one: reject it, or let it start without one."""
    forbidden_annotations: tuple[str, ...] = ()
    """Annotations that pods must not have, without their prefix: what only the injector decides."""
    own_namespace: str | None = None
    """The control plane's namespace. Its pods are not injected."""
    uid: int | None = 65532
    """The sidecar's user. None: the cluster chooses it (OpenShift), and mode redirect is not available."""
    listen_host: str = "0.0.0.0"
    """The address on which the sidecar listens. "::": IPv4 and IPv6, on nodes that have IPv6."""
    concurrency: int = 2
    """The sidecar's worker threads."""
    drain_seconds: int = 5
    """How long vLLM goes on serving after its pod began to stop, while clients still learn of it."""

    logged_requests: LoggedRequests = "all"
    """Which requests the sidecars log."""
    tracing: Tracing | None = None
    """Where the sidecars send spans. None: nowhere."""

    def __post_init__(self) -> None:
        for name in ("image", "redirect_image"):
            if not is_image(getattr(self, name)):
                raise InvalidField(name, not_an_image(getattr(self, name)))
        if self.kubernetes_version is not None and not _VERSION.fullmatch(self.kubernetes_version):
            raise InvalidField(
                "kubernetes_version",
                f"{self.kubernetes_version[:60]!r} is not a valid version. Use MAJOR.MINOR, for example 1.33.",
            )
        if self.uid is not None and not 0 < self.uid <= MAX_UID:
            raise InvalidField("uid", not_a_uid(str(self.uid)))
        if self.token_audience is not None:
            if self.control_plane is None:
                raise InvalidField("token_audience", "not used without a control plane. Set the URL of one.")
            if not _AUDIENCE.fullmatch(self.token_audience):
                raise InvalidField(
                    "token_audience",
                    f"{self.token_audience[:60]!r} is not a valid audience. Use letters, digits and ./:-_, for example"
                    " vllm-priority.",
                )
        # Services and probes come from outside the pod, so neither loopback nor the address of one pod will do.
        if self.listen_host not in ("0.0.0.0", "::"):
            raise InvalidField(
                "listen_host",
                f"{self.listen_host[:60]!r} is not an address on which every pod can be reached."
                " Use 0.0.0.0, or :: for IPv4 and IPv6.",
            )
        for name, allowed in (("concurrency", WORKERS), ("drain_seconds", DRAIN_SECONDS)):
            if getattr(self, name) not in allowed:
                raise InvalidField(name, f"{getattr(self, name)} must be from {allowed[0]} to {allowed[-1]}.")
        if self.own_namespace is not None:
            check_namespace(self.own_namespace, "own_namespace")

    @property
    def version(self) -> tuple[int, int] | None:
        """The cluster's version as (major, minor). None: not known."""
        found = _VERSION.fullmatch(self.kubernetes_version or "")
        return (int(found[1]), int(found[2])) if found else None

    def excludes(self, namespace: str) -> bool:
        """Return whether pods of this namespace are never injected."""
        return namespace in EXCLUDED_NAMESPACES or namespace == self.own_namespace


def is_image(text: str) -> bool:
    """Return whether `text` is a valid image reference."""
    return len(text) < 512 and _IMAGE.fullmatch(text) is not None


def not_an_image(text: str) -> str:
    """Return the problem of a text that `is_image` turns down."""
    return f"{text[:60]!r} is not a valid image reference. Use HOST/PATH:TAG, for example {ENVOY_IMAGE}."


def not_a_uid(text: str) -> str:
    """Return the problem of a text that is not a user id for the sidecar."""
    return f"{text[:60]!r} is not a valid user id. Use a number from 1 to {MAX_UID}, or none."
