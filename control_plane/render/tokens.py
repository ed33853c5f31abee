"""How Envoy verifies the tokens of clients: the policy's `trust.claims`."""

import json
from urllib.parse import urlsplit

from control_plane.address import Address
from control_plane.policy.claims import SPACE_SEPARATED, Claims
from control_plane.render.addresses import discovery_type, socket_address
from control_plane.render.lua_bundle import Setting
from control_plane.render.templates import Resource, render_template
from control_plane.tls import ServerTrust, to_server

FILTER_NAME = "vllm_priority_tokens"
"""Name of Envoy's filter that verifies tokens."""

TOKENS_NAMESPACE = "envoy.filters.http.jwt_authn"
"""Where Envoy leaves the payloads of tokens that it has verified, in dynamic metadata."""

KEYS_CLUSTER = "vllm_priority_keys"
"""Name of the cluster of the server that has the issuer's keys."""

SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"
"""Public CAs, where Debian, Alpine and Envoy's image have them."""


def metadata_key(claims: Claims) -> str:
    """The name of the payload in metadata. The script does not read another verifier's payload, whose name differs."""
    return f"vllm_priority_{claims.verifier}"


def token_filter(claims: Claims) -> Resource:
    """The filter that verifies tokens."""
    prefixes = ("Bearer ", "bearer ", "BEARER ") if claims.header == "authorization" else ("",)
    keys = None if isinstance(claims.jwks, str) else json.dumps(claims.jwks, sort_keys=True)
    return render_template(
        "token_filter",
        name=FILTER_NAME,
        claims=claims,
        from_headers=[{"name": claims.header, "value_prefix": prefix} for prefix in prefixes],
        key=metadata_key(claims),
        keys=keys,
        remote={
            "http_uri": {"uri": claims.jwks, "cluster": KEYS_CLUSTER, "timeout": "2s"},
            "cache_duration": "300s",
            # The listener starts when the keys are there, or could not be fetched.
            "async_fetch": {"fast_listener": False, "failed_refetch_duration": "2s"},
        },
    )


def keys_cluster(claims: Claims) -> Resource | None:
    """The cluster of the server that has the issuer's keys, if they are fetched."""
    if not isinstance(claims.jwks, str):
        return None
    parts = urlsplit(claims.jwks)
    address = Address(parts.hostname or "", parts.port or 443)
    transport_socket = to_server(ServerTrust(claims.jwks_ca or "", address.host))
    if claims.jwks_ca is None:
        common = transport_socket["typed_config"]["common_tls_context"]
        common["validation_context"]["trusted_ca"] = {"filename": SYSTEM_CA}
    return render_template(
        "keys_cluster",
        name=KEYS_CLUSTER,
        discovery_type=discovery_type(address),
        address=socket_address(address),
        transport_socket=transport_socket,
    )


def token_settings(claims: Claims) -> dict[str, Setting]:
    """What lua/claims.lua reads."""
    named = " ".join(f"{name}={value}" for name, value in claims.require.items())
    return {
        "key": metadata_key(claims),
        "header": claims.header,
        "text": f"trust.claims {named}".rstrip(),
        "require": tuple(
            {"name": name, "value": value, "words": name in SPACE_SEPARATED} for name, value in claims.require.items()
        ),
    }
