"""The render routes, which respond with the request for the engine, and the derender routes, which write text."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from control_plane.simulator.errors import VllmError
from control_plane.simulator.protocol import (
    AnthropicMessagesRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    GenerationRequest,
    ResponsesRequest,
)
from control_plane.simulator.responses import (
    CHAT_NULLS,
    COMPLETION_NULLS,
    chat_choice,
    completion_body,
    completion_choice,
    nulls,
    token_counts,
)
from control_plane.simulator.server import SimulatedServer, base_id
from control_plane.simulator.tokens import ChunkDecoder, token_text


def check_prompt(body: CompletionRequest) -> None:
    """Raise vLLM's error if a completion has no prompt."""
    if not body.prompt:
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise VllmError(message, param="prompt")


class RenderRoutes:
    """The four render routes. All ignore the priority header; /v1/messages/render ignores the body's priority, too."""

    def __init__(self, server: SimulatedServer) -> None:
        """Create the handlers of this server."""
        self._server = server

    def _rendered(
        self, body: GenerationRequest, prompt: list[int], request_id: str, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a GenerateRequest as vLLM writes it: with every field, null if the client did not set it."""
        params = {
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
            "top_p": 1.0, "min_p": 0.0, "stop": [], "stop_token_ids": [],
            "max_tokens": self._server.token_limit(body.requested_tokens, len(prompt)),
            "output_kind": 1 if body.stream else 2,
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

    async def chat(self, body: ChatCompletionRequest, request: Request) -> JSONResponse:
        """Handle /v1/chat/completions/render."""
        self._server.check_model(body.model)
        return JSONResponse(self._rendered(body, body.prompts[0], f"chatcmpl-{base_id(request)}", {}))

    async def messages(self, body: AnthropicMessagesRequest, request: Request) -> JSONResponse:
        """Handle /v1/messages/render."""
        self._server.check_model(body.model)
        return JSONResponse(self._rendered(body, body.prompts[0], f"chatcmpl-{base_id(request)}", {}))

    async def completion(self, body: CompletionRequest, request: Request) -> JSONResponse:
        """Handle /v1/completions/render, which responds with a list: one request for each prompt."""
        check_prompt(body)
        self._server.check_model(body.model)
        base, prompts = f"cmpl-{base_id(request)}", body.prompts
        names = [base] if len(prompts) == 1 else [f"{base}-{index}" for index in range(len(prompts))]
        return JSONResponse([self._rendered(body, *pair, {}) for pair in zip(prompts, names, strict=True)])

    async def responses(self, body: ResponsesRequest) -> JSONResponse:
        """Handle /v1/responses/render."""
        self._server.check_model(body.model)
        if body.previous_response_id is not None:
            message = "previous_response_id is not supported by the stateless render endpoint."
            raise VllmError(message, "invalid_request_error", param="previous_response_id")
        return JSONResponse(self._rendered(body, body.prompts[0], body.request_id, {"extra_args": {}}))


class DerenderRoutes:
    """The two derender routes, which turn generated tokens into text. They have no priority."""

    def __init__(self, server: SimulatedServer) -> None:
        """Create the handlers of this server."""
        self._server = server

    async def chat(self, body: DerenderChatRequest | DerenderChatStreamRequest) -> JSONResponse:
        """Handle /v1/chat/completions/derender."""
        self._server.check_model(body.model)
        model = body.model or self._server.settings.model
        if isinstance(body, DerenderChatStreamRequest):
            decoder = ChunkDecoder(body.stream_state or {})
            choices = []
            for choice in body.generate_chunk.choices:
                role = {} if decoder.role_sent else {"role": "assistant"}
                delta = {**role, "content": decoder.decode(choice.token_ids or []), "reasoning": None}
                rest = nulls("logprobs stop_reason token_ids")
                choices.append({"index": choice.index, "delta": delta, "finish_reason": choice.finish_reason, **rest})
            more = nulls("usage system_fingerprint prompt_token_ids prompt_text metrics")
            chunk = completion_body("chat.completion.chunk", body.generate_chunk.request_id, model, choices, **more)
            return JSONResponse({"chunk": chunk, "stream_state": decoder.state(role_sent=True, characters=0)})
        source = body.generate_response
        choices = [chat_choice(c.index, token_text(c.token_ids or []), c.finish_reason) for c in source.choices]
        counts = token_counts(body.prompt_tokens or 0, sum(len(choice.token_ids or []) for choice in source.choices))
        more = {**nulls(CHAT_NULLS), "system_fingerprint": None, "usage": counts}
        return JSONResponse(completion_body("chat.completion", source.request_id, model, choices, **more))

    async def completion(self, body: DerenderCompletionRequest | DerenderCompletionStreamRequest) -> JSONResponse:
        """Handle /v1/completions/derender."""
        self._server.check_model(body.model)
        model = body.model or self._server.settings.model
        if isinstance(body, DerenderCompletionStreamRequest):
            decoder = ChunkDecoder(body.stream_state or {})
            choices, written = [], 0
            for choice in body.generate_chunk.choices:
                text = decoder.decode(choice.token_ids or [])
                written += len(text)
                rest = nulls("logprobs stop_reason prompt_token_ids token_ids")
                choices.append({"index": choice.index, "text": text, "finish_reason": choice.finish_reason, **rest})
            more = nulls("usage system_fingerprint metrics")
            chunk = completion_body("text_completion", body.generate_chunk.request_id, model, choices, **more)
            return JSONResponse({"chunk": chunk, "stream_state": decoder.state(role_sent=False, characters=written)})
        if not body.generate_responses:
            raise VllmError("generate_responses must not be empty")
        flat = [choice for source in body.generate_responses for choice in source.choices]
        choices = [
            completion_choice(index, token_text(choice.token_ids or []), choice.finish_reason)
            for index, choice in enumerate(flat)
        ]
        counts = token_counts(sum(body.prompt_tokens or []), sum(len(choice.token_ids or []) for choice in flat))
        name = body.generate_responses[0].request_id
        more = {**nulls(COMPLETION_NULLS), "system_fingerprint": None, "usage": counts}
        return JSONResponse(completion_body("text_completion", name, model, choices, **more))
