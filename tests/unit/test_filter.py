"""The scripts with a stand-in for Envoy's handle: what becomes of a request and its response, and what is reported."""

import json
from collections.abc import Sequence

import pytest

from control_plane.explain import Explanation, Filter
from control_plane.policy.load import parse_policies
from control_plane.render.filter import OUTCOMES, Place

CHAT, GENERATE, MESSAGES = "/v1/chat/completions/render", "/inference/v1/generate", "/v1/messages/render"
JSON = ("content-type", "application/json")
X = "x-vllm-priority"
FIVE = (X, "5")
GZIP = ("content-encoding", "gzip")
REPORT = "x-vllm-priority-applied"

_filters: dict[tuple[str, Place | None], Filter] = {}


def send(
    headers: Sequence[tuple[str, str]] = (JSON, FIVE),
    body: bytes = b'{"a":1}',
    *,
    policy: str = "{}",
    path: str = CHAT,
    size: int = 0,
    length: bool = True,
    method: str = "POST",
    place: Place | None = None,
    **response: object,
) -> Explanation:
    """One request; `size`: bytes a chunk, 0 for one chunk; `length`: whether content-length is said."""
    key = (policy, place)
    if key not in _filters:
        _filters[key] = Filter(parse_policies(policy).default, "engine", place)
    step = size or max(len(body), 1)
    chunks = [body[at : at + step] for at in range(0, len(body), step)]
    lines = [*headers, *([("content-length", str(len(body)))] if length else [])]
    return _filters[key].explain(path, lines, chunks, method=method, **response)  # type: ignore[arg-type]


DEFAULT = "default: 3"
CLASSES = "classes: {batch: 10}"
IGNORE = "on_invalid: ignore"
FORWARD = "on_unmovable: forward"
NO = [JSON]
BIG = "limits: {max_body_bytes: 10}"

INSERTED = "5; source=header; outcome=inserted"

