"""A pod as the injector reads it: typed, validated once. What the injector does not look at is left unread."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from control_plane.errors import BadInput
from control_plane.injector.commands import Environment, Invocation, invocations
from control_plane.injector.resources import are_guaranteed
from control_plane.policy.messages import problems

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


class Mount(Partial):
    """Where a container has a volume."""

    name: Name
    mountPath: str  # noqa: N815 (Kubernetes' names)
    subPath: str | None = None  # noqa: N815
    subPathExpr: str | None = None  # noqa: N815


class Container(Partial):
    """A container, and what its command line says of it."""

    name: Name
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: Any = None
    """Not validated, as the probes are not: what is not as Kubernetes writes it is skipped."""
    ports: list[Port] | None = None
    resources: Resources | None = None
    volumeMounts: list[Mount] | None = None  # noqa: N815 (Kubernetes' names)
    livenessProbe: Any = None  # noqa: N815
    readinessProbe: Any = None  # noqa: N815
    startupProbe: Any = None  # noqa: N815

    @cached_property
    def starts(self) -> tuple[Invocation, ...]:
        """What the container starts of vLLM or SGLang, as far as its command line says."""
        return invocations(self.command or (), self.args or (), self.image or "", self.environment)

    @property
    def servers(self) -> list[Invocation]:
        """The HTTP servers among that."""
        return [start for start in self.starts if start.kind == "http"]

    @property
    def command_line(self) -> str:
        """The command line, as far as the pod contains it."""
        return " ".join((*(self.command or ()), *(self.args or ())))

    @property
    def environment(self) -> Environment:
        """The container's variables. None: the value is known only when the container starts."""
        found: dict[str, str | None] = {}
        for item in self.env if isinstance(self.env, list) else ():
            if isinstance(item, dict) and isinstance(name := item.get("name"), str):
                value = None if "valueFrom" in item else item.get("value", "")
                found[name] = value if isinstance(value, str) and "$(" not in value else None
        return found

    @property
    def named_ports(self) -> set[int]:
        """The ports that the container declares, and those that its options and variables name."""
        declared = {port.containerPort for port in self.ports or ()}
        options = re.findall(r"port[= ]['\"]?([0-9]{1,5})\b", self.command_line, re.IGNORECASE)
        variables = [value for name, value in self.environment.items() if value and "PORT" in name.upper()]
        # From this port on, vLLM looks for free ones for its own processes.
        first = self.environment.get("VLLM_PORT") or ""
        declared.update(range(int(first), int(first) + 100) if re.fullmatch("[0-9]{1,5}", first) else ())
        texts = (self.command_line, *(value for value in self.environment.values() if value))
        addresses = [port for text in texts for port in re.findall(r":([0-9]{1,5})\b", text)]
        return declared | {int(text) for text in (*options, *variables, *addresses) if re.fullmatch("[0-9]{1,5}", text)}

    @property
    def http_probes(self) -> Iterator[tuple[int, bool]]:
        """The port of each httpGet probe, and whether it uses HTTPS."""
        for probe in (self.readinessProbe, self.livenessProbe, self.startupProbe):
            request = probe.get("httpGet") if isinstance(probe, dict) else None
            if isinstance(request, dict):
                port = request.get("port")
                number = next((p.containerPort for p in self.tcp_ports if p.name == port), port)
                if isinstance(number, int):
                    yield number, request.get("scheme") == "HTTPS"

    @property
    def keep_alive_seconds(self) -> int | None:
        """How long vLLM keeps an idle connection, if the container sets that (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)."""
        value = self.environment.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
        return int(value) if value and re.fullmatch("[0-9]{1,6}", value) else None

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
    securityContext: Any = None  # noqa: N815
    volumes: Any = None
    """Not validated: what is not as Kubernetes writes it is skipped."""

    @property
    def all_containers(self) -> list[Container]:
        """Containers, then init containers: the order in which Kubernetes looks up a Service's port name."""
        return [*self.containers, *(self.initContainers or ())]

    def can_read(self, volume: str) -> bool:
        """Return whether any user of the pod can read the files of a volume, as far as the spec says.

        By default they can. A Secret's or a ConfigMap's `defaultMode` can forbid it, and with `fsGroup` the kubelet
        makes the files readable for the group that all containers of the pod belong to.
        """
        if isinstance(self.securityContext, dict) and self.securityContext.get("fsGroup") is not None:
            return True
        modes = [source.get("defaultMode") for source in self._sources(volume).values()]
        return all(mode & 0o004 for mode in modes if isinstance(mode, int))

    def is_projected(self, volume: str) -> bool:
        """Return whether the kubelet writes the files of a volume, from a Secret for example."""
        return any(kind in self._sources(volume) for kind in ("secret", "configMap", "projected", "downwardAPI"))

    def _sources(self, volume: str) -> Mapping[str, Mapping[str, Any]]:
        volumes = self.volumes if isinstance(self.volumes, list) else []
        found = next((entry for entry in volumes if isinstance(entry, dict) and entry.get("name") == volume), {})
        return {kind: source for kind, source in found.items() if isinstance(source, dict)}

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
