"""What an edit must not do to a body."""

import gzip
import json
import re

import pytest

from .conftest import RENDER, SidecarFactory
from .oracle import assert_moved, assert_refused, assert_untouched
from .sidecars import RunningSidecar
from .upstream import Connection, RecordingUpstream, Request, response
from .wire import TRANSPORTS, Answer, call, priority

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def _post(front: RunningSidecar, value: str | bytes, body: bytes, transport: str, **more: object) -> Answer:
    return call(front.address, RENDER, body, priority(value), transport=transport, **more)  # type: ignore[arg-type]


DECOYS = (
    b'{"service_tier":"priority","metadata":{"priority":"x"},'
    b'"messages":[{"role":"user","content":"\\"priority\\": 1}"}],"Priority":8}'
)


def test_only_the_top_level_member_of_that_exact_name_counts(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str
) -> None:
    answer = _post(front, "4", DECOYS, transport)
    assert answer.status == 200
    assert answer.applied == "4; source=header; outcome=inserted"
    assert_moved(upstream.only, DECOYS, 4)
    assert upstream.only.body == DECOYS[:-1] + b',"priority":4}'


def test_every_other_member_keeps_its_bytes_and_its_order(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str
) -> None:
    body = (
        b'{"seed":9007199254740993,"stop":[],"logit_bias":{},"temperature":1.0,'
        b'"tools":[{"z":1,"a":2}], "big":1e400,"nan":NaN,"inf":-Infinity,"e":"\\u00e9\\/"}'
    )
    assert _post(front, "1", body, transport).status == 200
    assert_moved(upstream.only, body, 1)


NO_INTEGERS = (
    "0x10", "1e3", "inf", "nan", "5.0", "", "--5", "+-5", "- 5", "5 6", "5,6", "1__0", "_1", "1_", "0b1", "true",
    "null", "five", "'5'", '"5"', "5;q=1", "%35", "\u0665", "\uff15",
)  # fmt: skip


@pytest.mark.parametrize("value", NO_INTEGERS)
def test_what_python_does_not_parse_as_an_integer_is_rejected(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, value: str
) -> None:
    answer = _post(front, value, b'{"priority":2}', transport)
    assert answer.status == 400
    assert answer.applied == "none; outcome=invalid"
    assert answer.header("content-type") == "application/json"
    shown = value if value.isascii() else None
    assert_refused(answer.body, "Bad Request", 400, param="x-vllm-priority", value=shown)
    assert upstream.requests == []


@pytest.mark.parametrize("value", NO_INTEGERS)
def test_what_is_not_an_integer_is_ignored_where_the_policy_says_so(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, value: str
) -> None:
    answer = _post(sidecar(policy="on_invalid: ignore"), value, b'{"priority":2}', transport)
    assert answer.status == 200
    assert answer.applied == "none; outcome=invalid"
    assert_untouched(upstream.only, b'{"priority":2}')


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("5", 5), ("+5", 5), ("-5", -5), ("007", 7), ("1_000", 1000), ("-0", 0), ("-00_0", 0), ("+1_0", 10),
        (" \t5 ", 5), ("9223372036854775807", 2**63 - 1), ("-9223372036854775808", -(2**63)),
        ("9007199254740993", 9007199254740993), ("0" * 100 + "3", 3),
    ],
)  # fmt: skip
def test_what_python_parses_as_an_integer_is_moved(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, value: str, number: int
) -> None:
    if transport.startswith("h2c"):
        value = value.strip()  # HTTP/2 forbids white space around a value (RFC 9113, 8.2.1)
    answer = _post(front, value, b'{"priority":2}', transport)
    assert answer.status == 200
    assert answer.applied == f"{number}; source=header; outcome=replaced"
    assert_moved(upstream.only, b'{"priority":2}', number)
    assert upstream.only.all("x-vllm-priority") == []


@pytest.mark.parametrize("value", ["9223372036854775808", "-9223372036854775809", "9" * 400])
def test_an_integer_past_64_bits_is_rejected(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, value: str
) -> None:
    answer = _post(front, value, b"{}", transport)
    assert answer.status == 400
    assert answer.applied == "none; outcome=out_of_range"
    assert_refused(answer.body, "Bad Request", 400, param="x-vllm-priority", value=value[:20])
    assert upstream.requests == []


def test_two_different_lines_are_ambiguous(front: RunningSidecar, upstream: RecordingUpstream, transport: str) -> None:
    answer = call(front.address, RENDER, b"{}", priority("3"), priority("9"), transport=transport)
    assert answer.status == 400
    assert answer.applied == "none; outcome=ambiguous"
    assert_refused(answer.body, "Bad Request", 400, param="x-vllm-priority")
    assert upstream.requests == []


def test_two_different_lines_are_ignored_where_the_policy_says_so(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str
) -> None:
    front = sidecar(policy="on_invalid: ignore")
    answer = call(front.address, RENDER, b'{"priority": 1}', priority("3"), priority("9"), transport=transport)
    assert (answer.status, answer.applied) == (200, "none; outcome=ambiguous")
    assert_untouched(upstream.only, b'{"priority": 1}')