# policy, headers, body -> the report, and the body that vLLM gets
PASSED = [
    ("{}", [JSON, FIVE], b'{"a":1}', INSERTED, b'{"a":1,"priority":5}'),
    ("{}", [JSON, FIVE], b"{}", INSERTED, b'{"priority":5}'),
    ("{}", [JSON, FIVE], b'{"priority":9}', "5; source=header; outcome=replaced", b'{"priority":5}'),
    (
        "{}", [JSON, FIVE], b'{"priority":9,"priority":8}',
        "5; source=header; outcome=replaced", b'{"priority":5,"priority":5}',
    ),
    ("{}", NO, b'{"priority":9}', "none; outcome=absent", b'{"priority":9}'),
    ("{}", [JSON, (X, "-0")], b"{}", "0; source=header; outcome=inserted", b'{"priority":0}'),
    (CLASSES, [JSON, (X, "batch")], b"{}", "10; source=class; outcome=inserted", b'{"priority":10}'),
    (DEFAULT, NO, b"{}", "3; source=default; outcome=inserted", b'{"priority":3}'),
    (DEFAULT, NO, b'{"priority":9}', "none; outcome=kept", b'{"priority":9}'),
    (DEFAULT, [JSON, FIVE], b'{"priority":9}', "5; source=header; outcome=replaced", b'{"priority":5}'),
    ("engine: sglang", [JSON, FIVE], b"{}", "-5; source=header; outcome=inserted", b'{"priority":-5}'),
    (
        "range: {max: 2, outside: clamp}", [JSON, FIVE], b"{}",
        "2; source=header; outcome=inserted; clamped", b'{"priority":2}',
    ),
    # a header value that is not a priority, under `ignore`
    (IGNORE, [JSON, (X, "high")], b'{"priority":2}', "none; outcome=invalid", b'{"priority":2}'),
    (IGNORE, [JSON, (X, "9" * 30)], b"{}", "none; outcome=out_of_range", b"{}"),
    (IGNORE, [JSON, FIVE, (X, "6")], b"{}", "none; outcome=ambiguous", b"{}"),
    ("{on_invalid: ignore, range: {max: 4}}", [JSON, FIVE], b"{}", "none; outcome=out_of_range", b"{}"),
    ("{on_invalid: ignore, default: 3}", [JSON, (X, "high")], b"{}",
     "3; source=default; outcome=inserted; invalid", b'{"priority":3}'),
    ("{on_invalid: ignore, default: 3}", [JSON, (X, "9" * 30)], b'{"priority":2}',
     "none; outcome=out_of_range", b'{"priority":2}'),
    ("{on_invalid: ignore, default: 3}", [JSON, FIVE, (X, "6")], b"{}",
     "3; source=default; outcome=inserted; ambiguous", b'{"priority":3}'),
    ("{on_invalid: ignore, default: 3}", [JSON, (X, "high")], b"[]", "none; outcome=not_an_object", b"[]"),
    ("{on_invalid: ignore, default: 3, tenants: {header: x-tenant, rules: {batch: {default: 10}}}}",
     [JSON, (X, "high"), ("x-tenant", "batch")], b"{}",
     "10; source=default; outcome=inserted; invalid", b'{"priority":10}'),
    # two equal lines are one value
    ("{}", [JSON, FIVE, FIVE], b"{}", INSERTED, b'{"priority":5}'),
    # bodies that are not a JSON object pass unchanged
    ("{}", [JSON, FIVE], b'[{"priority":1}]', "none; outcome=not_an_object", b'[{"priority":1}]'),
    ("{}", [JSON, FIVE], b"null", "none; outcome=not_an_object", b"null"),
    ("{}", [JSON, FIVE], b'{"a":', "none; outcome=malformed_json", b'{"a":'),
    ("{}", [JSON, FIVE], b"", "none; outcome=empty_body", b""),
    # a priority that cannot be moved, under `forward`; a default never causes a rejection
    (FORWARD, [FIVE], b"{}", "none; outcome=unsupported_media_type", b"{}"),
    (FORWARD, [JSON, FIVE, GZIP], b"\x1f\x8b{}", "none; outcome=unsupported_encoding", b"\x1f\x8b{}"),
    (FORWARD, [JSON, FIVE], "{}".encode("utf-16"), "none; outcome=unsupported_charset", "{}".encode("utf-16")),
    (DEFAULT, [], b"{}", "none; outcome=unsupported_media_type", b"{}"),
    (DEFAULT, [JSON, ("content-encoding", "br")], b"{}", "none; outcome=unsupported_encoding", b"{}"),
    (DEFAULT, NO, "{}".encode("utf-16"), "none; outcome=unsupported_charset", "{}".encode("utf-16")),
    # the limit is for bodies that are held, which these are not
    (f"{{{BIG}, {FORWARD}}}", [FIVE], b"x" * 11, "none; outcome=unsupported_media_type", b"x" * 11),
    (f"{{{BIG}, {IGNORE}}}", [JSON, (X, "x")], b"x" * 11, "none; outcome=invalid", b"x" * 11),
    (BIG, NO, b"x" * 11, "none; outcome=absent", b"x" * 11),
    ("{}", [JSON, FIVE, ("content-encoding", "identity")], b"{}", INSERTED, b'{"priority":5}'),
    ("{}", [("content-type", "Application/JSON; x"), FIVE], b"{}", INSERTED, b'{"priority":5}'),
]  # fmt: skip


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(("policy", "headers", "body", "report", "passed"), PASSED)
def test_what_reaches_vllm_and_what_is_said_of_it(
    policy: str, headers: list[tuple[str, str]], body: bytes, report: str, passed: bytes, size: int, length: bool
) -> None:
    found = send(headers, body, policy=policy, size=size, length=length)
    assert found.rejection is None
    assert found.report == report
    assert found.body == passed
    assert dict(found.response_headers)[REPORT] == report
    lengths = [value for name, value in found.headers if name == "content-length"]
    assert lengths in ([[str(len(found.body))]] if length else [[]])


