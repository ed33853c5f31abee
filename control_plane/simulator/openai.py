"""The coupled routes of the OpenAI API: chat completions, completions and responses."""

import itertools
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from control_plane.simulator.coupled import all_tokens, coupled_job, encodable
from control_plane.simulator.errors import overflow_error
from control_plane.simulator.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from control_plane.simulator.render import check_prompt
from control_plane.simulator.responses import (
    CHAT_NULLS,
    COMPLETION_NULLS,
    chat_choice,
    completion_body,
    completion_choice,
    event,
    event_stream,
    nulls,
    usage,
)
from control_plane.simulator.server import Job, SimulatedServer, until_disconnect
from control_plane.simulator.tokens import token_text


class OpenAiRoutes:
    """The three OpenAI routes."""

    def __init__(self, server: SimulatedServer) -> None:
        """Create the handlers of this server."""
        self._server = server
        self._model = server.settings.model
        self._fingerprint = f"vllm-{server.settings.version}-simulated"

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Handle /v1/chat/completions."""
        job = coupled_job(self._server, body, "chatcmpl-", request)
        if body.stream:
            return event_stream(self._chat_stream(job))
        tokens = await until_disconnect(request, all_tokens(self._server, job))
        choices = [chat_choice(index, token_text(tokens), job.finish) for index in range(job.choices)]
        more = {**nulls(CHAT_NULLS), "system_fingerprint": self._fingerprint, "usage": usage(job)}
        return JSONResponse(completion_body("chat.completion", job.request_id, self._model, choices, **more))

    async def _chat_stream(self, job: Job) -> AsyncGenerator[str, None]:
        def chunk(delta: dict[str, str], finish: str | None, tokens: Mapping[str, Any], **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **tokens}
            return event(completion_body("chat.completion.chunk", job.request_id, self._model, [choice], **more))

        if not encodable(job.priority):
            yield event(overflow_error().body)
        else:
            yield chunk({"role": "assistant", "content": ""}, None, {}, **nulls("prompt_token_ids prompt_text"))
            async for token, last in self._server.steps(job):
                delta = {"content": token_text([token])}
                if last:
                    more = {"system_fingerprint": self._fingerprint}
                    yield chunk(delta, job.finish, nulls("stop_reason token_ids"), **more)
                else:
                    yield chunk(delta, None, nulls("token_ids"))
        yield "data: [DONE]\n\n"

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Handle /v1/completions."""
        check_prompt(body)
        job = coupled_job(self._server, body, "cmpl-", request)
        if body.stream:
            return event_stream(self._completion_stream(job))
        tokens = await until_disconnect(request, all_tokens(self._server, job))
        choices = [completion_choice(index, token_text(tokens), job.finish) for index in range(job.choices)]
        more = {**nulls(COMPLETION_NULLS), "system_fingerprint": self._fingerprint, "usage": usage(job)}
        return JSONResponse(completion_body("text_completion", job.request_id, self._model, choices, **more))

    async def _completion_stream(self, job: Job) -> AsyncGenerator[str, None]:
        if not encodable(job.priority):
            yield event(overflow_error().body)
        else:
            async for token, last in self._server.steps(job):
                rest = nulls("logprobs stop_reason prompt_token_ids token_ids")
                finish = job.finish if last else None
                choice = {"index": 0, "text": token_text([token]), "finish_reason": finish, **rest}
                more = {"system_fingerprint": self._fingerprint} if last else {}
                yield event(completion_body("text_completion", job.request_id, self._model, [choice], **more))
        yield "data: [DONE]\n\n"

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """Handle /v1/responses."""
        job = coupled_job(self._server, body, "resp_", request)
        if body.stream:
            return event_stream(self._responses_stream(job, body))
        tokens = await until_disconnect(request, all_tokens(self._server, job))
        return JSONResponse(self._response(job, body, token_text(tokens)))

    def _response(self, job: Job, body: ResponsesRequest, text: str | None) -> dict[str, Any]:
        """Return the whole response object; without a text, it is in progress."""
        cut = {"reason": "max_output_tokens"} if text is not None and job.finish == "length" else None
        status = "in_progress" if text is None else "incomplete" if cut else "completed"
        return {
            "id": job.request_id, "created_at": int(time.time()), "model": self._model, "object": "response",
            "output": [] if text is None else [_message_item(text)], "status": status, "incomplete_details": cut,
            "usage": None if text is None else _response_usage(job), "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0, "tool_choice": "none", "tools": [],
            "background": False, "service_tier": "auto", "truncation": "disabled", "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **nulls("instructions metadata max_tool_calls previous_response_id prompt reasoning text top_logprobs"),
            **nulls("user kv_transfer_params ec_transfer_params input_messages output_messages"),
        }  # fmt: skip

    async def _responses_stream(self, job: Job, body: ResponsesRequest) -> AsyncGenerator[str, None]:
        """Yield the events of a response with one text."""
        numbers, where = itertools.count(), {"item_id": "msg_0", "output_index": 0, "content_index": 0}

        def numbered(kind: str, **members: Any) -> str:
            name = f"response.{kind}"
            return event({**members, "sequence_number": next(numbers), "type": name}, name)

        yield numbered("created", response=self._response(job, body, None))
        yield numbered("in_progress", response=self._response(job, body, None))
        if not encodable(job.priority):
            raise OverflowError("vLLM cuts the stream at this point, and so does the simulator")
        text, part = "", {"annotations": list[Any](), "text": "", "type": "output_text", "logprobs": list[Any]()}
        async for token, _ in self._server.steps(job):
            if not text:
                started = {**_message_item(""), "content": [], "status": "in_progress"}
                yield numbered("output_item.added", item=started, output_index=0)
                yield numbered("content_part.added", part=part, **where)
            text += token_text([token])
            yield numbered("output_text.delta", delta=token_text([token]), logprobs=[], **where)
        yield numbered("output_text.done", text=text, logprobs=[], **where)
        yield numbered("content_part.done", part={**part, "text": text, "logprobs": None}, **where)
        yield numbered("output_item.done", item=_message_item(text), output_index=0)
        yield numbered("completed", response=self._response(job, body, text))


def _message_item(text: str) -> dict[str, Any]:
    content = [{"annotations": list[Any](), "text": text, "type": "output_text", "logprobs": None}]
    item = {"id": "msg_0", "content": content, "role": "assistant", "status": "completed", "type": "message"}
    return {**item, "phase": None}


def _response_usage(job: Job) -> dict[str, Any]:
    before: dict[str, Any] = {"cached_tokens": 0, "cache_write_tokens": 0}
    after: dict[str, Any] = {"reasoning_tokens": 0, "tool_output_tokens": 0}
    return {
        "input_tokens": job.prompt,
        "input_tokens_details": {**before, "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
        "output_tokens": job.tokens,
        "output_tokens_details": {**after, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []},
        "total_tokens": job.prompt + job.tokens,
    }
