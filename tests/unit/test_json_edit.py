"""The streaming editor, by LuaJIT in process, against Python's json."""

import json
import random
from collections.abc import Iterator

import lupa.luajit21 as luajit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.package_data import read_text

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_FILLER = 32

_lua = luajit.LuaRuntime(encoding=None)
_edit = _lua.execute(b"return (function(...) " + read_text("lua", "json_edit.lua").encode() + b"\nend)()")


def edit(
    body: bytes,
    value: int,
    cuts: list[int],
    *,
    promised: bool,
    keep: bool = False,
    wide: bool = False,
    lists: bool = False,
) -> tuple[bytes, str]:
    """The body as the upstream would see it, and what came of it; cut before each position in `cuts`."""
    text = str(value).encode()
    member = _edit[b"member"](b"priority", text)
    growth = _edit[b"growth"](member, wide) if promised else 0
    editor = _edit[b"new"](b"priority", text, len(body) if promised else None, growth, keep)
    if lists:
        _edit[b"accept_list"](editor)
    bounds = [0, *sorted(set(cuts)), len(body)]
    out = b""
    for start, end in zip(bounds, bounds[1:], strict=False):
        chunk = body[start:end]
        new = _edit[b"feed"](editor, chunk)
        out += chunk if new is None else new
    if promised:
        assert len(out) == len(body) + growth
    result = _edit[b"result"](editor)
    return out, (result[1] if isinstance(result, tuple) else result).decode()


def tokens(body: bytes) -> list[tuple[str, object]]:
    """Top-level members, in order, with repeats."""
    found: list[tuple[str, object]] = []

    def pairs(members: list[tuple[str, object]]) -> object:
        found[:] = members
        return ("object", tuple(map(repr, members)))

    json.loads(body, object_pairs_hook=pairs)
    return found


def check(body: bytes, value: int, cuts: list[int], promised: bool) -> None:
    """The contract, for a well-formed object."""
    before = tokens(body)
    out, result = edit(body, value, cuts, promised=promised)
    after = tokens(out)
    wanted = [(name, value) if name == "priority" else (name, member) for name, member in before]
    if any(name == "priority" for name, _ in before):
        assert result == "replaced"
        if after != wanted:  # later members may be taken out where they outgrow the promised length
            assert promised
            assert [pair for pair in after if pair[0] != "priority"] == [p for p in wanted if p[0] != "priority"]
            assert {member for name, member in after if name == "priority"} == {value}
    else:
        assert result == "inserted"
        assert after == [*wanted, ("priority", value)]
        member = (b"," if before else b"") + b'"priority":%d' % value
        end = body.rindex(b"}")
        assert out.rstrip(b" ") == (body[:end] + member + body[end:]).rstrip(b" ")
    tail = len(out) - len(out.rstrip(b" ")) - (len(body) - len(body.rstrip(b" ")))
    assert tail <= (MAX_FILLER if promised else 0)


HARD = [
    b"{}",
    b" {\n}\n",
    b'{"a":1}',
    b'{"priority":1}',
    b'{"priority":1,"priority":2}',
    b'{"priority":1,"x":2,"priority":3 , "priority" :4}',
    b'{"\\u0070riority":7,"b":"}"}',
    b'{"\\u0070\\u0072\\u0069\\u006f\\u0072\\u0069\\u0074\\u0079":7}',
    b'{"\\u0070\\u0072\\u0069\\u006F\\u0072\\u0069\\u0074\\u0079":7,"priority":1}',
    b'{"service_tier":"priority","metadata":{"priority":"x"},"messages":[{"role":"user",'
    b'"content":"\\"priority\\": 1}"}],"Priority":8}',
    b'{"a":"\\\\","priority":"5"}',
    b'{"a":"\\\\\\"","priority":null,"b":[[],{},[{"priority":1}]]}',
    b'{"priority":{"priority":[1,"]}"]},"x":1}',
    b'{"priority":"a long text that is longer than any integer could be, with \\" and }"}',
    b'{"priority":-9223372036854775808}',
    b'{"priority":1.50e+3 ,"y":NaN}',
    b'{"prompt":"100% %1 %% %20","n":-Infinity}',
    b'{"seed":9007199254740993,"stop":[],"logit_bias":{},"temperature":1.0,"tools":[{"z":1,"a":2}]}',
    b'\xef\xbb\xbf{"a":"\xc3\xa9\\ud800","b":"\\u00e9"}',
    b'{ "a" : [ 1 , 2 , [ 3 ] ] , "priority" : 2 }   ',
    b'{"prioritY":1,"priority ":2,"":3,"\\priority":4}'.replace(b"\\p", b"p"),
]


