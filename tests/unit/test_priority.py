"""The header's value and the routes, as lua/priority.lua reads them: LuaJIT in process, against Python's int()."""

import json
from typing import Any

import lupa.luajit21 as luajit
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.package_data import read_text
from control_plane.policy.load import parse_policies
from control_plane.render.filter import filter_settings
from control_plane.render.lua_bundle import lua_literal
from control_plane.vllm import INT64_MAX, INT64_MIN, Role

_lua = luajit.LuaRuntime(encoding=None)
_priority = _lua.execute(b"return (function(...) " + read_text("lua", "priority.lua").encode() + b"\nend)()")


def lua_settings(policy: str = "{}", role: Role = "engine") -> Any:
    """The table that the script gets for this policy."""
    found = filter_settings(parse_policies(policy).default, role, "mesh")
    return _lua.execute(f"return {lua_literal(found)}".encode())


class Reader:
    """priority.reader() of a policy, with texts for bytes."""

    def __init__(self, policy: str = "{}") -> None:
        self._read, self._default = _priority[b"reader"](lua_settings(policy))

    def __call__(self, raw: str) -> dict[str, str]:
        found = self._read(raw.encode("latin-1")).items()
        return {key.decode(): value.decode("latin-1") for key, value in found if key not in {b"status", b"replace"}}

    @property
    def default(self) -> str | None:
        return self._default[b"text"].decode() if self._default else None


read_plain = Reader()


def outcome(found: dict[str, str]) -> str:
    return found.get("text") or found["outcome"]


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("5", "5"), ("+5", "5"), ("-5", "-5"), (" 5 ", "5"), ("\t5\t", "5"), ("007", "7"), ("-007", "-7"),
        ("1_000", "1000"),
        ("0", "0"), ("-0", "0"), ("+0", "0"), ("000", "0"), ("0_0", "0"), ("1_2_3", "123"), ("+1_0", "10"),
        (str(INT64_MAX), str(INT64_MAX)), (str(INT64_MIN), str(INT64_MIN)), ("9007199254740993", "9007199254740993"),
        ("0" * 100 + "5", "5"), (f"-{'0' * 100}{2**63}", str(INT64_MIN)),
        (str(INT64_MAX + 1), "out_of_range"), (str(INT64_MIN - 1), "out_of_range"), ("9" * 400, "out_of_range"),
        ("-" + "9" * 400, "out_of_range"), ("18446744073709551615", "out_of_range"),
        *(
            (raw, "invalid")
            for raw in (
                "", " ", "5.0", "5.", ".5", "1e3", "1E3", "0x10", "0b1", "0o7", "inf", "-inf", "nan", "true", "null",
                "--5", "+-5", "- 5", "+", "-", "5-", "5 6", "5, 6", "5,6", "3,9", "_5", "5_", "5__0", "-_5", "5L", "5n",
                '"5"', "'5'", "[5]", "high", "\u00b2", "5\u00a0", "1'000", "1.000", "1 000", "%d", "5;", "5%00",
            )
        ),
    ],
)  # fmt: skip
def test_a_value_is_what_python_reads(raw: str, value: str) -> None:
    assert outcome(read_plain(raw)) == value


# What can stand in a header: printable ASCII and tabs.
header_texts = st.text(st.sampled_from([*map(chr, range(32, 127)), "\t"]), max_size=30)
number_like = st.text("0123456789_+-. \tex", max_size=24)


@given(header_texts | number_like | st.integers().map(str) | st.integers(INT64_MIN - 9, INT64_MAX + 9).map(str))
@settings(deadline=None, max_examples=2000)
def test_any_text_is_taken_or_refused_as_by_pythons_int(raw: str) -> None:
    try:
        value = int(raw)
    except ValueError:
        wanted = "invalid"
    else:
        wanted = str(value) if INT64_MIN <= value <= INT64_MAX else "out_of_range"
    assert outcome(read_plain(raw)) == wanted


