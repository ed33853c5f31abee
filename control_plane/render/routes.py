"""What happens to which request, by Envoy's routes: headers, buffers, and which filters run."""

import re

from control_plane.policy.model import Policy
from control_plane.render.filter import DEFERRED_NAME, FILTER_NAME
from control_plane.render.templates import Resource
from control_plane.vllm import INT64_MAX, READS_HEADER, RESPONSE_ROUTES

FORWARDED_PROTO_NOTE = "x-vllm-priority-forwarded-proto"

_HELD_HERE = 32768
"""A longer body, and one of unknown length, is held by the deferred filter: HELD_HERE in lua/filter.lua."""

_WITHOUT_LUA = {
    FILTER_NAME: {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.LuaPerRoute",
        "disabled": True,
    }
}

FROM_A_PAGE = "'origin' in request.headers"
"""CEL: whether a page in a browser sent the request. A header whose value is empty otherwise is not added by Envoy."""

_TO_A_PAGE = (
    f"{FROM_A_PAGE} && '{FILTER_NAME}' in metadata.filter_metadata"
    f" && 'report' in metadata.filter_metadata['{FILTER_NAME}']"
)
"""CEL: whether a page gets a report. It can read the report only if the response exposes that header."""


def routes(policy: Policy, held_memory: int) -> list[Resource]:
    """Every request goes to the one cluster; routes differ in what they remove and hold, and in which filters run.

    No policy can edit another method than POST, or a route on which vLLM reads the header itself: Lua is off there. The
    deferred filter runs where a body may be edited in chunks, and where the response is edited.
    """
    not_post = {"name": ":method", "string_match": {"exact": "POST"}, "invert_match": True}
    long = {"name": "content-length", "range_match": {"start": _HELD_HERE + 1, "end": INT64_MAX}}
    unknown_length = {"name": "content-length", "present_match": True, "invert_match": True}
    deferred = {
        "typed_per_filter_config": {
            DEFERRED_NAME: {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
        },
        # The main filter edits chunks only where this says that they will be held.
        "metadata": {"filter_metadata": {FILTER_NAME: {"deferred": True, "held_memory": held_memory}}},
    }
    without_lua = {"typed_per_filter_config": _WITHOUT_LUA}
    # Lua decodes a path as vLLM does; Envoy compares it as it came.
    percent_encoded = {"name": ":path", "string_match": {"contains": "%"}}
    # Envoy joins the lines of a repeated content-type, and only Lua can separate equal ones again.
    single = {
        "name": "content-type",
        "string_match": {"contains": ","},
        "invert_match": True,
        "treat_missing_header_as_empty": True,
    }
    untouched = sorted(policy.routes.with_root(READS_HEADER)) if policy.ordinary == "pass" else []
    kinds: list[tuple[Resource, Resource]] = [
        ({"prefix": "/", "headers": [not_post, single]}, without_lua),
        *(({"path": path, "headers": [single]}, without_lua) for path in untouched),
        ({"prefix": "/", "headers": [long]}, deferred),
        ({"prefix": "/", "headers": [unknown_length]}, deferred),
        *(({"path": path}, deferred) for path in sorted(policy.routes.with_root(RESPONSE_ROUTES))),
        ({"prefix": "/", "headers": [percent_encoded]}, deferred),
        ({"prefix": "/"}, {}),
    ]
    routes = []
    noted = {"name": FORWARDED_PROTO_NOTE, "present_match": True}
    for match, options in kinds:
        for wanted, removed in (
            ({**match, "headers": [*match.get("headers", []), noted]}, FORWARDED_PROTO_NOTE),
            (match, "x-forwarded-proto"),
        ):
            upstream = {"cluster": "upstream", "timeout": "0s"}
            routes.append({"match": wanted, "request_headers_to_remove": [removed], "route": upstream, **options})
    return routes


def report_headers(policy: Policy) -> list[Resource]:
    """What adds the report to a response, Envoy's own included, if there is one. Lua would take three times as long."""
    if not policy.report_header:
        return []
    value = f"%DYNAMIC_METADATA({FILTER_NAME}:report:text)%"
    header = {"key": policy.report_header, "value": value}
    name = f"%CEL({_TO_A_PAGE} ? {_cel_text(policy.report_header)} : '')%"
    exposed = {"key": "access-control-expose-headers", "value": name}
    return [
        {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"},
        {"header": exposed, "append_action": "APPEND_IF_EXISTS_OR_ADD"},
    ]


def _cel_text(text: str) -> str:
    """A string of CEL. Header names may contain quotes, and percent signs, which would end Envoy's command."""
    return "'" + re.sub(r"[^a-z0-9_-]", lambda found: f"\\x{ord(found[0]):02x}", text) + "'"
