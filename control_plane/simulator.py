"""vLLM's contract in small: the routes, answers, errors and queue that a priority meets, without a model.

For the demo and for quick tests. It follows vLLM 0.32.0 (vllm/entrypoints/scale_out, vllm/v1/core/sched); the
end-to-end tests hold the two against each other, so that this cannot drift. Text is one token a byte.
"""

import asyncio
import codecs
import heapq
import itertools
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.errors import CheckFailed
from control_plane.policy import INT64_MAX, INT64_MIN, RENDER_ROUTES

PRIORITY_HEADER = "X-Vllm-Priority"
GENERATE_ROUTE = "/inference/v1/generate"
DERENDER_ROUTES = ("/v1/chat/completions/derender", "/v1/completions/derender")

# Prefixes behind --api-key: vllm/entrypoints/serve/middleware/authenticate.py.
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_SCALE_OUT_OFF = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."

# Token ids: 0 to 2 are special, the rest are bytes.
_END, _TURN, _FIRST_BYTE = 0, 1, 3
_VOCABULARY = _FIRST_BYTE + 256
_REPLY = b" The quick brown fox jumps over the lazy dog."


@dataclass(frozen=True)
class SimulatorSettings:
    """One simulated server.

    kind: "render" is `vllm launch render`, "engine" is `vllm serve`. scale_out: `--enable-scale-out` (an engine's;
    a render server always has its routes). scheduling: `--scheduling-policy`. slots: `--max-num-seqs`.
    tokens_per_second: of each running request. dev_mode: VLLM_SERVER_DEV_MODE=1.
    """

    kind: Literal["render", "engine"] = "engine"
    scale_out: bool = True
    scheduling: Literal["priority", "fcfs"] = "priority"
    slots: int = 1
    tokens_per_second: float = 400.0
    api_key: str | None = None
    dev_mode: bool = False
    version: str = "0.32.0"
    model: str = "simulated"
    max_model_len: int = 4096


class Slots:
    """The scheduler's queue: `count` requests run, the others wait by (priority, arrival), or by arrival alone.

    A request that runs is never evicted by one that waits: vllm/v1/core/sched/request_queue.py.
    """

    def __init__(self, count: int, by_priority: bool) -> None:
        self.running = 0
        self._count = count
        self._by_priority = by_priority
        self._arrivals = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(not turn.done() for _, _, turn in self._queue)

    @asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[None]:
        """Wait for a slot, hold it, give it on. Whoever is cancelled while waiting leaves the queue."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority if self._by_priority else 0, next(self._arrivals), turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.running -= 1
            turn.cancel()
            self._admit()

    def _admit(self) -> None:
        while self._queue and (self._queue[0][2].done() or self.running < self._count):
            turn = heapq.heappop(self._queue)[2]
            if not turn.done():
                self.running += 1
                turn.set_result(None)


# ---- bodies: the fields of vLLM's that a priority test can meet; the others are accepted and ignored

Priority = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
TokenIds = list[Annotated[int, Field(ge=0)]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = False
    n: int = 1
    ignore_eos: bool = False

    @property
    def asked_tokens(self) -> int | None:
        return None

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt."""
        raise NotImplementedError


class ChatCompletionRequest(_Body):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Priority = 0

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompts(self) -> list[list[int]]:
        return [_chat_tokens(self.messages)]


class CompletionRequest(_Body):
    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    max_tokens: int | None = 16
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Priority = 0

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        items: Any = self.prompt if several else [self.prompt]
        return [_text_tokens(item) if isinstance(item, str) else item for item in items]


class ResponsesRequest(_Body):
    input: str | list[Any]
    request_id: str = ""
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    cache_salt: str | None = None
    priority: Priority = 0

    @model_validator(mode="before")
    @classmethod
    def _name(cls, data: Any) -> Any:
        return {"request_id": f"resp_{_random_id()}", **data} if isinstance(data, dict) else data

    @property
    def asked_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def prompts(self) -> list[list[int]]:
        messages = self.input if isinstance(self.input, list) else [{"role": "user", "content": self.input}]
        return [_chat_tokens(messages)]


