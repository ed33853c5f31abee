"""Every outcome, and every policy key that leads to one: in the response header, the counters and the access log."""

import json
from dataclasses import dataclass, field

import pytest

from control_plane.render.filter import OUTCOMES
from control_plane.report_header import SidecarReport, parse_report

from .conftest import GENERATE, MESSAGES, RENDER, SidecarFactory
from .oracle import assert_moved, assert_refused, assert_untouched
from .sidecars import counted
from .upstream import RecordingUpstream, answering, response
from .wire import Answer, Header, call, priority

FORWARD = "on_unmovable: forward"
IGNORE = "on_invalid: ignore"


@dataclass(frozen=True)
class Case:
    """A request under a policy, and what must be said of it."""

    outcome: str
    value: str | None = None
    source: str | None = None
    policy: str = "{}"
    headers: tuple[Header, ...] = ()
    body: bytes = b"{}"
    target: str = RENDER
    content_type: bytes = b"application/json"
    status: int = 200
    answer: bytes = field(default=b'{"priority":0}')

    @property
    def report(self) -> str:
        if self.value is None:
            return f"none; outcome={self.outcome}"
        return f"{self.value}; source={self.source}; outcome={self.outcome}"


CASES = {
    "inserted": Case("inserted", "5", "header", headers=(priority("5"),)),
    "inserted from a class": Case(
        "inserted", "-10", "class", "classes: {interactive: -10}", headers=(priority("interactive"),)
    ),
    "replaced": Case("replaced", "5", "header", headers=(priority("5"),), body=b'{"priority":1}'),
    "response_edited": Case("response_edited", "5", "header", headers=(priority("5"),), target=MESSAGES),
    "default": Case("inserted", "3", "default", "default: 3"),
    "default in a response": Case("response_edited", "3", "default", "default: 3", target=MESSAGES),
    "default by class": Case("inserted", "10", "default", "{classes: {batch: 10}, default: batch}"),
    "kept: the body has its own under a default": Case("kept", policy="default: 3", body=b'{"priority":1}'),
    "absent": Case("absent"),
    "absent, with one in the body": Case("absent", body=b'{"priority":1}'),
    "invalid": Case("invalid", headers=(priority("high"),), status=400),
    "invalid, ignored": Case("invalid", policy=IGNORE, headers=(priority("high"),)),
    "out_of_range": Case("out_of_range", headers=(priority("9" * 30),), status=400),
    "out_of_range of the policy": Case(
        "out_of_range", policy="range: {min: -5, max: 5}", headers=(priority("6"),), status=400
    ),
    "out_of_range, ignored": Case("out_of_range", policy=IGNORE, headers=(priority("9" * 30),)),
    "ambiguous": Case("ambiguous", headers=(priority("1"), priority("2")), status=400),
    "ambiguous, ignored": Case("ambiguous", policy=IGNORE, headers=(priority("1"), priority("2"))),
    "unsupported_media_type": Case(
        "unsupported_media_type", headers=(priority("5"),), content_type=b"text/plain", status=415
    ),
    "not_an_object": Case("not_an_object", headers=(priority("5"),), body=b"[1]"),
    "unsupported_media_type, forwarded": Case(
        "unsupported_media_type", policy=FORWARD, headers=(priority("5"),), content_type=b"text/plain"
    ),
    "malformed_json": Case("malformed_json", headers=(priority("5"),), body=b'{"a" 1}'),
    "empty_body": Case("empty_body", headers=(priority("5"),), body=b""),
    "unsupported_encoding": Case(
        "unsupported_encoding", headers=(priority("5"), (b"Content-Encoding", b"gzip")), status=415
    ),
    "unsupported_encoding, forwarded": Case(
        "unsupported_encoding", policy=FORWARD, headers=(priority("5"), (b"Content-Encoding", b"gzip"))
    ),
    "unsupported_charset": Case(
        "unsupported_charset", headers=(priority("5"),), body="{}".encode("utf-16"), status=415
    ),
    "header_set": Case(
        "header_set", "5", "header", "ordinary: enforce", headers=(priority("+05"),), target="/v1/chat/completions"
    ),
    "ignored": Case("ignored", policy="body: ignore", body=b'{"priority":-9}'),
    "not_allowed": Case("not_allowed", policy="body: reject", body=b'{"priority":-9}', status=400),
    "untrusted": Case("untrusted", policy="trust: {peers: [192.0.2.0/24]}", headers=(priority("5"),)),
    "untrusted, rejected": Case(
        "untrusted",
        policy="trust: {peers: [192.0.2.0/24], otherwise: reject}",
        headers=(priority("5"),),
        status=403,
    ),
    "response with an encoding": Case(
        "unsupported_encoding", headers=(priority("5"),), target=MESSAGES, answer=b"\x1f\x8b"
    ),
}


