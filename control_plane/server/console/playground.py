"""One request through the filter, for people: what they typed, and what becomes of it."""

import asyncio
import contextlib
import difflib
import json
import logging
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import yaml

from control_plane.errors import BadInput, InvalidField
from control_plane.explain import check_request_line, client_at, parse_header, with_framing
from control_plane.policy.model import Policies, Policy
from control_plane.vllm import ENGINE_ROUTES, GENERATE_ROUTE, READS_HEADER, ROLES, Role

_log = logging.getLogger("vllm_priority.control_plane")

MAX_BODY_BYTES = 64 * 1024
MAX_FORM_BYTES = 4 * MAX_BODY_BYTES
"""A form encodes a byte in up to three."""
_MAX_HEADERS = 100
_MAX_HEADER_BYTES = 16 * 1024
_MAX_WAITING = 4
_SHOWN_AT_EACH_END = 1000
"""Of a long part of the body that is the same, so much is shown before and after a change, in bytes."""

_COMMON_KEYS = ("policy", "role", "method", "path", "peer", "identity", "headers", "body")

OUTCOMES = {
    "inserted": ("The body had no priority. The sidecar inserts one.", None),
    "replaced": ("The body had a priority. The sidecar replaces it.", None),
    "header_set": ("vLLM reads the header on this route. The sidecar writes it as a plain integer.", "ordinary"),
    "response_edited": ("The sidecar sets the priority of vLLM's response.", None),
    "absent": ("The request has no priority header, and the policy has no default.", "default"),
    "kept": ("The request has no priority header. The body's own priority stays.", "body"),
    "invalid": ("The header value is neither an integer nor a class of the policy.", "on_invalid"),
    "out_of_range": ("The value does not fit into 64 bits, or is outside the policy's range.", "range"),
    "ambiguous": (
        "The header has several values, or the body has a priority that only some JSON readers accept, or too many.",
        "on_invalid",
    ),
    "invalid_path": ("The path contains a control character.", None),
    "unsupported_media_type": ("The content type is not application/json.", "on_unmovable"),
    "unsupported_charset": ("The body is in UTF-16 or UTF-32.", "on_unmovable"),
    "unsupported_encoding": ("The body has a content-encoding.", "on_unmovable"),
    "malformed_json": ("The body is not valid JSON.", None),
    "not_an_object": ("The body is JSON, but not an object.", None),
    "empty_body": ("The request has no body.", None),
    "upstream_error": ("vLLM's response is an error, or is not JSON.", None),
    "ignored": ("The body's priority is replaced by 0, vLLM's own default.", "body"),
    "not_allowed": ("The body has a priority, and the policy rejects that.", "body"),
    "untrusted": ("The policy does not let this client set a priority.", "trust"),
    "too_large": ("The body is larger than the sidecar holds.", "limits"),
    "overloaded": ("The sidecar has no memory left for this body.", None),
}
"""Each outcome: what it means, and the key of the policy that decides, if one does."""
_SOURCES = {"header": "header", "class": "classes", "default": "default", "body": "body"}


@dataclass(frozen=True)
class Typed:
    """What a person typed into the form."""

    policy: str = "default"
    role: str = "engine"
    method: str = "POST"
    path: str = GENERATE_ROUTE
    peer: str = "127.0.0.1"
    identity: str = ""
    headers: str = "X-Vllm-Priority: -10"
    body: str = '{"token_ids":[1,2,3]}'

    @classmethod
    def of(cls, form: bytes) -> "Typed":
        """Return the fields of a form. BadInput if it is not one."""
        if len(form) > MAX_FORM_BYTES:
            raise _too_large()
        try:
            fields = parse_qs(form.decode("ascii"), keep_blank_values=True, errors="surrogateescape", max_num_fields=20)
        except ValueError:
            raise BadInput("The request is not a form of this page. Use the form.") from None
        return cls(**{key: values[-1] for key, values in fields.items() if key in _COMMON_KEYS})

    @property
    def body_bytes(self) -> bytes:
        """The body. Forms write each line break as CR LF, and here it is what a client would send: LF."""
        return self.body.replace("\r\n", "\n").encode("utf-8", "surrogateescape")