@given(
    st.integers(INT64_MIN - 5, INT64_MAX + 5) | st.integers(-200, 200),
    st.none() | st.integers(INT64_MIN, INT64_MAX) | st.integers(-99, 99),
    st.none() | st.integers(INT64_MIN, INT64_MAX) | st.integers(-99, 99),
    st.booleans(),
)
@settings(deadline=None, max_examples=500)
def test_bounds_are_compared_as_integers(value: int, low: int | None, high: int | None, clamp: bool) -> None:
    if low is not None and high is not None and low > high:
        low, high = high, low
    clamp = clamp and (low, high) != (None, None)
    bounds = {"min": low, "max": high, "outside": "clamp" if clamp else "reject"}
    found = Reader(json.dumps({"range": bounds}))(str(value))
    least = INT64_MIN if low is None else low
    most = INT64_MAX if high is None else high
    if least <= value <= most:
        assert (found["text"], found["note"]) == (str(value), "")
    elif clamp and value < least and low is not None:
        assert (found["text"], found["note"]) == (str(low), "; clamped")
    elif clamp and value > most and high is not None:
        assert (found["text"], found["note"]) == (str(high), "; clamped")
    else:
        assert outcome(found) == "out_of_range"


CLASSES = "classes: {interactive: -10, batch: 10, Batch: 11}"


@pytest.mark.parametrize(
    ("raw", "value", "source"),
    [
        ("batch", "10", "class"),
        (" interactive\t", "-10", "class"),
        ("Batch", "11", "class"),
        ("7", "7", "header"),
        ("BATCH", "invalid", None),
        ("batch,batch", "invalid", None),
        ("batch interactive", "invalid", None),
        ("", "invalid", None),
    ],
)
def test_a_class_is_a_name_of_the_policy(raw: str, value: str, source: str | None) -> None:
    found = Reader(CLASSES)(raw)
    assert (outcome(found), found.get("source")) == (value, source)


@pytest.mark.parametrize(
    ("policy", "raw", "value"),
    [
        ("engine: vllm", "5", "5"),
        ("engine: sglang", "5", "-5"),
        ("engine: sglang", "-5", "5"),
        ("engine: sglang", "-0", "0"),
        ("engine: sglang", str(INT64_MAX), str(-INT64_MAX)),
        ("engine: sglang", str(INT64_MIN + 1), str(INT64_MAX)),
        ("engine: sglang", str(INT64_MIN), "out_of_range"),
        ("{engine: sglang, range: {min: 3, outside: clamp}}", "1", "-3"),
        ("{engine: sglang, classes: {batch: 10}}", "batch", "-10"),
    ],
)
def test_a_value_is_negated_for_sglang_alone_and_after_the_bounds(policy: str, raw: str, value: str) -> None:
    assert outcome(Reader(policy)(raw)) == value


@pytest.mark.parametrize(
    ("policy", "default"),
    [
        ("{}", None),
        ("default: 0", "0"),
        (f"default: {INT64_MIN}", str(INT64_MIN)),
        ("{default: batch, classes: {batch: 10}}", "10"),
        ("{engine: sglang, default: 10}", "-10"),
    ],
)
def test_the_default_is_written_as_a_header_would_be(policy: str, default: str | None) -> None:
    assert Reader(policy).default == default


WHOLE = f"Use an integer from {INT64_MIN} to {INT64_MAX}"


@pytest.mark.parametrize(
    ("policy", "raw", "message"),
    [
        ("{}", "high", f"x-vllm-priority: 'high' is not an integer. {WHOLE}"),
        ("{}", "", f"x-vllm-priority: '' is not an integer. {WHOLE}"),
        ("{}", "9" * 20, f"x-vllm-priority: '{'9' * 20}' is out of range. {WHOLE}"),
        ("{}", "x" * 41, f"x-vllm-priority: '{'x' * 37}...' is not an integer. {WHOLE}"),
        ("{}", "x" * 40, f"x-vllm-priority: '{'x' * 40}' is not an integer. {WHOLE}"),
        ("{}", "100%d", f"x-vllm-priority: '100%d' is not an integer. {WHOLE}"),
        (
            "{header: x-p, range: {min: -5, max: 5}}", "6",
            "x-p: '6' is out of range. Use an integer from -5 to 5",
        ),
        (
            CLASSES, "high",
            f"x-vllm-priority: 'high' is not an integer or a class. {WHOLE}, or a class: Batch, batch, interactive",
        ),
        ("engine: sglang", str(INT64_MIN), f"x-vllm-priority: '{INT64_MIN}' cannot be negated. {WHOLE}"),
    ],
)  # fmt: skip
def test_a_refusal_names_header_value_and_what_is_valid(policy: str, raw: str, message: str) -> None:
    assert Reader(policy)(raw)["message"] == message


