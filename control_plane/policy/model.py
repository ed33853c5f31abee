"""The policy: what to do with a priority.

Every function past `load` takes these frozen models and checks nothing again.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from control_plane.vllm import (
    ENGINE_ROUTES,
    INT64_MAX,
    INT64_MIN,
    PRIORITY_HEADER,
    READS_HEADER,
    REJECTS_MEMBER,
    RENDER_ROUTES,
    RESPONSE_ROUTES,
    Role,
)

# Headers that HTTP or Envoy gives a meaning of its own.
RESERVED_HEADERS = frozenset(
    {
        "host", "content-length", "content-type", "content-encoding", "transfer-encoding", "connection",
        "te", "upgrade", "expect", "authorization", "trailer", "keep-alive",
    }
)  # fmt: skip

Int64 = Annotated[int, Field(strict=True, ge=INT64_MIN, le=INT64_MAX)]

HeaderName = Annotated[
    str,
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
    StringConstraints(pattern=r"^[a-z0-9!#$%&'*+.^_`|~-]+$", max_length=128),
]

# A class name must never be mistaken for a number, so it starts with a letter.
ClassName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,62}$")]

RoutePath = Annotated[str, StringConstraints(pattern=r"^/[^?#%\s]*$", max_length=1024)]

PolicyName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Range(_Model):
    """Priorities that are let through, bounds included; null is no bound."""

    min: Int64 | None = Field(default=None, description="Smallest priority that is let through.")
    max: Int64 | None = Field(default=None, description="Largest priority that is let through.")
    outside: Literal["reject", "clamp"] = Field(
        default="reject", description="reject: 400 (or as on_invalid says); clamp: the nearest bound is used."
    )

    def contains(self, value: int) -> bool:
        """Whether `value` lies within the bounds."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


# Tuples are written as YAML lists, which strict mode would refuse.
_Paths = Annotated[tuple[RoutePath, ...], Field(strict=False)]


class Routes(_Model):
    """The POST routes that are edited, by role; `extra` is added to both."""

    render: Literal["default"] | _Paths = Field(default="default", description="Routes on render servers.")
    engine: Literal["default"] | _Paths = Field(default="default", description="Routes on engines.")
    extra: _Paths = Field(default=(), description="More routes, on both roles.")
    root_path: Annotated[str, StringConstraints(pattern=r"^(/[^/?#%\s]+)+$", max_length=256)] | None = Field(
        default=None, description="The --root-path of vLLM: its routes are edited with and without this prefix."
    )

    def for_role(self, role: Role) -> tuple[str, ...]:
        """Percent-decoded paths edited by a sidecar of this role, without repeats."""
        chosen = self.render if role == "render" else self.engine
        if chosen == "default":
            chosen = RENDER_ROUTES if role == "render" else ENGINE_ROUTES
        return tuple(dict.fromkeys((*chosen, *self.extra)))

    def with_root(self, paths: Iterable[str]) -> list[str]:
        """These paths, and each with `root_path` before it: vLLM serves both (starlette/_utils.py, get_route_path)."""
        return [*paths, *(f"{self.root_path}{path}" for path in paths if self.root_path)]

    def kinds(self, role: Role) -> dict[str, str]:
        """Every percent-decoded path that is edited on this role, and what of it: "request" or "response"."""
        paths = self.for_role(role)
        kinds = ["response" if path in RESPONSE_ROUTES else "request" for path in paths]
        return dict(zip(self.with_root(paths), kinds * 2, strict=False))


class Limits(_Model):
    """Limits of the sidecar's own."""

    max_body_bytes: Annotated[int, Field(strict=True, ge=1, le=2**52)] | None = Field(
        default=64 * 1024 * 1024,
        description="Largest body whose priority is set, in bytes: it is held until it is complete. A larger one is "
        "rejected with 413. null: no limit.",
    )


