"""The facts about vLLM that this package relies on, each once.

They were read from the source of vLLM 0.32.0 and 0.33.0, whose modules the comments name. tests/e2e checks them against
a real server.
"""

from typing import Literal

Role = Literal["render", "engine"]
"""What a vLLM server does: `vllm launch render` only renders prompts, `vllm serve` runs the engine."""

ROLES: tuple[Role, ...] = ("render", "engine")

DEFAULT_PORT = 8000
"""The port of a server whose command line names none (vllm/entrypoints/openai/cli_args.py)."""

PRIORITY_HEADER = "X-Vllm-Priority"
"""The request header that vLLM reads on some routes only, see `READS_HEADER`."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
"""The bounds of a priority. vLLM sends it to the engine by msgpack, as a 64-bit integer."""

# Routes that accept a body priority and ignore the header (vllm/entrypoints/serve/disagg, vllm/entrypoints/openai).
RENDER_ROUTES = (
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
)
GENERATE_ROUTE = "/inference/v1/generate"
ENGINE_ROUTES = (GENERATE_ROUTE, "/cohere/v2/chat/render", *RENDER_ROUTES)

RESPONSE_ROUTES = frozenset({"/v1/messages/render"})
"""Routes whose request cannot carry a priority. Their response, a GenerateRequest, can."""

READS_HEADER = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/cohere/v2/chat"}
)
"""Routes on which vLLM reads the header itself, so that a second reader could only disagree with it."""

READS_HEADER_ONLY = frozenset({"/v1/messages"})
"""Those of them that read no priority from the body."""

# Routes outside the scale-out API that read a priority from the body, and not from the header.
BODY_ROUTES = (
    "/v1/chat/completions/batch", "/generative_scoring",
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    "/v2/embed", "/v1/systemone",
    # A chat or a pooling request by its body (vllm/entrypoints/sagemaker). For a chat, vLLM reads the header, too: none
    # may be left on it.
    "/invocations",
)  # fmt: skip

REJECTS_MEMBER = frozenset({"/v1/decisions"})
"""Routes on which a body that has a `priority` gets a 400 (vLLM 0.33)."""
