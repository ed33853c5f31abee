"""What `make soak` sends, and that it sees when something else arrives."""

import dataclasses

import pytest

from tests.integration.upstream import Request
from tests.reliability.soak import Plan, plan, problem

PLANS = [plan(number, seed=1) for number in range(300)]


def arrived(plan: Plan, body: bytes) -> Request:
    return Request("POST", plan.target, "HTTP/1.1", b"", [], "length", len(body), 1, body)


def of_kind(kind: str) -> Plan:
    return next(one for one in PLANS if one.kind == kind and len(one.body) < 10_000)


def test_a_seed_gives_the_same_requests_again() -> None:
    assert PLANS[:50] == [plan(number, seed=1) for number in range(50)]
    assert PLANS[:50] != [plan(number, seed=2) for number in range(50)]


def test_the_requests_are_mixed() -> None:
    assert {one.kind for one in PLANS} == {"plain", "body", "header", "class", "both", "malformed", "invalid"}
    assert len({(one.policy, one.target, one.transport, one.keep) for one in PLANS}) == 2 * 3 * 4 * 2
    assert min(len(one.body) for one in PLANS) < 200
    assert max(len(one.body) for one in PLANS) > 3_000_000


def test_an_invalid_value_must_be_rejected() -> None:
    invalid = of_kind("invalid")
    assert problem(invalid, 400, []) == ""
    assert problem(invalid, 200, [arrived(invalid, invalid.body)]) == "status 200, 1 reached the upstream"


def test_a_request_must_arrive_once() -> None:
    header = of_kind("header")
    right = arrived(header, header.body[:-1] + b',"priority":%d}' % (header.priorities or [0])[0])
    assert problem(header, 200, [right]) == ""
    assert problem(header, 200, []) == "status 200, 0 reached the upstream"
    assert problem(header, 200, [right, right]) == "status 200, 2 reached the upstream"
    assert problem(header, 503, [right]) == "status 503, 1 reached the upstream"


@pytest.mark.parametrize(
    ("kind", "before", "after", "expected"),
    [
        ("header", b"{", b'{"priority":12345,', "priority [12345] instead of "),
        ("header", b"{", b"{ ", "priority [] instead of "),
        ("body", b'"model":"m"', b'"model":"n"', "another member than priority was changed"),
        ("malformed", b"{", b"{ ", "a malformed body was changed"),
    ],
)
def test_a_body_that_arrives_otherwise_is_wrong(kind: str, before: bytes, after: bytes, expected: str) -> None:
    sent = of_kind(kind)
    assert problem(sent, 200, [arrived(sent, sent.body.replace(before, after, 1))]).startswith(expected)


def test_a_header_or_bytes_that_are_left_are_wrong() -> None:
    body = of_kind("body")
    right = arrived(body, body.body)
    assert problem(body, 200, [right]) == ""
    sent_on = dataclasses.replace(right, headers=[(b"x-vllm-priority", b"5")])
    assert problem(body, 200, [sent_on]) == "the header was sent on"
    assert problem(body, 200, [dataclasses.replace(right, surplus=b"x")]) == "1 bytes more than the length"
