"""What the coupled routes share. They render and generate in one process, and they read the priority header."""

from fastapi import Request

from control_plane.simulator.errors import overflow_error
from control_plane.simulator.protocol import GenerationRequest, SamplingParams
from control_plane.simulator.server import Job, SimulatedServer, base_id
from control_plane.vllm import INT64_MIN, PRIORITY_HEADER


def header_priority(header: str | None, body: int) -> int:
    """Return the priority that a coupled route uses, for the header's value and the body's priority.

    A value that Python's int() does not parse falls back to the body.
    Source: vllm/entrypoints/generate/base/serving.py, _get_priority.
    """
    if header is None:
        return body
    try:
        return int(header)
    except ValueError:
        return body


def encodable(priority: int) -> bool:
    """Return whether the engine's msgpack can encode the priority; no coupled route checks the header's range."""
    return INT64_MIN <= priority < 2**64


def coupled_job(server: SimulatedServer, body: GenerationRequest, prefix: str, request: Request) -> Job:
    """Return the job of a coupled request, whose request id starts with `prefix`.

    Raises:
        VllmError: The model is not served, or the prompt or the number of tokens exceeds a limit.
    """
    server.check_model(body.model)
    params = SamplingParams(max_tokens=body.requested_tokens, n=body.n, ignore_eos=body.ignore_eos)
    priority = header_priority(request.headers.get(PRIORITY_HEADER), getattr(body, "priority", 0))
    return server.job(f"{prefix}{base_id(request)}", len(body.prompts[0]), params, priority)


async def all_tokens(server: SimulatedServer, job: Job) -> list[int]:
    """Return all token ids of the job, or raise vLLM's error 500 if its priority cannot be encoded."""
    if not encodable(job.priority):
        raise overflow_error()
    return await server.all_steps(job)
