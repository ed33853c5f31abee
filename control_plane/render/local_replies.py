"""Envoy's own error responses, in the shape of vLLM's."""

import json

from control_plane.policy.model import Policy
from control_plane.render.filter import FILTER_NAME, held_bytes
from control_plane.render.placement import Placement
from control_plane.render.routes import FROM_A_PAGE
from control_plane.render.templates import Resource

HEADERS_TIMEOUT = 60
"""Seconds within which the headers of a request must arrive."""


def local_replies(policy: Policy, placement: Placement) -> list[Resource]:
    """What Envoy's own responses become. The first mapper whose filter matches is used, so the last one matches all.

    Each lets a browser's page read the response, as vLLM's own do (`--allowed-origins`, by default all).
    """
    bound = placement.request_timeout_seconds
    late = f"The headers of a request must arrive within {HEADERS_TIMEOUT} s"
    if bound:
        late += f", and all of it within the sidecar's request timeout of {bound} s"
    again = "Send the request again later."
    cut = 'response.code_details.startsWith("upstream_reset_before_response_started'
    no_connection = " || ".join(
        f'{cut}{{{reason}")'
        for reason in ("remote_connection_failure", "local_connection_failure", "connection_timeout")
    )
    tls_failed = (
        cel_filter('response.code_details.contains("TLS_error")'),
        _error(
            503,
            "the sidecar cannot establish TLS with the vLLM server: its certificate has expired, is for another name,"
            " or was signed by another CA than the one that the sidecar trusts.",
        ),
    )
    kinds: list[tuple[Resource, Resource]] = [
        (_status("EQ", 408), _error(408, f"{late}.")),
        (
            cel_filter('response.code_details == "overload"'),
            _error(
                503,
                f"the sidecar is short of memory and accepts no requests. {again}"
                " If this happens often, raise the sidecar's memory limit.",
            ),
        ),
        (
            cel_filter('response.code_details == "request_payload_too_large"'),
            _error(
                413,
                f"the request body is larger than the {held_bytes(policy)} bytes that the sidecar can hold."
                " Send a smaller body, or raise limits.max_body_bytes and restart the sidecar.",
            ),
        ),
        (
            cel_filter('response.code_details == "no_healthy_upstream"'),
            _error(
                503,
                "the sidecar has no vLLM server to send the request to: the server's address is unknown, or the server"
                f" fails its health check. {again}",
            ),
        ),
        *([tls_failed] if placement.upstream_trust else []),
        (
            cel_filter(no_connection),
            _error(503, f"the sidecar cannot connect to the vLLM server. Check that the server is running. {again}"),
        ),
        (
            cel_filter(f'response.code == 503 && {cut}")'),
            _error(
                503,
                "the vLLM server closed the connection before it responded. The sidecar sends each request once. Send"
                " it again if that is safe.",
            ),
        ),
        (_status("GE", 100), {}),
    ]
    return [{"filter": matched, "headers_to_add": [_READABLE], **changes} for matched, changes in kinds]


_STATUS_NAMES = {408: "Request Timeout", 413: "Payload Too Large", 503: "Service Unavailable"}


def _error(status: int, message: str) -> Resource:
    """A body in the shape of vLLM's errors, for Envoy's own responses. Where a mapper has none, Envoy's text stays."""
    error = {"error": {"message": message, "type": _STATUS_NAMES[status], "param": None, "code": status}}
    text = json.dumps(error).replace("%", "%%")
    return {"body_format_override": {"text_format_source": {"inline_string": text}, "content_type": "application/json"}}


def cel_filter(expression: str) -> Resource:
    """An access log's filter by a CEL expression."""
    cel = "type.googleapis.com/envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    return {
        "extension_filter": {
            "name": "envoy.access_loggers.extension_filters.cel",
            "typed_config": {"@type": cel, "expression": expression},
        }
    }


def _status(comparison: str, status: int) -> Resource:
    """A filter of local responses by their status. Envoy requires a runtime key; nothing sets this one."""
    value = {"default_value": status, "runtime_key": f"{FILTER_NAME}.local_reply"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


_READABLE = {
    "header": {"key": "access-control-allow-origin", "value": f"%CEL({FROM_A_PAGE} ? '*' : '')%"},
    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
}
"""Lets a page in a browser read Envoy's own responses."""
