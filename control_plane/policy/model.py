"""The policy: what to do with a priority.

Every function past `load` takes these frozen models and checks nothing again.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from control_plane.policy.fields import ClassName, HeaderName, Int64, PolicyModel, PolicyName, Range, RoutePath
from control_plane.policy.trust import Tenant, Tenants, Trust, check_tenants, check_trust
from control_plane.vllm import (
    BODY_ROUTES,
    ENGINE_ROUTES,
    INT64_MIN,
    PRIORITY_HEADER,
    READS_HEADER,
    READS_HEADER_ONLY,
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

RootPath = Annotated[str, StringConstraints(pattern=r"^(/[^/?#%\s]+)+$", max_length=256)]
"""The prefix of vLLM's routes that --root-path sets."""

# Tuples are written as YAML lists, which strict mode would refuse.
_Paths = Annotated[tuple[RoutePath, ...], Field(strict=False)]


class Routes(PolicyModel):
    """The POST routes that are edited, by role; `extra` is added to both."""

    render: Literal["default"] | _Paths = Field(default="default", description="Routes to edit on render servers.")
    engine: Literal["default"] | _Paths = Field(default="default", description="Routes to edit on engines.")
    extra: _Paths = Field(default=(), description="More routes to edit, on both roles.")
    root_path: RootPath | None = Field(
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


class Limits(PolicyModel):
    """Limits of the sidecar's own."""

    max_body_bytes: Annotated[int, Field(strict=True, ge=1, le=2**52)] | None = Field(
        default=64 * 1024 * 1024,
        description="Largest body whose priority is set, in bytes: it is held until it is complete. A larger one is "
        "rejected with 413. null: no limit.",
    )


class Policy(PolicyModel):
    """What the sidecar does with a priority."""

    header: HeaderName = Field(
        default=PRIORITY_HEADER.lower(), description="The request header that carries the priority."
    )
    engine: Literal["vllm", "sglang"] = Field(
        default="vllm", description="vllm: lower is more urgent. sglang: higher is, so the value is negated."
    )
    on_invalid: Literal["reject", "ignore"] = Field(
        default="reject",
        description="What happens to a header value that is not a valid priority. reject: 400; ignore: it counts as "
        "if there were no header, so the body's own priority applies, or the default.",
    )
    on_unmovable: Literal["reject", "forward"] = Field(
        default="reject",
        description="What happens to a priority whose body is not JSON in UTF-8, or has a content-encoding. "
        "reject: 415; forward: the request passes unchanged.",
    )
    keep_header: bool = Field(default=False, description="Whether the request keeps the header once it was moved.")
    report_header: HeaderName | None = Field(
        default="x-vllm-priority-applied", description="Response header that reports what was done. null: none."
    )
    default: Int64 | ClassName | None = Field(
        default=None, description="Priority or class of a request that names none. null: left to vLLM, which uses 0."
    )
    range: Range = Field(default=Range(), description="Range of valid priorities, bounds included.")
    classes: Mapping[ClassName, Int64] = Field(
        default={}, description="Names that the header may carry instead of a number."
    )
    body: Literal["accept", "clamp", "ignore", "reject"] = Field(
        default="accept",
        description="What a priority in the body is worth if no header names one. accept: vLLM gets it as it is; "
        "clamp: it is moved into the range; ignore: the default replaces it, or 0; reject: 400. With clamp, ignore and "
        "reject, a body that the sidecar cannot read is rejected.",
    )
    ordinary: Literal["pass", "enforce"] = Field(
        default="pass",
        description="Routes that are not edited otherwise, such as /v1/chat/completions. enforce: the whole policy "
        "holds there, too. Where vLLM reads the header, it gets a plain integer within the range.",
    )
    trust: Trust | None = Field(default=None, description="Who may name a priority. null: everyone.")
    tenants: Tenants | None = Field(default=None, description="Range, classes and default by tenant.")
    routes: Routes = Field(default=Routes(), description="The routes that are edited.")
    limits: Limits = Field(default=Limits(), description="Limits that the sidecar sets.")

    @cached_property
    def as_json(self) -> str:
        """The policy as text: equal texts are equal policies."""
        return self.model_dump_json()

    def below(self, root_path: str | None) -> "Policy":
        """Return this policy for a vLLM with that root path, unless the policy sets one itself."""
        if root_path is None or self.routes.root_path is not None:
            return self
        routes = self.routes.model_copy(update={"root_path": root_path})
        return Policy.model_construct(**{**dict(self), "routes": routes})

    @property
    def default_value(self) -> int | None:
        """`default` as a number: a class name is looked up."""
        return self.classes[self.default] if isinstance(self.default, str) else self.default

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        """Reject values that are valid alone and not together. Each message starts with its key's path."""
        bounds = self.range
        if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
            raise ValueError(
                f"range.min: {bounds.min} is greater than range.max, which is {bounds.max}. Use a smaller value."
            )
        if bounds.outside == "clamp" and bounds.min is None and bounds.max is None:
            raise ValueError("range.outside: 'clamp' needs a bound. Set range.min or range.max.")
        named = [("header", self.header), ("report_header", self.report_header)]
        if self.tenants and self.tenants.header is not None:
            named.append(("tenants.header", self.tenants.header))
        token_header = self.trust.claims.header if self.trust and self.trust.claims else "authorization"
        if token_header != "authorization":
            named.append(("trust.claims.header", token_header))
        for key, name in named:
            if name in RESERVED_HEADERS or (name or "").startswith("x-envoy-"):
                raise ValueError(
                    f"{key}: {name!r} has a meaning in HTTP or Envoy. Use another name, for example x-priority."
                )
        if token_header in (self.header, self.report_header):
            own = "header" if token_header == self.header else "report_header"
            raise ValueError(f"trust.claims.header: '{token_header}' is the policy's {own}. Use another name.")
        if self.header == self.report_header:
            raise ValueError(f"report_header: {self.header!r} is the request header. Use another name, or null.")
        self._check_values()
        self._check_rules()
        for path in self.routes.extra:
            for known in sorted(RESPONSE_ROUTES | READS_HEADER | REJECTS_MEMBER):
                if path != known and path.endswith(known):
                    prefix = path.removesuffix(known)
                    raise ValueError(
                        f"routes.extra: {path} is vLLM's {known} below {prefix}, and would be edited as another route. "
                        f"Set routes.root_path to {prefix}."
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
                    raise ValueError(f"{where}: vLLM reads the header on {path} itself. Remove this route.")
                raise ValueError(f"{where}: vLLM rejects a priority in the body of {path}. Remove this route.")
        return self

    def _check_values(self) -> None:
        """Reject classes and a default that are outside the range."""
        bounds = self.range
        for name, value in self.classes.items():
            if not bounds.contains(value):
                raise ValueError(f"classes.{name}: {value} is outside range. Use a value within it.")
            self._check_negatable(f"classes.{name}", value)
        if isinstance(self.default, str) and self.default not in self.classes:
            known = f"one of the classes: {', '.join(self.classes)}" if self.classes else "define this class"
            raise ValueError(f"default: {self.default!r} is not a class. Use an integer, or {known}.")
        default = self.default_value
        if default is not None:
            if not bounds.contains(default):
                raise ValueError(f"default: {default} is outside range. Use a value within it.")
            self._check_negatable("default", default)

    def kinds(self, role: Role) -> dict[str, str]:
        """Every percent-decoded path on which the policy holds, and what is edited there.

        "request" or "response"; or on a route that reads the header itself "ordinary" (header or body) or "header".
        """
        kinds = self.routes.kinds(role)
        if self.ordinary == "enforce":
            read = {path: "header" if path in READS_HEADER_ONLY else "ordinary" for path in sorted(READS_HEADER)}
            for path, kind in {**dict.fromkeys(BODY_ROUTES, "request"), **read}.items():
                for known in self.routes.with_root([path]):
                    kinds.setdefault(known, kind)
        return kinds

    def of_tenant(self, name: str) -> "Policy":
        """The policy with a tenant's own values in place of its own."""
        tenant = self.tenants.rules[name] if self.tenants else Tenant()
        own = {key: getattr(tenant, key) for key in tenant.model_fields_set}
        return self.model_copy(
            update={key: value for key, value in own.items() if key == "default" or value is not None}
        )

    @property
    def reads_certificates(self) -> str | None:
        """The key that reads clients' certificates, if any."""
        if self.trust and self.trust.identities:
            return "trust.identities"
        return "tenants.identity" if self.tenants and self.tenants.identity else None

    @property
    def open_routes(self) -> str | None:
        """What a client can still do around this policy's rules, for a person; None where there is nothing."""
        if self.ordinary == "enforce" or (self.trust is None and self.body == "accept" and self.tenants is None):
            return None
        return (
            "trust, body and tenants hold only on the routes that are edited. On vLLM's other routes, any client can "
            "still set any priority. Set ordinary: enforce to close them"
        )

    def _check_rules(self) -> None:
        """Reject contradictions in `body`, `ordinary`, `trust` and `tenants`."""
        trust, tenants = self.trust, self.tenants
        own = [tenant.range for tenant in tenants.rules.values() if tenant.range] if tenants else []
        if self.body == "clamp" and all(bounds.min is None and bounds.max is None for bounds in [self.range, *own]):
            raise ValueError("body: 'clamp' needs a bound. Set range.min or range.max.")
        if self.ordinary == "enforce":
            if self.header != PRIORITY_HEADER.lower():
                raise ValueError(
                    f"ordinary: 'enforce' needs the header that vLLM reads. Set header to {PRIORITY_HEADER.lower()}."
                )
            if self.keep_header:
                raise ValueError(
                    "keep_header: with ordinary: enforce, vLLM would read a kept header. Set keep_header to false."
                )
        if self.engine == "sglang":
            if self.ordinary == "enforce":
                raise ValueError("ordinary: 'enforce' is for vLLM, whose routes read the header. Use pass with sglang.")
            if self.default is None and (self.body == "ignore" or (trust and trust.otherwise == "drop")):
                raise ValueError("default: with sglang, a priority that is ignored needs another value. Set a default.")
        if trust:
            check_trust(trust)
        if tenants:
            check_tenants(tenants, trust)
            for key, name in (("header", self.header), ("report_header", self.report_header)):
                if name is not None and tenants.header == name:
                    raise ValueError(f"tenants.header: '{name}' is the policy's {key}. Use another name.")
            for name in tenants.rules:
                try:
                    self.of_tenant(name)._check_values()
                except ValueError as error:
                    raise ValueError(f"tenants.rules.{name}.{error}") from None

    def _check_negatable(self, key: str, value: int) -> None:
        if self.engine == "sglang" and value == INT64_MIN:
            raise ValueError(f"{key}: {value} cannot be negated for sglang. Use at least {INT64_MIN + 1}.")


class NamedPolicy(PolicyModel):
    """A policy for the sidecars whose labels match; its keys replace those of the file's top level."""

    name: PolicyName = Field(description="Name of the policy: lower-case letters, digits and hyphens.")
    selector: Mapping[str, str] = Field(
        description="Labels that a sidecar must have, all of them. Empty: the policy is used by its name only."
    )
    policy: Policy = Field(description="Keys of a policy, as above.")


class Policies(PolicyModel):
    """A policy file: the default policy and the named ones, tried in order."""

    default: Policy = Policy()
    named: Annotated[tuple[NamedPolicy, ...], Field(strict=False)] = ()
    files: tuple[Path, ...] = ()
    """The files that were read with the policy file."""

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        taken = {"default"}
        for entry in self.named:
            if entry.name in taken:
                raise ValueError(
                    f"policies: the name {entry.name!r} is already in use. Use a different name for each policy."
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