# policy, headers, body -> status, outcome, what the message says, the parameter
REFUSED = [
    (
        "{}",
        [JSON, (X, "high")],
        b"{}",
        400,
        "invalid",
        "x-vllm-priority: 'high' is not an integer. Use an integer from",
        X,
    ),
    ("{}", [JSON, (X, "")], b"{}", 400, "invalid", "x-vllm-priority: '' is not an integer", X),
    ("{}", [JSON, (X, "3,9")], b"{}", 400, "invalid", "'3,9' is not an integer", X),
    ("{}", [(X, "high")], b"{}", 400, "invalid", "is not an integer", X),
    ("{}", [JSON, (X, "9" * 30)], b"{}", 400, "out_of_range", "is out of range. Use an integer from ", X),
    ("range: {max: 4}", [JSON, FIVE], b"{}", 400, "out_of_range", "'5' is out of range", X),
    ("{}", [JSON, (X, "3"), (X, "9")], b"{}", 400, "ambiguous", "several lines with different values", X),
    ("{header: x-p}", [JSON, ("x-p", "high")], b"{}", 400, "invalid", "x-p: 'high' is not an integer", "x-p"),
    ("{}", [FIVE], b"{}", 415, "unsupported_media_type", "Send it with content-type application/json", X),
    (
        "{}",
        [("content-type", "text/json"), FIVE],
        b"{}",
        415,
        "unsupported_media_type",
        "content-type application/json",
        X,
    ),
    ("{}", [JSON, FIVE, GZIP], b"\x1f\x8b", 415, "unsupported_encoding", "has a content-encoding", X),
    ("{}", [JSON, FIVE], '{"a":1}'.encode("utf-16"), 415, "unsupported_charset", "a body in UTF-16 or UTF-32. Send", X),
    ("{}", [JSON, FIVE], '{"a":1}'.encode("utf-16-be"), 415, "unsupported_charset", "UTF-16 or UTF-32", X),
    ("{}", [JSON, FIVE], '{"a":1}'.encode("utf-32"), 415, "unsupported_charset", "UTF-16 or UTF-32", X),
    (BIG, [JSON, FIVE], b'{"a":12345}', 413, "too_large", "larger than 10 bytes, the limit", None),
    (f"{{{BIG}, {DEFAULT}}}", NO, b'{"a":12345}', 413, "too_large", "limits.max_body_bytes", None),
    ("{}", [JSON, FIVE], b"{" + b",".join([b'"priority":1'] * 257) + b"}", 400, "ambiguous", "more than 256 times", X),
    ("{}", [JSON, FIVE], b'{"priority":"%s"}' % (b"1" * 4096), 400, "ambiguous", "longer than 4096 bytes", X),
]
TYPES = {400: "Bad Request", 413: "Payload Too Large", 415: "Unsupported Media Type"}


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(("policy", "headers", "body", "status", "outcome", "message", "param"), REFUSED)
def test_a_refusal_is_in_vllms_shape_and_counted(
    policy: str, headers: list[tuple[str, str]], body: bytes, status: int, outcome: str, message: str,
    param: str | None, size: int, length: bool,
) -> None:  # fmt: skip
    found = send(headers, body, policy=policy, size=size, length=length)
    assert found.rejection is not None
    error = json.loads(found.rejection[1])["error"]
    assert message in error.pop("message")
    assert error == {"type": TYPES[status], "param": param, "code": status}
    assert (found.rejection[0], found.outcome, found.report) == (status, outcome, f"none; outcome={outcome}")
    assert dict(found.response_headers)[REPORT] == found.report


def test_every_outcome_but_those_of_an_answer_is_reached_here() -> None:
    reached = {report.partition("outcome=")[2].partition(";")[0] for _, _, _, report, _ in PASSED}
    assert reached | {row[4] for row in REFUSED} == set(OUTCOMES) - {
        "response_edited",
        "upstream_error",
        "invalid_path",
        "overloaded",
        *("header_set", "ignored", "not_allowed", "untrusted"),  # see test_enforcement.py
    }


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
def test_a_body_of_just_the_limit_passes(length: bool) -> None:
    found = send(body=b'{"a":1234}', policy=BIG, size=3, length=length)
    assert (found.rejection, found.outcome) == (None, "inserted")


