"""The two Lua filters: what they read of a policy, their scripts, and how Envoy is given them."""

from dataclasses import dataclass
from ipaddress import ip_network
from typing import Literal, Self

from control_plane.policy.model import Policy
from control_plane.policy.trust import Trust, identity_pattern
from control_plane.render.lua_bundle import Setting, bundle, library, loader, parts_of
from control_plane.render.templates import Resource, render_template
from control_plane.render.tokens import token_settings
from control_plane.vllm import Role

FILTER_NAME = "vllm_priority"
"""Name of the main filter, its ECDS resource, its dynamic metadata namespace, and the prefix of its stats."""

DEFERRED_NAME = f"{FILTER_NAME}_deferred"
"""Name of the deferred filter."""

OUTCOMES = (
    "inserted", "replaced", "kept", "response_edited", "absent",
    "invalid", "out_of_range", "ambiguous", "invalid_path", "too_large",
    "unsupported_media_type", "unsupported_charset", "unsupported_encoding",
    "malformed_json", "not_an_object", "empty_body", "upstream_error", "overloaded",
    "header_set", "ignored", "not_allowed", "untrusted",
)  # fmt: skip
"""What can become of a priority."""


@dataclass(frozen=True)
class ManagedEnvoy:
    """An Envoy that we configure: its routes add the report to responses, and say where the deferred filter is on.

    `report_header`: the name under which they add it: that of the policy it started with; empty where they add none.
    `shares_script`: its two scripts load their text from its environment, see `environment`.
    """

    report_header: str
    shares_script: bool = False

    @classmethod
    def of(cls, policy: Policy, shares_script: bool = False) -> Self:
        """As `listeners()` configures one that starts with this policy."""
        return cls(policy.report_header or "", shares_script)


_LUA_VARIABLE = "VLLM_PRIORITY_LUA"


def environment(policy: Policy) -> dict[str, str]:
    """The environment of an Envoy whose scripts share their text."""
    return {_LUA_VARIABLE: library(parts_of(_client_settings(policy)))}


Place = ManagedEnvoy | Literal["mesh", "waypoint"]
"""Where a filter runs: in an Envoy that we configure; in a mesh, with the deferred filter after it; or alone."""


def filter_settings(policy: Policy, role: Role, place: Place) -> dict[str, Setting]:
    """What the main filter's Lua reads of a policy. Priorities are texts: Lua's numbers cannot hold every int64."""
    renamed = isinstance(place, ManagedEnvoy) and place.report_header != (policy.report_header or "")
    return {
        "header": policy.header,
        "report_header": policy.report_header,
        "keep_header": policy.keep_header,
        "reject_invalid": policy.on_invalid == "reject",
        "reject_unmovable": policy.on_unmovable == "reject",
        "negate": policy.engine == "sglang",
        **_own_settings(policy),
        "routes": policy.kinds(role),
        "body": policy.body,
        "enforces_ordinary": policy.ordinary == "enforce",
        **_client_settings(policy),
        "max_body_bytes": _max_body_bytes(policy, place),
        "deferred": place == "mesh",
        "buffer_bytes": _WAYPOINT_BUFFER if place == "waypoint" else None,
        "routes_report": place.report_header if isinstance(place, ManagedEnvoy) and renamed else None,
        "counts": not isinstance(place, ManagedEnvoy),
    }


def _client_settings(policy: Policy) -> dict[str, Setting]:
    """The part of the settings that says who a client is."""
    tenants = policy.tenants
    return {
        "trust": trust_settings(policy.trust) if policy.trust else None,
        "reject_untrusted": policy.trust is not None and policy.trust.otherwise == "reject",
        "tenant_header": tenants.header if tenants else None,
        "tenant_claim": tenants.claim if tenants else None,
        "tenant_identities": tuple({"name": name, "pattern": identity_pattern(name)} for name in tenants.rules)
        if tenants and tenants.identity
        else None,
        "tenants": {name: _own_settings(policy.of_tenant(name)) for name in (tenants.rules if tenants else ())},
    }


def _max_body_bytes(policy: Policy, place: Place) -> int | None:
    limit = policy.limits.max_body_bytes
    if place != "waypoint":
        return limit
    return _WAYPOINT_BUFFER if limit is None else min(limit, _WAYPOINT_BUFFER)


def _own_settings(policy: Policy) -> dict[str, Setting]:
    """The part of the settings that a tenant has its own of."""
    default = policy.default_value
    return {
        "default": None if default is None else str(default),
        "min": None if policy.range.min is None else str(policy.range.min),
        "max": None if policy.range.max is None else str(policy.range.max),
        "clamp": policy.range.outside == "clamp",
        "classes": {name: str(value) for name, value in policy.classes.items()},
    }


def trust_settings(trust: Trust) -> dict[str, Setting]:
    """What lua/trust.lua reads."""
    return {
        "peers": tuple(str(ip_network(text)) for text in trust.peers) or None,
        "forwarded_by": tuple(str(ip_network(text)) for text in trust.forwarded_by) or None,
        "identities": tuple(map(identity_pattern, trust.identities)) or None,
        "claims": token_settings(trust.claims) if trust.claims else None,
    }


def deferred_settings(policy: Policy, place: Place) -> dict[str, Setting]:
    """What the deferred filter's Lua reads of the policy that its proxy starts with."""
    managed = isinstance(place, ManagedEnvoy)
    return {
        "header": policy.header,
        "report_header": policy.report_header,
        "report_by_routes": managed,
        "counts": not managed,
    }


def filter_script(policy: Policy, role: Role, place: Place) -> str:
    """The main filter's script. It sees responses where nothing else can: alone, and where the report is renamed."""
    settings = filter_settings(policy, role, place)
    if isinstance(place, ManagedEnvoy) and place.shares_script:
        return loader(settings, "filter", _LUA_VARIABLE)
    sees_responses = place == "waypoint" or settings["routes_report"] is not None
    return bundle(settings, sees_responses=sees_responses, comments=place == "mesh")


def deferred_script(policy: Policy, place: Place) -> str:
    """The deferred filter's script."""
    settings = deferred_settings(policy, place)
    if isinstance(place, ManagedEnvoy) and place.shares_script:
        return loader(settings, "deferred", _LUA_VARIABLE)
    return bundle(settings, "deferred", sees_responses=True, comments=place == "mesh")


def poll_token_script(token_file: str) -> str:
    """The script that adds the sidecar's token to its polls."""
    return bundle({"token_file": token_file}, "poll_token", comments=False)


def filter_config(policy: Policy, role: Role, place: Place) -> Resource:
    """The main filter's typed_config."""
    return _lua(filter_script(policy, role, place))


def deferred_config(policy: Policy, place: Place) -> Resource:
    """The deferred filter's typed_config."""
    return _lua(deferred_script(policy, place))


def _lua(script: str) -> Resource:
    return render_template("filter", filter_name=FILTER_NAME, script=script)


_HELD_SLACK = 1048576
"""Bytes that Envoy may hold beyond `limits.max_body_bytes`, so that the filter sees where a body passes that limit."""

_WAYPOINT_BUFFER = 1048576
"""Bytes of a body that a waypoint holds. It is Envoy's own limit, which a TrafficExtension cannot raise."""

_UNLIMITED = 2**32 - 1
"""Bytes that Envoy may hold where the policy sets no limit: lua/memory.lua sets it, not this."""


def held_bytes(policy: Policy) -> int:
    """How many bytes of one body a proxy has to hold."""
    limit = policy.limits.max_body_bytes
    return _UNLIMITED if limit is None else min(limit + _HELD_SLACK, _UNLIMITED)
