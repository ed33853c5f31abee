"""Who may name a priority, and which values a tenant has of its own."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from control_plane.policy.claims import Claims, check_claims
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
    """Range, classes and default by tenant. A tenant is named by a header, which only a trusted client may send."""

    header: HeaderName = Field(description="The request header that names the tenant.")
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
            if index != other and re.fullmatch(re.escape(pattern).replace(r"\*", "[^/]+"), identity):
                raise ValueError(f"trust.identities: '{pattern}' matches '{identity}', too. Remove one.")


def _lies_within(inner: _IPNetwork, outer: _IPNetwork) -> bool:
    """Whether every address of `inner` is one of `outer`, or both are the same."""
    return inner.version == outer.version and inner.prefixlen >= outer.prefixlen and inner.network_address in outer


def identity_pattern(text: str) -> str:
    """An entry of `trust.identities` as a Lua pattern: `*` stands for at least one byte other than a slash."""
    return "^" + re.sub(r"[^A-Za-z0-9*]", lambda found: f"%{found[0]}", text).replace("*", "[^/]+") + "$"