class AnthropicMessagesRequest(_Body):
    """Has no `priority`: whatever the body says is ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int

    @property
    def stream_options(self) -> dict[str, Any]:
        """What vLLM makes of a streamed message."""
        return {"include_usage": True, "continuous_usage_stats": True}

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[list[int]]:
        return [_chat_tokens(self.messages)]


class SamplingParams(BaseModel):
    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = 16
    n: int = 1
    ignore_eos: bool = False


class GenerateRequest(BaseModel):
    request_id: str = Field(default_factory=lambda: _random_id())
    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams
    model: str | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    cache_salt: str | None = None
    priority: Priority = 0

    @field_validator("token_ids")
    @classmethod
    def _not_negative(cls, token_ids: list[int]) -> list[int]:
        if any(token < 0 for token in token_ids):
            raise ValueError("token_ids must not contain negative values")
        return token_ids


class _Choice(BaseModel):
    index: int
    token_ids: TokenIds | None = None
    finish_reason: str | None = None


class _Generated(BaseModel):
    request_id: str = Field(default_factory=lambda: _random_id())
    choices: list[_Choice]


class DerenderChatRequest(BaseModel):
    stream: Literal[False] = False
    model: str | None = None
    generate_response: _Generated
    prompt_tokens: int | None = None


class DerenderChatStreamRequest(BaseModel):
    stream: Literal[True]
    model: str | None = None
    generate_chunk: _Generated
    stream_state: dict[str, Any] | None = None
    prompt_tokens: int | None = None


class DerenderCompletionRequest(BaseModel):
    stream: Literal[False] = False
    model: str | None = None
    generate_responses: list[_Generated]
    prompt_tokens: list[int] | None = None

    @model_validator(mode="after")
    def _one_count_each(self) -> "DerenderCompletionRequest":
        if self.prompt_tokens is not None and len(self.prompt_tokens) != len(self.generate_responses):
            given, wanted = len(self.prompt_tokens), len(self.generate_responses)
            raise ValueError(f"prompt_tokens length ({given}) must equal generate_responses length ({wanted})")
        return self


class DerenderCompletionStreamRequest(BaseModel):
    stream: Literal[True]
    model: str | None = None
    generate_chunk: _Generated
    stream_state: dict[str, Any] | None = None
    prompt_tokens: int | None = None


# ---- errors, in vLLM's shapes


class _VllmError(Exception):
    """Answered as vLLM answers: {"error": {message, type, param, code}}."""

    def __init__(self, message: str, kind: str = "BadRequestError", code: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _vllm_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, _VllmError)
    return JSONResponse(error.body, status_code=error.code)


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    """400, never 422. Values are shown shortened, as vllm/entrypoints/serve/exception_handling does."""
    assert isinstance(error, RequestValidationError)
    problems = [_problem(item) for item in error.errors()]
    title = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}:"
    lines = [title, *(f"  {item}" for item in problems[:10])]
    if len(problems) > 10:
        lines.append(f"  ...and {len(problems) - 10} more errors")
    first = problems[0]
    body = _VllmError("\n".join(lines), "Bad Request", 400, first["loc"] if isinstance(first, dict) else None).body
    return JSONResponse(body, status_code=400)


def _problem(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    if item["loc"] == ("body",) and item.get("input") is None:
        # FastAPI's answer to a null body changed after the version that vLLM 0.32 uses.
        item = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
    parts = [str(part) for part in item["loc"]]
    named = [part for part in parts if not re.search(r"[\[\]{}()]", part) and part not in {"str", "int", "list"}]
    return {**item, "loc": ".".join(named or parts), "input": _short(item.get("input"))}


def _short(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else text[:200] + "...[truncated]"


async def _json_only(request: Request) -> None:
    if request.headers.get("content-type", "").lower().split(";", maxsplit=1)[0] != "application/json":
        raise RequestValidationError(errors=["Unsupported Media Type: Only 'application/json' is allowed"])


class _Authentication:
    """`--api-key`: a bearer token on the guarded prefixes."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"].startswith(_GUARDED)
        if guarded:
            headers = dict(reversed(scope["headers"]))
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(token, self._api_key):
                await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


# ---- tokens


def _random_id() -> str:
    return secrets.token_hex(8)


def _text_tokens(text: str) -> list[int]:
    return [_FIRST_BYTE + byte for byte in text.encode("utf-8", "surrogatepass")]


def _chat_tokens(messages: list[Any]) -> list[int]:
    tokens: list[int] = []
    for message in [*messages, {"role": "assistant", "content": ""}]:
        content = message.get("content", "") if isinstance(message, dict) else message
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        role = message.get("role", "user") if isinstance(message, dict) else "user"
        tokens += [_TURN, *_text_tokens(f"{role}\n{content}")]
    return tokens


def _bytes(tokens: list[int]) -> bytes:
    return bytes(token - _FIRST_BYTE for token in tokens if token >= _FIRST_BYTE)


