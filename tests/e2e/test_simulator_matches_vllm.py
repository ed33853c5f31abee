"""The simulator is compared with real vLLM route by route, so that the demo cannot drift from what vLLM does.

Both get the same bytes. The tests compare the status, the names of the headers, and the body: errors to the letter,
other responses by their structure (which members, of which types) and by the priorities in them. Tokens and texts
differ, because the simulator has no model.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from control_plane import simulator
from control_plane.vllm import Role
from tests.e2e.queue_order import GENERATE, generate_request
from tests.e2e.render_requests import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, ROUTES
from tests.e2e.vllm_server import MODEL_NAME

JSON = {"content-type": "application/json"}
CHAT_BODY = BODIES[CHAT]


@dataclass(frozen=True)
class Case:
    """One request, sent to a render server, an engine, or both."""

    name: str
    path: str
    content: bytes | Mapping[str, Any] | list[Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    roles: tuple[Role, ...] = ("render",)

    def send(self, client: httpx.Client, url: str) -> httpx.Response:
        content = self.content
        if not isinstance(content, bytes | None):
            content = json.dumps(content).encode()
        headers = {**(JSON if content is not None else {}), **self.headers}
        return client.request(self.method, url + self.path, content=content, headers=headers)


BOTH: tuple[Role, ...] = ("render", "engine")
ENGINE: tuple[Role, ...] = ("engine",)

PLAIN = [
    Case(f"{route} {headers} {members}", route, {**BODIES[route], **members}, headers, roles=BOTH)
    for route in ROUTES
    for headers in ({}, {"X-Vllm-Priority": "-10"})
    for members in ({}, {"priority": 4})
]

PRIORITIES = [
    Case(f"priority {text}", CHAT, json.dumps(CHAT_BODY)[:-1].encode() + b', "priority": ' + text.encode() + b"}")
    for text in (
        '"5"', '" 5 "', '"5.0"', '"1_000"', "5.0", "1e3", "true", "false", "-0", "1.0000",
        "9223372036854775807", "-9223372036854775808",
        "5.5", "null", '""', '"abc"', '"5.5"', "[]", "{}", "NaN", "Infinity", "1e30",
        "9223372036854775808", "-9223372036854775809",
        '1, "priority": 2', '1, "\\u0070riority": 3', '1, "PRIORITY": 3',
    )
]  # fmt: skip

WHOLE = json.dumps(CHAT_BODY).encode()
BODY_FORMS = [
    Case(f"body: {name}", CHAT, content)
    for name, content in {
        "empty": b"",
        "null": b"null",
        "list": b"[]",
        "list of a number": b"[1]",
        "text": b'"x"',
        "number": b"5",
        "empty object": b"{}",
        "cut": b"{",
        "data behind": WHOLE + b" x",
        "white space around": b" \n" + WHOLE + b"\n ",
        "nested 20,000 deep": b"[" * 20_000 + b"]" * 20_000,
        "NaN elsewhere": b'{"a": NaN, ' + WHOLE[1:],
        "lone surrogate": WHOLE[:-1] + b', "a": "\\ud800"}',
        "invalid UTF-8": WHOLE[:-1] + b', "a": "\xff"}',
        "NUL in a text": WHOLE[:-1] + b', "a": "\0"}',
        "UTF-8 with BOM": WHOLE.decode().encode("utf-8-sig"),
        "UTF-16": WHOLE.decode().encode("utf-16"),
        "UTF-16-BE without BOM": WHOLE.decode().encode("utf-16-be"),
        "UTF-32": WHOLE.decode().encode("utf-32"),
    }.items()
] + [
    Case("body: gzip", CHAT, gzip.compress(WHOLE, mtime=0), {"content-encoding": "gzip"}),
    Case("body: names gzip, is plain", CHAT, WHOLE, {"content-encoding": "gzip"}),
]

CONTENT_TYPES = [
    Case(f"content-type: {value}", CHAT, WHOLE, {"content-type": value})
    for value in (
        "application/json; charset=utf-8", "Application/JSON", "application/json;", "application/jsonx",
        "application/vnd.api+json", "text/json", "",
    )
]  # fmt: skip

PATHS = [
    Case(f"path: {path}", path, CHAT_BODY)
    for path in (
        "/v1/chat/completions%2Frender", "/v1/chat/completions/%72ender", "//v1/chat/completions/render",
        "/v1/chat/completions/render/", "/V1/chat/completions/render", "/v1/chat/completions/render?x=1",
        "/v1/nothing", "/v1/chat/completions",
    )
] + [
    Case(f"{method} {CHAT}", CHAT, method=method, roles=BOTH) for method in ("GET", "PUT", "DELETE", "HEAD")
]  # fmt: skip

REFUSED = [
    *(Case(f"{route}: unknown model", route, {**BODIES[route], "model": "nope"}, roles=BOTH) for route in ROUTES),
    *(Case(f"{route}: no model", route, {k: v for k, v in BODIES[route].items() if k != "model"}) for route in ROUTES),
    *(Case(f"{route}: {{}}", route, {}) for route in ROUTES),
    Case("chat: max_tokens 0", CHAT, {**CHAT_BODY, "max_tokens": 0}),
    Case("completions: no prompt", COMPLETIONS, {"model": MODEL_NAME}),
    Case("responses: previous_response_id", RESPONSES, {**BODIES[RESPONSES], "previous_response_id": "resp_1"}),
    Case("messages: no max_tokens", MESSAGES, {"model": MODEL_NAME, "messages": CHAT_BODY["messages"]}),
]

SHORT_PROMPT = {"token_ids": [5, 6, 7]}
GENERATES = [
    Case("generate", GENERATE, generate_request(8), roles=ENGINE),
    Case("generate with a header", GENERATE, generate_request(8), {"X-Vllm-Priority": "-10"}, roles=ENGINE),
    Case("generate with a priority", GENERATE, generate_request(8, priority=-10), roles=ENGINE),
    Case("generate with a model", GENERATE, generate_request(8, model=MODEL_NAME), roles=ENGINE),
    Case("generate: stream", GENERATE, generate_request(8, stream=True), roles=ENGINE),
    Case(
        "generate: stream with usage",
        GENERATE,
        generate_request(8, stream=True, stream_options={"include_usage": True}),
        roles=ENGINE,
    ),
    Case("generate: text", GENERATE, generate_request(8, output_mode="text"), roles=ENGINE),
    Case("generate: {}", GENERATE, {}, roles=ENGINE),
    Case("generate: no token ids", GENERATE, {"token_ids": [], "sampling_params": {}}, roles=ENGINE),
    Case("generate: negative token id", GENERATE, {"token_ids": [-1], "sampling_params": {}}, roles=ENGINE),
    Case("generate: unknown token id", GENERATE, {"token_ids": [99_999], "sampling_params": {}}, roles=ENGINE),
    Case("generate: unknown model", GENERATE, generate_request(8, model="nope"), roles=ENGINE),
    Case("generate: priority 5.5", GENERATE, generate_request(8, priority=5.5), roles=ENGINE),
    Case("generate: priority null", GENERATE, generate_request(8, priority=None), roles=ENGINE),
    Case("generate: priority too large", GENERATE, generate_request(8, priority=2**63), roles=ENGINE),
    Case("generate: stream, refused", GENERATE, generate_request(8, stream=True, priority=2**63), roles=ENGINE),
    Case("generate: a list", GENERATE, [generate_request(8)], roles=ENGINE),
    Case("generate: text/plain", GENERATE, generate_request(8), {"content-type": "text/plain"}, roles=ENGINE),
    Case("generate on a render server", GENERATE, generate_request(8)),
    Case("GET generate", GENERATE, method="GET", roles=ENGINE),
]

GENERATED = {"request_id": "g-1", "choices": [{"index": 0, "token_ids": [20, 21, 22], "finish_reason": "length"}]}
CHUNK = {"request_id": "g-1", "choices": [{"index": 0, "token_ids": [20], "finish_reason": None}]}
DERENDER_CHAT, DERENDER_COMPLETIONS = "/v1/chat/completions/derender", "/v1/completions/derender"
DERENDERS = [
    Case("derender chat", DERENDER_CHAT, {"generate_response": GENERATED, "prompt_tokens": 5}, roles=BOTH),
    Case("derender completions", DERENDER_COMPLETIONS, {"generate_responses": [GENERATED], "prompt_tokens": [5]}),
    Case("derender chat: stream", DERENDER_CHAT, {"stream": True, "generate_chunk": CHUNK}),
    Case("derender completions: stream", DERENDER_COMPLETIONS, {"stream": True, "generate_chunk": CHUNK}),
    Case("derender chat: {}", DERENDER_CHAT, {}),
    Case("derender completions: no responses", DERENDER_COMPLETIONS, {"generate_responses": []}),
    Case(
        "derender completions: counts", DERENDER_COMPLETIONS, {"generate_responses": [GENERATED], "prompt_tokens": []}
    ),
    Case("derender chat: unknown model", DERENDER_CHAT, {"generate_response": GENERATED, "model": "nope"}),
]

COUPLED_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT_BODY, "ignore_eos": True},
    "/v1/completions": {"model": MODEL_NAME, "prompt": "The quick", "max_tokens": 8, "ignore_eos": True},
    "/v1/messages": BODIES[MESSAGES],
}
COUPLED = [
    *(
        Case(f"{path} X-Vllm-Priority: {value}", path, body, {"X-Vllm-Priority": value}, roles=ENGINE)
        for path, body in COUPLED_BODIES.items()
        for value in ("-10", "urgent")
    ),
    *(Case(f"{path} on a render server", path, body) for path, body in COUPLED_BODIES.items()),
    Case(
        "chat: a header that no engine can hold",
        "/v1/chat/completions",
        CHAT_BODY,
        {"X-Vllm-Priority": str(2**64)},
        roles=ENGINE,
    ),
    Case("/v1/chat/completions: unknown model", "/v1/chat/completions", {**CHAT_BODY, "model": "nope"}, roles=ENGINE),
]

AROUND = [
    Case(f"GET {path}", path, method="GET", roles=BOTH)
    for path in ("/health", "/version", "/v1/models", "/ping", "/server_info?config_format=json")
]

CASES = [
    *PLAIN, *PRIORITIES, *BODY_FORMS, *CONTENT_TYPES, *PATHS, *REFUSED, *GENERATES, *DERENDERS, *COUPLED, *AROUND,
]  # fmt: skip


@pytest.fixture(scope="module")
def simulators() -> Iterator[dict[Role, str]]:
    """A simulated render server and a simulated engine, configured like the real ones."""
    render = simulator.SimulatorSettings(kind="render", model=MODEL_NAME)
    engine = simulator.SimulatorSettings(kind="engine", model=MODEL_NAME)
    with simulator.run(render) as render_url, simulator.run(engine) as engine_url:
        yield {"render": render_url, "engine": engine_url}


@pytest.fixture(scope="module")
def real(render_url: str, engine_url: str) -> dict[Role, str]:
    return {"render": render_url, "engine": engine_url}


@pytest.mark.parametrize(
    ("role", "case"), [pytest.param(role, case, id=f"{role}: {case.name}") for case in CASES for role in case.roles]
)
def test_the_simulator_responds_like_vllm(
    role: Role, case: Case, real: dict[Role, str], simulators: dict[Role, str], client: httpx.Client
) -> None:
    simulated, expected = (described(case.send(client, urls[role])) for urls in (simulators, real))
    assert not differences(simulated, expected)


@pytest.mark.parametrize("role", BOTH)
def test_the_simulator_has_vllms_queue_metrics(role: Role, real: dict[Role, str], simulators: dict[Role, str]) -> None:
    """The metrics that show the queue, with their types and labels. A render server has none of them."""
    families = {url: queue_metrics(url) for url in (real[role], simulators[role])}
    assert families[simulators[role]] == families[real[role]]
    assert bool(families[real[role]]) == (role == "engine")


def described(response: httpx.Response) -> dict[str, Any]:
    """Return what must be the same. If it differs, the test shows both."""
    media_type = response.headers.get("content-type", "").partition(";")[0]
    found: dict[str, Any] = {
        "status": response.status_code,
        "headers": sorted(set(response.headers) - {"date"}),
        "media type": media_type,
    }
    if media_type == "text/event-stream":
        found["events"] = _events(response.text)
    elif media_type == "application/json" and response.content:
        document = response.json()
        found["body"] = document if response.is_error else structure(document)
        found["priorities"] = _priorities(document)
    else:
        found["body"] = response.text
    if "location" in response.headers:
        found["location"] = httpx.URL(response.headers["location"]).path
    return found


def differences(simulated: Any, expected: Any, where: str = "") -> list[str]:
    """Return the differences, one line each, so that a failure reads as a list of what to fix in the simulator."""
    if isinstance(simulated, dict) and isinstance(expected, dict):
        missing = [f"{where}.{key}: missing, vLLM: {expected[key]!r}" for key in expected.keys() - simulated.keys()]
        extra = [f"{where}.{key}: {simulated[key]!r}, not in vLLM's" for key in simulated.keys() - expected.keys()]
        same = [key for key in expected if key in simulated]
        return [
            *missing,
            *extra,
            *(line for k in same for line in differences(simulated[k], expected[k], f"{where}.{k}")),
        ]
    if isinstance(simulated, list) and isinstance(expected, list) and len(simulated) == len(expected):
        pairs = enumerate(zip(simulated, expected, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{where}[{index}]")]
    return [] if simulated == expected else [f"{where}: {simulated!r}, vLLM: {expected!r}"]


def structure(value: Any) -> Any:
    """Return the members and the types of their values. A list is represented by its first item."""
    if isinstance(value, dict):
        return {key: structure(member) for key, member in value.items()}
    if isinstance(value, list):
        return [structure(value[0])] if value else []
    return type(value).__name__


def _priorities(document: Any) -> list[Any]:
    items = document if isinstance(document, list) else [document]
    return [item.get("priority") for item in items if isinstance(item, dict)]


def _events(text: str) -> list[Any]:
    """Return the structure of each event without repeats: vLLM puts as many tokens into an event as it has ready."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        names = [line for line in block.splitlines() if line.startswith("event:")]
        data = "".join(line[5:].strip() for line in block.splitlines() if line.startswith("data:"))
        if data:
            event = [names, data if data == "[DONE]" else structure(json.loads(data))]
            if not found or found[-1] != event:
                found.append(event)
    return found


QUEUE_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:request_queue_time_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:num_preemptions_total",
)


def queue_metrics(url: str) -> set[tuple[str, str, str]]:
    """Return (name, type, label names) of the metrics that show the queue. Bucket bounds are left out."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    found = set()
    for name, labels in re.findall(r"^([^#{\s]+)\{([^}]*)\} ", text, re.MULTILINE):
        family = re.sub(r"_(bucket|count|sum)$", "", name)
        if family in QUEUE_METRICS:
            found.add((name, types.get(family, ""), ",".join(sorted(re.findall(r"(\w+)=\"", labels)))))
    return found
