"""A pod as the injector reads it: typed, validated once. What the injector does not look at is left unread."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from control_plane.errors import BadInput
from control_plane.injector.commands import port_option, server_role
from control_plane.injector.resources import are_guaranteed
from control_plane.policy.messages import problems
from control_plane.vllm import Role

Ascii = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]*$", max_length=4096)]
Name = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=253)]
PortNumber = Annotated[int, Field(ge=1, le=65535)]


class Partial(BaseModel):
    """Base of the models of Kubernetes' objects. They hold the fields that are looked at and ignore the others."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Metadata(Partial):
    """A pod's metadata. Labels become part of Envoy's configuration, so they must be ASCII."""

    labels: Mapping[str, Ascii] | None = None
    annotations: Mapping[str, str] | None = None


class Port(Partial):
    """A container's port."""

    containerPort: PortNumber  # noqa: N815 (Kubernetes' name)
    name: Name | None = None
    hostPort: int | None = None  # noqa: N815
    protocol: str | None = None

    @property
    def is_tcp(self) -> bool:
        """Whether the protocol is TCP, which is the default."""
        return self.protocol in (None, "", "TCP")


class Resources(Partial):
    """A container's requests and limits, as quantities."""

    requests: Mapping[str, str | int | float] | None = None
    limits: Mapping[str, str | int | float] | None = None


class Container(Partial):
    """A container, and what its command line says of it."""

    name: Name
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: Any = None
    """Not validated: only `keep_alive_seconds` reads it."""
    ports: list[Port] | None = None
    resources: Resources | None = None

    @property
    def command_line(self) -> str:
        """The command line, as far as the pod contains it."""
        return " ".join((*(self.command or ()), *(self.args or ())))

    @property
    def role(self) -> Role | None:
        """The role of the vLLM server that the container runs. None: it runs none."""
        return server_role(self.command_line, self.image or "", bool(self.command))

    @property
    def port_option(self) -> int | None:
        """The port that the command line names. None: it names none."""
        return port_option(self.command_line)

    @property
    def keep_alive_seconds(self) -> int | None:
        """How long vLLM keeps an idle connection, if the container sets that (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)."""
        variables = [item for item in self.env if isinstance(item, dict)] if isinstance(self.env, list) else []
        values = [item.get("value") for item in variables if item.get("name") == "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]
        last = values[-1] if values else None
        return int(last) if isinstance(last, str) and re.fullmatch("[0-9]{1,6}", last) else None

    @property
    def tcp_ports(self) -> list[Port]:
        """The TCP ports that the container declares."""
        return [port for port in self.ports or () if port.is_tcp]

    @property
    def is_guaranteed(self) -> bool:
        """Whether the container permits the QoS class Guaranteed for its pod."""
        resources = self.resources or Resources()
        return are_guaranteed(resources.requests or {}, resources.limits or {})


class Os(Partial):
    """The pod's operating system."""

    name: str | None = None


class Spec(Partial):
    """A pod's spec."""

    containers: Annotated[list[Container], Field(min_length=1)]
    initContainers: list[Container] | None = None  # noqa: N815
    hostNetwork: bool | None = None  # noqa: N815
    restartPolicy: str | None = None  # noqa: N815
    terminationGracePeriodSeconds: int | None = None  # noqa: N815
    os: Os | None = None

    @property
    def all_containers(self) -> list[Container]:
        """Containers, then init containers: the order in which Kubernetes looks up a Service's port name."""
        return [*self.containers, *(self.initContainers or ())]

    @property
    def is_guaranteed(self) -> bool:
        """Whether the QoS class is Guaranteed. Such a pod may own CPUs, and a sidecar must not end that."""
        return all(container.is_guaranteed for container in self.all_containers)


class Pod(Partial):
    """A pod, or a pod template."""

    metadata: Metadata | None = None
    spec: Spec

    @property
    def labels(self) -> Mapping[str, str]:
        """The pod's labels."""
        return (self.metadata and self.metadata.labels) or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        """The pod's annotations."""
        return (self.metadata and self.metadata.annotations) or {}


PartialT = TypeVar("PartialT", bound=Partial)


def read(model: type[PartialT], data: object, what: str) -> PartialT:
    """Return `data` as `model`.

    Raises:
        BadInput: the data is not as Kubernetes writes it. The message names `what` it is, and the fields at fault.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BadInput(ascii_line(f"{what}: {problems(model, error, whole='the object')}")) from None


def ascii_line(text: str) -> str:
    """Return `text` as one line of at most 1000 ASCII characters, which an HTTP warning header can carry."""
    if text.isascii() and text.isprintable():
        return text[:1000]
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in text)[:1000]
