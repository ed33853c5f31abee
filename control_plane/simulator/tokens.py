"""The simulator's tokens: each byte of a text is one token, so that no model or tokenizer is needed."""

import codecs
import itertools
import secrets
from collections.abc import Mapping
from typing import Any

END, TURN, FIRST_BYTE = 0, 1, 3
"""Token ids 0 to 2 are special; the bytes follow."""

VOCABULARY_SIZE = FIRST_BYTE + 256

_REPLY = b" The quick brown fox jumps over the lazy dog."

REPLY_TOKENS = len(_REPLY) + 1
"""The number of tokens in the reply that ends by itself, with the end token."""


def random_id() -> str:
    """Return a random id of 16 hexadecimal digits."""
    return secrets.token_hex(8)


def text_tokens(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [FIRST_BYTE + byte for byte in text.encode("utf-8", "surrogatepass")]


def chat_tokens(messages: list[Any]) -> list[int]:
    """Return the token ids of a chat's messages and of the start of the assistant's turn."""
    tokens: list[int] = []
    for message in [*messages, {"role": "assistant", "content": ""}]:
        content = message.get("content", "") if isinstance(message, dict) else message
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        role = message.get("role", "user") if isinstance(message, dict) else "user"
        tokens += [TURN, *text_tokens(f"{role}\n{content}")]
    return tokens


def reply_tokens(count: int, ends: bool) -> list[int]:
    """Return `count` token ids of the reply, which repeats; the last one is the end token if the reply `ends`."""
    tokens = [FIRST_BYTE + byte for byte in itertools.islice(itertools.cycle(_REPLY), count)]
    return [*tokens[:-1], END] if ends else tokens


def token_bytes(tokens: list[int]) -> bytes:
    """Return the bytes that these tokens stand for; special tokens stand for none."""
    return bytes(token - FIRST_BYTE for token in tokens if token >= FIRST_BYTE)


def token_text(tokens: list[int]) -> str:
    """Return the text that these tokens stand for."""
    return token_bytes(tokens).decode("utf-8", "replace")


class ChunkDecoder:
    """Decodes UTF-8 across chunks. The client carries the state from one request to the next, as with vLLM."""

    def __init__(self, carried: Mapping[str, Any]) -> None:
        """Restore the decoder from `carried`, the `stream_state` of the previous response, or from an empty one."""
        self.role_sent = bool(carried.get("role_sent"))
        self._offset = int(carried.get("logprob_text_offset") or 0)
        # A character can be cut between two chunks, so the state holds the last tokens.
        self._context: list[int] = list(carried.get("logprob_context_token_ids") or [])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(token_bytes(self._context))

    def decode(self, tokens: list[int]) -> str:
        """Return the text that these tokens complete."""
        self._context = [*self._context, *tokens][-4:]
        return self._decoder.decode(token_bytes(tokens))

    def state(self, role_sent: bool, characters: int) -> dict[str, Any]:
        """Return the `stream_state` for the next chunk, after `characters` more were written."""
        last = [token_text([token]) for token in self._context[-1:]]
        return {
            "prev_tokens": last, "prefix_offset": 0, "read_offset": len(last), "role_sent": role_sent,
            "logprob_context_token_ids": self._context, "logprob_text_offset": self._offset + characters,
            "output_token_ids": [], "output_chunk_lens": [], "tools_streamed": False, "last_tool_call_ids": [],
        }  # fmt: skip
