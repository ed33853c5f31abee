"""The editor, run by LuaJIT in this process, against Python's json."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import lupa.luajit21 as luajit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.package_data import read_text

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def _module(name: str, *needs: Any) -> Any:
    loaded = _lua.execute(b"return function(...) " + read_text("lua", f"{name}.lua").encode() + b"\nend")
    return loaded(*needs)


_lua = luajit.LuaRuntime(encoding=None)
_scan = _module("json_scan")
_edit = _module("json_edit", _scan)
constant = _lua.eval(b"function(text) return function() return text end end")


def edit(
    body: bytes, value: int, cuts: list[int], *, known: bool, keep: bool = False, lists: bool = False
) -> tuple[bytes, str]:
    """The body as the upstream would see it, and its outcome; cut before each position in `cuts`.

    `known`: whether the editor is told the length.
    """
    editor = _edit[b"new"](
        b"priority",
        str(value).encode(),
        None if keep else constant(str(value).encode()),
        len(body) if known else None,
        lists,
    )
    bounds = [0, *sorted(set(cuts)), len(body)]
    out = b""
    for start, end in zip(bounds, bounds[1:], strict=False):
        piece = body[start:end]
        if piece:
            new = _edit[b"feed"](editor, piece)
            out += piece if new is None else new
    result = _edit[b"finish"](editor)
    patches = _edit[b"patches"](editor)
    for patch in reversed(list(patches.values()) if patches is not None else []):
        at, size = int(patch[b"at"]), int(patch[b"size"])
        out = out[:at] + patch[b"text"] + out[at + size :]
    if isinstance(result, tuple):
        result = result[1] if result[0] is None else result[0]
    return out, result.decode()


def tokens(body: bytes) -> list[tuple[str, object]]:
    """Top-level members, in order, with repeats."""
    found: list[tuple[str, object]] = []

    def pairs(members: list[tuple[str, object]]) -> object:
        found[:] = members
        return ("object", tuple(map(repr, members)))

    json.loads(body, object_pairs_hook=pairs)
    return found


def check(body: bytes, value: int, cuts: list[int], known: bool) -> None:
    """The contract, for a well-formed object."""
    before = tokens(body)
    out, result = edit(body, value, cuts, known=known)
    if result == "unclear":
        # json.loads accepts what JSON's grammar does not have: as a value of the member, it is not replaced.
        assert out == body
        assert re.search(rb"NaN|Infinity|\\u[dD][89abAB]|\\u[dD][c-fC-F]|\xed[\xa0-\xbf]", body)
        return
    after = tokens(out)
    if any(name == "priority" for name, _ in before):
        assert result == "replaced"
        assert after == [(name, value) if name == "priority" else (name, member) for name, member in before]
    else:
        assert result == "inserted"
        member = (b"," if before else b"") + b'"priority":%d' % value
        end = body.rindex(b"}")
        assert out == body[:end] + member + body[end:]


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
@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("body", HARD, ids=range(len(HARD)))
def test_every_cut_of_a_hard_document(body: bytes, known: bool, value: int) -> None:
    if value in (5, INT64_MIN):
        for cut in range(len(body) + 1):
            check(body, value, [cut], known)
    check(body, value, list(range(len(body))), known)
    check(body, value, [], known)


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
    known=st.booleans(),
)
def test_any_document_cut_anywhere(body: bytes, value: int, seed: int, known: bool) -> None:
    chance = random.Random(seed)
    cuts = [chance.randrange(len(body) + 1) for _ in range(chance.choice([0, 1, 2, 5, len(body)]))]
    check(body, value, cuts, known)


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b'[{"token_ids":[1],"priority":1}]', b'"priority"', b"5", b"{", b'{"a":1', b'{"a":1,}',
        b'{"a" 1}', b'{"a":}', b'{,"a":1}', b'{"a":1]', b'{"priority":nul}', b"{'a':1}", b'{"priority"', b'{a:1}',
    ],
)  # fmt: skip
def test_a_text_that_is_not_an_object_passes_unchanged(body: bytes, known: bool) -> None:
    for cuts in ([], list(range(len(body))), [len(body) // 2], *([cut] for cut in range(len(body)))):
        out, result = edit(body, -10, cuts, known=known)
        assert out == body
        assert result in {"malformed", "not_object"}


# Each was turned into valid JSON, or into another number, by an editor that did not check the value that it replaced.
MALFORMED = [
    b'{"priority":""00000,"messages":[]}',
    b"{}99",
    b"{}[]e5",
    b'{"priority":""e-1}',
    b'{"priority":"a"5}',
    b'{"priority":1e }',
    b'{"priority":01}',
    b'{"priority":-}',
    b'{"priority":+1}',
    b'{"priority":.5}',
    b'{"priority":5.}',
    b'{"priority":0x10}',
    b'{"priority":NaN}',
    b'{"priority":-Infinity}',
    b'{"priority":tru}',
    b'{"priority":nulll}',
    b'{"priority":1 2}',
    b'{"priority":[1}',
    b'{"priority":[1,]}',
    b'{"priority":{"a"}}',
    b'{"priority":{"a":}}',
    b'{"priority":{a:1}}',
    b'{"priority":[1}]}',
    b'{"priority":"\\x"}',
    b'{"priority":"\\u12"}',
    b'{"priority":"\n"}',
    b'{"priority":"\\ud800"}',
    b'{"priority":"\\u00\\\\41"}',
    b'{"priority":"\xff"}',
    b'{"priority":"\xc3"}',
    b'{"priority":"\xed\xa0\x80"}',
    b'{"priority":[[1]',
    b'{"priority":1]',
    b'{"priority":1,}',
    b'{"priority":1}}',
    b'{"priority":1}x',
    b'{"priority":' + b"[" * 70 + b"]" * 70 + b"}",
    b'{"priority":1',
    b'{"priority":"1',
    b'{"priority":',
    b'\xef\xbb{"priority":1}',
    b'\xef{"priority":1}',
    b'\xef\xbb\xbf\xef\xbb\xbf{"priority":1}',
    b' \xef\xbb\xbf{"priority":1}',
]


# Python's json module accepts these, and may find a second value of the member after them: they are rejected.
UNCLEAR = [
    b'{"priority":NaN}',
    b'{"priority":-Infinity}',
    b'{"priority":"\\ud800"}',
    b'{"priority":"\xed\xa0\x80"}',
    b'{"priority":' + b"[" * 70 + b"]" * 70 + b"}",
]


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_text_passes_unchanged_wherever_it_is_cut(body: bytes, known: bool) -> None:
    for cuts in ([], list(range(len(body))), *([cut] for cut in range(len(body)))):
        out, result = edit(body, -1, cuts, known=known)
        assert out == body
        assert result in {"malformed", "not_object", "unclear"}
        assert (result == "unclear") == (body in UNCLEAR)


@pytest.mark.parametrize(
    "value",
    [
        b'"\\u0035"',
        b'"5"',
        b'" 5 "',
        b"5.0",
        b"1e3",
        b"-0",
        b"true",
        b"null",
        b'{"a":[1,{"b":"]"}, "\xc3\xa9"]}',
        b"[]",
        b"{}",
        b'"\xf0\x9f\x98\x80\\ud83d\\ude00"',
        b"[" * 60 + b"]" * 60,
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
def test_any_value_by_the_grammar_is_replaced(value: bytes, known: bool) -> None:
    body = b'{"a":1, "priority" : %s , "b":2}' % value
    for cuts in ([], list(range(len(body))), *([cut] for cut in range(len(body)))):
        assert edit(body, -1, cuts, known=known) == (b'{"a":1, "priority" : -1 , "b":2}', "replaced")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", ['{"a":1}', ' {"priority":1}'])
def test_utf16_and_utf32_are_recognised_and_pass_unchanged(text: str, encoding: str) -> None:
    body = text.encode(encoding)
    for cuts in ([], list(range(len(body)))):
        assert edit(body, 5, cuts, known=True) == (body, "charset")


def test_keep_adds_only_what_is_missing() -> None:
    assert edit(b'{"a":1}', 5, [3], known=False, keep=True) == (b'{"a":1,"priority":5}', "inserted")
    assert edit(b'{"priority":2}', 5, [3], known=False, keep=True) == (b'{"priority":2}', "kept")
    assert edit(b'{"priority":2}', 5, [3], known=True, keep=True) == (b'{"priority":2}', "kept")


def test_each_object_of_a_list_is_edited() -> None:
    body = b'[ {"priority":0,"a":[{"priority":0}]}, {"b":"]"} ,{} ]'
    wanted = b'[ {"priority":7,"a":[{"priority":0}]}, {"b":"]","priority":7} ,{"priority":7} ]'
    for cuts in ([], list(range(len(body)))):
        assert edit(body, 7, cuts, known=False, lists=True) == (wanted, "inserted")


def test_an_old_value_of_the_most_bytes_is_replaced_and_a_longer_one_is_not() -> None:
    for size, outcome in ((4096, "replaced"), (4097, "unclear")):
        body = b'{"priority":"' + b"x" * (size - 2) + b'","a":1}'
        for cuts in ([], [13], list(range(0, len(body), 100)), list(range(len(body)))):
            out, result = edit(body, 5, cuts, known=True)
            assert result == outcome
            assert out == (body if outcome == "unclear" else b'{"priority":5,"a":1}')


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [1000, 64])
def test_more_members_than_the_limit_are_not_edited_from_there_on(size: int, known: bool) -> None:
    members = [b'"priority":123456'] * 256
    most = b"{" + b",".join(members) + b"}"
    assert edit(most, 5, list(range(0, len(most), size)), known=known)[1] == "replaced"
    body = most[:-1] + b',"priority":1234567' * 3 + b',"a":1}'
    assert edit(body, 5, list(range(0, len(body), size)), known=known) == (body, "too_many")


PAD = b'"x":"' + b"a" * 20_000 + b'"'
# Long enough for lazy mode; what matters lies at the cuts.
LAZY = [
    b"{" + PAD + b"}",
    b"{" + PAD + b" }  \n",
    b"{" + PAD + b',"priority":4}',
    b'{"priority":4,' + PAD + b"}",
    b"{" + PAD + b',"\\u0070riority":4}',
    b"{" + PAD + b',"a":{}}',
    b"{" + PAD + b',"a":"priority"}',
    b"{" + b" " * 20_000 + b"}",
    b"\xef\xbb\xbf {" + PAD + b"}",
    b"{" + PAD + b',"a":"u00"}' + b" " * 20,
]
LAZY_MALFORMED = [
    b"{" + PAD + b',"priority":4}x', b"{" + PAD, b"[" + PAD + b"}", b"{" + PAD + b"]", PAD + b"}", b"x{" + PAD + b"}",
    b"{" + PAD + b'}priority', b"{" + PAD + b'} "priority":1}', b"{" + PAD + b"} x",
]  # fmt: skip


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("body", LAZY, ids=range(len(LAZY)))
def test_a_text_that_need_not_be_scanned_is_edited_alike_wherever_it_is_cut(body: bytes, known: bool) -> None:
    edge = 40
    for cut in (*range(edge), *range(len(body) - edge, len(body))):
        check(body, -7, [cut], known)
        check(body, -7, [cut, cut + 1, cut + 3], known)
    check(body, -7, list(range(len(body) - edge, len(body))), known)


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("body", LAZY_MALFORMED, ids=range(len(LAZY_MALFORMED)))
def test_a_malformed_text_that_need_not_be_scanned_passes_unchanged_or_stays_malformed(
    body: bytes, known: bool
) -> None:
    for cut in (*range(40), *range(len(body) - 40, len(body))):
        out, _ = edit(body, -7, [cut], known=known)
        if out != body:
            with pytest.raises(ValueError):
                json.loads(out)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1}}',
        b'{"a":"}',
        b'{"a":"b}',
        b'{"a":"\\}',
        b'{"a":}',
        b'{"a":1,}',
        b'{"a"}',
        b"{]}",
        b"{{}",
        b'{"a":{}',
        b'{"a":[}',
        b'{"a":1}{}',
        b'{"a":1 "b":2}',
        b'{"a":01}',
        b"{,}",
        b'{"a":1,,"b":2}',
    ],
)
def test_inserting_without_a_scan_never_makes_a_malformed_text_valid(body: bytes) -> None:
    """The claim of insert_unscanned() in lua/json_edit.lua."""
    long = body[:1] + b" " * 16_384 + body[1:]
    out, _ = edit(long, 5, [], known=True)
    with pytest.raises(ValueError):
        json.loads(out)


def chunks(body: bytes, size: int) -> Iterator[bytes]:
    """The body in pieces of `size` bytes."""
    for start in range(0, len(body), size):
        yield body[start : start + size]


def test_nothing_is_kept_of_what_was_passed_on() -> None:
    editor = _edit[b"new"](b"priority", b"5", constant(b"5"))
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
@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
def test_white_space_in_any_place_around_any_kind_of_value(value: str, known: bool) -> None:
    for before in SEPARATORS:
        for after in SEPARATORS:
            body = (
                f'{{{before}"a"{before}:{after}{value}{before},{after}"priority"{after}:{before}{value}{after},'
                f'{before}"b"{before}:{after}{value}{before}}}'
            ).encode()
            check(body, 5, [], known)
            for cut in range(len(body)):
                check(body, -10, [cut], known)


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("end", ["}", ",", " }", "\n,"])
def test_a_number_of_any_length_ends_where_it_ends(end: str, known: bool) -> None:
    for size in range(1, 12):
        number = "1234567890123"[:size]
        for body in (f'{{"a":{number}{end}', f'{{"priority":{number}{end}'):
            whole = (body if body.endswith("}") else body + '"b":1}').encode()
            for cut in range(len(whole)):
                check(whole, 5, [cut], known)


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"a":,"b":1}', b'{"a": }', b'{"a":"x" "b":1}', b'{"a":"x", b":1}', b'{"a":"x",1}', b'{"a":"x", 1}',
        b'{"a":"x",,"b":1}', b'{"a":"x":"b"}', b'{"a";"x"}', b'{"a" "x"}', b'{"a":1 "b":2}', b'{"a":1\x0b,"b":2}',
        b'{"a":[1]"b":2}', b'{"a":"x"\x00,"b":1}', b'{"a":"x",\x0b"b":1}', b'{"a":\x0b]}', b'{;"a":1}',
    ],
)  # fmt: skip
def test_one_wrong_byte_between_members_is_seen_wherever_the_text_is_cut(body: bytes, known: bool) -> None:
    for cuts in ([], list(range(len(body))), *([cut] for cut in range(len(body)))):
        out, result = edit(body, 5, cuts, known=known)
        assert out == body
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
        check(body, 5, [cut], known=False)


def test_a_byte_order_mark_in_pieces_and_white_space_stand_before_the_text() -> None:
    for body in (b'\xef\xbb\xbf{"a":1}', b'\xef\xbb\xbf \n{ "a":1}', b' {"a":1}', b"\t{}"):
        for cuts in ([], list(range(len(body))), *([cut] for cut in range(len(body)))):
            out, result = edit(body, 5, cuts, known=False)
            assert (result, json.loads(out.decode("utf-8-sig"))["priority"]) == ("inserted", 5)


def test_all_objects_of_a_list_get_the_member_however_it_is_cut() -> None:
    body = b'[{"a":1},{"b":"x"}, {"priority":3} ,{}]'
    wanted = [{"a": 1, "priority": 7}, {"b": "x", "priority": 7}, {"priority": 7}, {"priority": 7}]
    for cut in range(len(body)):
        out, _ = edit(body, 7, [cut], known=False, lists=True)
        assert json.loads(out) == wanted
