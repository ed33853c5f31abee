"""What vLLM says to hard bodies, paths and values: the ground the sidecar's rules stand on.

Each row is asked straight, through the sidecar without a header (where the answer has to be the same), and through the
sidecar with `X-Vllm-Priority: -10`.
"""

import gzip
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.queue_order import GENERATE, generate_request
from tests.e2e.render_requests import BODIES, CHAT, ROUTES

JSON = {"content-type": "application/json"}
HEADER = {"X-Vllm-Priority": "-10"}
APPLIED = "x-vllm-priority-applied"
BODY = json.dumps(BODIES[CHAT]).encode()


@dataclass(frozen=True)
class Row:
    """The priority, or (status, param), that comes back straight, and through the sidecar with the header."""

    content: bytes
    straight: int | tuple[int, str | None]
    with_header: int | tuple[int, str | None]


def having(priority: str) -> bytes:
    """The plain body with this text as its priority."""
    return BODY[:-1] + b', "priority": ' + priority.encode() + b"}"


REFUSED = (400, "body.priority")
UNREADABLE = (400, None)
"""vLLM: {"detail": "There was an error parsing the body"}."""

ROWS = {
    # Values. Whatever the body says, the header takes its place.
    **{
        f"priority {text}": Row(having(text), value, -10)
        for text, value in {
            "5": 5, '"5"': 5, '" 5 "': 5, '"1_000"': 1000, "5.0": 5, "1e3": 1000, "true": 1, "false": 0, "-0": 0,
            '1, "priority": 2': 2, '1, "\\u0070riority": 3': 3, '1, "PRIORITY": 3': 1,
            "9223372036854775807": 2**63 - 1, "-9223372036854775808": -(2**63),
        }.items()
    },
    **{
        f"priority {text}": Row(having(text), REFUSED, -10)
        for text in ("5.5", "null", '""', '"abc"', "[]", "{}", "1e30", "9223372036854775808")
    },
    # Only some readers accept it, and a second priority could hide after it: the sidecar rejects it.
    "priority NaN": Row(having("NaN"), REFUSED, (400, "x-vllm-priority")),
    # Bodies that vLLM takes, though a stricter parser would not.
    "white space around": Row(b" \n" + BODY + b"\r\n\t", 0, -10),
    "UTF-8 with BOM": Row(BODY.decode().encode("utf-8-sig"), 0, -10),
    "NaN elsewhere": Row(b'{"x": NaN, ' + BODY[1:], 0, -10),
    "lone surrogate": Row(BODY[:-1] + b', "x": "\\ud800"}', 0, -10),
    "UTF-16": Row(BODY.decode().encode("utf-16"), 0, (415, "x-vllm-priority")),
    "UTF-16-LE without BOM": Row(BODY.decode().encode("utf-16-le"), 0, (415, "x-vllm-priority")),
    "UTF-32": Row(BODY.decode().encode("utf-32"), 0, (415, "x-vllm-priority")),
    # Bodies that vLLM refuses: its own error is the better one, so the sidecar leaves the refusing to it.
    "empty": Row(b"", (400, "body"), (400, "body")),
    "null": Row(b"null", (400, "body"), (400, "body")),
    "list": Row(b"[]", (400, "body"), (400, "body")),
    "list of an object": Row(b'[{"priority": 1}]', (400, "body"), (400, "body")),
    "empty object": Row(b"{}", (400, "body.messages"), (400, "body.messages")),
    "invalid UTF-8": Row(BODY[:-1] + b', "x": "\xff"}', UNREADABLE, UNREADABLE),
    "nested 20,000 deep": Row(b"[" * 20_000 + b"]" * 20_000, UNREADABLE, UNREADABLE),
    "unknown model": Row(BODY.replace(b'"tiny"', b'"nope"'), (404, "model"), (404, "model")),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_body(row: Row, render_url: str, render_sidecar_url: str, client: httpx.Client) -> None:
    straight = client.post(render_url + CHAT, content=row.content, headers=JSON)
    assert said(straight) == row.straight, straight.text
    through = client.post(render_sidecar_url + CHAT, content=row.content, headers=JSON)
    assert same(through) == same(straight)
    with_header = client.post(render_sidecar_url + CHAT, content=row.content, headers={**JSON, **HEADER})
    assert said(with_header) == row.with_header, with_header.text


MALFORMED = {
    "data behind": BODY + b" x",
    "cut at the end": BODY[:-1],
    "cut early": b'{"model": ',
    "comma at the end": BODY[:-1] + b",}",
    "no value": BODY[:-1] + b', "x":}',
    "single quotes": BODY.replace(b'"', b"'"),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_malformed_json_is_refused_by_vllm(
    content: bytes, render_url: str, render_sidecar_url: str, client: httpx.Client
) -> None:
    """The sidecar learns of it last, after what was sent on: the place that vLLM's error names can be moved by that."""
    straight = client.post(render_url + CHAT, content=content, headers=JSON)
    through = client.post(render_sidecar_url + CHAT, content=content, headers=JSON)
    assert same(through) == same(straight)
    with_header = client.post(render_sidecar_url + CHAT, content=content, headers={**JSON, **HEADER})
    for answer in (straight, with_header):
        assert answer.status_code == 400
        assert "JSON decode error" in answer.json()["error"]["message"]


def test_gzip_body_is_refused_by_vllm_and_named_by_the_sidecar(
    render_url: str, render_sidecar_url: str, client: httpx.Client
) -> None:
    """vLLM decodes no body: with a priority in the header the sidecar says what the matter is."""
    headers = {**JSON, "content-encoding": "gzip"}
    content = gzip.compress(BODY)
    straight = client.post(render_url + CHAT, content=content, headers=headers)
    assert said(straight) == UNREADABLE
    assert same(client.post(render_sidecar_url + CHAT, content=content, headers=headers)) == same(straight)
    named = client.post(render_sidecar_url + CHAT, content=content, headers={**headers, **HEADER})
    assert said(named) == (415, "x-vllm-priority")
    assert named.headers[APPLIED] == "none; outcome=unsupported_encoding"


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        *((value, True) for value in ("application/json; charset=utf-8", "Application/JSON", "application/json;")),
        *((value, False) for value in ("text/json", "application/problem+json", "application/jsonx", "")),
    ],
)
def test_content_type(
    value: str, accepted: bool, render_url: str, render_sidecar_url: str, client: httpx.Client
) -> None:
    headers = {"content-type": value}
    straight = client.post(render_url + CHAT, content=BODY, headers=headers)
    assert said(straight) == (0 if accepted else (400, None))
    assert same(client.post(render_sidecar_url + CHAT, content=BODY, headers=headers)) == same(straight)
    with_header = client.post(render_sidecar_url + CHAT, content=BODY, headers={**headers, **HEADER})
    assert said(with_header) == (-10 if accepted else (415, "x-vllm-priority"))


