"""Random documents, cut at random places, through real Envoy, against Python's json.

The seed is fixed, so that a failure comes again; FUZZ_SEED and FUZZ_ROUNDS change the run.
"""

import json
import os
import random
import re
from collections.abc import Iterator

import pytest

from .conftest import MESSAGES, RENDER, SidecarFactory
from .oracle import assert_moved
from .sidecars import RunningSidecar
from .upstream import RecordingUpstream, answering, pairs_of, response
from .wire import TRANSPORTS, Http1, Http2, connect, priority

SEED = int(os.environ.get("FUZZ_SEED", "20261130"))
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "150"))

JSON = (b"Content-Type", b"application/json")
KEYS = (
    '"priority"', '"\\u0070riority"', '"prior\\u0069ty"', '"\\u0070\\u0072\\u0069\\u006f\\u0072\\u0069\\u0074\\u0079"',
)  # fmt: skip
NEAR_KEYS = (
    '"Priority"', '"priority "', '"priorit"', '"priorityy"', '"prio\\\\u0072ity"', '"\\"priority\\""', '"\\\\"', '""',
    '"a\\\\\\""', '"é☃"', '"\\ud83d\\ude00"', '"p\\nriority"',
)  # fmt: skip
SCALARS = (
    "0", "-0", "1", "9007199254740993", "-1.5e-300", "1E+400", "true", "false", "null", "NaN", "-Infinity", '""', '"x"',
    '"\\\\"', '"\\""', '"\\\\\\""', '"}"', '"]"', '",\\"priority\\":1"', '"\\u0022priority\\u0022"', '"\\ud800"',
    '"é☃😀"', '"priority"', '"{[:,"', '"\\\\\\\\"',
)  # fmt: skip
BLANKS = ("", "", "", " ", "\n", "\r\n\t ", "  ")
VALUES = ("5", "-7", "0", "-9223372036854775808", "9223372036854775807", "+12", "1_0")


def _is_refused(text: bytes) -> bool:
    """Whether vLLM would refuse this body as no JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return True
    return False


class Documents:
    """JSON texts of every awkward kind, from one seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def blank(self) -> str:
        return self.random.choice(BLANKS)

    def value(self, depth: int = 0) -> str:
        kind = self.random.random()
        if depth > 4 or kind < 0.55:
            return self.random.choice(SCALARS)
        if kind < 0.6:
            return '"' + self.random.choice(("a", "b", "\\\\")) * self.random.choice((1, 100, 3000)) + 'z"'
        count = self.random.choice((0, 1, 2, 3))
        if kind < 0.8:
            items = [self.blank() + self.value(depth + 1) + self.blank() for _ in range(count)]
            return "[" + ",".join(items) + (self.blank() if not items else "") + "]"
        return self.object(depth + 1, 0.3)

    def object(self, depth: int = 0, chance: float = 0.35) -> str:
        members = []
        for _ in range(self.random.choice((0, 1, 2, 3, 5))):
            keys = KEYS if self.random.random() < chance else (*NEAR_KEYS, '"k"', '"messages"')
            key, value = self.random.choice(keys), self.value(depth)
            members.append(self.blank() + key + self.blank() + ":" + self.blank() + value + self.blank())
        return "{" + (",".join(members) or self.blank()) + "}"

    def document(self) -> bytes:
        text = self.blank() + self.object() + self.blank()
        bom = "\ufeff" if self.random.random() < 0.1 else ""
        return (bom + text).encode()

    def malformed(self) -> bytes:
        """A document with bytes taken out, put in or changed, which Python's json refuses.

        It names no priority: an old value goes, whatever was wrong with it.
        """
        while True:
            text = bytearray((self.blank() + self.object(0, 0) + self.blank()).encode())
            if re.search(rb"riority|\\u00(69|70)", text):
                continue
            for _ in range(self.random.choice((1, 1, 2, 4))):
                at = self.random.randrange(len(text) + 1)
                cut = self.random.choice((0, 0, 1, 3))
                text[at : at + cut] = self.random.choice(
                    (b"", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"x", b"1")
                )
            if self.random.random() < 0.2:
                del text[self.random.randrange(len(text) + 1) :]
            if _is_refused(bytes(text)):
                return bytes(text)

    def cuts(self, body: bytes) -> list[int]:
        style = self.random.random()
        if style < 0.2 and len(body) < 400:
            return list(range(1, len(body)))
        return [self.random.randrange(len(body) + 1) for _ in range(self.random.choice((0, 1, 2, 5, 20)))]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _rounds(front: RunningSidecar, transport: str) -> Iterator[Http1 | Http2]:
    """A connection for each round; a new one every 25 rounds."""
    for start in range(0, ROUNDS, 25):
        with connect(front.address, transport) as client:
            for _ in range(start, min(start + 25, ROUNDS)):
                yield client


