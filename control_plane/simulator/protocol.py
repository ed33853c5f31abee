"""The request bodies of vLLM's routes, with the fields that matter to a priority.

Other fields are accepted and ignored.
The class names and validation messages are vLLM's own, because they appear in its error responses.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from control_plane.simulator.tokens import chat_tokens, random_id, text_tokens
from control_plane.vllm import INT64_MAX, INT64_MIN

DERENDER_ROUTES = ("/v1/chat/completions/derender", "/v1/completions/derender")

Priority = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
TokenIds = list[Annotated[int, Field(ge=0)]]


class GenerationRequest(BaseModel):
    """The fields that the routes for chats, completions, responses and messages have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = False
    n: int = 1
    ignore_eos: bool = False

    @property
    def requested_tokens(self) -> int | None:
        """The number of tokens that the client asks for, or None if it leaves that to the server."""
        return None

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt."""
        raise NotImplementedError


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions and of its render route."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Priority = 0

    @property
    def requested_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompts(self) -> list[list[int]]:
        return [chat_tokens(self.messages)]


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions and of its render route, with one or several prompts as text or token ids."""

    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    max_tokens: int | None = 16
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Priority = 0

    @property
    def requested_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        items: Any = self.prompt if several else [self.prompt]
        return [text_tokens(item) if isinstance(item, str) else item for item in items]


class ResponsesRequest(GenerationRequest):
    """The body of /v1/responses and of its render route."""

    input: str | list[Any]
    request_id: str = ""
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    cache_salt: str | None = None
    priority: Priority = 0

    @model_validator(mode="before")
    @classmethod
    def _with_request_id(cls, data: Any) -> Any:
        return {"request_id": f"resp_{random_id()}", **data} if isinstance(data, dict) else data

    @property
    def requested_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def prompts(self) -> list[list[int]]:
        messages = self.input if isinstance(self.input, list) else [{"role": "user", "content": self.input}]
        return [chat_tokens(messages)]


class AnthropicMessagesRequest(GenerationRequest):
    """The body of /v1/messages and of its render route. It has no `priority`, so vLLM ignores one in the body."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int

    @property
    def stream_options(self) -> dict[str, Any]:
        """The stream options that vLLM sets for a streamed message."""
        return {"include_usage": True, "continuous_usage_stats": True}

    @property
    def requested_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[list[int]]:
        return [chat_tokens(self.messages)]


class SamplingParams(BaseModel):
    """How to sample; None for `max_tokens` means up to the end of the context."""

    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = 16
    n: int = 1
    ignore_eos: bool = False


class GenerateRequest(BaseModel):
    """The body of /inference/v1/generate, which is also what the render routes respond with."""

    request_id: str = Field(default_factory=lambda: random_id())
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


class Choice(BaseModel):
    """One generated choice, as far as a derender route reads it."""

    index: int
    token_ids: TokenIds | None = None
    finish_reason: str | None = None


class Generated(BaseModel):
    """A response of /inference/v1/generate, or one chunk of it, as far as a derender route reads it."""

    request_id: str = Field(default_factory=lambda: random_id())
    choices: list[Choice]


class DerenderChatRequest(BaseModel):
    """A whole generate response that becomes a chat completion."""

    stream: Literal[False] = False
    model: str | None = None
    generate_response: Generated
    prompt_tokens: int | None = None


class DerenderChatStreamRequest(BaseModel):
    """One generate chunk that becomes a chunk of a chat completion."""

    stream: Literal[True]
    model: str | None = None
    generate_chunk: Generated
    stream_state: dict[str, Any] | None = None
    prompt_tokens: int | None = None


class DerenderCompletionRequest(BaseModel):
    """Whole generate responses, one for each prompt, that become a completion."""

    stream: Literal[False] = False
    model: str | None = None
    generate_responses: list[Generated]
    prompt_tokens: list[int] | None = None

    @model_validator(mode="after")
    def _one_count_each(self) -> "DerenderCompletionRequest":
        if self.prompt_tokens is not None and len(self.prompt_tokens) != len(self.generate_responses):
            given, wanted = len(self.prompt_tokens), len(self.generate_responses)
            raise ValueError(f"prompt_tokens length ({given}) must equal generate_responses length ({wanted})")
        return self


class DerenderCompletionStreamRequest(BaseModel):
    """One generate chunk that becomes a chunk of a completion."""

    stream: Literal[True]
    model: str | None = None
    generate_chunk: Generated
    stream_state: dict[str, Any] | None = None
    prompt_tokens: int | None = None