@pytest.mark.parametrize(
    ("path", "straight", "with_header"),
    [
        ("/v1/chat/completions%2Frender", 0, -10),
        ("/v1/chat/completions/%72ender", 0, -10),
        ("/v1/chat/completions/render?x=1", 0, -10),
        ("//v1/chat/completions/render", (404, None), (404, None)),
        ("/V1/chat/completions/render", (404, None), (404, None)),
        ("/v1/chat/completions/render/", (307, None), (307, None)),
    ],
)
def test_path(
    path: str, straight: Any, with_header: Any, render_url: str, render_sidecar_url: str, client: httpx.Client
) -> None:
    """vLLM routes on the percent-decoded path, and so does the sidecar: no spelling of a route slips by."""
    assert said(client.post(render_url + path, content=BODY, headers=JSON)) == straight
    assert said(client.post(render_sidecar_url + path, content=BODY, headers={**JSON, **HEADER})) == with_header


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", ["0x10", "1e3", "5.0", "", "--5", "5, 6", "urgent", str(2**63)])
def test_what_is_no_priority_is_refused_in_vllms_shape(
    value: str, route: str, render_sidecar_url: str, client: httpx.Client
) -> None:
    refused = client.post(render_sidecar_url + route, json=BODIES[route], headers={"X-Vllm-Priority": value})
    assert said(refused) == (400, "x-vllm-priority")
    own = client.post(render_sidecar_url + CHAT, content=having("null"), headers=JSON).json()
    assert {key: type(member) for key, member in refused.json()["error"].items()} == {
        key: type(member) for key, member in own["error"].items()
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        generate_request(2, priority=5.5),
        generate_request(2, priority=None),
        generate_request(2, model="nope"),
        {"token_ids": [], "sampling_params": {}},
        {"token_ids": [99_999], "sampling_params": {}},
        [generate_request(2)],
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_generates_own_errors_arrive_unchanged(
    body: Any, engine_url: str, engine_sidecar_url: str, client: httpx.Client
) -> None:
    straight = client.post(engine_url + GENERATE, json=body)
    assert straight.is_client_error
    assert same(client.post(engine_sidecar_url + GENERATE, json=body)) == same(straight)


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/nothing", CHAT])
def test_other_traffic_passes_unchanged(
    path: str, render_url: str, render_sidecar_url: str, client: httpx.Client
) -> None:
    straight, through = (client.get(url + path, headers=HEADER) for url in (render_url, render_sidecar_url))
    assert APPLIED not in through.headers
    assert (through.status_code, set(through.headers)) == (straight.status_code, set(straight.headers))
    if path != "/v1/models":  # names a random id
        assert through.content == straight.content


def said(answer: httpx.Response) -> int | tuple[int, str | None]:
    """The priority of a GenerateRequest, or the status and the `param` of an error."""
    if answer.status_code == 200:
        return int(answer.json()["priority"])
    error = answer.json().get("error", {}) if answer.content else {}
    return answer.status_code, error.get("param")


def same(answer: httpx.Response) -> tuple[Any, ...]:
    """What a sidecar may not change: all but the date, a random id, and the sidecar's own header."""
    headers = {name: value for name, value in answer.headers.items() if name not in {"date", APPLIED}}
    content: Any = answer.content
    if answer.status_code == 200:
        content = {key: value for key, value in answer.json().items() if key != "request_id"}
    return answer.status_code, headers, content