def test_values_are_read_alike_however_many_came_before() -> None:
    read = Reader(CLASSES)
    for _ in range(2):
        for number in range(-1500, 1500):
            assert outcome(read(str(number))) == str(number)
    assert outcome(read("batch")) == "10"


@given(st.text(st.characters(max_codepoint=255), max_size=200), st.none() | st.text('ab-"\\', max_size=9))
@settings(deadline=None)
def test_an_error_body_is_json_in_vllms_shape_whatever_it_quotes(message: str, param: str | None) -> None:
    body = _priority[b"error_body"](400, message.encode("latin-1"), None if param is None else param.encode())
    assert json.loads(body.decode("ascii")) == {
        "error": {"message": message, "type": "Bad Request", "param": param, "code": 400}
    }


@pytest.mark.parametrize(
    ("code", "kind"), [(400, "Bad Request"), (413, "Payload Too Large"), (415, "Unsupported Media Type")]
)
def test_an_error_says_its_type(code: int, kind: str) -> None:
    error = json.loads(_priority[b"error_body"](code, b"m", None))["error"]
    assert error == {"message": "m", "type": kind, "param": None, "code": code}


@pytest.mark.parametrize(
    ("content_type", "is_json"),
    [
        ("application/json", True),
        ("Application/JSON", True),
        ("application/json; charset=utf-8", True),
        ("application/json ;x", True),
        (" application/json", True),
        ("application/json;", True),
        ("application/jsonx", False),
        ("application/vnd.api+json", False),
        ("text/json", False),
        ("application/json, text/plain", False),
        ("application /json", False),
        (";application/json", False),
        ("", False),
        (";", False),
    ],
)
def test_a_media_type_is_json_as_vllm_has_it(content_type: str, is_json: bool) -> None:
    assert bool(_priority[b"is_json"](content_type.encode())) is is_json


def test_no_media_type_is_not_json() -> None:
    assert not _priority[b"is_json"](None)


CHAT, MESSAGES = "/v1/chat/completions/render", "/v1/messages/render"


def kind_of(settings: Any, target: str) -> Any:
    """What is edited for a request target, without the route that it is counted under."""
    found = _priority[b"router"](settings)(target.encode())
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize(
    ("target", "edited"),
    [
        (CHAT, b"request"),
        ("/inference/v1/generate", b"request"),
        (MESSAGES, b"response"),
        (f"{CHAT}?x=1", b"request"),
        (f"{CHAT}?", b"request"),
        (f"{CHAT}?a?b/c%20#d", b"request"),
        ("/v1/chat/completions%2Frender", b"request"),
        ("/v1/chat/completions%2frender", b"request"),
        ("/v1/chat/completions/%72ender", b"request"),
        ("/%76%31/messages/render?x", b"response"),
        # decoded once only, and only where it is an escape
        ("/v1/chat/completions%252Frender", False),
        ("/v1/chat/completions/render%", False),
        ("/v1/chat/completions/render%7", False),
        ("/v1/chat/completions/render%zz", False),
        ("/v1/chat/completions/render%00", b"control character"),
        ("/v1/chat/completions/render%3Fx", False),
        # not as it is
        (f"{CHAT}/", False),
        (f"/{CHAT}", False),
        ("/V1/chat/completions/render", False),
        ("/v1/chat/completions/Render", False),
        ("/v1/chat/completions", False),
        ("/v1/chat/completions/render2", False),
        ("/x?/v1/chat/completions/render", False),
        ("", False),
        ("*", False),
        ("http://h/v1/chat/completions/render", False),
    ],
)
def test_a_route_is_matched_as_starlette_does(target: str, edited: bytes | bool) -> None:
    assert kind_of(lua_settings(), target) == edited


