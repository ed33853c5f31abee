"""Why a pod is not injected, and what an injection warns of. The codes are API: they do not change once released."""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Reason(Enum):
    """Why a pod is not injected.

    `user_error`: the pod asks for something that cannot be done, so whoever writes the pod can fix it. The webhook
    rejects such a pod, unless it is set up to ignore failures. Pods with any other reason start without a sidecar.
    """

    NOT_REQUESTED = "NotRequested", False, 'The pod does not have the label `vllm-priority.io/inject: "true"`.'
    OPTED_OUT = "OptedOut", False, 'The pod has the label `vllm-priority.io/inject: "false"`.'
    ALREADY_INJECTED = "AlreadyInjected", False, "The pod has the sidecar already."
    NAMESPACE_EXCLUDED = (
        "NamespaceExcluded", False, "The namespace is one of Kubernetes' own, or that of the control plane.",
    )  # fmt: skip
    HOST_NETWORK = "HostNetwork", False, "The pod has `hostNetwork: true`, so its ports are those of the node."
    WINDOWS = "Windows", False, "The pod runs on Windows, and the image of Envoy is for Linux."
    UNKNOWN_ANNOTATION = "UnknownAnnotation", True, "An annotation under `vllm-priority.io/` has an unknown name."
    INVALID_ANNOTATION = "InvalidAnnotation", True, "An annotation has a value that is not valid."
    FORBIDDEN_ANNOTATION = (
        "ForbiddenAnnotation",
        True,
        "The pod has an annotation that the injector is set up to forbid.",
    )
    UNKNOWN_POLICY = "UnknownPolicy", True, "The annotation `policy` names a policy that does not exist."
    NO_VLLM_CONTAINER = "NoVllmContainer", True, "The pod has several containers, and none of them runs vLLM."
    NO_POD_TEMPLATE = "NoPodTemplate", False, "Containers run vLLM, but not in a pod template."
    SEVERAL_VLLM_CONTAINERS = (
        "SeveralVllmContainers", True, "Several containers run vLLM, and no `upstream-port` says which one is meant.",
    )  # fmt: skip
    SERVES_NOTHING = (
        "ServesNothing", False, "The container is a headless worker (`--headless`) or runs a batch: it serves nothing.",
    )  # fmt: skip
    LEADER_UNKNOWN = (
        "LeaderUnknown", True, "The command starts a server in one pod and headless workers in others.",
    )  # fmt: skip
    NOT_HTTP = "NotHttp", True, "The server speaks gRPC, or listens on a Unix socket."
    UPSTREAM_TLS = (
        "UpstreamTls", True, "vLLM serves HTTPS, and the sidecar cannot do the same with vLLM's certificate.",
    )  # fmt: skip
    PORT_UNKNOWN = "PortUnknown", True, "The pod does not say on which port vLLM listens."
    PORT_IN_USE = "PortInUse", True, "The annotation `listen-port` names a port that the pod uses already."
    PORT_NAME_NOT_UNIQUE = (
        "PortNameNotUnique", True, "In modes `swap` and `takeover`: another container has a port of the same name.",
    )  # fmt: skip
    NATIVE_UNSUPPORTED = (
        "NativeUnsupported", True, "The annotation `native` is `true`, and the cluster's Kubernetes is too old for it.",
    )  # fmt: skip
    WOULD_NOT_COMPLETE = (
        "WouldNotComplete", True, "The pod runs to completion, and a plain sidecar would keep it running.",
    )  # fmt: skip
    CONFIGURATION_TOO_LARGE = (
        "ConfigurationTooLarge", True, "The sidecar's configuration does not fit into one argument of a container.",
    )  # fmt: skip
    SWAP_UNAVAILABLE = "SwapUnavailable", True, "In mode `swap`: vLLM cannot be given another port."
    UNREACHABLE = (
        "Unreachable", True, "In mode `auto`: vLLM cannot be given another port, and its port has no name.",
    )  # fmt: skip
    REDIRECT_UNAVAILABLE = (
        "RedirectUnavailable", True, "In mode `redirect`: the injector is set up without a user id for the sidecar.",
    )  # fmt: skip

    def __init__(self, code: str, user_error: bool, meaning: str) -> None:
        self.code = code
        self.user_error = user_error
        self.meaning = meaning


class NotInjectedError(Exception):
    """The pod cannot be injected. `detail` says in words what `reason` says as a code."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def not_injected(reason: Reason, detail: str) -> str:
    """Return the one line that says why a pod was not injected."""
    return f"not injected ({reason.code}): {detail}"


class WarningCode(StrEnum):
    """What an injection warns of."""

    ROLE_GUESSED = "RoleGuessed"
    """The annotation `role` is missing: the role follows from the vLLM container's command."""
    PORT_GUESSED = "PortGuessed"
    """Neither vLLM's command nor a probe names the port on which it listens."""
    PORT_DIFFERS = "PortDiffers"
    """The vLLM container declares ports, but not the one that its command names."""
    LISTEN_PORT_MOVED = "ListenPortMoved"
    """The sidecar's usual port is in use: it listens on the next free one."""
    NUMERIC_TARGETS_BYPASS = "NumericTargetsBypass"
    """In mode `takeover`: clients that target vLLM's port by number bypass the sidecar, or may."""
    NEIGHBOR_BYPASSES = "NeighborBypasses"
    """In mode `takeover`: another container of the pod sends its requests to vLLM's port number."""
    HOST_PORT_BYPASSES = "HostPortBypasses"
    """In mode `takeover`: what arrives at the vLLM container's hostPort bypasses the sidecar."""
    NOT_REACHED = "NotReached"
    """Nothing reaches the sidecar until the Service is changed."""
    REDIRECT_CHOSEN = "RedirectChosen"
    """A Service targets vLLM's port by number, so the injector chose mode `redirect`."""
    REDIRECT_NEEDS_NET_ADMIN = "RedirectNeedsNetAdmin"
    """In mode `redirect`: Pod Security `baseline` and `restricted` reject the init container's NET_ADMIN."""
    NATIVE_MAY_BE_UNSUPPORTED = "NativeMayBeUnsupported"
    """The sidecar is native, and the version of Kubernetes is not known."""
    NO_SLEEP_HOOK = "NoSleepHook"
    """This Kubernetes has no preStop sleep: requests may be lost when the pod stops."""
    LOOPBACK_TLS = "LoopbackTls"
    """vLLM serves HTTPS: so does the sidecar, which does not verify vLLM's certificate inside the pod."""
    LABEL_NOT_ON_TEMPLATE = "LabelNotOnTemplate"
    """The label is on a Deployment or another workload, but not on its pod template, so its pods get no sidecar."""
    NOT_INJECTED = "NotInjected"
    """The pod asked for a sidecar and starts without one."""


@dataclass(frozen=True)
class InjectionWarning:
    """One warning: a stable code, and one sentence for whoever wrote the pod."""

    code: WarningCode
    message: str

    def __str__(self) -> str:
        return self.message


Warnings = tuple[InjectionWarning, ...]
"""What a decision warns of, in the order in which it was found out. Decisions return it beside their result."""


def warn(code: WarningCode, message: str) -> Warnings:
    """Return one warning."""
    return (InjectionWarning(code, message),)
