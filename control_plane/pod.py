"""What the injector reads of an AdmissionReview and of a pod: typed, validated once, the rest left unread."""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from control_plane.errors import BadInput
from control_plane.policy import Role

_Ascii = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]*$", max_length=4096)]
_Name = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=253)]
_PortNumber = Annotated[int, Field(ge=1, le=65535)]


class Read(BaseModel):
    """The parts of Kubernetes' objects that are looked at; the rest passes unread."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Kind(Read):
    """GroupVersionKind of the object under review."""

    kind: str


class Request(Read):
    """One admission request. `namespace` is empty for what has none; a pod's own metadata may still lack it."""

    uid: _Name
    operation: str
    kind: Kind
    namespace: str = ""
    subResource: str | None = None  # noqa: N815 (Kubernetes' name)


class Review(Read):
    """An AdmissionReview as the API server sends it."""

    apiVersion: Literal["admission.k8s.io/v1"]  # noqa: N815
    kind: Literal["AdmissionReview"]
    request: Request


class Metadata(Read):
    """Labels go into the sidecar's configuration, so they are held to ASCII here."""

    labels: Mapping[str, _Ascii] | None = None
    annotations: Mapping[str, str] | None = None


class Port(Read):
    """A container's port."""

    containerPort: _PortNumber  # noqa: N815
    name: _Name | None = None
    hostPort: int | None = None  # noqa: N815
    protocol: str | None = None

    @property
    def is_tcp(self) -> bool:
        """Whether it is TCP, which is what no protocol means."""
        return self.protocol in (None, "", "TCP")


class Resources(Read):
    """Requests and limits, as quantities."""

    requests: Mapping[str, str | int | float] | None = None
    limits: Mapping[str, str | int | float] | None = None


class Container(Read):
    """A container, and what its command line tells."""

    name: _Name
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    ports: list[Port] | None = None
    resources: Resources | None = None

    @property
    def line(self) -> str:
        """The command line as far as the pod tells it."""
        return " ".join((*(self.command or ()), *(self.args or ())))

    @property
    def role(self) -> Role | None:
        """The role its command line gives away; None where it is no vLLM (or SGLang) server that answers HTTP."""
        line, image = self.line, self.image or ""
        if re.search(r"--headless\b", line):  # a worker of a multi-node engine: it serves nothing
            return None
        if re.search(r"(?:\bvllm|^)\s*launch\s+render\b", line):
            return "render"
        if re.search(r"\bvllm\s+serve\b|\bvllm\.entrypoints\b|\bsglang\.launch_server\b", line):
            return "engine"
        # The images' own entry point is the server: vLLM's Dockerfile has ["vllm", "serve"].
        return "engine" if not self.command and re.search(r"vllm|sglang", image.rsplit("/", 1)[-1]) else None

    @property
    def listens_on(self) -> int | None:
        """`--port` of the command line."""
        found = re.search(r"--port[= ]\s*(\d{1,5})\b", self.line)
        return int(found[1]) if found and 0 < int(found[1]) < 65536 else None


class Os(Read):
    """The pod's operating system."""

    name: str | None = None


class Spec(Read):
    """A pod's spec."""

    containers: Annotated[list[Container], Field(min_length=1)]
    initContainers: list[Container] | None = None  # noqa: N815
    hostNetwork: bool | None = None  # noqa: N815
    restartPolicy: str | None = None  # noqa: N815
    terminationGracePeriodSeconds: int | None = None  # noqa: N815
    os: Os | None = None

    @property
    def all_containers(self) -> list[Container]:
        """Containers first, as a Service looks a port's name up."""
        return [*self.containers, *(self.initContainers or ())]

    @property
    def is_guaranteed(self) -> bool:
        """Whether the pod has the QoS class Guaranteed: with it go exclusive CPUs, and a sidecar could end them."""
        for container in self.all_containers:
            limits = (container.resources and container.resources.limits) or {}
            requests = (container.resources and container.resources.requests) or {}
            if not all(key in limits and requests.get(key, limits[key]) == limits[key] for key in ("cpu", "memory")):
                return False
        return True


class Pod(Read):
    """A pod, or the template of one."""

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


ModelT = TypeVar("ModelT", bound=BaseModel)


def read(model: type[ModelT], data: object, what: str) -> ModelT:
    """`data` as `model`; BadInput names `what`, the path of the first fault, and the fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or "it"
        raise BadInput(ascii_line(f"{what}: {path}: {first['msg']}; allowed: as Kubernetes writes it")) from None


def ascii_line(text: str) -> str:
    """One line of ASCII: such as an HTTP warning header can carry."""
    if text.isascii() and text.isprintable():
        return text[:1000]
    return "".join(c if " " <= c <= "~" else c.encode("ascii", "backslashreplace").decode() for c in text)[:1000]


_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?)(?:([numkKMGTPE])(i)?|[eE]([+-]?[0-9]{1,2}))?")
_POWERS = {"n": -3, "u": -2, "m": -1, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
# A resource's name, maybe with a domain before it: nvidia.com/gpu, hugepages-2Mi.
_RESOURCE = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def _amount(quantity: str) -> Decimal:
    """What Kubernetes' quantity stands for: 1Gi, 500m, 2e3."""
    found = _QUANTITY.fullmatch(quantity)
    assert found, quantity
    number, unit, binary, exponent = found.groups()
    if exponent:
        return Decimal(number).scaleb(int(exponent))
    return Decimal(number) * Decimal(1024 if binary else 1000) ** _POWERS.get(unit, 0)


def amount(quantity: str) -> Decimal | None:
    """What a Kubernetes quantity stands for: 1Gi, 500m, 2e3; None for any other text."""
    return _amount(quantity) if _QUANTITY.fullmatch(quantity) else None


def parse_resources(text: str, what: str) -> Mapping[str, Any]:
    """Kubernetes' ResourceRequirements from JSON; BadInput names `what` was wrong."""
    allowed = 'allowed: such as {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}}'
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{what}: not JSON; {allowed}") from None
    groups = found.items() if isinstance(found, dict) else ()
    fine = isinstance(found, dict) and all(
        group in ("requests", "limits")
        and isinstance(amounts, dict)
        and all(_RESOURCE.fullmatch(name) for name in amounts)
        and all(isinstance(amount, str) and _QUANTITY.fullmatch(amount) for amount in amounts.values())
        for group, amounts in groups
    )
    if not fine:
        raise BadInput(f"{what}: {text[:60]!r} is not allowed; {allowed}")
    limits = found.get("limits", {})
    for name, amount in found.get("requests", {}).items():
        # Kubernetes refuses such a pod: better said here, by whom it comes from.
        if name in limits and _amount(amount) > _amount(limits[name]):
            raise BadInput(
                f"{what}: requests.{name} {amount} is above limits.{name} {limits[name]}; allowed: requests <= limits"
            )
    return dict(groups)


def guaranteed(resources: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with requests that are the limits, for both CPU and memory, as the QoS class Guaranteed wants."""
    amounts = {"cpu": "1", **resources.get("requests", {}), **resources.get("limits", {})}
    return {"requests": amounts, "limits": amounts}
