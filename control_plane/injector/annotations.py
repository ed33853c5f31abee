"""The labels and annotations of pods that are this product's API, and what they ask for, as one typed request.

The text below each constant is its documentation for users, in docs/reference. In a Deployment and the like they belong
to the pod template.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from control_plane.errors import InvalidField
from control_plane.injector.reasons import NotInjectedError, Reason
from control_plane.injector.resources import ResourceRequirements, parse_resources
from control_plane.injector.settings import is_image, not_an_image
from control_plane.vllm import ROLES, Role

Mode = Literal["auto", "swap", "takeover", "redirect", "port"]
"""How traffic reaches the sidecar; traffic.py says what each mode does."""
MODES: tuple[Mode, ...] = ("auto", "swap", "takeover", "redirect", "port")

PREFIX = "vllm-priority.io/"
"""The prefix of all our labels and annotations."""

INJECT_LABEL = PREFIX + "inject"
"""`"true"` requests the sidecar. `"false"` declines it, also from `vllm-priority inject`."""

ROLE = PREFIX + "role"
"""`render` or `engine`. Default: follows from the vLLM container's command, with a warning."""
UPSTREAM_PORT = PREFIX + "upstream-port"
"""vLLM's port, from 1 to 65535. It also says which container is meant if several run vLLM. Default: follows from the
vLLM container's command, its probes and its declared ports."""
LISTEN_PORT = PREFIX + "listen-port"
"""The sidecar's port, from 1024 to 65535. Default: in mode `swap` vLLM's port, otherwise 18000 (render) or 18001
(engine), or the next free port."""
IMAGE = PREFIX + "image"
"""Envoy's image, of version 1.37 or later. Default: the injector's `--sidecar-image`."""
RESOURCES = PREFIX + "resources"
"""Kubernetes' ResourceRequirements, as JSON, for example `{"requests": {"cpu": "500m"}}`. Default: the injector's."""
POLICY = PREFIX + "policy"
"""The name of a policy in the policy file. Default: the first policy whose selector matches the pod's labels."""
NATIVE = PREFIX + "native"
"""`true`: a restartable init container; `false`: a plain container. Default: depends on the version of Kubernetes."""
MODE = PREFIX + "mode"
"""How traffic reaches the sidecar: `auto`, `swap`, `takeover`, `redirect` or `port`. Default: `auto`."""
REQUEST_ANNOTATIONS = (ROLE, UPSTREAM_PORT, LISTEN_PORT, IMAGE, RESOURCES, POLICY, NATIVE, MODE)
"""The annotations by which a pod asks for something."""

INJECTED = PREFIX + "injected"
"""What the injector did, as JSON, so that `vllm-priority inject --uninject` can take the sidecar out again."""
ORIGINAL = PREFIX + "original"
"""Only from `vllm-priority inject`, if it had to change a manifest's layout: the original manifest, compressed."""
STATUS = PREFIX + "status"
"""Written by the injector: what was done to the pod and what it warns of, with the codes. It is for people to read."""
CERTIFICATE = PREFIX + "certificate"
"""For the sidecar's Envoy, as JSON: the paths of the certificate and the key with which vLLM serves HTTPS."""
WRITTEN_ANNOTATIONS = (INJECTED, ORIGINAL, STATUS, CERTIFICATE)

MIN_LISTEN_PORT = 1024
"""The sidecar runs without privileges, so it cannot listen on a port below."""


