"""Fixed cases: what was reported, and what a fuzzing run has found. A run prints its finds in this form."""

from .filter_driver import Framing, Sent

_FRAMINGS: tuple[tuple[Framing, str], ...] = (("length", "-1"), ("chunked", "5"))


def _framed(*bodies: bytes) -> list[Sent]:
    """Each body with a content-length and without, whole and byte by byte."""
    return [
        Sent(chunks, framing=framing, value=value)
        for body in bodies
        for chunks in ([body], [body[at : at + 1] for at in range(len(body))])
        for framing, value in _FRAMINGS
    ]


def _with_priority(*values: bytes) -> list[bytes]:
    return [b'{"priority":%b,"messages":[]}' % value for value in values]


# A value that is followed by more: it was glued to the new value, so that -1 arrived as -100000.
GLUED = _framed(*_with_priority(b'""00000', b"{}99", b"[]e5", b'""e-1', b'"a"5', b"{}{}", b'""""', b"5{}", b'5""'))

# Malformed values that disappeared, so that the document became valid.
MENDED = _framed(
    *_with_priority(
        b"1e ", b"01", b"-", b"1e", b"1e+", b"+5", b"5.", b".5", b"tru", b"{5}", b"[01]", b"[u]", b'{"a"}', b'{"a":01}',
        b'["\xff"]', b'"\xff"', b'"\xc0\x80"', b'"\x01"', b'"\n"', b'"\\0"', b'"\\u12"', b'["\x01"]', b"[,]", b"[1,]",
        b"[}", b"{]", b"[1 2]", b'{"a":1,}', b"{1:2}", b"9" * 62 + b"vv", b"5\x00", b"5\x0b", b"\xc2\xa05", b"- 1",
    ),
    b'{"priority":5', b'{"priority":"', b'{"priority":[', b'{"priority":{"a":1}', b'{"a":1,"priority":5,}',
    b'{"priority":1}}', b'{"priority":1}{"priority":2}', b'{"priority":1}99', b'{"priority":1}""',
    b'{"priority":1} \x00',
    b'{"priority" 5}', b'{"priority":5 "a":1}', b'{"priority":5,,"a":1}', b'{,"priority":5}', b'{"pri\\qority":1}',
    b'{"\\u0070riority":01}', b'{"\\u0070riority":{}99}', b'{"a":{"priority":1}', b'{priority:5}', b"{'priority':5}",
)  # fmt: skip

# A value that json.loads accepts and a stricter scan does not, before a second member. If the document passes unchanged
# as malformed, vLLM reads the client's own -100 in place of the header's value, past any range.
_ACCEPTED_BY_PYTHON = (
    b"NaN", b"-Infinity", b'"\\ud800"', b'"\xed\xa0\x80"', b"[" * 100 + b"]" * 100, b"[" * 900 + b"]" * 900,
)  # fmt: skip
BYPASS = _framed(*[b'{"priority":%b,"priority":-100}' % value for value in _ACCEPTED_BY_PYTHON])

# Valid, and odd: every byte but the values of `priority` stays.
VALID = _framed(
    b"{}", b" {\n}\n", b'{"a":1 }', b"[]", b"null", b"5", b'""', b"", b" ", b'[{"priority":1}]',
    *_with_priority(
        b"5.0", b"1e3", b"-0", b'""', b'"a"', b"{}", b"[]", b"null", b"NaN", b"-Infinity", b"1e400", b'"\\ud800"',
        b'"\xed\xa0\x80"', b'{"priority":1}', b'[{"priority":[1]}]', b"9" * 100, b'"\\u0022}"', b'"\x7f"',
    ),
    b'{"priority":1,"priority":2}', b'{"priority":1,"\\u0070riority":2}', b'{"priority":1,"x":2,"priority":[3] }',
    b'{"pri\\u006Frity":1}', b'{"pri\\u006frity":1}', b'{"priority\\u0000":1}', b'{"Priority":1}',
    b'\xef\xbb\xbf{"priority":1}', b'{"seed":9007199254740993,"stop":[],"priority" :\t2\r\n}',
    b'{"service_tier":"priority","metadata":{"priority":"x"},"m":"\\"priority\\": 1}"}', b'{"a":"\xff","priority":1}',
    b'{"prompt":"100% %1 %% %20"}', b'{"\\\\":"\\\\\\"","priority":"\\\\"}', b'{"a":"\\ud800"}', b'{"priority":1}   ',
)  # fmt: skip

# A known length above 800 KiB: the length was promised before the body was seen, and the scalar written back behind it.
STREAMED = [
    Sent(
        [
            b'{"pad":"' + b"x" * 900_000 + b'","priority":' + b"9" * 30,
            b"9" * 32 + b"vv" + b" " * 60 + b"GET /docs HTTP/1.1\r\nX:",
        ]
    ),
    Sent([b'{"priority":7,"pad":"' + b"x" * 600_000, b"x" * 300_000 + b'"}']),
    Sent([b'{"pad":"' + b"x" * 900_000 + b'"', b',"priority"', b": 7", b"}"]),
    Sent([b'{"pad":"' + b"x" * 900_000 + b'","priority":1,"priority":22,"priority":[3]}']),
    Sent([b'{"pad":"' + b"x" * 900_000 + b'"}' + b" " * 100_000]),
    Sent([b'{"pad":"' + b"x" * 1_048_000 + b'","priority":01}'], framing="chunked"),
    Sent([b'{"priority":1,"pad":"' + b"x" * 1_048_000 + b'",}'], framing="chunked"),
]

# At the limits of what is rejected.
LIMITS = (
    [
        Sent([b"{" + b",".join([b'"priority":1'] * count) + b"}"], framing=framing)
        for count in (256, 257, 5000)
        for framing in ("length", "chunked")
    ]
    + _framed(*_with_priority(b'"' + b"x" * 4094 + b'"'))[::2]
    + [
        Sent([b'{"priority":' + value + b"}"])
        for value in (
            b'"' + b"x" * 4095 + b'"',
            b"9" * 4096,
            b"9" * 4097,
            b"[" * 2048 + b"]" * 2048,
            b"[" * 3000 + b"]" * 3000,
        )
    ]
    + [Sent(['{"priority":1}'.encode(name)]) for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")]
)

FOUND: list[Sent] = []
"""What fuzzing runs have found."""

CASES = [*GLUED, *MENDED, *BYPASS, *VALID, *STREAMED, *LIMITS, *FOUND]
