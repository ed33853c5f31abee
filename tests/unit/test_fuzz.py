"""Malformed and valid documents through the whole filter in this process: fixed cases, then generated ones.

The seed of the generated ones is fixed here. `make fuzz` takes another one each time, and runs for as long as wanted.
"""

from collections.abc import Callable

import pytest

from control_plane import explain
from tests.fuzz.campaign import as_source, check, report, search
from tests.fuzz.cases import CASES
from tests.fuzz.filter_driver import Sent
from tests.fuzz.lua_instructions import counted

SEED, DOCUMENTS = 20261130, 1500


@pytest.mark.parametrize("sent", CASES, ids=range(len(CASES)))
def test_a_fixed_case_keeps_every_property(sent: Sent) -> None:
    assert not check(sent), as_source(sent)


def test_generated_and_mutated_documents_keep_every_property() -> None:
    count, failures = search(SEED, range(DOCUMENTS))
    assert count == DOCUMENTS
    assert not failures, f"{len(failures)} violations, among them:\n{report(SEED, failures)}"


# Each is a body that is sent one byte at a time, and grows with its argument.
TRICKLES: dict[str, Callable[[int], list[bytes]]] = {
    "white space after a comma": lambda count: [b'{"priority":1', b",", *[b" "] * count, b'"a":2}'],
    "white space before a value": lambda count: [b'{"priority":', *[b" "] * count, b"1}"],
    "a key": lambda count: [b'{"', *[b"p"] * count, b'":1}'],
    "a key of escapes": lambda count: [b'{"', *[b"\\", b"u", b"0", b"0", b"7", b"0"] * (count // 6), b'":1}'],
    "backslashes": lambda count: [b'{"a":"', *[b"\\", b"\\"] * (count // 2), b'"}'],
    "a number": lambda count: [b'{"priority":', *[b"9"] * count, b"}"],
    "brackets": lambda count: [b'{"priority":', *[b"["] * count],
    "white space after the object": lambda count: [b'{"priority":1}', *[b"\n"] * count],
    "nothing but white space": lambda count: [b" "] * count,
    "members": lambda count: [b"{", *[b'"a":1,'] * count, b'"b":2}'],
}


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("name", TRICKLES)
def test_a_body_in_single_bytes_takes_time_in_proportion_to_its_length(
    name: str, framing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trickle = TRICKLES[name]
    pad = [b'{"pad":"' + b"x" * 900_000 + b'",'] if framing == "length" else []
    counts = []
    for size in (1500, 6000):
        chunks = trickle(size)
        if pad:  # a body that is long from its start is edited in another way, if there is one
            chunks = [*pad, chunks[0].lstrip(b"{ "), *chunks[1:]]
        counts.append(counted(monkeypatch, explain, Sent(chunks, framing=framing, value="-9223372036854775808")))  # type: ignore[arg-type]
    assert counts[1] < 8 * counts[0], f"four times the bytes took {counts[1] / counts[0]:.1f} times the instructions"
