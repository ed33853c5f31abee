"""The pieces that documents are made of, and that mutations put into them."""

VALUES = ("-1", "5", "9223372036854775807", "-9223372036854775808")

KEYS = (
    b'"priority"', b'"priority"', b'"priority"', b'"\\u0070riority"', b'"prior\\u0069ty"', b'"priorit\\u0079"',
    b'"\\u0070\\u0072\\u0069\\u006f\\u0072\\u0069\\u0074\\u0079"', b'"pri\\u006Frity"',
)  # fmt: skip
NEAR_KEYS = (
    b'"Priority"', b'"priority "', b'"priorit"', b'"priorityy"', b'"prio\\\\u0072ity"', b'"\\"priority\\""', b'""',
    b'"a\\\\\\""', '"é☃"'.encode(), b'"\\ud83d\\ude00"', b'"p\\nriority"', b'"priority\\u0000"', b'"\\u0070"',
    b'"k"', b'"k"', b'"messages"', b'"prompt"', b'"u00"', b'"\\\\"', b'"\\u0050riority"', b'"xpriority"',
)  # fmt: skip
BROKEN_KEYS = (
    b"priority", b"'priority'", b'"priority', b'priority"', b'"pri\\qority"', b'"\\u007riority"', b'"\\u00g0riority"',
    b'"\\U0070riority"', b'"prior\x01ity"', b'"prior\xffity"', b'"prior\nity"', b"1", b"null", b'"\\u0070riority\\"',
    b'"priority\\"', b'"\xed\xa0\x80"', b'"\\ud800"',
)  # fmt: skip

SCALARS = (
    b"0", b"-0", b"1", b"9007199254740993", b"-1.5e-300", b"1E+20", b"5.0", b"1e3", b"true", b"false", b"null", b'""',
    b'"x"', b'"\\\\"', b'"\\""', b'"\\\\\\""', b'"}"', b'"]"', b'",\\"priority\\":1"', b'"\\u0022priority\\u0022"',
    '"é☃😀"'.encode(), b'"priority"', b'"{[:,"', b'"\\\\\\\\"', b'"\\ud83d\\ude00"', b'"\\/\\b\\f\\n\\r\\t"',
    b'"\\u0000"', b"5", b"-7", b"9223372036854775807", b'"priority\\":1,\\""', b'"\x7f"', b'"u0070"',
)  # fmt: skip
# Accepted by some readers only.
ODD_SCALARS = (
    b"NaN", b"Infinity", b"-Infinity", b'"\\ud800"', b'"\\udc00\\ud800"', b"1e400", b"-1e400", b'"\xed\xa0\x80"',
    b"9" * 30, b"9" * 62, b"9" * 400,
)  # fmt: skip
BROKEN_VALUES = (
    b"01", b"-", b"1e", b"1e+", b".5", b"5.", b"+5", b"0x10", b"1_0", b"nan", b"-NaN", b"Inf", b"tru", b"True", b"nul",
    b"None", b"", b"--1", b"- 1", b"1 2", b"1.5.5", b"1.e5", b"-01", b"00", b"-.5", b"1e5.5", b"1ee5", b"1e5e5", b"1E",
    b"5-", b"5+5", b'"abc', b"'5'", b'"\xff"', b'"\xc3"', b'"\xc0\x80"', b'"\xf4\x90\x80\x80"', b'"\xe2\x82"',
    b'"\x01"', b'"\t"', b'"\n"', b'"\\q"', b'"\\u12"', b'"\\u12x4"', b'"\\', b'"\\"', b"[1,]", b"[,1]", b"[1 2]",
    b"[01]", b'["\xff"]', b'["\x01"]', b'["\\x"]', b"[-]", b"[.]", b"[tru]", b"[}", b"{]", b"[", b"{", b"]", b"}",
    b'{"a"}', b'{"a":}', b'{"a":1,}', b"{,}", b"{1:2}", b'{"a" 1}', b'{"a":01}', b'{"a":"\xff"}', b'{"a":1 "b":2}',
    b"{:1}", b'{"a"::1}', b"[[]", b"[]]", b'[""00]', b"[{}9]", b'""00000', b'"a"5', b"{}99", b"[]e5", b'""e-1', b'""""',
    b'"a""b"', b'5"x"', b"5{}", b"5[]", b"{}{}", b"[][]", b"{}[]", b'{}""', b'""{}', b"truefalse", b"nullx", b"true1",
    b"1true", b"5//c", b"5/**/", b"5\x00", b"\x005", b"5\x0b", b"\x0c5", b"5\xa0", b"\xc2\xa05", b"5\xef\xbb\xbf",
    b"\xef\xbb\xbf5", b"5;", b"5:6", b":5", b"5,", b",5", b"5,,", b"9" * 62 + b"vv", b"\x1f", b"5\x7f", b"undefined",
    b"1e3x", b"[1,2", b'{"a":[}', b"\\u0035", b"5\\", b"\xff", b'"\\ud800\\u12"',
)  # fmt: skip
LONG_VALUES = (
    b"9" * 4097, b'"' + b"x" * 4094 + b'"', b'"' + b"x" * 4095 + b'"', b'"' + b"x" * 5000 + b'"',
    b"[" * 3000 + b"]" * 3000, b"[" * 2048 + b"]" * 2048,
)  # fmt: skip

BLANKS = (b"", b"", b"", b"", b" ", b"\n", b"\r\n\t ", b"  ")
STRUCTURAL = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\")
BYTES = (
    *STRUCTURAL, *STRUCTURAL, b"x", b"1", b"0", b"-", b"e", b".", b" ", b"\x00", b"\x01", b"\xff", b"\n", b"u", b"\x0b",
)  # fmt: skip
MARKS = (
    b"\xef\xbb\xbf", b"\xef\xbb\xbf", b"\xef\xbb", b"\xef", b"\xef\xbb\xbf\xef\xbb\xbf", b" \xef\xbb\xbf", b"\xff\xfe",
    b"\xfe\xff",
)  # fmt: skip
TRAILING = (
    b"99", b"{}", b"x", b"}", b"]", b",", b"\x00", b' "', b'{"priority":1}', b"null", b"  \n", b" " * 100, b"//",
    b"\xef\xbb\xbf", b" e5", b'""', b"\x1a", b"\n\n\t ", b"\xa0", b",5", b"\x0b",
)  # fmt: skip
BOUNDARIES = (16_384, 32_768, 65_536, 131_072, 262_144, 819_200, 1_048_576)
"""Where Envoy or the filter may cut a body, or treats longer ones in another way."""