def test_two_equal_lines_are_one_value(front: RunningSidecar, upstream: RecordingUpstream, transport: str) -> None:
    answer = call(front.address, RENDER, b"{}", priority("3"), priority("3"), transport=transport)
    assert answer.status == 200
    assert_moved(upstream.only, b"{}", 3)
    assert upstream.only.all("x-vllm-priority") == []


def test_a_list_in_one_line_is_not_an_integer(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str
) -> None:
    answer = _post(front, "3,9", b"{}", transport)
    assert (answer.status, answer.applied) == (400, "none; outcome=invalid")
    assert upstream.requests == []


def test_percent_signs_are_plain_characters(front: RunningSidecar, upstream: RecordingUpstream, transport: str) -> None:
    for body in (b'{"prompt":"100% %1 %% %20"}', b'{"%1":"%0","priority" : "%1"}'):
        upstream.clear()
        assert _post(front, "7", body, transport).status == 200
        assert_moved(upstream.only, body, 7)


@pytest.mark.parametrize("body", [b"{}", b" {\n}\n", b"{ }", b"\t{\r\n}\r\n", b"\xef\xbb\xbf{}", b"\xef\xbb\xbf {} "])
def test_an_empty_object_gets_no_stray_comma(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, body: bytes
) -> None:
    assert _post(front, "5", body, transport).status == 200
    assert_moved(upstream.only, body, 5)
    assert upstream.only.json() == {"priority": 5}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"[]",
        b"null",
        b'[{"token_ids":[1],"priority":1}]',
        b'"priority"',
        b"5",
        b"true",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf\xbf",
        b"\xbf\xbb\xef",
        b"\xef\xbb",
    ],
)
def test_a_body_that_is_not_an_object_passes_through(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, body: bytes
) -> None:
    answer = _post(front, "5", body, transport)
    assert answer.status == 200
    assert answer.applied is not None
    assert not answer.applied.startswith("5"), "nothing was applied"
    assert_untouched(upstream.only, body)


GZIPPED = gzip.compress(b'{"prompt":"x","priority":2}', mtime=0)


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"deflate", b"zstd", b"GZIP", b"gzip, identity", b"x-unknown"])
def test_an_encoded_body_is_rejected(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, encoding: bytes
) -> None:
    answer = call(front.address, RENDER, GZIPPED, priority("5"), (b"Content-Encoding", encoding), transport=transport)
    assert answer.status == 415
    assert answer.applied == "none; outcome=unsupported_encoding"
    assert_refused(answer.body, "Unsupported Media Type", 415, param="x-vllm-priority")
    assert upstream.requests == []


@pytest.mark.parametrize("body", [GZIPPED, b'{"a":1}'])
def test_an_encoded_body_is_forwarded_to_the_byte_where_the_policy_says_so(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, body: bytes
) -> None:
    front = sidecar(policy="on_unmovable: forward")
    answer = call(front.address, RENDER, body, priority("5"), (b"Content-Encoding", b"gzip"), transport=transport)
    assert (answer.status, answer.applied) == (200, "none; outcome=unsupported_encoding")
    assert upstream.only.body == body
    assert upstream.only.all("content-encoding") == ["gzip"]


def test_identity_is_not_an_encoding(front: RunningSidecar, upstream: RecordingUpstream, transport: str) -> None:
    answer = call(front.address, RENDER, b"{}", priority("5"), (b"Content-Encoding", b"identity"), transport=transport)
    assert answer.status == 200
    assert_moved(upstream.only, b"{}", 5)


@pytest.mark.parametrize("media_type", [b"text/plain", b"application/x-www-form-urlencoded", b"text/json", None])
def test_a_body_of_another_media_type_is_rejected(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, media_type: bytes | None
) -> None:
    answer = call(front.address, RENDER, b"{}", priority("5"), transport=transport, content_type=media_type)
    assert (answer.status, answer.applied) == (415, "none; outcome=unsupported_media_type")
    assert_refused(answer.body, "Unsupported Media Type", 415, param="x-vllm-priority")
    assert upstream.requests == []


@pytest.mark.parametrize("media_type", [b"text/plain", None])
def test_a_body_of_another_media_type_is_forwarded_where_the_policy_says_so(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, media_type: bytes | None
) -> None:
    front = sidecar(policy="on_unmovable: forward")
    answer = call(front.address, RENDER, b'{"a":1}', priority("5"), transport=transport, content_type=media_type)
    assert (answer.status, answer.applied) == (200, "none; outcome=unsupported_media_type")
    assert upstream.only.body == b'{"a":1}'


@pytest.mark.parametrize(
    "media_type", [b"application/json", b"Application/JSON", b"application/json; charset=utf-8", b"application/json;x"]
)
def test_every_spelling_that_vllm_accepts_as_json_is_edited(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, media_type: bytes
) -> None:
    assert call(front.address, RENDER, b"{}", priority("5"), transport=transport, content_type=media_type).status == 200
    assert_moved(upstream.only, b"{}", 5)
    assert upstream.only.all("content-type") == [media_type.decode()]


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"\x00","b":1}',
        b'{"a":"\xff\xfe\x80","b":"\xed\xa0\x80"}',
        b'{"\xff":1,"priority":2}',
        b'{"a":"\\ud800","\\udfff":"\\uDEAD"}',
        '{"a":"\U0001f600 é ﷽","\u2028":1}'.encode(),
    ],
)
def test_odd_bytes_are_kept_and_the_length_is_right(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, body: bytes
) -> None:
    assert _post(front, "6", body, transport).status == 200
    request = upstream.only
    if b"priority" in body:
        assert request.body == body.replace(b":2}", b":6}")
    else:
        assert request.body == body[:-1] + b',"priority":6}'