def _framing(transport: str) -> str:
    return "length" if transport.endswith("length") else "chunked"


def test_a_document_keeps_its_bytes_and_gets_its_priority(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str
) -> None:
    documents = Documents(f"{SEED} {transport}")
    for client in _rounds(front, transport):
        upstream.clear()
        body, value = documents.document(), documents.random.choice(VALUES)
        cuts = documents.cuts(body)
        answer = client.post(RENDER, [JSON, priority(value)], body, framing=_framing(transport), cuts=cuts)
        assert answer.status == 200, (body, cuts)
        assert_moved(upstream.only, body, int(value))


def test_malformed_text_stays_malformed(sidecar: SidecarFactory, upstream: RecordingUpstream, transport: str) -> None:
    documents = Documents(f"malformed {SEED} {transport}")
    front = sidecar(policy="on_unmovable: forward")
    for client in _rounds(front, transport):
        upstream.clear()
        body = documents.malformed()
        cuts = documents.cuts(body)
        answer = client.post(RENDER, [JSON, priority("5")], body, framing=_framing(transport), cuts=cuts)
        assert answer.status == 200, (body, cuts)
        seen = upstream.only.body
        assert _is_refused(seen), (body, cuts, seen)
        # Without a priority of its own, all that may have come to it is one member and white space behind it.
        if b"riority" not in body and b"\\u" not in body:
            trimmed = seen.rstrip(b" ")
            added = [trimmed.replace(member, b"", 1) for member in (b',"priority":5', b'"priority":5')]
            assert any(text.rstrip(b" ") == body.rstrip(b" ") for text in (trimmed, *added)), (body, seen)


def test_an_answer_keeps_its_bytes_and_gets_the_priority(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str
) -> None:
    documents = Documents(f"answer {SEED} {transport}")
    for client in _rounds(front, transport):
        upstream.clear()
        body = documents.document()
        pieces = [body[a:b] for a, b in _pairs([0, *sorted(set(documents.cuts(body))), len(body)]) if a < b]
        chunks = pieces if documents.random.random() < 0.5 else None
        upstream.handler = answering(response(body, chunks=chunks))
        answer = client.post(MESSAGES, [JSON, priority("-3")], b"{}", framing=_framing(transport))
        assert answer.status == 200, body
        before, after = (
            pairs_of(body.removeprefix(b"\xef\xbb\xbf")),
            pairs_of(answer.body.removeprefix(b"\xef\xbb\xbf")),
        )
        assert [repr(value) for key, value in after if key == "priority"], (body, answer.body)
        assert {repr(value) for key, value in after if key == "priority"} == {"-3"}
        kept = [pair for pair in after if pair[0] != "priority"]
        assert repr(kept) == repr([pair for pair in before if pair[0] != "priority"])


def _pairs(edges: list[int]) -> Iterator[tuple[int, int]]:
    return zip(edges, edges[1:], strict=False)


def test_noise_raises_no_error_in_the_script(
    front: RunningSidecar, upstream: RecordingUpstream, transport: str
) -> None:
    noise = random.Random(f"noise {SEED} {transport}")
    for client in _rounds(front, transport):
        upstream.clear()
        body = noise.choice((b"{", b"[", b"", b'{"', b"\xef\xbb\xbf")) + noise.randbytes(
            noise.choice((0, 1, 7, 100, 3000))
        )
        cuts = [noise.randrange(len(body) + 1) for _ in range(noise.choice((0, 1, 8)))]
        answer = client.post(RENDER, [JSON, priority("5")], body, framing=_framing(transport), cuts=cuts)
        assert answer.status in (200, 415), body
    assert not any(front.lua_errors().values())