@dataclass(frozen=True)
class InjectionRequest:
    """What a pod asks for in its annotations. None: it does not say."""

    role: Role | None = None
    upstream_port: int | None = None
    listen_port: int | None = None
    image: str | None = None
    resources: ResourceRequirements | None = None
    policy: str | None = None
    native: bool | None = None
    mode: Mode | None = None

    @classmethod
    def parse(cls, annotations: Mapping[str, str], forbidden: Sequence[str] = ()) -> Self:
        """Parse a pod's annotations. `forbidden`: names that it must not have, without their prefix.

        Raises:
            NotInjectedError: an annotation is forbidden, or has an unknown name or a value that is not valid.
        """
        known = (*REQUEST_ANNOTATIONS, *WRITTEN_ANNOTATIONS)
        if unknown := sorted(key for key in annotations if key.startswith(PREFIX) and key not in known):
            names = ", ".join(key.removeprefix(PREFIX) for key in REQUEST_ANNOTATIONS)
            raise NotInjectedError(
                Reason.UNKNOWN_ANNOTATION, f"annotation {unknown[0]} is unknown. It must be one of: {names}."
            )
        if named := [name for name in forbidden if PREFIX + name in annotations]:
            detail = f"annotation {PREFIX}{named[0]} is not allowed in this cluster. Remove it."
            raise NotInjectedError(Reason.FORBIDDEN_ANNOTATION, detail)
        native = _choice(annotations, NATIVE, ("true", "false"))
        return cls(
            role=_choice(annotations, ROLE, ROLES),
            upstream_port=_port(annotations, UPSTREAM_PORT, 1),
            listen_port=_port(annotations, LISTEN_PORT, MIN_LISTEN_PORT),
            image=_image(annotations),
            resources=_resources(annotations),
            policy=annotations.get(POLICY),
            native=None if native is None else native == "true",
            mode=_choice(annotations, MODE, MODES),
        )


class CommandEdit(BaseModel):
    """One change to the command line of the vLLM container."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: Literal["command", "args"]
    index: int
    """The entry of the list."""
    now: str
    was: str | None
    """What `now` stands for: part of the entry, or all of it. None: the entry did not exist."""


class InjectionRecord(BaseModel):
    """What the injector did to a pod: the value of the annotation `injected`. With it the sidecar can be taken out."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True)

    container: str
    """The name of the vLLM container."""
    role: Role
    mode: Mode
    upstream_port: int
    """vLLM's port."""
    port_before: int | None = None
    """What vLLM's port was before the sidecar took that number, in mode swap."""
    edits: tuple[CommandEdit, ...] = ()
    """The changes to vLLM's command line, in mode swap."""
    port_name: str | None = None
    """The port name that moved to the sidecar, in modes swap and takeover."""
    port_renamed_to: str | None = None
    """What vLLM's port is called since."""
    numbered: tuple[str, ...] = ()
    """The probes and hooks that used the name and were given the number: `readinessProbe/httpGet`."""
    added_hook: Literal["lifecycle", "preStop"] | None = None
    """The outermost key that was added to the vLLM container for its preStop sleep."""
    created: tuple[Literal["metadata", "annotations", "initContainers", "volumes", "args"], ...] = ()
    """The parts of the pod that did not exist before."""

    def to_json(self) -> str:
        """Return the annotation's value."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the annotation's value. pydantic's ValidationError, a ValueError, says that it was edited."""
        return cls.model_validate_json(text)


_TextT = TypeVar("_TextT", bound=str)


def _choice(annotations: Mapping[str, str], key: str, choices: Sequence[_TextT]) -> _TextT | None:
    value = annotations.get(key)
    if value is None:
        return None
    for choice in choices:
        if value == choice:
            return choice
    raise _invalid(key, f"{value[:60]!r} must be one of: {', '.join(choices)}.")


def _port(annotations: Mapping[str, str], key: str, low: int) -> int | None:
    value = annotations.get(key)
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,5}", value) and low <= int(value) < 65536:
        return int(value)
    raise _invalid(key, f"{value[:60]!r} is not a valid port. Use a number from {low} to 65535.")


def _image(annotations: Mapping[str, str]) -> str | None:
    image = annotations.get(IMAGE)
    if image is not None and not is_image(image):
        raise _invalid(IMAGE, not_an_image(image))
    return image


def _resources(annotations: Mapping[str, str]) -> ResourceRequirements | None:
    try:
        return parse_resources(annotations[RESOURCES]) if RESOURCES in annotations else None
    except InvalidField as error:
        raise _invalid(RESOURCES, error.problem) from None


def _invalid(key: str, problem: str) -> NotInjectedError:
    return NotInjectedError(Reason.INVALID_ANNOTATION, f"annotation {key}: {problem}")
