"""What is logged and measured of requests: the access log, and the metrics, which are access loggers to Envoy.

Counters of the script's own would start again with each policy, since a change of the policy replaces the script.
"""

from collections.abc import Mapping, Sequence

from control_plane.render.filter import FILTER_NAME
from control_plane.render.local_replies import cel_filter
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource

STANDARD_STREAMS: Mapping[str, str] = {"/dev/stdout": "Stdout", "/dev/stderr": "Stderr"}
"""Access logs that Envoy writes by their descriptor -> the name of its logger."""


def _reported(field: str) -> str:
    """Envoy's command for a field of the report that lua/report.lua leaves."""
    return f"%DYNAMIC_METADATA({FILTER_NAME}:report:{field})%"


LOG_FIELDS = {
    "time": "%START_TIME%",
    "method": "%REQ(:METHOD):128%",
    "path": "%PATH(NQ:PATH):256%",
    "route": _reported("route"),
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "outcome": _reported("outcome"),
    "value": _reported("value"),
    "source": _reported("source"),
    "class": _reported("class"),
    "report": _reported("text"),
    "tenant": f"%DYNAMIC_METADATA({FILTER_NAME}:tenant)%",
    "trusted_by": f"%DYNAMIC_METADATA({FILTER_NAME}:trusted_by)%",
    "peer": "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%",
    "request_id": "%REQ(X-REQUEST-ID):128%",
    "traceparent": "%REQ(TRACEPARENT):128%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "duration_ms": "%DURATION%",
}
"""What the access log says of a request. Neither bodies nor queries nor keys: no field may contain one. What a client
chooses has a bound, so that it cannot fill the log."""

_UNREMARKABLE = ("inserted", "replaced", "header_set", "response_edited", "kept", "absent")
"""Outcomes that are no problem: the priority was applied, or the client asked for none."""


def access_log(path: str) -> Resource:
    """Envoy's access logger. It cannot open /dev/stdout by its path where that is a socket, as under systemd."""
    stream = STANDARD_STREAMS.get(path)
    kind = f"stream.v3.{stream}AccessLog" if stream else "file.v3.FileAccessLog"
    return {
        "@type": f"type.googleapis.com/envoy.extensions.access_loggers.{kind}",
        **({} if stream else {"path": path}),
        "log_format": {"json_format": LOG_FIELDS},
    }


METRICS_PREFIX = "vllm_priority"
"""The prefix of the sidecar's own metrics. Prometheus sees `envoy_vllm_priority_requests`."""

COUNTED_BY = ("route", "outcome", "source", "class", "priority")
"""Labels of the counter of requests. Each has few values, whatever clients send: see lua/report.lua."""

TIMED_BY = ("class", "priority")
"""Labels of the histograms of times."""


def loggers(placement: Placement) -> list[Resource]:
    """Envoy's access loggers. Each logs requests that have a report, and the times only those that vLLM responds to."""
    reported = {
        "metadata_filter": {
            "matcher": {"filter": FILTER_NAME, "path": [{"key": "report"}], "value": {"present_match": True}},
            "match_if_key_not_found": False,
        }
    }
    from_upstream = {"and_filter": {"filters": [reported, cel_filter("response.code_details == 'via_upstream'")]}}
    outcomes = ", ".join(f"'{outcome}'" for outcome in _UNREMARKABLE)
    problem = cel_filter(
        "response.code_details != 'via_upstream'"
        f" || !(metadata.filter_metadata['{FILTER_NAME}']['report']['outcome'] in [{outcomes}])"
    )
    logged: Mapping[str, Resource] = {"all": reported, "problems": {"and_filter": {"filters": [reported, problem]}}}
    log = [
        {"name": "log", "filter": chosen, "typed_config": access_log(placement.access_log)}
        for mode, chosen in logged.items()
        if mode == placement.logged_requests
    ]
    return [
        *log,
        {"name": "counts", "filter": reported, "typed_config": counts()},
        {"name": "times", "filter": from_upstream, "typed_config": times()},
    ]


def counts() -> Resource:
    """What is counted of every request, as metrics."""
    return _metrics(
        counters=[{"stat": _stat("requests", COUNTED_BY), "value_fixed": 1}],
        histograms=[
            {"stat": _stat("request_bytes", ("route",)), "unit": "Bytes", "value_format": "%BYTES_RECEIVED%"},
        ],
    )


def times() -> Resource:
    """What is measured of requests that vLLM responds to."""
    # From the request's last byte to the first byte that vLLM gets.
    filter_time = "%COMMON_DURATION(DS_RX_END:US_TX_BEG:us)%"
    return _metrics(
        counters=[],
        histograms=[
            {"stat": _stat("filter_time", ("route",)), "unit": "Microseconds", "value_format": filter_time},
            {"stat": _stat("time_to_first_byte", TIMED_BY), "unit": "Milliseconds",
             "value_format": "%RESPONSE_DURATION%"},
            {"stat": _stat("duration", TIMED_BY), "unit": "Milliseconds", "value_format": "%DURATION%"},
        ],
    )  # fmt: skip


def _metrics(counters: list[Resource], histograms: list[Resource]) -> Resource:
    return {
        "@type": "type.googleapis.com/envoy.extensions.access_loggers.stats.v3.Config",
        # Envoy before 1.39 requires this field, and none rejects it.
        "stat_prefix": METRICS_PREFIX,
        "counters": counters,
        "histograms": histograms,
    }


def _stat(name: str, labels: Sequence[str]) -> Resource:
    return {"name": name, "tags": [{"name": label, "value_format": _reported(label)} for label in labels]}