def test_a_nul_after_the_object_is_malformed_and_passes_through(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str
) -> None:
    assert _post(front, "6", b'{"a":1}\x00', transport).status == 200
    assert re.fullmatch(rb'\{"a":1(,"priority":6)?\}\x00 *', upstream.only.body)


DUPLICATES = (
    b'{"priority":1,"a":[],"priority":2}',
    b'{"\\u0070riority":1,"a":{"priority":3},"priority":"2"}',
    b'{"priority" : 1.5e3 , "\\u0070\\u0072iorit\\u0079" : null , "prompt" : "x" }',
    b'{"a":1,' + b",".join([b'"priority":0'] * 50) + b"}",
)


@pytest.mark.parametrize("value", ["5", "-9223372036854775808"])
@pytest.mark.parametrize("body", DUPLICATES)
def test_readers_of_the_first_and_of_the_last_duplicate_agree(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, body: bytes, value: str
) -> None:
    answer = _post(front, value, body, transport)
    assert answer.applied == f"{value}; source=header; outcome=replaced"
    assert_moved(upstream.only, body, int(value))


@pytest.mark.parametrize(
    "old",
    [
        b"1",
        b"-1.5e+10",
        b"null",
        b"true",
        b'"5"',
        b'"a\\"}b"',
        b"[]",
        b"[1,[2,{}]]",
        b'{"priority":{}}',
        b'"' + b"x" * 4000 + b'"',
        b"1" * 300,
    ],
)
def test_an_old_value_of_any_type_is_replaced_in_place(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, old: bytes
) -> None:
    body = b'{"a":1, "priority" :\t' + old + b' ,"z":[2]}\n'
    assert _post(front, "-7", body, transport).status == 200
    assert_moved(upstream.only, body, -7)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_a_body_in_utf_16_or_32_is_rejected(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, encoding: str
) -> None:
    answer = _post(front, "5", '{"prompt":"é","priority":2}'.encode(encoding), transport)
    assert (answer.status, answer.applied) == (415, "none; outcome=unsupported_charset")
    assert_refused(answer.body, "Unsupported Media Type", 415, param="x-vllm-priority")
    assert upstream.requests == []


def _parse_as_vllm_does(request: Request, connection: Connection) -> None:
    connection.read_body(request)
    try:
        json.loads(request.body)
    except ValueError:
        connection.send(response(b'{"detail":"There was an error parsing the body"}', b"400 Bad Request"))
    else:
        connection.send(response(b'{"ran":true}'))


@pytest.mark.parametrize("value", ["5", "12", "-100", "-9223372036854775808"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_a_body_in_utf_16_or_32_can_still_be_read_where_the_policy_forwards_it(
    sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str, encoding: str, value: str
) -> None:
    document = {"prompt": "é", "priority": 2}
    body = json.dumps(document, ensure_ascii=False).encode(encoding)
    answer = _post(sidecar(policy="on_unmovable: forward"), value, body, transport)
    assert (answer.status, answer.applied) == (200, "none; outcome=unsupported_charset")
    assert upstream.only.body == body
    assert upstream.only.json() == document


@pytest.mark.parametrize(
    "body",
    [b'{"a":', b'{"a":1', b'{"a"}', b'{"a":1,}', b"{,}", b"{a:1}", b'{"a":1}}', b'{"a":1} x', b"{'a':1}", b'{"a":tru',
     b'{"a":"', b'{"priority', b'{"priority":', b"{", b"}", b"[{]}", b'{"a":[}]}', b'{"a" 1}', b'{"a":1 "b":2}'],
)  # fmt: skip
def test_malformed_json_stays_malformed_and_reaches_the_upstream(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, body: bytes
) -> None:
    """vLLM's own error is the better one. An edit that mended a body would run what no client sent."""
    upstream.handler = _parse_as_vllm_does
    answer = _post(front, "5", body, transport)
    assert answer.status == 400
    assert json.loads(answer.body) == {"detail": "There was an error parsing the body"}
    assert upstream.only.body == body


@pytest.mark.parametrize("depth", [500, 20_000, 100_000])
def test_deep_nesting_passes_through(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str, depth: int
) -> None:
    body = b'{"a":' + b"[" * depth + b"]" * depth + b',"priority":{"b":' + b"[" * 40 + b"]" * 40 + b"}}"
    assert _post(front, "5", body, transport).status == 200
    seen = upstream.only.body
    assert seen.startswith(b'{"a":' + b"[" * depth + b"]" * depth + b',"priority":5')
    assert seen.rstrip(b" }").endswith(b'"priority":5')