@pytest.mark.parametrize("value", [5, -10, INT64_MIN, INT64_MAX, 0])
@pytest.mark.parametrize("promised", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("body", HARD, ids=range(len(HARD)))
def test_every_cut_of_a_hard_document(body: bytes, promised: bool, value: int) -> None:
    if value in (5, INT64_MIN):
        for cut in range(len(body) + 1):
            check(body, value, [cut], promised)
    check(body, value, list(range(len(body))), promised)
    check(body, value, [], promised)


KEYS = st.sampled_from(["priority", "priority", "a", "Priority", "prior", "priority2", "messages", "é", '"', "\\", ""])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=20)
    | st.sampled_from(['"priority":1', "}", "{", "\\", '\\"', "]", "[" * 30]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
SPACE = st.sampled_from(["", "", " ", "\n", "\t \r\n"])


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """Objects with repeated keys, escapes of every kind, and white space anywhere."""
    escape_all = draw(st.booleans())
    ascii_only = draw(st.booleans())

    def text(value: str) -> str:
        if escape_all and value == "priority":
            return '"' + "".join(f"\\u{ord(c):04x}" if draw(st.booleans()) else c for c in value) + '"'
        return json.dumps(value, ensure_ascii=ascii_only)

    def write(value: object) -> str:
        space = draw(SPACE)
        if isinstance(value, dict):
            return "{" + ",".join(f"{space}{text(k)}{space}:{space}{write(v)}" for k, v in value.items()) + space + "}"
        if isinstance(value, list):
            return "[" + ",".join(space + write(item) for item in value) + space + "]"
        return json.dumps(value, ensure_ascii=ascii_only)

    members = draw(st.lists(st.tuples(KEYS, VALUES), max_size=8))
    space = draw(SPACE)
    inside = ",".join(f"{space}{text(k)}{space}:{draw(SPACE)}{write(v)}{space}" for k, v in members)
    return (draw(SPACE) + "{" + inside + draw(SPACE) + "}" + draw(SPACE)).encode("utf-8", "surrogatepass")


@settings(max_examples=600, deadline=None)
@given(
    body=documents(),
    value=st.integers(INT64_MIN, INT64_MAX) | st.integers(-100, 100),
    seed=st.integers(0, 2**32),
    promised=st.booleans(),
)
def test_any_document_cut_anywhere(body: bytes, value: int, seed: int, promised: bool) -> None:
    chance = random.Random(seed)
    cuts = [chance.randrange(len(body) + 1) for _ in range(chance.choice([0, 1, 2, 5, len(body)]))]
    check(body, value, cuts, promised)


@pytest.mark.parametrize("promised", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b'[{"token_ids":[1],"priority":1}]', b'"priority"', b"5", b"{", b'{"a":1', b'{"a":1,}',
        b'{"a" 1}', b'{"a":}', b'{,"a":1}', b'{"a":1]', b'{"priority":nul}', b"{'a':1}", b'{"priority"', b'{a:1}',
    ],
)  # fmt: skip
def test_what_is_no_object_goes_on_as_it_was(body: bytes, promised: bool) -> None:
    for cuts in ([], list(range(len(body))), [len(body) // 2]):
        out, result = edit(body, -10, cuts, promised=promised)
        assert out.rstrip(b" ") == body
        assert result in {"malformed", "not_object"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", ['{"a":1}', ' {"priority":1}'])
def test_utf16_and_utf32_are_told_and_stay_readable(text: str, encoding: str) -> None:
    body = text.encode(encoding)
    for cuts in ([], list(range(len(body)))):
        out, result = edit(body, 5, cuts, promised=True, wide=True)
        assert result == "wide"
        assert out.startswith(body)
        assert json.loads(out) == json.loads(text)


def test_keep_adds_only_what_is_missing() -> None:
    assert edit(b'{"a":1}', 5, [3], promised=False, keep=True) == (b'{"a":1,"priority":5}', "inserted")
    assert edit(b'{"priority":2}', 5, [3], promised=False, keep=True) == (b'{"priority":2}', "kept")
    out, result = edit(b'{"priority":2}', 5, [3], promised=True, keep=True)
    assert (out.rstrip(), result) == (b'{"priority":2}', "kept")


def test_each_object_of_a_list_is_edited() -> None:
    body = b'[ {"priority":0,"a":[{"priority":0}]}, {"b":"]"} ,{} ]'
    wanted = b'[ {"priority":7,"a":[{"priority":0}]}, {"b":"]","priority":7} ,{"priority":7} ]'
    for cuts in ([], list(range(len(body)))):
        assert edit(body, 7, cuts, promised=False, lists=True) == (wanted, "inserted")


def test_a_large_old_value_leaves_room_where_it_stood_and_nothing_behind() -> None:
    body = b'{"priority":"' + b"x" * 10_000 + b'","a":1}'
    out, _ = edit(body, 5, list(range(0, len(body), 100)), promised=True)
    assert json.loads(out) == {"priority": 5, "a": 1}
    assert len(out) - len(out.rstrip(b" ")) <= MAX_FILLER


def test_white_space_without_end_before_a_member_that_must_go_is_given_up_on() -> None:
    body = b'{"priority":1,' + b" " * 70_000 + b'"priority":2}'
    out, result = edit(body, INT64_MIN, list(range(0, len(body), 1000)), promised=True)
    assert result == "overfull"


@pytest.mark.parametrize("promised", [True, False])
@pytest.mark.parametrize("size", [1000, 64])
def test_members_without_number_are_given_up_on_and_no_byte_behind_is_touched(size: int, promised: bool) -> None:
    members = [b'"priority":123456'] * 256
    most = b"{" + b",".join(members) + b"}"
    assert edit(most, 5, list(range(0, len(most), size)), promised=promised)[1] == "replaced"
    rest = b',"priority":1234567' * 3 + b',"a":1}'
    out, result = edit(most[:-1] + rest, 5, list(range(0, len(most), size)), promised=promised)
    assert result == "overfull"
    assert out.rstrip(b" ").endswith(rest)


def chunks(body: bytes, size: int) -> Iterator[bytes]:
    """The body in pieces of `size` bytes."""
    for start in range(0, len(body), size):
        yield body[start : start + size]


def test_nothing_is_kept_of_what_was_passed_on() -> None:
    editor = _edit[b"new"](b"priority", b"5", None, 0, False)
    used = _lua.eval(b'function() collectgarbage("collect") return collectgarbage("count") end')
    _edit[b"feed"](editor, b'{"image":"')
    before = used()
    block = b"A" * 65536
    for _ in range(200):
        assert _edit[b"feed"](editor, block) is None
    assert used() - before < 256


SEPARATORS = ["", " ", "  ", "\n  ", "\t"]
EVERY_KIND = ["1", "-0.70", "123456", "true", "false", "null", '"x"', '""', '"\\""', "[]", '{"b":"}"}']


@pytest.mark.parametrize("value", EVERY_KIND)
@pytest.mark.parametrize("promised", [True, False], ids=["length", "chunked"])
def test_white_space_in_any_place_around_any_kind_of_value(value: str, promised: bool) -> None:
    for before in SEPARATORS:
        for after in SEPARATORS:
            body = (
                f'{{{before}"a"{before}:{after}{value}{before},{after}"priority"{after}:{before}{value}{after},'
                f'{before}"b"{before}:{after}{value}{before}}}'
            ).encode()
            check(body, 5, [], promised)
            for cut in range(len(body)):
                check(body, -10, [cut], promised)


@pytest.mark.parametrize("promised", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("end", ["}", ",", " }", "\n,"])
def test_a_number_of_any_length_ends_where_it_ends(end: str, promised: bool) -> None:
    for size in range(1, 12):
        number = "1234567890123"[:size]
        for body in (f'{{"a":{number}{end}', f'{{"priority":{number}{end}'):
            whole = (body if body.endswith("}") else body + '"b":1}').encode()
            for cut in range(len(whole)):
                check(whole, 5, [cut], promised)


@pytest.mark.parametrize("promised", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"a":,"b":1}', b'{"a": }', b'{"a":"x" "b":1}', b'{"a":"x", b":1}', b'{"a":"x",1}', b'{"a":"x", 1}',
        b'{"a":"x",,"b":1}', b'{"a":"x":"b"}', b'{"a";"x"}', b'{"a" "x"}', b'{"a":1 "b":2}', b'{"a":1\x0b,"b":2}',
        b'{"a":[1]"b":2}', b'{"a":"x"\x00,"b":1}', b'{"a":"x",\x0b"b":1}', b'{"a":\x0b]}', b'{;"a":1}',
    ],
)  # fmt: skip
def test_one_wrong_byte_between_members_is_seen_wherever_the_text_is_cut(body: bytes, promised: bool) -> None:
    for cuts in ([], list(range(len(body))), *([cut] for cut in range(len(body)))):
        out, result = edit(body, 5, cuts, promised=promised)
        assert out.rstrip(b" ") == body
        assert result == "malformed"


def test_keys_as_long_as_the_name_and_as_its_escaped_forms_are_not_taken_for_it() -> None:
    keys = [
        "messages",
        "prioritz",
        "max_tokens",
        "stream_options",
        "\\u0070riorit",
        "\\u0070rioritz",
        "p" * 48,
        "p" * 49,
    ]
    body = ("{" + ",".join(f'"{key}":1' for key in keys) + "}").encode()
    for cut in range(len(body)):
        check(body, 5, [cut], promised=False)


def test_a_byte_order_mark_in_pieces_and_white_space_stand_before_the_text() -> None:
    for body in (b'\xef\xbb\xbf{"a":1}', b'\xef\xbb\xbf \n{ "a":1}', b' {"a":1}', b"\t{}"):
        for cuts in ([], list(range(len(body))), *([cut] for cut in range(len(body)))):
            out, result = edit(body, 5, cuts, promised=False)
            assert (result, json.loads(out.decode("utf-8-sig"))["priority"]) == ("inserted", 5)


def test_all_objects_of_a_list_get_the_member_however_it_is_cut() -> None:
    body = b'[{"a":1},{"b":"x"}, {"priority":3} ,{}]'
    wanted = [{"a": 1, "priority": 7}, {"b": "x", "priority": 7}, {"priority": 7}, {"priority": 7}]
    for cut in range(len(body)):
        out, _ = edit(body, 7, [cut], promised=False, lists=True)
        assert json.loads(out) == wanted