@pytest.mark.parametrize(
    ("path", "method"),
    [(CHAT, "GET"), (CHAT, "PUT"), (CHAT, "OPTIONS"), ("/v1/chat/completions", "POST"), ("/metrics", "POST"),
     (f"{CHAT}/", "POST"), ("/v1/decisions", "POST")],
)  # fmt: skip
@pytest.mark.parametrize("value", ["5", "high", ""])
def test_a_request_that_is_not_a_post_on_an_edited_route_passes_untouched(path: str, method: str, value: str) -> None:
    headers = [JSON, (X, value), GZIP]
    found = send(headers, b'{"priority":1}', path=path, method=method, policy=BIG)
    assert found.body == b'{"priority":1}'
    assert found.headers == (*headers, ("content-length", "14"))
    assert (found.report, found.rejection, found.response) == (None, None, None)
    assert found.response_headers == (JSON,)


@pytest.mark.parametrize(
    ("policy", "headers", "kept"),
    [
        ("{}", [JSON, FIVE], False),
        ("keep_header: true", [JSON, FIVE], True),
        # nothing was moved
        (IGNORE, [JSON, (X, "high")], True),
        (FORWARD, [FIVE], True),
    ],
)
@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_the_header_goes_once_it_was_moved(policy: str, headers: list[tuple[str, str]], kept: bool, path: str) -> None:
    names = [name for name, _ in send(headers, policy=policy, path=path).headers]
    assert ("x-vllm-priority" in names) is kept


@pytest.mark.parametrize(("policy", "kept"), [("{}", False), ("keep_header: true", True)])
def test_the_header_goes_where_the_answer_carries_it(policy: str, kept: bool) -> None:
    names = [name for name, _ in send(policy=policy, path=MESSAGES).headers]
    assert ("x-vllm-priority" in names) is kept


def test_no_report_header_where_the_policy_has_none() -> None:
    for path in (CHAT, MESSAGES):
        found = send(policy="report_header: null", path=path)
        assert found.value == "5"
        assert REPORT not in dict(found.response_headers)


def test_a_report_of_the_server_is_replaced() -> None:
    head = ((":status", "200"), JSON, (REPORT, "forged"))
    assert dict(send(response_head=head).response_headers)[REPORT] == "5; source=header; outcome=inserted"


ANSWERED = [
    (b'{"priority":0}', b'{"priority":5}'),
    (b'{"token_ids":[1,2],"priority":0,"x":{"priority":0}}', b'{"token_ids":[1,2],"priority":5,"x":{"priority":0}}'),
    (b'[{"priority":0},{"a":1,"priority":-9223372036854775808}]', b'[{"priority":5},{"a":1,"priority":5}]'),
    (b'{"a":1}', b'{"a":1,"priority":5}'),
    (b"[]", b"[]"),
]


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(("response", "edited"), ANSWERED)
def test_the_answer_of_messages_render_is_edited(response: bytes, edited: bytes, size: int) -> None:
    step = size or len(response)
    chunks = [response[at : at + step] for at in range(0, len(response), step)]
    head = ((":status", "200"), JSON, ("content-length", str(len(response))))
    found = send(body=b'{"priority":9}', path=MESSAGES, response_head=head, response_chunks=chunks)
    assert found.body == b'{"priority":9}', "its request cannot carry one"
    assert found.response == edited
    headers = dict(found.response_headers)
    done = "5; source=header; outcome=response_edited" if response != b"[]" else "none; outcome=not_an_object"
    assert (headers[REPORT], headers["content-length"]) == (done, str(len(edited)))


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(
    "response", [b'{"priority":12', b'{"priority":1,"a":', b'{"priority":1}x', b'{"priority":{"a":[1']
)
def test_a_malformed_answer_passes_unchanged_and_is_reported(response: bytes, size: int) -> None:
    step = size or len(response)
    chunks = [response[at : at + step] for at in range(0, len(response), step)]
    head = ((":status", "200"), JSON, ("content-length", str(len(response))))
    found = send(path=MESSAGES, response_head=head, response_chunks=chunks)
    assert (found.response, found.report) == (response, "none; outcome=malformed_json")
    assert dict(found.response_headers)[REPORT] == "none; outcome=malformed_json"


