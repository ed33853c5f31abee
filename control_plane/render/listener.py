"""Envoy's listeners: the sidecar's own, and the one for health checks."""

from control_plane.policy.model import Policy
from control_plane.render.addresses import socket_address
from control_plane.render.clusters import CONNECTION_BUFFER
from control_plane.render.filter import (
    DEFERRED_NAME,
    FILTER_NAME,
    ManagedEnvoy,
    deferred_config,
    filter_config,
    held_bytes,
)
from control_plane.render.local_replies import HEADERS_TIMEOUT, local_replies
from control_plane.render.loggers import loggers
from control_plane.render.placement import Placement
from control_plane.render.routes import FORWARDED_PROTO_NOTE, report_headers, routes
from control_plane.render.templates import Resource, render_template
from control_plane.render.tokens import token_filter
from control_plane.render.tracing import tracing
from control_plane.tls import from_clients

_HTTP2_WINDOW = CONNECTION_BUFFER
"""Bytes that an HTTP/2 client may send on although Envoy has stopped reading."""


def listeners(policy: Policy, placement: Placement) -> list[Resource]:
    """The Envoy listeners: the sidecar's own, and the health one where the placement has it."""
    envoy = ManagedEnvoy.of(policy, placement.shares_script)
    typed_config = filter_config(policy, placement.role, envoy)
    if placement.control_plane:
        http_filter = render_template(
            "discovered_filter",
            filter_name=FILTER_NAME,
            typed_config=typed_config,
            refresh_delay=f"{placement.refresh_seconds:g}s",
        )
    else:
        http_filter = {"name": FILTER_NAME, "typed_config": typed_config}
    listener = render_template(
        "listener",
        filter_name=FILTER_NAME,
        listen=socket_address(placement.listen),
        loggers=loggers(placement),
        tracing=placement.tracing and tracing(placement.tracing, placement.role),
        token_filter=token_filter(policy.trust.claims) if policy.trust and policy.trust.claims else None,
        http_filter=http_filter,
        deferred_filter={
            "name": DEFERRED_NAME,
            "disabled": True,
            "typed_config": deferred_config(policy, envoy),
        },
        buffer=CONNECTION_BUFFER,
        window=_HTTP2_WINDOW,
        note=FORWARDED_PROTO_NOTE,
        request_timeout=f"{placement.request_timeout_seconds}s",
        headers_timeout=f"{HEADERS_TIMEOUT}s",
        idle_timeout=f"{placement.idle_timeout_seconds}s",
        drain_timeout=f"{placement.drain_timeout_seconds}s",
        default_host=str(placement.upstream),
        ignored_upgrades=_everything_but("websocket"),
        local_replies={"mappers": local_replies(policy, placement)},
        report_headers=report_headers(policy),
        held_bytes=held_bytes(policy),
        routes=routes(policy, held_memory(placement)),
        transport_socket=placement.listen_tls and from_clients(placement.listen_tls),
    )
    if placement.health is None:
        return [listener]
    drain = placement.drain
    health = render_template(
        "health_listener",
        address=socket_address(placement.health),
        # Envoy counts the time that a response is delayed as a part of the request's.
        request_timeout=f"{5 + (drain.response_delay_seconds if drain else 0)}s",
        drain=drain,
        drain_path=drain and drain.path,
        drain_delay=drain and f"{drain.response_delay_seconds}s",
    )
    return [listener, health]


def held_memory(placement: Placement) -> int:
    """The resident set in bytes above which the filter sheds bodies; lua/memory.lua may use an eighth more.

    What is left is for what grows between two readings: the allocator's own memory, the buffers of connections, LuaJIT.
    """
    return placement.memory_limit_bytes * 3 // 4


def _everything_but(word: str) -> list[Resource]:
    """String matchers for every text except `word`, ignoring case: RE2 has no negative lookahead.

    One for each place where a text may differ, since Envoy 1.37 refuses a regular expression as long as all of them.
    """
    differs = [f"{word[:at]}([^{letter}].*)?" for at, letter in enumerate(word)]
    return [{"safe_regex": {"regex": f"(?i){pattern}"}} for pattern in (*differs, f"{word}.+")]
