"""The request bodies of the benchmark: made here, the same at every run, no file to download."""

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
    "400KB": (_GENERATE, lambda: _generate(65_000, (",", ":")), "400 KB generate, 65,000 token ids"),
    "1MB": (_CHAT, lambda: images(2**20), "1 MB chat, base64 images"),
    "16MB": (_CHAT, lambda: images(2**24), "16 MB chat, base64 images"),
}
NAMES: tuple[str, ...] = tuple(_BODIES)


def body(name: str) -> Body:
    """The body of that name (see NAMES)."""
    route, build, what = _BODIES[name]
    return Body(name, route, build(), what)
