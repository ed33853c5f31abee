"""Generated and mutated documents. Each follows from a seed and its number, so that a failure can be repeated.

Mutations concentrate on what an editor of one member can get wrong: the bytes around the `priority` members, structural
bytes, truncation, trailing data, white space, byte-order marks, nesting, and chunk boundaries.
"""

import random
import re
from dataclasses import dataclass
from itertools import islice

from .filter_driver import FRAMINGS, Sent
from .pieces import (
    BLANKS,
    BOUNDARIES,
    BROKEN_KEYS,
    BROKEN_VALUES,
    BYTES,
    KEYS,
    LONG_VALUES,
    MARKS,
    NEAR_KEYS,
    ODD_SCALARS,
    SCALARS,
    STRUCTURAL,
    TRAILING,
    VALUES,
)  # fmt: skip

_INTERESTING = re.compile(rb"p?riority|\\u00")


@dataclass(frozen=True)
class Fuzzed:
    """A request to send, and the number of the document that it carries."""

    number: int
    sent: Sent


class Generator:
    """Documents and requests of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def request(self, number: int) -> Fuzzed:
        """Return the request of this number."""
        return Fuzzed(number, _Request(random.Random(f"{self.seed} {number}")).sent())


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    """Return `body` in pieces, cut before these offsets."""
    edges = [0, *sorted(set(cuts) & set(range(1, len(body)))), len(body)]
    return [body[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]


class _Request:
    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.chance = source.random
        self.choice = source.choice

    def sent(self) -> Sent:
        body = self.document()
        if self.chance() < 0.6:
            body = self.mutated(body)
        if self.chance() < 0.05:
            body = self.moved_to_a_boundary(body)
        return Sent(
            chunks=tuple(cut(body, self.cuts(body))),
            framing=self.choice(FRAMINGS),
            value=self.choice(VALUES),
            is_default=self.chance() < 0.1,
            place=self.choice(("managed", "managed", "managed", "mesh", "waypoint")),
        )

    # Valid documents, or nearly: a few values are such as some readers reject.

    def document(self) -> bytes:
        roll = self.chance()
        if roll < 0.03:
            text = self.blank() + self.value(0) + self.blank()
        else:
            text = self.blank() + self.object(0, 0.4) + self.blank()
        return b"\xef\xbb\xbf" + text if self.chance() < 0.04 else text

    def blank(self) -> bytes:
        if self.chance() < 0.01:
            return self.choice((b" ", b"\n", b"\t", b" \r\n")) * self.choice((10, 300, 5000))
        return self.choice(BLANKS)

    def value(self, depth: int) -> bytes:
        roll = self.chance()
        if depth > 3 or roll < 0.6:
            return self.choice(ODD_SCALARS if self.chance() < 0.06 else SCALARS)
        if roll < 0.63:
            piece = self.choice((b"a", b"\\\\", b'\\"', b"u", b"\\u0070", b"priority"))
            return b'"' + piece * self.choice((1, 50, 700)) + b'z"'
        count = self.choice((0, 1, 2, 3))
        if roll < 0.8:
            return b"[" + (b",".join(self.padded(self.value(depth + 1)) for _ in range(count)) or self.blank()) + b"]"
        if roll < 0.81:
            depth = self.choice((5, 100, 127, 128, 129, 300))
            return b"[" * depth + b"]" * depth
        return self.object(depth + 1, 0.2)

    def object(self, depth: int, share: float) -> bytes:
        members = []
        count = self.choice((0, 1, 1, 2, 3, 5))
        if depth == 0 and self.chance() < 0.004:
            count, share = self.choice((256, 257, 300)), 1.0
        for _ in range(count):
            key = self.choice(KEYS if self.chance() < share else NEAR_KEYS)
            members.append(self.padded(key) + b":" + self.padded(self.value(depth)))
        return b"{" + (b",".join(members) or self.blank()) + b"}"

    def padded(self, text: bytes) -> bytes:
        return self.blank() + text + self.blank()

    # Mutations.

    def mutated(self, body: bytes) -> bytes:
        for _ in range(self.choice((1, 1, 1, 2, 2, 4))):
            body = self.choice(_MUTATIONS)(self, body)
        return body

    def spot(self, body: bytes) -> int:
        """An offset, as a rule near a member of the name."""
        if self.chance() < 0.7:
            places = [found.start() for found in islice(_INTERESTING.finditer(body), 20)]
            if places:
                return min(max(self.choice(places) + self.random.randint(-6, 24), 0), len(body))
        return self.random.randint(0, len(body))

    def with_broken_member(self, body: bytes) -> bytes:
        """Insert a member with a malformed value or key at a place where a member can stand."""
        roll = self.chance()
        key = self.choice(BROKEN_KEYS if roll < 0.15 else KEYS)
        value = self.choice(BROKEN_VALUES if roll < 0.85 else ODD_SCALARS)
        if self.chance() < 0.06:
            value = self.choice(LONG_VALUES)
        if self.chance() < 0.1:
            value = self.choice((b"[%b]", b'{"a":%b}', b'[{"b":[%b]}]', b'["", %b , 1]')) % value
        member = self.padded(key) + b":" + self.padded(value)
        opening, closing = body.find(b"{"), body.rfind(b"}")
        if opening < 0 or closing < opening:
            return b"{" + member + b"}"
        inner = body[opening + 1 : closing].strip()
        if self.chance() < 0.5:
            return body[: opening + 1] + member + (b"," if inner else b"") + body[opening + 1 :]
        return body[:closing] + (b"," if inner else b"") + member + body[closing:]

    def with_byte(self, body: bytes) -> bytes:
        at = self.spot(body)
        return body[:at] + self.choice(BYTES) + body[at:]

    def without_bytes(self, body: bytes) -> bytes:
        at = self.spot(body)
        return body[:at] + body[at + self.choice((1, 1, 1, 2, 5)) :]

    def with_other_byte(self, body: bytes) -> bytes:
        at = self.spot(body)
        return body[:at] + self.choice(BYTES) + body[at + 1 :]

    def structural(self) -> bytes:
        return self.choice(STRUCTURAL)

    def with_structure_changed(self, body: bytes) -> bytes:
        places = [i for i, code in enumerate(body[:5000]) if code in b'"{}[],:\\']
        if len(places) < 2:
            return body
        at, other = sorted(self.random.sample(places, 2))
        roll = self.chance()
        if roll < 0.3:
            return body[:at] + body[at + 1 :]
        if roll < 0.5:
            return body[:at] + body[at : at + 1] + body[at:]
        if roll < 0.75:
            return body[:at] + body[other : other + 1] + body[at + 1 : other] + body[at : at + 1] + body[other + 1 :]
        return body[:at] + self.structural() + body[at + 1 :]

    def repeated_slice(self, body: bytes) -> bytes:
        at = self.spot(body)
        end = at + self.choice((1, 3, 10, 30))
        to = self.spot(body)
        return body[:to] + body[at:end] + body[to:]

    def truncated(self, body: bytes) -> bytes:
        return body[: self.spot(body)]

    def with_trailing_data(self, body: bytes) -> bytes:
        return body + self.choice(TRAILING)

    def with_blanks(self, body: bytes) -> bytes:
        at = self.spot(body)
        blanks = self.choice((b" ", b"\t", b"\n", b"\r", b" \n")) * self.choice((1, 5, 100, 100, 70_000))
        return body[:at] + blanks + body[at:]

    def with_mark(self, body: bytes) -> bytes:
        return self.choice(MARKS) + body

    def in_another_encoding(self, body: bytes) -> bytes:
        text = body.decode("utf-8", "replace")
        return text.encode(self.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")))

    def with_nesting(self, body: bytes) -> bytes:
        depth = self.choice((10, 127, 200, 1100, 3000))
        opened, closed = self.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"priority":', b"}]")))
        closed = closed * self.choice((depth, depth, depth - 1, depth + 1))
        nested = opened * depth + b"1" + closed
        if self.chance() < 0.3 and b"]" in nested:
            at = nested.rfind(b"]", 0, self.random.randint(1, len(nested)))
            nested = nested[:at] + b"}" + nested[at + 1 :]
        return self.insert_value(body, nested)

    def insert_value(self, body: bytes, value: bytes) -> bytes:
        member = self.choice((*KEYS, b'"k"', b'"k"')) + b":" + value
        at = body.find(b"{") + 1
        if at == 0:
            return body
        return body[:at] + member + (b"" if body[at:].lstrip()[:1] == b"}" else b",") + body[at:]

    def with_member_repeated(self, body: bytes) -> bytes:
        key = self.choice(KEYS)
        return self.insert_value(body, self.value(2)).replace(b'"k"', key, 1)

    # Documents that are long enough to be cut where Envoy or the filter cuts.

    def moved_to_a_boundary(self, body: bytes) -> bytes:
        """Put a long member before the interesting part, so that a boundary falls into it."""
        boundary = self.choice(BOUNDARIES if self.chance() < 0.3 else BOUNDARIES[:3])
        interesting = self.spot(body)
        opening = body.find(b"{")
        if opening < 0 or boundary < interesting + 100:
            return body
        length = boundary - interesting + self.random.randint(-3, 3)
        kind = self.chance()
        if kind < 0.25:
            pad = b'"pad":"' + b"x" * (length - 9) + b'",'
        elif kind < 0.5:
            pad = (b'"pad":[' + b"12345," * (length // 6))[: length - 4].rstrip(b",") + b"0],"
            pad += b" " * (length - len(pad))
        elif kind < 0.75:
            pad = b'"pad":"' + (b'\\"' * length)[: (length - 9) // 2 * 2] + b'",'
            pad += b" " * (length - len(pad))
        else:
            pad = b" " * length
        body = body[: opening + 1] + pad + body[opening + 1 :]
        if self.chance() < 0.2:
            end = body.rfind(b"}")
            body = body[:end] + b" " * self.choice((10, 70_000, 500_000)) + body[end:]
        return body

    def cuts(self, body: bytes) -> list[int]:
        roll = self.chance()
        if roll < 0.2 and len(body) < 400:
            return list(range(1, len(body)))
        if roll < 0.4:
            return []
        cuts = [self.spot(body) for _ in range(self.choice((1, 1, 2, 5, 20)))]
        if len(body) > 16_384 and roll < 0.8:
            cuts += list(range(16_384, len(body), 16_384))
        return cuts


_MUTATIONS = (
    _Request.with_broken_member, _Request.with_broken_member, _Request.with_broken_member, _Request.with_broken_member,
    _Request.with_byte, _Request.with_byte, _Request.without_bytes, _Request.without_bytes, _Request.with_other_byte,
    _Request.with_structure_changed, _Request.with_structure_changed, _Request.repeated_slice, _Request.truncated,
    _Request.with_trailing_data, _Request.with_blanks, _Request.with_mark, _Request.with_nesting,
    _Request.with_member_repeated, _Request.with_member_repeated, _Request.in_another_encoding,
)  # fmt: skip