TARGETS = [
    *(
        path + end
        for path in (CHAT, MESSAGES, "/inference/v1/generate")
        for end in ("", "?x=1", "/", "%0a", "%20", "x")
    ),
    "/v1/chat/completions%2Frender",
    "/v1/chat/completions/%72ender",
    "/V1/chat/completions/render",
    "//v1/responses/render",
    "/llm/v1/messages/render",
    "/llm/v1/chat/completions/render",
    "/llm%2Fv1/responses/render",
    "/llmx/v1/responses/render",
    "/llm/llm/v1/responses/render",
    "/llm",
    "/",
    "/llm/",
    "/x/v1/responses/render",
]


@pytest.mark.parametrize("root_path", ["", "/llm", "/a/llm"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_route_table_agrees_with_starlettes_own_matching(target: str, root_path: str) -> None:
    """vLLM sets the root path on its FastAPI app: a path is served with and without that prefix."""
    policy = f"routes: {{root_path: {root_path}}}" if root_path else "{}"
    routes = parse_policies(policy).default.routes
    app = FastAPI(root_path=root_path)
    for path in routes.for_role("engine"):
        app.post(path)(lambda path=path: PlainTextResponse(path))
    with TestClient(app) as client:
        served = client.post(target, follow_redirects=False)
    edited = kind_of(lua_settings(policy), target)
    if "%0a" in target:
        assert edited == b"control character", "Starlette's $ matches before a final newline"
    elif served.status_code == 200:
        assert edited == (b"response" if served.text == MESSAGES else b"request")
    else:
        assert edited is False


def test_a_route_is_counted_under_its_own_name_however_it_is_spelled() -> None:
    route_of = _priority[b"router"](lua_settings())
    for target in (CHAT, CHAT + "?x=1", CHAT.replace("r", "%72"), CHAT.replace("/", "%2F")):
        assert route_of(target.encode()) == (b"request", CHAT.encode())
    assert route_of(b"/x%0a") == (b"control character", b"")


def test_a_request_without_a_target_is_no_route() -> None:
    assert _priority[b"router"](lua_settings())(None) is False


@pytest.mark.parametrize(
    ("role", "policy", "target", "edited"),
    [
        ("render", "{}", "/inference/v1/generate", False),
        ("render", "{}", CHAT, b"request"),
        ("render", "routes: {render: [/own]}", CHAT, False),
        ("render", "routes: {render: [/own]}", "/own", b"request"),
        ("render", "routes: {extra: [/v1/embeddings]}", "/v1/embeddings", b"request"),
        ("engine", "routes: {extra: [/v1/embeddings]}", "/v1/embeddings", b"request"),
        ("engine", "routes: {engine: [/v1/messages/render]}", MESSAGES, b"response"),
        ("engine", "routes: {extra: [/ünï]}", "/%C3%BCn%c3%af", b"request"),
        ("engine", "routes: {engine: []}", "/inference/v1/generate", False),
    ],
)
def test_routes_come_from_role_and_policy(role: Role, policy: str, target: str, edited: bytes | bool) -> None:
    assert kind_of(lua_settings(policy, role), target) == edited


def test_routes_are_found_alike_however_many_others_came_before() -> None:
    route_of = _priority[b"router"](lua_settings())
    for number in range(2500):
        assert route_of(b"/other?%d" % number) is False
        assert route_of(f"{CHAT}?{number}".encode()) == (b"request", CHAT.encode())


@pytest.mark.parametrize("line", ["application/json", "application/json; charset=utf-8", "a", 'x/y; boundary="a,b"'])
@pytest.mark.parametrize("count", range(2, 9))
def test_equal_lines_that_were_joined_are_one(line: str, count: int) -> None:
    found = _priority[b"repeated_line"](",".join([line] * count).encode())
    assert found == line.encode()


@pytest.mark.parametrize(
    "joined",
    ["a,b", "a,a,b", "a, a", "a,", ",a", ",", ",,", "a,,a", "application/json,text/plain", "x/y;b=1,x/y;b=2",
     'multipart/form-data; boundary="a,b"', ",".join(["a"] * 11)],
)  # fmt: skip
def test_lines_that_differ_stay_joined(joined: str) -> None:
    assert _priority[b"repeated_line"](joined.encode()) is None
