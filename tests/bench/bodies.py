"""The request bodies of the benchmark. They are generated, and the same in every run."""

import base64
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Place = Literal["front", "middle", "end"]
PLACES: tuple[Place, ...] = ("front", "middle", "end")

HEADER = "x-vllm-priority"
OTHER_ROUTE = "/v1/chat/completions"
"""A route that vLLM reads the header on itself: the filter leaves it alone."""


@dataclass(frozen=True)
class Body:
    """A JSON request body, the route it is for, and what the issue calls it."""

    name: str
    route: str
    data: bytes
    what: str

    def with_priority(self, place: Place, value: int = 7) -> bytes:
        """The same body with a `priority` member as the first, the middle or the last of its members."""
        members = list(json.loads(self.data).items())
        at = {"front": 0, "middle": len(members) // 2, "end": len(members)}[place]
        members.insert(at, ("priority", value))
        return _encoded(dict(members))


def _encoded(value: Any) -> bytes:
    # Clients differ: OpenAI's sends non-ASCII as it is, and compact separators.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _padded(size: int, build: Callable[[str], dict[str, Any]], text: str) -> bytes:
    """`build(text * n)` cut so that the encoded body is `size` bytes. `text` is ASCII without escapes."""
    room = size - len(_encoded(build("")))
    return _encoded(build((text * (room // len(text) + 1))[:room]))


def _completion() -> bytes:
    return _padded(
        100, lambda text: {"model": "tiny", "prompt": text, "max_tokens": 16, "temperature": 0.7}, "Say it. "
    )


def _chat_4k() -> bytes:
    def build(text: str) -> dict[str, Any]:
        return {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant. " * 20},
                {"role": "user", "content": text},
            ],
            "temperature": 0.7,
            "top_p": 0.95,
            "max_tokens": 256,
            "stream": False,
        }

    return _padded(4096, build, "Explain how a scheduler orders its waiting requests. ")


def _generate(count: int, separators: tuple[str, str]) -> bytes:
    ids = random.Random(count)
    value = {
        "request_id": "bench-1",
        "token_ids": [ids.randrange(151_000) for _ in range(count)],
        "sampling_params": {"temperature": 0.7, "max_tokens": 256, "seed": 42, "stop": [], "logit_bias": {}},
        "model": "tiny",
        "stream": False,
    }
    return json.dumps(value, separators=separators).encode()


_TURNS = (
    'He said: "the queue is {n} long"\nand then\tleft.\n',
    'def area(r):\n    return 3.14159 * r ** 2  # "round"\n',
    "C:\\models\\tiny\\weights-{n}.bin is missing\n",
    "Größe, naïve Übergänge, und – natürlich – Prüfsummen №{n}.\n",
    "優先度の高いリクエストを先に処理してください。{n}番目です。\n",
    "Приоритет запроса меньше — значит раньше. 🚀🚀\n",
    '{{"priority": {n}, "note": "inside a string"}}\n',
)


def _chat_200k() -> bytes:
    order = random.Random(200)
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a careful assistant.\n"}]
    size = 0
    while size < 199_000:
        text = "".join(order.choice(_TURNS).format(n=order.randrange(1000)) for _ in range(order.randrange(4, 20)))
        messages.append({"role": "assistant" if len(messages) % 2 == 0 else "user", "content": text})
        size += len(_encoded(messages[-1])) + 1
    return _encoded({"model": "tiny", "messages": messages, "temperature": 0.7, "max_tokens": 256, "stream": True})


_SHORT = (
    "Thanks, that helps.",
    "Can you check the second replica as well? It restarted {n} minutes ago.",
    'Yes. Replica {n} says "ready", and its queue is empty.',
    'The log says "connection reset by peer" {n} times since noon, always from the same pod.',
    "It's the probe: the timeout is one second, and the model needs {n} ms to answer.",
    "Please raise it to five seconds, roll it out to one replica first,\nand tell me the p99 after {n} requests.",
    "Done. The p99 went from {n} ms to half of that, and no request was lost during the rollout.",
    "ok\n",
)


def _chat_short() -> bytes:
    """A long conversation of 1,300 short messages: every message costs its braces, its keys and its quotes."""
    order = random.Random(1300)
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a careful assistant."}]
    while len(messages) < 1_300:
        sentences = (order.choice(_SHORT).format(n=order.randrange(1000)) for _ in range(order.choice((1, 2))))
        role = "assistant" if len(messages) % 2 == 0 else "user"
        messages.append({"role": role, "content": order.choice((" ", "\n")).join(sentences)})
    return _encoded({"model": "tiny", "messages": messages, "temperature": 0.7, "max_tokens": 256, "stream": True})


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": what} for key, what in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema, "strict": True}}


_TOOLS = [
    _tool("edit_file", "Replace a text in a file.", path="Path of the file", old="Text to replace", new="New text"),
    _tool("search", "Search the repository.", pattern="A regular expression", glob="Files to search"),
    _tool("run", "Run a command in the shell.", command="The command", working_directory="Where to run it"),
]


def _tool_call(order: random.Random) -> tuple[str, dict[str, Any], str]:
    """A call as an agent makes it: the tool's name, its arguments, and its result, which is text."""
    number = order.randrange(1000)
    path = f"src/service/worker_{number}.py"
    match order.randrange(3):
        case 0:
            old = f'    log.info("job %s: state=\\"%s\\"", job.id, state)\n    return {{"id": job.id, "n": {number}}}\n'
            new = f"    if not job:\n        raise ValueError(\"no job '{number}'\")\n{old}"
            return "edit_file", {"path": path, "old": old, "new": new}, json.dumps({"ok": True, "path": path})
        case 1:
            matches = [
                {"path": path, "line": order.randrange(900), "text": f'    "{word}": config["{word}"] or "{number}",'}
                for word in order.sample(("host", "port", "user", "token", "region", "queue", "retries"), 4)
            ]
            return "search", {"pattern": '"\\w+":\\s*config\\["', "glob": "**/*.py"}, json.dumps({"matches": matches})
        case _:
            command = (
                f'curl -s -H "Content-Type: application/json" -d "{{\\"id\\": {number}}}" http://127.0.0.1:8080/jobs'
            )
            # The response of a service holds JSON in a string, so the quotes in it are escaped three times.
            payload = json.dumps({"id": number, "tags": ["a", "b"], "owner": {"name": "x", "team": "y"}})
            output = json.dumps({"status": "queued", "payload": payload, "log": f'C:\\jobs\\{number}.log: "ok"\n'})
            return (
                "run",
                {"command": command, "working_directory": "/srv/app"},
                json.dumps({"stdout": output, "exit": 0}),
            )


def _chat_tools() -> bytes:
    """An agent's conversation: arguments and results of tools are JSON inside JSON strings.

    It has 25,000 quotes and 43,000 backslashes. It contains neither the text `priority` nor an escape of the form
    `\\u00`, so a filter can find out quickly that the member is missing. The cases that replace a member measure the
    full scan of the same text.
    """
    order = random.Random(7)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a coding agent. Use the tools.\n"},
        {"role": "user", "content": 'The service answers "500" for some jobs. Find out why, and fix it.\n'},
    ]
    size = 1_700
    while size < 200_000:
        tool, arguments, result = _tool_call(order)
        call_id = f"call_{order.randrange(16**12):012x}"
        function = {"name": tool, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls = [{"id": call_id, "type": "function", "function": function}]
        turn: list[dict[str, Any]] = [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]
        messages += turn
        size += len(_encoded(turn))
    value = {"model": "tiny", "messages": messages, "tools": _TOOLS, "tool_choice": "auto", "temperature": 0.7}
    return _encoded({**value, "max_tokens": 1024, "stream": True})


def images(size: int) -> bytes:
    """A chat of `size` bytes or a few less, nearly all of it four base64 images."""
    noise = random.Random(size)
    each = (size - 700) // 4 // 4 * 3
    parts: list[dict[str, Any]] = [{"type": "text", "text": 'What differs between these "pictures"?\n'}]
    for _ in range(4):
        url = "data:image/png;base64," + base64.b64encode(noise.randbytes(each)).decode()
        parts.append({"type": "image_url", "image_url": {"url": url, "detail": "high"}})
    return _encoded(
        {"model": "tiny", "messages": [{"role": "user", "content": parts}], "temperature": 0.7, "max_tokens": 256}
    )


_CHAT = "/v1/chat/completions/render"
_GENERATE = "/inference/v1/generate"

_BODIES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "100B": ("/v1/completions/render", _completion, "100 B completion"),
    "4KB": (_CHAT, _chat_4k, "4 KB chat"),
    "29KB": (_GENERATE, lambda: _generate(4_000, (", ", ": ")), "29 KB generate, 4,000 token ids"),
    "200KB": (_CHAT, _chat_200k, "200 KB chat, escapes and non-ASCII"),
    "170KB-short": (_CHAT, _chat_short, "170 KB chat, 1,300 short messages"),
    "200KB-tools": (_CHAT, _chat_tools, "200 KB chat, tool calls: JSON inside JSON strings"),
    "400KB": (_GENERATE, lambda: _generate(65_000, (",", ":")), "400 KB generate, 65,000 token ids"),
    "1MB": (_CHAT, lambda: images(2**20), "1 MB chat, base64 images"),
    "16MB": (_CHAT, lambda: images(2**24), "16 MB chat, base64 images"),
}
NAMES: tuple[str, ...] = tuple(_BODIES)


def body(name: str) -> Body:
    """The body of that name (see NAMES)."""
    route, build, what = _BODIES[name]
    return Body(name, route, build(), what)
