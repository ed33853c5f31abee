"""The coupled route of the Anthropic API: /v1/messages."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from control_plane.simulator.coupled import all_tokens, coupled_job, encodable
from control_plane.simulator.errors import VllmError
from control_plane.simulator.protocol import AnthropicMessagesRequest
from control_plane.simulator.responses import event, event_stream
from control_plane.simulator.server import Job, SimulatedServer, until_disconnect
from control_plane.simulator.tokens import token_text


class AnthropicRoute:
    """The messages route."""

    def __init__(self, server: SimulatedServer) -> None:
        """Create the handler of this server."""
        self._server = server

    async def messages(self, body: AnthropicMessagesRequest, request: Request) -> Response:
        """Handle /v1/messages."""
        job = coupled_job(self._server, body, "chatcmpl-", request)
        if body.stream:
            return event_stream(self._stream(job))
        try:
            tokens = await until_disconnect(request, all_tokens(self._server, job))
        except VllmError as error:
            kind = error.body["error"]["type"]
            return JSONResponse({"type": "error", "error": {"type": kind, "message": str(error)}}, error.code)
        return JSONResponse({**self._message(job), "content": [{"type": "text", "text": token_text(tokens)}]})

    def _message(self, job: Job) -> dict[str, Any]:
        reason = "end_turn" if job.finish == "stop" else "max_tokens"
        return {
            "id": job.request_id, "type": "message", "role": "assistant", "content": [],
            "model": self._server.settings.model, "stop_reason": reason,
            "usage": {"input_tokens": job.prompt, "output_tokens": job.tokens},
        }  # fmt: skip

    async def _stream(self, job: Job) -> AsyncGenerator[str, None]:
        if not encodable(job.priority):
            yield event({"type": "error", "error": {"type": "internal_error", "message": ""}}, "error")
            return
        message = self._message(job)
        usage = {"input_tokens": job.prompt, "output_tokens": 0}
        start = {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield event({"type": "message_start", "message": start}, "message_start")
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        yield event(block, "content_block_start")
        async for token, _ in self._server.steps(job):
            text = {"type": "text_delta", "text": token_text([token])}
            yield event({"type": "content_block_delta", "delta": text, "index": 0}, "content_block_delta")
        yield event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        yield event({"type": "message_delta", "delta": end, "usage": message["usage"]}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")
