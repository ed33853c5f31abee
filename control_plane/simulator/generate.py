"""/inference/v1/generate, which takes its priority from the body alone."""

import time
from collections.abc import AsyncGenerator

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from control_plane.simulator.errors import VllmError
from control_plane.simulator.protocol import GenerateRequest
from control_plane.simulator.responses import event, event_stream, nulls, token_choice, usage
from control_plane.simulator.server import Job, SimulatedServer, base_id, until_disconnect
from control_plane.simulator.tokens import VOCABULARY_SIZE


class GenerateRoute:
    """The generate route."""

    def __init__(self, server: SimulatedServer) -> None:
        """Create the handler of this server."""
        self._server = server

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        """Handle /inference/v1/generate."""
        server = self._server
        server.check_model(body.model)
        if len(body.token_ids) > server.settings.max_model_len:
            message = f"The decoder prompt (length {len(body.token_ids)}) is longer than the maximum model length of"
            hint = "Make sure that `max_model_len` is no smaller than the number of text tokens."
            raise VllmError(f"{message} {server.settings.max_model_len}. {hint}")
        for token in body.token_ids:
            if token >= VOCABULARY_SIZE:
                raise VllmError(f"Token id {token} is out of vocabulary")
        params, prompt = body.sampling_params, len(body.token_ids)
        if "max_tokens" not in params.model_fields_set:
            params = params.model_copy(update={"max_tokens": None})
        job = server.job(f"generate-tokens-{base_id(request, body.request_id)}", prompt, params, body.priority)
        if body.stream:
            return event_stream(self._stream(job, body))
        tokens = await until_disconnect(request, server.all_steps(job))
        return JSONResponse(
            {
                "request_id": job.request_id,
                "model": server.settings.model,
                "created": int(time.time()),
                "usage": usage(job),
                "output_mode": body.output_mode,
                "choices": [token_choice(i, tokens, job, True, body.output_mode) for i in range(job.choices)],
                **nulls("prompt_logprobs prompt_token_id_logprobs prompt_token_ids mm_placeholders metrics"),
                **nulls("kv_transfer_params ec_transfer_params"),
            }
        )

    async def _stream(self, job: Job, body: GenerateRequest) -> AsyncGenerator[str, None]:
        common = {"request_id": job.request_id, "usage": None, "output_mode": body.output_mode}
        async for token, last in self._server.steps(job):
            for index in range(job.choices):
                yield event({**common, "choices": [token_choice(index, [token], job, last, body.output_mode)]})
        if (body.stream_options or {}).get("include_usage"):
            counts = {key: value for key, value in usage(job).items() if value is not None}
            yield event({**common, "usage": counts, "choices": []})
        yield "data: [DONE]\n\n"