def test_a_long_answer_that_ends_inside_a_value_loses_none_of_it() -> None:
    response = b'{"x":"' + b"y" * 200_000 + b'","priority":12'
    chunks = [response[:-8], response[-8:-1], response[-1:]]
    head = ((":status", "200"), JSON, ("content-length", str(len(response))))
    found = send(path=MESSAGES, response_head=head, response_chunks=chunks)
    assert (found.response, found.report) == (response, "none; outcome=malformed_json")


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("end", [b',"priority":', b',"priority":1', b"}}", b""])
def test_a_long_malformed_body_is_not_left_half_edited(end: bytes, length: bool) -> None:
    body = b'{"priority":9,"x":"' + b"y" * 1_100_000 + b'"' + end
    found = send(body=body, size=60_000, length=length)
    assert (found.outcome, found.rejection and found.rejection[0]) == ("malformed_json", 400)
    body = b'{"x":"' + b"y" * 1_100_000 + b'"' + end
    found = send(body=body, size=60_000, length=length)
    assert found.outcome == "malformed_json"
    assert found.rejection is not None or found.body == body


def test_equal_content_type_lines_become_one_and_others_stay() -> None:
    found = send(headers=[("content-type", "application/json"), ("content-type", "text/plain"), FIVE], policy=FORWARD)
    assert [value for name, value in found.headers if name == "content-type"] == ["application/json", "text/plain"]


@pytest.mark.parametrize(
    ("policy", "headers", "report"),
    [
        (DEFAULT, NO, "3; source=default; outcome=response_edited"),
        (CLASSES, [JSON, (X, "batch")], "10; source=class; outcome=response_edited"),
        ("range: {min: 7, outside: clamp}", [JSON, FIVE], "7; source=header; outcome=response_edited; clamped"),
    ],
)
def test_an_edited_answer_says_where_its_priority_comes_from(
    policy: str, headers: list[tuple[str, str]], report: str
) -> None:
    found = send(headers, policy=policy, path=MESSAGES)
    assert dict(found.response_headers)[REPORT] == report
    assert found.response == b'{"priority":%s}' % report.partition(";")[0].encode()


@pytest.mark.parametrize(
    ("head", "outcome"),
    [
        (((":status", "400"), JSON), "upstream_error"),
        (((":status", "403"), JSON), "upstream_error"),
        (((":status", "500"), ("content-type", "text/plain")), "upstream_error"),
        (((":status", "200"), ("content-type", "text/event-stream")), "upstream_error"),
        (((":status", "200"),), "upstream_error"),
        (((":status", "200"), JSON, GZIP), "unsupported_encoding"),
    ],
)
def test_an_answer_that_cannot_carry_it_is_left_alone_and_said(head: tuple[tuple[str, str], ...], outcome: str) -> None:
    response = b'{"priority":0}'
    found = send(path=MESSAGES, response=response, response_head=(*head, ("content-length", "14")))
    assert found.response == response
    headers = dict(found.response_headers)
    assert headers[REPORT] == f"none; outcome={outcome}"
    assert headers["content-length"] == "14"


def test_an_answer_whose_encoding_is_none_is_edited() -> None:
    head = ((":status", "200"), JSON, ("content-encoding", "identity"))
    found = send(path=MESSAGES, response=b'{"priority":0}', response_head=head)
    assert (found.response, dict(found.response_headers)[REPORT]) == (
        b'{"priority":5}', "5; source=header; outcome=response_edited",
    )  # fmt: skip


def test_an_answer_without_a_priority_asked_for_is_left_alone() -> None:
    found = send(NO, path=MESSAGES)
    assert (found.response, found.report) == (None, "none; outcome=absent")


@pytest.mark.parametrize("value", ["high", "9" * 30])
def test_a_bad_value_is_refused_on_messages_render_too(value: str) -> None:
    found = send([JSON, (X, value)], path=MESSAGES)
    assert found.rejection is not None
    assert found.rejection[0] == 400


def test_a_path_with_a_control_character_is_rejected() -> None:
    for path in (f"{CHAT}%0a", f"{CHAT}%0A?x=1", "/v1/completions%00", "/a%7fb"):
        found = send(path=path)
        assert found.rejection is not None
        assert (found.rejection[0], found.outcome) == (400, "invalid_path")
    assert send(path=f"{CHAT}%0a", method="GET").rejection is None