@pytest.mark.parametrize("transport", ["h1-length", "h1-chunked", "h2c"])
@pytest.mark.parametrize("name", CASES)
def test_an_outcome_is_seen_in_the_header_a_counter_and_the_access_log(
    sidecar: SidecarFactory, upstream: RecordingUpstream, name: str, transport: str
) -> None:
    case = CASES[name]
    gzip = [(b"content-encoding", b"gzip")] if case.answer.startswith(b"\x1f") else []
    upstream.handler = answering(response(case.answer, headers=gzip))
    front = sidecar(policy=case.policy)
    before, headers = front.counters(), (*case.headers, (b"X-Request-Id", f"{name} {transport}".encode()))
    answer = call(front.address, case.target, case.body, *headers, transport=transport, content_type=case.content_type)
    assert answer.status == case.status
    assert answer.applied == case.report
    assert len(upstream.requests) == (1 if case.status == 200 else 0)
    entry = front.logged_of(f"{name} {transport}")  # Envoy counts a request when it logs it
    assert (entry["report"], entry["outcome"]) == (case.report, case.outcome)
    assert (entry["value"], entry["source"], entry["route"]) == (case.value, case.source, case.target)
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", case.target, case.status)
    grown = {counter: value - before.get(counter, 0) for counter, value in front.counters().items()}
    assert sum(grown.values()) == 1, {counter: value for counter, value in grown.items() if value}
    assert front.counter(case.outcome) == counted(before, case.outcome) + 1


def test_every_outcome_is_reached() -> None:
    reached = {case.outcome for case in CASES.values()}
    assert reached == set(OUTCOMES) - {"too_large", "invalid_path", "upstream_error", "overloaded"}, (
        "those have tests of their own"
    )


