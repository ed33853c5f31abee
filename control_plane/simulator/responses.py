"""The parts of vLLM's response bodies and event streams that several routes share."""

import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import StreamingResponse

from control_plane.simulator.server import Job
from control_plane.simulator.tokens import token_text

CHAT_NULLS = "service_tier prompt_logprobs prompt_token_ids prompt_text kv_transfer_params ec_transfer_params metrics"
COMPLETION_NULLS = "service_tier kv_transfer_params ec_transfer_params metrics"


def nulls(names: str) -> dict[str, Any]:
    """Return members with the value null, which vLLM writes even if the client did not ask for them."""
    return dict.fromkeys(names.split())


def token_counts(prompt: int, completion: int) -> dict[str, Any]:
    """Return the `usage` member for these numbers of tokens."""
    total = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return {**total, **nulls("prompt_tokens_details completion_tokens_details")}


def usage(job: Job) -> dict[str, Any]:
    """Return the `usage` member of a job."""
    return token_counts(job.prompt, job.tokens * job.choices)


def token_choice(index: int, tokens: list[int], job: Job, last: bool, mode: str) -> dict[str, Any]:
    """Return a choice of /inference/v1/generate; `mode` is the request's `output_mode`."""
    return {
        "index": index,
        "finish_reason": job.finish if last else None,
        "token_ids": tokens,
        "weight_versions": [{"version": "default", "start": 0, "end": job.tokens}] if last else None,
        **({"text": token_text(tokens)} if mode == "text" else {}),
        **nulls("stop_reason routed_experts sampling_mask logprobs"),
    }


def chat_choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    """Return a choice of a chat completion."""
    message = {"role": "assistant", "content": text, **nulls("refusal annotations audio function_call reasoning")}
    rest = nulls("logprobs stop_reason token_ids routed_experts")
    return {"index": index, "message": message, "finish_reason": finish, **rest}


def completion_choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    """Return a choice of a completion."""
    rest = nulls("logprobs stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts")
    return {"index": index, "text": text, "finish_reason": finish, **rest}


def completion_body(kind: str, name: str, model: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the members that chat completions and completions share, whole or as a chunk.

    Args:
        kind: The `object` member, for example "chat.completion.chunk".
        name: The `id` member.
        model: The `model` member.
        choices: The `choices` member.
        **more: Members that only this kind of response has.
    """
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices, **more}


def event(data: dict[str, Any], name: str | None = None) -> str:
    """Return one server-sent event."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def event_stream(events: AsyncGenerator[str, None]) -> StreamingResponse:
    """Return a streamed response.

    The 200 is sent at once, while the request still waits for a slot. A client that disconnects closes `events`.
    """
    return StreamingResponse(events, media_type="text/event-stream")