class Part(NamedTuple):
    """A part of the body to show. `kind` is same, removed, inserted, or hidden, whose text is the number of bytes."""

    kind: str
    text: str


class Change(NamedTuple):
    """A change of the body. `at` is the byte of the client's body at which it begins, the first of which is 0."""

    at: int
    removed: str
    inserted: str


class Rule(NamedTuple):
    """What of the policy decided, as YAML."""

    key: str
    text: str


@dataclass(frozen=True)
class Result:
    """What becomes of a request."""

    outcome: str | None
    meaning: str
    report_header: str | None
    report: str | None
    value: str | None
    rules: list[Rule]
    trusted_by: str | None
    sent_bytes: int
    received_bytes: int
    headers: list[Part]
    body: list[Part]
    changes: list[Change]
    rejection: tuple[int, str] | None
    response: str | None
    response_headers: list[tuple[str, str]]


class Playground:
    """Runs requests through the filter, one at a time, each within `seconds`."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._turn = asyncio.Semaphore(1)
        self._waiting = 0

    async def run(self, typed: Typed, policies: Policies) -> Result:
        """Return what becomes of a request. BadInput where it is not valid, or cannot be run now."""
        policy = policies.by_name.get(typed.policy)
        if policy is None:
            raise InvalidField("policy", f"{typed.policy[:63]!r} is not a policy of the file.")
        lines = self._headers(typed)
        if self._waiting > _MAX_WAITING:
            raise BadInput("Other requests wait for the playground. Try again in a few seconds.")
        self._waiting += 1
        try:
            async with self._turn:
                # In a thread: a policy may have thousands of classes, and sidecars poll meanwhile.
                request = await asyncio.to_thread(_request, typed, policy, lines)
                found = await self._explain(request)
                return await asyncio.to_thread(_result, typed, policy, lines, found)
        finally:
            self._waiting -= 1

    @staticmethod
    def _headers(typed: Typed) -> list[tuple[str, str]]:
        body = typed.body_bytes
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        lines = [line for line in typed.headers.splitlines() if line.strip()]
        if len(lines) > _MAX_HEADERS or len(typed.headers) > _MAX_HEADER_BYTES:
            raise BadInput(f"headers: Use at most {_MAX_HEADERS} headers of {_MAX_HEADER_BYTES} bytes in all.")
        parsed = []
        for line in lines:
            header = parse_header(line)
            if header is None:
                raise BadInput(
                    f"headers: {line[:100]!r} is not a valid header. Use NAME: VALUE, for example X-Vllm-Priority: -10."
                )
            parsed.append(header)
        return with_framing(parsed, body)

    async def _explain(self, request: bytes) -> dict[str, Any]:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "control_plane.server.console.explain_one",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._seconds):
                output, errors = await child.communicate(request)
        except TimeoutError:
            raise BadInput(
                f"The request took longer than {self._seconds:g} seconds, so it was stopped. Try again when the control"
                " plane's machine is less busy, or use vllm-priority explain."
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        if child.returncode != 0:
            _log.error("The playground's process ended with %s: %s", child.returncode, ascii(errors[-500:]))
            raise BadInput("The request could not be run. The control plane's log has the reason.")
        found: dict[str, Any] = json.loads(output)
        return found


def routes_of(policy: Policy) -> list[str]:
    """Return routes to choose from."""
    known = [*ENGINE_ROUTES, *sorted(READS_HEADER), *policy.routes.extra]
    return list(dict.fromkeys(known))[:100]


def _too_large() -> BadInput:
    return BadInput(f"body: Too large for this page: at most {MAX_BODY_BYTES} bytes. Use vllm-priority explain.")


def _request(typed: Typed, policy: Policy, headers: list[tuple[str, str]]) -> bytes:
    check_request_line(typed.method, typed.path)
    role: Role | None = next((role for role in ROLES if role == typed.role), None)
    if role is None:
        raise InvalidField("role", f"{typed.role[:63]!r} is not a role. It must be one of: {', '.join(ROLES)}.")
    identities = [name for name in typed.identity.replace(",", " ").split() if name]
    client = client_at(typed.peer.strip(), identities)
    if not (typed.path + typed.identity).isascii():
        raise InvalidField("path", "Use ASCII only, in the identity too. Other characters are percent-encoded.")
    request = {
        # A tenant's own values are those that its rule sets, so what is not set must stay so.
        "policy": policy.model_dump_json(exclude_unset=True),
        "role": role,
        "path": typed.path,
        "method": typed.method.upper(),
        "headers": headers,
        "body": typed.body_bytes.decode("latin-1"),
        "client": client.address,
        "identities": client.identities,
    }
    return json.dumps(request).encode()


def _result(typed: Typed, policy: Policy, headers: list[tuple[str, str]], found: dict[str, Any]) -> Result:
    outcome = found["outcome"]
    meaning, key = OUTCOMES.get(outcome or "", ("", None))
    if outcome is None:
        meaning = "Only POST requests on the routes of the policy are edited, so the request passes through unchanged."
        key = "routes"
    keys = [_SOURCES.get(found["source"] or ""), key, "trust" if found["trusted_by"] is not None else None]
    values = policy.model_dump(mode="json")
    rules = [
        Rule(key, yaml.safe_dump({key: values[key]}, sort_keys=False, allow_unicode=True).strip())
        for key in dict.fromkeys(keys)
        if key
    ]
    pieces = [(kind, data.encode("latin-1")) for kind, data in found["pieces"]]
    return Result(
        outcome=outcome,
        meaning=meaning,
        report_header=policy.report_header,
        report=found["report"],
        value=found["value"],
        rules=rules,
        trusted_by=found["trusted_by"],
        sent_bytes=len(typed.body_bytes),
        received_bytes=found["bytes"],
        headers=list(_header_parts(headers, found["headers"])),
        body=_body_parts(pieces),
        changes=_changes(pieces),
        rejection=found["rejection"] and (found["rejection"][0], _text(found["rejection"][1].encode("latin-1"))),
        response=None if found["response"] is None else _text(found["response"].encode("latin-1")),
        response_headers=[(name, value) for name, value in found["response_headers"]],
    )


def _header_parts(before: list[tuple[str, str]], after: list[list[str]]) -> list[Part]:
    old = [f"{name.lower()}: {value}" for name, value in before]
    new = [f"{name}: {value}" for name, value in after]
    parts: list[Part] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            parts += [Part("same", line) for line in old[i:j]]
        else:
            parts += [Part("removed", line) for line in old[i:j]]
            parts += [Part("inserted", line) for line in new[k:m]]
    return parts


def _body_parts(pieces: list[tuple[str, bytes]]) -> list[Part]:
    parts: list[Part] = []
    for kind, data in pieces:
        hidden = len(data) - 2 * _SHOWN_AT_EACH_END
        if hidden > 100:
            parts.append(Part(kind, _text(data[:_SHOWN_AT_EACH_END])))
            parts.append(Part("hidden", str(hidden)))
            parts.append(Part(kind, _text(data[-_SHOWN_AT_EACH_END:])))
        else:
            parts.append(Part(kind, _text(data)))
    return parts


def _changes(pieces: list[tuple[str, bytes]]) -> list[Change]:
    changes: list[Change] = []
    at, begun = 0, False
    for kind, data in pieces:
        if kind == "same":
            at, begun = at + len(data), False
            continue
        if not begun:
            changes.append(Change(at, "", ""))
            begun = True
        last = changes[-1]
        if kind == "removed":
            changes[-1] = last._replace(removed=_text(data))
            at += len(data)
        else:
            changes[-1] = last._replace(inserted=_text(data))
    return changes


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