def test_what_is_not_edited_is_neither_counted_nor_logged(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar()
    before = front.counters()
    assert call(front.address, "/v1/completions", b"{}", priority("5"), (b"X-Request-Id", b"other")).applied is None
    call(front.address, RENDER, b"{}", (b"X-Request-Id", b"edited route"))
    assert front.logged_of("edited route")["report"] == "none; outcome=absent"
    assert '"other"' not in front.access_log.read_text()
    assert sum(front.counters().values()) - sum(before.values()) == 1


def _moved(
    sidecar: SidecarFactory, upstream: RecordingUpstream, policy: str, *headers: Header, body: bytes = b"{}"
) -> Answer:
    upstream.clear()
    return call(sidecar(policy=policy).address, RENDER, body, *headers)


def test_the_header_goes_unless_it_is_to_be_kept(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    for policy, kept in (("{}", []), ("keep_header: true", ["+5"])):
        assert _moved(sidecar, upstream, policy, priority("+5")).status == 200
        assert_moved(upstream.only, b"{}", 5)
        assert upstream.only.all("x-vllm-priority") == kept


def test_a_default_fills_in_and_never_overrides(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    _moved(sidecar, upstream, "default: 3", body=b'{"a":1}')
    assert_moved(upstream.only, b'{"a":1}', 3)
    for body in (b'{"priority":7}', b'{"a":1,"\\u0070riority":"x"}', b'{"priority":1,"priority":2}'):
        _moved(sidecar, upstream, "default: 3", body=body)
        assert_untouched(upstream.only, body)
    _moved(sidecar, upstream, "default: 3", priority("4"), body=b'{"priority":7}')
    assert_moved(upstream.only, b'{"priority":7}', 4)


def test_a_default_never_refuses_a_request_that_asked_for_nothing(
    sidecar: SidecarFactory, upstream: RecordingUpstream
) -> None:
    front = sidecar(policy="default: 3")
    for content_type, body in ((b"text/plain", b"x"), (b"application/json", "{}".encode("utf-16"))):
        upstream.clear()
        assert call(front.address, RENDER, body, content_type=content_type).status == 200
        assert upstream.only.body.startswith(body)


def test_classes_are_exact_names_beside_numbers(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    policy = "classes: {interactive: -10, batch: 10}"
    for value, moved in (("interactive", -10), ("batch", 10), ("7", 7)):
        assert _moved(sidecar, upstream, policy, priority(value)).status == 200
        assert_moved(upstream.only, b"{}", moved)
    for value in ("Interactive", "batch2", "constructor", "__index"):
        answer = _moved(sidecar, upstream, policy, priority(value))
        assert (answer.status, answer.applied) == (400, "none; outcome=invalid")
        assert_refused(answer.body, "Bad Request", 400, param="x-vllm-priority", value=value)
        assert b"interactive" in answer.body, "the message says which names there are"


def test_classes_and_defaults_are_negated_for_sglang(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    policy = "{engine: sglang, classes: {batch: 10}, default: batch}"
    for headers in ((), (priority("batch"),), (priority("10"),)):
        assert _moved(sidecar, upstream, policy, *headers).status == 200
        assert_moved(upstream.only, b"{}", -10)


@pytest.mark.parametrize(
    ("value", "moved"),
    [
        ("-6", -5),
        ("-5", -5),
        ("0", 0),
        ("5", 5),
        ("6", 5),
        ("9" * 30, 5),
        ("-" + "9" * 30, -5),
        ("9223372036854775808", 5),
    ],
)
def test_a_range_can_clamp(sidecar: SidecarFactory, upstream: RecordingUpstream, value: str, moved: int) -> None:
    answer = _moved(sidecar, upstream, "range: {min: -5, max: 5, outside: clamp}", priority(value))
    assert answer.status == 200
    notes = ("clamped",) if moved != int(value) else ()
    assert parse_report(answer.applied) == SidecarReport("inserted", moved, "header", notes)
    assert_moved(upstream.only, b"{}", moved)


@pytest.mark.parametrize(("value", "status"), [("-5", 200), ("-6", 400), ("5", 200), ("6", 400)])
def test_a_range_can_reject(sidecar: SidecarFactory, upstream: RecordingUpstream, value: str, status: int) -> None:
    answer = _moved(sidecar, upstream, "range: {min: -5, max: 5}", priority(value))
    assert answer.status == status
    if status == 400:
        assert_refused(answer.body, "Bad Request", 400, param="x-vllm-priority", value=value)


def test_a_range_with_one_bound_leaves_the_other_side_to_64_bits(
    sidecar: SidecarFactory, upstream: RecordingUpstream
) -> None:
    policy = "range: {min: 0, outside: clamp}"
    assert _moved(sidecar, upstream, policy, priority("9223372036854775807")).status == 200
    assert_moved(upstream.only, b"{}", 2**63 - 1)
    assert _moved(sidecar, upstream, policy, priority("9223372036854775808")).status == 400
    assert _moved(sidecar, upstream, policy, priority("-9223372036854775809")).status == 200
    assert_moved(upstream.only, b"{}", 0)


def test_the_report_can_be_renamed_or_left_out(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    answer = _moved(sidecar, upstream, "report_header: null", priority("5"))
    assert [name.lower() for name, _ in answer.headers] == [b"date", b"server", b"content-type", b"content-length"]
    assert_moved(upstream.only, b"{}", 5)
    answer = _moved(sidecar, upstream, "report_header: X-Told", priority("5"))
    assert (answer.header("x-told"), answer.applied) == ("5; source=header; outcome=inserted", None)


def test_without_a_report_an_edited_answer_and_a_refusal_still_work(
    sidecar: SidecarFactory, upstream: RecordingUpstream
) -> None:
    front = sidecar(policy="report_header: null")
    upstream.handler = answering(response(b'{"priority":0}'))
    answer = call(front.address, MESSAGES, b"{}", priority("5"))
    assert (json.loads(answer.body), answer.applied) == ({"priority": 5}, None)
    assert call(front.address, RENDER, b"{}", priority("x")).status == 400


def test_a_report_that_the_upstream_forges_is_replaced(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    upstream.handler = answering(response(b"{}", headers=[(b"x-vllm-priority-applied", b"99; forged")]))
    answer = call(sidecar().address, RENDER, b"{}", priority("5"))
    assert answer.applied == "5; source=header; outcome=inserted"


def test_another_header_can_carry_the_priority(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    policy = "header: X-Request-Priority"
    assert _moved(sidecar, upstream, policy, (b"x-request-PRIORITY", b"5"), priority("9")).status == 200
    assert_moved(upstream.only, b"{}", 5)
    assert upstream.only.all("x-request-priority") == []
    assert upstream.only.all("x-vllm-priority") == ["9"]
    answer = _moved(sidecar, upstream, policy, (b"x-request-priority", b"high"))
    assert_refused(answer.body, "Bad Request", 400, param="x-request-priority", value="high")


def test_routes_can_be_added_and_chosen(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar("engine", "routes: {engine: [/a/b], extra: [/v1/embeddings, /with-signs_~.x]}")
    for target, edited in (
        ("/a/b", True), ("/v1/embeddings?x=1", True), ("/v1/%65mbeddings", True), (GENERATE, False), ("/a/b/", False),
    ):  # fmt: skip
        upstream.clear()
        answer = call(front.address, target, b"{}", priority("5"))
        assert (answer.applied is not None) is edited, target
        assert upstream.only.json() == ({"priority": 5} if edited else {})


def test_a_value_in_an_error_cannot_break_its_json(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    for value in (b'"},{"', b"\\", b"\xff\xfe", "é☃".encode(), b"<script>", b"%s%n", b"a" * 5000):
        answer = call(sidecar().address, RENDER, b"{}", priority(value))
        assert answer.status == 400
        assert_refused(answer.body, "Bad Request", 400, param="x-vllm-priority")
        assert len(answer.body) < 2000