def test_a_rejection_can_be_read_by_a_page_in_a_browser() -> None:
    found = send([JSON, (X, "high"), ("origin", "http://localhost:3000")])
    assert dict(found.response_headers)["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in dict(send([JSON, (X, "high")]).response_headers)


PLACES: list[Place | None] = [None, "mesh", "waypoint"]
LONG = b'{"prompt":"' + b"x" * 1_200_000 + b'"}'
MIDDLE = b'{"prompt":"' + b"x" * 200_000 + b'"}'


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [0, 4096, 65_537])
@pytest.mark.parametrize(
    "body", [LONG, MIDDLE, LONG[:-1] + b"}}"[1:] + b" " * 70_000], ids=["1.2 MB", "200 KB", "spaces"]
)
@pytest.mark.parametrize("place", PLACES, ids=["sidecar", "mesh", "waypoint"])
def test_a_long_body_gets_its_member_and_an_exact_length(
    place: Place | None, body: bytes, size: int, length: bool
) -> None:
    found = send(body=body, size=size, length=length, place=place)
    if place == "waypoint" and len(body) > 1 << 20:
        assert (found.report, found.rejection and found.rejection[0]) == ("none; outcome=too_large", 413)
        return
    assert found.report == INSERTED
    end = body.rindex(b"}")
    assert found.body == body[:end] + b',"priority":5' + body[end:]
    lengths = [value for name, value in found.headers if name == "content-length"]
    assert lengths == ([str(len(found.body))] if length else [])


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("tail", [b"", b"x", b',"a":1}}', b"}}", b"}5"], ids=["cut", "x", "brace", "braces", "digit"])
@pytest.mark.parametrize("place", PLACES, ids=["sidecar", "mesh", "waypoint"])
def test_a_long_body_that_ends_malformed_passes_unchanged(place: Place | None, tail: bytes, length: bool) -> None:
    body = MIDDLE[:-1] + b',"priority":1' + b" " * 70_000 + tail
    found = send(body=body, size=4096, length=length, place=place)
    assert (found.report, found.body == body) == ("none; outcome=malformed_json", True)
    lengths = [value for name, value in found.headers if name == "content-length"]
    assert lengths == ([str(len(found.body))] if length else [])


def test_a_malformed_body_over_1_mib_stays_malformed_when_a_value_was_replaced_before_the_fault() -> None:
    body = b'{"priority":1,' + LONG[1:] + b"x"
    found = send(body=body, size=4096)
    assert found.report == "none; outcome=malformed_json"
    assert found.body == body.replace(b'"priority":1,', b'"priority":5,')


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("place", PLACES, ids=["sidecar", "mesh", "waypoint"])
def test_a_long_body_in_an_unsupported_charset_is_rejected_or_forwarded(
    place: Place | None, encoding: str, length: bool
) -> None:
    body = MIDDLE.decode().encode(encoding)
    found = send(body=body, size=16_384, length=length, place=place)
    assert found.rejection is not None
    assert (found.rejection[0], found.report) == (415, "none; outcome=unsupported_charset")
    for policy, headers in ((FORWARD, [JSON, FIVE]), (DEFAULT, NO)):
        found = send(headers, body, policy=policy, size=16_384, length=length, place=place)
        assert (found.rejection, found.report) == (None, "none; outcome=unsupported_charset")
        assert found.body == body


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("place", PLACES, ids=["sidecar", "mesh", "waypoint"])
def test_a_body_that_grows_past_the_limit_is_rejected_and_nothing_of_it_passes(
    place: Place | None, length: bool
) -> None:
    found = send(body=MIDDLE, size=16_384, policy="limits: {max_body_bytes: 100000}", length=length, place=place)
    assert found.rejection is not None
    assert (found.rejection[0], found.report) == (413, "none; outcome=too_large")


def test_one_filter_serves_many_requests_alike() -> None:
    first = [send(headers, body, policy=policy) for policy, headers, body, _, _ in PASSED]
    assert [send(headers, body, policy=policy) for policy, headers, body, _, _ in PASSED] == first