def _text(tokens: list[int]) -> str:
    return _bytes(tokens).decode("utf-8", "replace")


@dataclass(frozen=True)
class _Job:
    """What to generate: `choices` times `tokens` tokens, after `prompt` tokens of prompt."""

    request_id: str
    prompt: int
    tokens: int
    choices: int
    finish: str
    priority: int

    @property
    def reply(self) -> list[int]:
        text = itertools.islice(itertools.cycle(_REPLY), self.tokens)
        tokens = [_FIRST_BYTE + byte for byte in text]
        return [*tokens[:-1], _END] if self.finish == "stop" else tokens


class _Server:
    """The handlers, over one settings object and one queue."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self.settings = settings
        self.slots = Slots(settings.slots, settings.scheduling == "priority")
        self.registry = CollectorRegistry()
        if settings.kind == "engine":
            self._metrics()

    def _metrics(self) -> None:
        """The gauges and counters of vllm/v1/metrics/loggers.py that show the queue."""
        names, labels = ["engine", "model_name"], ("0", self.settings.model)
        gauges: tuple[tuple[str, str, Callable[[], int]], ...] = (
            ("running", "Number of requests in model execution batches.", lambda: self.slots.running),
            ("waiting", "Number of requests waiting to be processed.", lambda: self.slots.waiting),
        )
        for name, text, read in gauges:
            gauge = Gauge(f"vllm:num_requests_{name}", text, names, registry=self.registry)
            gauge.labels(*labels).set_function(read)
        preempted = Counter("vllm:num_preemptions", "Cumulative number of preemption.", names, registry=self.registry)
        preempted.labels(*labels)
        queued = Histogram("vllm:request_queue_time_seconds", "Time in WAITING phase.", names, registry=self.registry)
        self._queue_time = queued.labels(*labels)

    # -- what every handler asks

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            message = f"The model `{name}` does not exist. Valid aliases: {self.settings.model}."
            raise _VllmError(message, "NotFoundError", 404, "model")

    def room(self, asked: int | None, prompt: int) -> int:
        """max_tokens: what was asked for, bounded by the context that is left."""
        left = self.settings.max_model_len - prompt
        if left < 0:
            longest = self.settings.max_model_len
            raise _VllmError(f"Input length ({prompt}) exceeds model's maximum context length ({longest}).")
        if asked is not None and asked < 1:
            message = f"max_tokens must be at least 1, got {asked}. (parameter=max_tokens, value={asked})"
            raise _VllmError(message, param="max_tokens")
        return left if asked is None else min(left, asked)

    def job(self, request_id: str, prompt: int, params: SamplingParams, priority: int) -> _Job:
        if params.n > self.settings.slots:
            message = f"sampling_params.n must be at most the server's max_num_seqs ({self.settings.slots})"
            raise _VllmError(f"{message}, got {params.n}.")
        tokens, sentence = self.room(params.max_tokens, prompt), len(_REPLY) + 1
        ends = not params.ignore_eos and sentence <= tokens
        return _Job(request_id, prompt, sentence if ends else tokens, params.n, "stop" if ends else "length", priority)

    async def steps(self, job: _Job) -> AsyncGenerator[tuple[int, bool], None]:
        """(token, whether it is the last), one at a time, once the request has a slot."""
        arrived = time.monotonic()
        async with self.slots.slot(job.priority):
            self._queue_time.observe(time.monotonic() - arrived)
            reply = job.reply
            for index, token in enumerate(reply, 1):
                await asyncio.sleep(1 / self.settings.tokens_per_second)
                yield token, index == len(reply)

    async def all_steps(self, job: _Job) -> list[int]:
        return [token async for token, _ in self.steps(job)]

    # -- render

    def rendered(self, body: Any, prompt: list[int], request_id: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        """A GenerateRequest as vLLM dumps it: every field, null where nothing was asked."""
        params = {
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
            "top_p": 1.0, "min_p": 0.0, "stop": [], "stop_token_ids": [],
            "max_tokens": self.room(body.asked_tokens, len(prompt)), "output_kind": 1 if body.stream else 2,
            "skip_clone": True, **extra, "bad_words": [], "skip_reading_prefix_cache": False,
        }  # fmt: skip
        if body.ignore_eos:
            params["ignore_eos"] = True
        options = getattr(body, "stream_options", None) if body.stream else None
        return {
            "request_id": request_id, "token_ids": prompt, "token_offsets": None, "features": None,
            "content_parts": None, "sampling_params": params, "model": body.model, "reasoning_ended": None,
            "reasoning_parser_kwargs": None, "return_token_ids": None, "output_mode": "tokens",
            "stream": bool(body.stream), "stream_options": options, "cache_salt": getattr(body, "cache_salt", None),
            "priority": getattr(body, "priority", 0), "kv_transfer_params": None, "ec_transfer_params": None,
        }  # fmt: skip

    async def render_chat(self, body: ChatCompletionRequest, request: Request) -> JSONResponse:
        self.check_model(body.model)
        return JSONResponse(self.rendered(body, body.prompts[0], f"chatcmpl-{_base_id(request)}", {}))

    async def render_messages(self, body: AnthropicMessagesRequest, request: Request) -> JSONResponse:
        self.check_model(body.model)
        return JSONResponse(self.rendered(body, body.prompts[0], f"chatcmpl-{_base_id(request)}", {}))

    async def render_completion(self, body: CompletionRequest, request: Request) -> JSONResponse:
        _check_prompt(body)
        self.check_model(body.model)
        base, prompts = f"cmpl-{_base_id(request)}", body.prompts
        names = [base] if len(prompts) == 1 else [f"{base}-{index}" for index in range(len(prompts))]
        answer = [self.rendered(body, prompt, name, {}) for prompt, name in zip(prompts, names, strict=True)]
        return JSONResponse(answer)

    async def render_responses(self, body: ResponsesRequest) -> JSONResponse:
        self.check_model(body.model)
        if body.previous_response_id is not None:
            message = "previous_response_id is not supported by the stateless render endpoint."
            raise _VllmError(message, "invalid_request_error", param="previous_response_id")
        return JSONResponse(self.rendered(body, body.prompts[0], body.request_id, {"extra_args": {}}))

    # -- generate

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        self.check_model(body.model)
        if len(body.token_ids) > self.settings.max_model_len:
            message = f"The decoder prompt (length {len(body.token_ids)}) is longer than the maximum model length of"
            hint = "Make sure that `max_model_len` is no smaller than the number of text tokens."
            raise _VllmError(f"{message} {self.settings.max_model_len}. {hint}")
        for token in body.token_ids:
            if token >= _VOCABULARY:
                raise _VllmError(f"Token id {token} is out of vocabulary")
        params, prompt = body.sampling_params, len(body.token_ids)
        if "max_tokens" not in params.model_fields_set:
            params = params.model_copy(update={"max_tokens": None})
        job = self.job(f"generate-tokens-{_base_id(request, body.request_id)}", prompt, params, body.priority)
        if body.stream:
            return _sse(self._generate_stream(job, body))
        tokens = await _until_disconnect(request, self.all_steps(job))
        choices = [_token_choice(index, tokens, job, True, body.output_mode) for index in range(job.choices)]
        answer = {
            "request_id": job.request_id,
            "model": self.settings.model,
            "created": int(time.time()),
            "usage": _usage(job),
            "output_mode": body.output_mode,
            "choices": choices,
            **_nulls("prompt_logprobs prompt_token_id_logprobs prompt_token_ids mm_placeholders metrics"),
            **_nulls("kv_transfer_params ec_transfer_params"),
        }
        return JSONResponse(answer)

    async def _generate_stream(self, job: _Job, body: GenerateRequest) -> AsyncGenerator[str, None]:
        async for token, last in self.steps(job):
            for index in range(job.choices):
                choice = _token_choice(index, [token], job, last, body.output_mode)
                yield _event(
                    {"request_id": job.request_id, "usage": None, "output_mode": body.output_mode, "choices": [choice]}
                )
        if (body.stream_options or {}).get("include_usage"):
            usage = {key: value for key, value in _usage(job).items() if value is not None}
            yield _event({"request_id": job.request_id, "usage": usage, "output_mode": body.output_mode, "choices": []})
        yield "data: [DONE]\n\n"

    # -- derender

    async def derender_chat(self, body: DerenderChatRequest | DerenderChatStreamRequest) -> JSONResponse:
        self.check_model(body.model)
        model = body.model or self.settings.model
        if isinstance(body, DerenderChatStreamRequest):
            decode = _Decoder(body.stream_state or {})
            choices = []
            for choice in body.generate_chunk.choices:
                role = {} if decode.role_sent else {"role": "assistant"}
                delta = {**role, "content": decode(choice.token_ids or []), "reasoning": None}
                rest = _nulls("logprobs stop_reason token_ids")
                choices.append({"index": choice.index, "delta": delta, "finish_reason": choice.finish_reason, **rest})
            more = _nulls("usage system_fingerprint prompt_token_ids prompt_text metrics")
            chunk = _answer("chat.completion.chunk", body.generate_chunk.request_id, model, choices, **more)
            return JSONResponse({"chunk": chunk, "stream_state": decode.state(role_sent=True, offset=0)})
        source = body.generate_response
        choices = [_chat_choice(item.index, _text(item.token_ids or []), item.finish_reason) for item in source.choices]
        usage = _counts(body.prompt_tokens or 0, sum(len(choice.token_ids or []) for choice in source.choices))
        more = {**_nulls(_AROUND_CHAT), "system_fingerprint": None, "usage": usage}
        return JSONResponse(_answer("chat.completion", source.request_id, model, choices, **more))

    async def derender_completion(
        self, body: DerenderCompletionRequest | DerenderCompletionStreamRequest
    ) -> JSONResponse:
        self.check_model(body.model)
        model = body.model or self.settings.model
        if isinstance(body, DerenderCompletionStreamRequest):
            decode = _Decoder(body.stream_state or {})
            choices, written = [], 0
            for choice in body.generate_chunk.choices:
                text = decode(choice.token_ids or [])
                written += len(text)
                rest = _nulls("logprobs stop_reason prompt_token_ids token_ids")
                choices.append({"index": choice.index, "text": text, "finish_reason": choice.finish_reason, **rest})
            more = _nulls("usage system_fingerprint metrics")
            chunk = _answer("text_completion", body.generate_chunk.request_id, model, choices, **more)
            return JSONResponse({"chunk": chunk, "stream_state": decode.state(role_sent=False, offset=written)})
        if not body.generate_responses:
            raise _VllmError("generate_responses must not be empty")
        flat = [choice for source in body.generate_responses for choice in source.choices]
        choices = [
            _completion_choice(index, _text(choice.token_ids or []), choice.finish_reason)
            for index, choice in enumerate(flat)
        ]
        usage = _counts(sum(body.prompt_tokens or []), sum(len(choice.token_ids or []) for choice in flat))
        name = body.generate_responses[0].request_id
        more = {**_nulls(_AROUND_COMPLETION), "system_fingerprint": None, "usage": usage}
        return JSONResponse(_answer("text_completion", name, model, choices, **more))

    # -- the coupled routes: these read the header themselves

    def coupled_job(self, body: Any, prefix: str, request: Request, prompt: list[int]) -> _Job:
        self.check_model(body.model)
        params = SamplingParams(max_tokens=body.asked_tokens, n=body.n, ignore_eos=body.ignore_eos)
        priority = header_priority(request.headers.get(PRIORITY_HEADER), getattr(body, "priority", 0))
        return self.job(f"{prefix}{_base_id(request)}", len(prompt), params, priority)

    @property
    def _fingerprint(self) -> str:
        return f"vllm-{self.settings.version}-simulated"

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        job = self.coupled_job(body, "chatcmpl-", request, body.prompts[0])
        if body.stream:
            return _sse(self._chat_stream(job))
        tokens = await _until_disconnect(request, self._encodable(job))
        choices = [_chat_choice(index, _text(tokens), job.finish) for index in range(job.choices)]
        more = {**_nulls(_AROUND_CHAT), "system_fingerprint": self._fingerprint, "usage": _usage(job)}
        return JSONResponse(_answer("chat.completion", job.request_id, self.settings.model, choices, **more))

    async def _chat_stream(self, job: _Job) -> AsyncGenerator[str, None]:
        def chunk(delta: dict[str, str], finish: str | None, tokens: Mapping[str, Any], **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **tokens}
            kind = "chat.completion.chunk"
            return _event(_answer(kind, job.request_id, self.settings.model, [choice], **more))

        if not encodable(job.priority):
            yield _event(_overflow().body)
        else:
            yield chunk({"role": "assistant", "content": ""}, None, {}, **_nulls("prompt_token_ids prompt_text"))
            async for token, last in self.steps(job):
                delta = {"content": _text([token])}
                if last:
                    more = {"system_fingerprint": self._fingerprint}
                    yield chunk(delta, job.finish, _nulls("stop_reason token_ids"), **more)
                else:
                    yield chunk(delta, None, _nulls("token_ids"))
        yield "data: [DONE]\n\n"

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        _check_prompt(body)
        job = self.coupled_job(body, "cmpl-", request, body.prompts[0])
        if body.stream:
            return _sse(self._completion_stream(job))
        tokens = await _until_disconnect(request, self._encodable(job))
        choices = [_completion_choice(index, _text(tokens), job.finish) for index in range(job.choices)]
        more = {**_nulls(_AROUND_COMPLETION), "system_fingerprint": self._fingerprint, "usage": _usage(job)}
        return JSONResponse(_answer("text_completion", job.request_id, self.settings.model, choices, **more))

    async def _completion_stream(self, job: _Job) -> AsyncGenerator[str, None]:
        if not encodable(job.priority):
            yield _event(_overflow().body)
        else:
            async for token, last in self.steps(job):
                rest = _nulls("logprobs stop_reason prompt_token_ids token_ids")
                choice = {"index": 0, "text": _text([token]), "finish_reason": job.finish if last else None, **rest}
                more = {"system_fingerprint": self._fingerprint} if last else {}
                yield _event(_answer("text_completion", job.request_id, self.settings.model, [choice], **more))
        yield "data: [DONE]\n\n"

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        job = self.coupled_job(body, "resp_", request, body.prompts[0])
        if body.stream:
            return _sse(self._responses_stream(job, body))
        tokens = await _until_disconnect(request, self._encodable(job))
        return JSONResponse(self._response(job, body, _text(tokens)))

    def _response(self, job: _Job, body: ResponsesRequest, text: str | None) -> dict[str, Any]:
        """The whole response object; without a text, one that is in progress."""
        cut = {"reason": "max_output_tokens"} if text is not None and job.finish == "length" else None
        status = "in_progress" if text is None else "incomplete" if cut else "completed"
        return {
            "id": job.request_id, "created_at": int(time.time()), "model": self.settings.model, "object": "response",
            "output": [] if text is None else [_message_item(text)], "status": status, "incomplete_details": cut,
            "usage": None if text is None else _response_usage(job), "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0, "tool_choice": "none", "tools": [],
            "background": False, "service_tier": "auto", "truncation": "disabled", "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **_nulls("instructions metadata max_tool_calls previous_response_id prompt reasoning text top_logprobs"),
            **_nulls("user kv_transfer_params ec_transfer_params input_messages output_messages"),
        }  # fmt: skip

    async def _responses_stream(self, job: _Job, body: ResponsesRequest) -> AsyncGenerator[str, None]:
        """The response's life, around the deltas of its one text."""
        numbers, where = itertools.count(), {"item_id": "msg_0", "output_index": 0, "content_index": 0}

        def event(kind: str, **members: Any) -> str:
            return _event({**members, "sequence_number": next(numbers), "type": f"response.{kind}"}, f"response.{kind}")

        yield event("created", response=self._response(job, body, None))
        yield event("in_progress", response=self._response(job, body, None))
        if not encodable(job.priority):
            raise OverflowError("vLLM cuts the stream here, and so does this")
        text, part = "", {"annotations": list[Any](), "text": "", "type": "output_text", "logprobs": list[Any]()}
        async for token, _ in self.steps(job):
            if not text:
                started = {**_message_item(""), "content": [], "status": "in_progress"}
                yield event("output_item.added", item=started, output_index=0)
                yield event("content_part.added", part=part, **where)
            text += _text([token])
            yield event("output_text.delta", delta=_text([token]), logprobs=[], **where)
        yield event("output_text.done", text=text, logprobs=[], **where)
        yield event("content_part.done", part={**part, "text": text, "logprobs": None}, **where)
        yield event("output_item.done", item=_message_item(text), output_index=0)
        yield event("completed", response=self._response(job, body, text))

    async def messages(self, body: AnthropicMessagesRequest, request: Request) -> Response:
        job = self.coupled_job(body, "chatcmpl-", request, body.prompts[0])
        if body.stream:
            return _sse(self._messages_stream(job))
        try:
            tokens = await _until_disconnect(request, self._encodable(job))
        except _VllmError as error:
            kind = error.body["error"]["type"]
            return JSONResponse({"type": "error", "error": {"type": kind, "message": str(error)}}, error.code)
        return JSONResponse({**self._message(job), "content": [{"type": "text", "text": _text(tokens)}]})

    def _message(self, job: _Job) -> dict[str, Any]:
        reason = "end_turn" if job.finish == "stop" else "max_tokens"
        return {
            "id": job.request_id, "type": "message", "role": "assistant", "content": [],
            "model": self.settings.model, "stop_reason": reason,
            "usage": {"input_tokens": job.prompt, "output_tokens": job.tokens},
        }  # fmt: skip

    async def _messages_stream(self, job: _Job) -> AsyncGenerator[str, None]:
        if not encodable(job.priority):
            yield _event({"type": "error", "error": {"type": "internal_error", "message": ""}}, "error")
            return
        message = self._message(job)
        usage = {"input_tokens": job.prompt, "output_tokens": 0}
        start = {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event({"type": "message_start", "message": start}, "message_start")
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        yield _event(block, "content_block_start")
        async for token, _ in self.steps(job):
            delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": _text([token])}, "index": 0}
            yield _event(delta, "content_block_delta")
        yield _event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        yield _event({"type": "message_delta", "delta": end, "usage": message["usage"]}, "message_delta")
        yield _event({"type": "message_stop"}, "message_stop")

    async def _encodable(self, job: _Job) -> list[int]:
        if not encodable(job.priority):
            raise _overflow()
        return await self.all_steps(job)

    # -- around them

    async def models(self) -> JSONResponse:
        permission = {
            "id": f"modelperm-{_random_id()}", "object": "model_permission", "created": int(time.time()),
            "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
            "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False, "organization": "*",
            "group": None, "is_blocking": False,
        }  # fmt: skip
        card = {
            "id": self.settings.model, "object": "model", "created": int(time.time()), "owned_by": "vllm",
            "root": self.settings.model, "parent": None, "max_model_len": self.settings.max_model_len,
            "permission": [permission],
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [card]})

    async def version(self) -> JSONResponse:
        return JSONResponse({"version": self.settings.version})

    async def healthy(self) -> Response:
        return Response()

    async def metrics(self) -> Response:
        return Response(generate_latest(self.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def server_info(self, config_format: Literal["text", "json"] = "text") -> JSONResponse:
        scheduler = {"policy": self.settings.scheduling, "max_num_seqs": self.settings.slots}
        config: Any = {"scheduler_config": scheduler}
        if config_format == "text":
            config = f"model='{self.settings.model}', max_seq_len={self.settings.max_model_len}"
        return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def scale_out_off(self) -> JSONResponse:
        return JSONResponse(_VllmError(_SCALE_OUT_OFF, "PermissionDeniedError", 403).body, status_code=403)


class _Decoder:
    """UTF-8 over chunks. The state travels with the client, in the members that vLLM's has."""

    def __init__(self, carried: Mapping[str, Any]) -> None:
        self.role_sent = bool(carried.get("role_sent"))
        self._offset = int(carried.get("logprob_text_offset") or 0)
        # The last tokens, of which some bytes may wait for the rest of their character.
        self._context: list[int] = list(carried.get("logprob_context_token_ids") or [])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(_bytes(self._context))

    def __call__(self, tokens: list[int]) -> str:
        """The text that is whole by now."""
        self._context = [*self._context, *tokens][-4:]
        return self._decoder.decode(_bytes(tokens))

    def state(self, role_sent: bool, offset: int) -> dict[str, Any]:
        """What the client sends with the next chunk; `offset` characters were written."""
        last = [_text([token]) for token in self._context[-1:]]
        return {
            "prev_tokens": last, "prefix_offset": 0, "read_offset": len(last), "role_sent": role_sent,
            "logprob_context_token_ids": self._context, "logprob_text_offset": self._offset + offset,
            "output_token_ids": [], "output_chunk_lens": [], "tools_streamed": False, "last_tool_call_ids": [],
        }  # fmt: skip


def _message_item(text: str) -> dict[str, Any]:
    content = [{"annotations": list[Any](), "text": text, "type": "output_text", "logprobs": None}]
    item = {"id": "msg_0", "content": content, "role": "assistant", "status": "completed", "type": "message"}
    return {**item, "phase": None}


def _response_usage(job: _Job) -> dict[str, Any]:
    before: dict[str, Any] = {"cached_tokens": 0, "cache_write_tokens": 0}
    after: dict[str, Any] = {"reasoning_tokens": 0, "tool_output_tokens": 0}
    return {
        "input_tokens": job.prompt,
        "input_tokens_details": {**before, "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
        "output_tokens": job.tokens,
        "output_tokens_details": {**after, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []},
        "total_tokens": job.prompt + job.tokens,
    }


def header_priority(header: str | None, body: int) -> int:
    """The priority a coupled route uses: vllm/entrypoints/generate/base/serving.py, _get_priority."""
    if header is None:
        return body
    try:
        return int(header)
    except ValueError:
        return body


def encodable(priority: int) -> bool:
    """Whether the engine's msgpack takes the priority; no route checks a header's bounds."""
    return INT64_MIN <= priority < 2**64


def _overflow() -> _VllmError:
    return _VllmError("", "InternalServerError", 500)


def _base_id(request: Request, default: str | None = None) -> str:
    return request.headers.get("x-request-id") or default or _random_id()


def _check_prompt(body: CompletionRequest) -> None:
    if not body.prompt:
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise _VllmError(message, param="prompt")


def _nulls(names: str) -> dict[str, Any]:
    """Members that vLLM writes though nothing was asked for them."""
    return dict.fromkeys(names.split())


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    total = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return {**total, **_nulls("prompt_tokens_details completion_tokens_details")}


def _usage(job: _Job) -> dict[str, Any]:
    return _counts(job.prompt, job.tokens * job.choices)


def _token_choice(index: int, tokens: list[int], job: _Job, last: bool, mode: str) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": job.finish if last else None,
        "token_ids": tokens,
        "weight_versions": [{"version": "default", "start": 0, "end": job.tokens}] if last else None,
        **({"text": _text(tokens)} if mode == "text" else {}),
        **_nulls("stop_reason routed_experts sampling_mask logprobs"),
    }


def _chat_choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, **_nulls("refusal annotations audio function_call reasoning")}
    rest = _nulls("logprobs stop_reason token_ids routed_experts")
    return {"index": index, "message": message, "finish_reason": finish, **rest}


def _completion_choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    rest = _nulls("logprobs stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts")
    return {"index": index, "text": text, "finish_reason": finish, **rest}


_AROUND_CHAT = "service_tier prompt_logprobs prompt_token_ids prompt_text kv_transfer_params ec_transfer_params metrics"
_AROUND_COMPLETION = "service_tier kv_transfer_params ec_transfer_params metrics"


def _answer(kind: str, name: str, model: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The members that chat and text completions share, whole or in chunks."""
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices, **more}


def _event(data: dict[str, Any], name: str | None = None) -> str:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def _sse(events: AsyncGenerator[str, None]) -> StreamingResponse:
    """The 200 goes out at once, while the request still waits; a client that leaves closes `events`."""
    return StreamingResponse(events, media_type="text/event-stream")


async def _until_disconnect(request: Request, work: Awaitable[list[int]]) -> list[int]:
    """`work`, given up as soon as the client is gone: vLLM aborts the request then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else []
    finally:
        task.cancel()
        left.cancel()


def create_app(settings: SimulatorSettings) -> FastAPI:
    """The ASGI application of one simulated server."""
    server = _Server(settings)
    app = FastAPI(openapi_url=None)
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    if settings.api_key:
        app.add_middleware(_Authentication, api_key=settings.api_key)
    app.add_exception_handler(_VllmError, _vllm_error)
    app.add_exception_handler(RequestValidationError, _validation_error)

    scale_out: dict[str, Callable[..., Any]] = dict(
        zip(
            (*RENDER_ROUTES, *DERENDER_ROUTES),
            (
                server.render_chat, server.render_completion, server.render_responses, server.render_messages,
                server.derender_chat, server.derender_completion,
            ),
            strict=True,
        )
    )  # fmt: skip
    posts: dict[str, Callable[..., Any]] = {}
    gets: dict[str, Callable[..., Any]] = {
        "/health": server.healthy,
        "/ping": server.healthy,
        "/version": server.version,
        "/v1/models": server.models,
        "/metrics": server.metrics,
    }
    if settings.kind == "engine":
        scale_out[GENERATE_ROUTE] = server.generate
        posts |= {
            "/v1/chat/completions": server.chat,
            "/v1/completions": server.completion,
            "/v1/responses": server.responses,
            "/v1/messages": server.messages,
        }
        if settings.dev_mode:
            gets["/server_info"] = server.server_info
    if settings.kind == "engine" and not settings.scale_out:
        for path in scale_out:
            app.add_api_route(path, server.scale_out_off, methods=["POST"], response_model=None)
    else:
        posts |= scale_out
    for path, handler in posts.items():
        app.add_api_route(path, handler, methods=["POST"], dependencies=[Depends(_json_only)], response_model=None)
    for path, handler in gets.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    return app


@contextmanager
def run(settings: SimulatorSettings, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """A simulated server in a thread of its own, while the block runs; yields its URL. Port 0: a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CheckFailed(f"the simulator cannot listen on {host}:{port}: {error.strerror}") from None
    config = uvicorn.Config(
        create_app(settings), log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="simulator", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise CheckFailed(f"the simulator did not start on {host}:{port}")
            time.sleep(0.005)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        # Open streams need not end by themselves.
        server.force_exit = server.should_exit = True
        thread.join(timeout=10)
        listener.close()
