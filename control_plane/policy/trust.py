"""Who may name a priority, and which values a tenant has of its own."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from control_plane.policy.claims import SPACE_SEPARATED, ClaimName, Claims, check_claims
from control_plane.policy.fields import ClassName, HeaderName, Int64, PolicyModel, Range

TenantName = Annotated[str, StringConstraints(pattern=r"^[!-~]([ -~]{0,254}[!-~])?$")]
Identity = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,512}$")]

_IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


def _network(key: str, text: str) -> _IPNetwork:
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(
            f"{key}: '{text}' is not a network ({error}). Use CIDR notation, for example 10.0.0.0/8."
        ) from None
    if getattr(network.network_address, "ipv4_mapped", None):
        raise ValueError(f"{key}: '{text}' is an IPv4 network in IPv6. Use IPv4, for example 10.0.0.0/8.")
    return network


class Trust(PolicyModel):
    """Who may name a priority: a client that an entry of `peers` or `identities` matches, or `claims`."""

    peers: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="Networks of clients, for example 10.0.0.0/8. The connection's own address counts."
    )
    forwarded_by: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description="Networks of proxies. From these, X-Forwarded-For is believed: the right-most address that is not "
        "such a proxy's counts as the client's.",
    )
    identities: Annotated[tuple[Identity, ...], Field(strict=False)] = Field(
        default=(),
        description="Names in the client's verified certificate, URI or DNS. * stands for any text without a slash.",
    )
    claims: Claims | None = Field(
        default=None, description="A token that a trusted client sends, and that Envoy verifies. null: none."
    )
    otherwise: Literal["drop", "reject"] = Field(
        default="drop",
        description="What happens to the priority of another client. drop: it counts as if the client named none; "
        "reject: 403.",
    )


class Tenant(PolicyModel):
    """A tenant's own values. What is left out is the policy's."""

    range: Range | None = Field(default=None, description="The tenant's range.")
    classes: Mapping[ClassName, Int64] | None = Field(default=None, description="The tenant's classes.")
    default: Int64 | ClassName | None = Field(default=None, description="The tenant's default.")


class Tenants(PolicyModel):
    """Range, classes and default by tenant. One of `header`, `claim` and `identity` says who names the tenant."""

    header: HeaderName | None = Field(default=None, description="The request header that names the tenant.")
    claim: ClaimName | None = Field(
        default=None, description="The claim that names the tenant, in a token that `trust.claims` verifies."
    )
    identity: bool = Field(
        default=False,
        description="Whether the names of `rules` are names in the client's verified certificate, URI or DNS. * stands "
        "for any text without a slash, and the first rule that matches counts.",
    )
    rules: Mapping[TenantName, Tenant] = Field(min_length=1, description="The tenants by name. Any other name is none.")


def check_trust(trust: Trust) -> None:
    """Reject entries that can never decide anything. The message of the ValueError starts with the key's path."""
    if trust.forwarded_by and not trust.peers:
        raise ValueError("trust.forwarded_by: has no effect without trust.peers. Name the clients' networks there.")
    for key, networks in (("peers", trust.peers), ("forwarded_by", trust.forwarded_by)):
        parsed = [_network(f"trust.{key}[{index}]", text) for index, text in enumerate(networks)]
        for index, inner in enumerate(parsed):
            for other, outer in enumerate(parsed):
                if index != other and _lies_within(inner, outer):
                    raise ValueError(f"trust.{key}: {inner} lies within {outer}, so it decides nothing. Remove one.")
    if trust.claims:
        check_claims(trust.claims)
    for index, identity in enumerate(trust.identities):
        for other, pattern in enumerate(trust.identities):
            if index != other and _covers(pattern, identity):
                raise ValueError(f"trust.identities: '{pattern}' matches '{identity}', too. Remove one.")


def _covers(pattern: str, identity: str) -> bool:
    """Whether `pattern` matches all that `identity`, another pattern, matches."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^/]+"), identity) is not None


def check_tenants(tenants: Tenants, trust: Trust | None) -> None:
    """Reject tenants that no request can have. The message of the ValueError starts with the key's path."""
    ways = [tenants.header is not None, tenants.claim is not None, tenants.identity]
    if sum(ways) != 1:
        raise ValueError("tenants: exactly one of header, claim and identity names the tenant. Set one of them.")
    claims = trust.claims if trust else None
    if tenants.claim is not None:
        if claims is None:
            raise ValueError("tenants.claim: needs trust.claims, which verifies the token. Set it.")
        only = claims.require.get(tenants.claim)
        others = [name for name in tenants.rules if name != only]
        # A client that is trusted for another reason can have a token with another value.
        if only is not None and others and tenants.claim not in SPACE_SEPARATED and trust and _by_token_only(trust):
            raise ValueError(f"tenants.rules.{others[0]}: trust.claims.require accepts only '{only}'. Remove one.")
    if tenants.identity:
        patterns = list(tenants.rules)
        for index, identity in enumerate(patterns):
            for pattern in patterns[:index]:
                if _covers(pattern, identity):
                    raise ValueError(
                        f"tenants.rules.{identity}: '{pattern}' comes first and matches, too, so this rule never "
                        "counts. Put it first, or remove it."
                    )


def _by_token_only(trust: Trust) -> bool:
    return not trust.peers and not trust.identities


def _lies_within(inner: _IPNetwork, outer: _IPNetwork) -> bool:
    """Whether every address of `inner` is one of `outer`, or both are the same."""
    return inner.version == outer.version and inner.prefixlen >= outer.prefixlen and inner.network_address in outer


def identity_pattern(text: str) -> str:
    """An entry of `trust.identities` as a Lua pattern: `*` stands for at least one byte other than a slash."""
    return "^" + re.sub(r"[^A-Za-z0-9*]", lambda found: f"%{found[0]}", text).replace("*", "[^/]+") + "$"