class Policy(_Model):
    """What the sidecar does with a priority."""

    header: HeaderName = Field(
        default=PRIORITY_HEADER.lower(), description="The request header that carries the priority."
    )
    engine: Literal["vllm", "sglang"] = Field(
        default="vllm", description="vllm: lower is more urgent. sglang: higher is, so the value is negated."
    )
    on_invalid: Literal["reject", "ignore"] = Field(
        default="reject",
        description="A header value that is no priority. reject: 400; ignore: the body's own value is used.",
    )
    on_unmovable: Literal["reject", "forward"] = Field(
        default="reject",
        description="A priority on a body that is not JSON or is encoded. reject: 415; forward: as it came.",
    )
    keep_header: bool = Field(default=False, description="Leave the header on the request once it was moved.")
    report_header: HeaderName | None = Field(
        default="x-vllm-priority-applied", description="Response header that says what was done; null: none."
    )
    default: Int64 | ClassName | None = Field(
        default=None, description="Priority (or class) of a request that names none; null: left to vLLM, which uses 0."
    )
    range: Range = Field(default=Range(), description="Priorities that are let through.")
    classes: Mapping[ClassName, Int64] = Field(
        default={}, description="Names that the header may carry instead of a number."
    )
    routes: Routes = Field(default=Routes(), description="The routes that are edited.")
    limits: Limits = Field(default=Limits(), description="Bounds of the sidecar's own.")

    @cached_property
    def as_json(self) -> str:
        """The policy as text: equal texts are equal policies."""
        return self.model_dump_json()

    @property
    def default_value(self) -> int | None:
        """`default` as a number: a class name is looked up."""
        return self.classes[self.default] if isinstance(self.default, str) else self.default

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        """Refuse values that are fine alone and not together. Each message starts with its key's path."""
        bounds = self.range
        if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
            raise ValueError(f"range.min: {bounds.min} is above range.max {bounds.max}; allowed: min <= max")
        if bounds.outside == "clamp" and bounds.min is None and bounds.max is None:
            raise ValueError("range.outside: clamp needs range.min or range.max to clamp to")
        for key, name in (("header", self.header), ("report_header", self.report_header)):
            if name in RESERVED_HEADERS or (name or "").startswith("x-envoy-"):
                raise ValueError(f"{key}: {name!r} has a meaning in HTTP or Envoy; allowed: a name of its own")
        if self.header == self.report_header:
            raise ValueError(f"report_header: {self.header!r} is the request header; allowed: another name, or null")
        for name, value in self.classes.items():
            if not bounds.contains(value):
                raise ValueError(f"classes.{name}: {value} is outside range; allowed: a value within range")
            self._check_negatable(f"classes.{name}", value)
        if isinstance(self.default, str) and self.default not in self.classes:
            known = ", ".join(self.classes) or "none are defined"
            raise ValueError(f"default: {self.default!r} is no class; allowed: an integer, or a class ({known})")
        default = self.default_value
        if default is not None:
            if not bounds.contains(default):
                raise ValueError(f"default: {default} is outside range; allowed: a value within range")
            self._check_negatable("default", default)
        for path in self.routes.extra:
            for known in sorted(RESPONSE_ROUTES | READS_HEADER | REJECTS_MEMBER):
                if path != known and path.endswith(known):
                    prefix = path.removesuffix(known)
                    raise ValueError(
                        f"routes.extra: {path} is vLLM's {known} below {prefix}, and would be edited as another route. "
                        f"Use routes.root_path: {prefix}"
                    )
        for key, paths in (
            ("render", self.routes.for_role("render")),
            ("engine", self.routes.for_role("engine")),
        ):
            for path in paths:
                if path not in READS_HEADER | REJECTS_MEMBER:
                    continue
                where = f"routes.{'extra' if path in self.routes.extra else key}"
                if path in READS_HEADER:
                    raise ValueError(f"{where}: vLLM reads the header on {path} itself; allowed: routes that ignore it")
                raise ValueError(f"{where}: vLLM answers 400 to a priority on {path}; allowed: routes that take it")
        return self

    def _check_negatable(self, key: str, value: int) -> None:
        if self.engine == "sglang" and value == INT64_MIN:
            raise ValueError(f"{key}: {value} cannot be negated for sglang; allowed: {INT64_MIN + 1} and up")


class NamedPolicy(_Model):
    """A policy for the sidecars whose labels match; its keys replace those of the file's top level."""

    name: PolicyName
    selector: Mapping[str, str] = Field(description="Labels that a sidecar must all have. Empty: chosen by name only.")
    policy: Policy


class Policies(_Model):
    """A policy file: the default policy and the named ones, tried in order."""

    default: Policy = Policy()
    named: Annotated[tuple[NamedPolicy, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        taken = {"default"}
        for entry in self.named:
            if entry.name in taken:
                raise ValueError(
                    f"policies: the name {entry.name!r} is taken; allowed: a name of its own for each policy"
                )
            taken.add(entry.name)
        return self

    @property
    def by_name(self) -> Mapping[str, Policy]:
        """Every policy by its name, the default one first, under `default`."""
        return {"default": self.default, **{entry.name: entry.policy for entry in self.named}}

    def choose(self, labels: Mapping[str, str], name: str | None = None) -> Policy | None:
        """The policy of that name (None where there is no such policy), or the first whose selector matches.

        Without a name, and with no selector that matches, the default policy.
        """
        if name == "default":
            return self.default
        for entry in self.named:
            if name is not None:
                if entry.name == name:
                    return entry.policy
            elif entry.selector and all(labels.get(key) == value for key, value in entry.selector.items()):
                return entry.policy
        return self.default if name is None else None


def policy_schema() -> dict[str, Any]:
    """JSON Schema of a policy, for the chart's values.schema.json and for editors."""
    return Policy.model_json_schema()
