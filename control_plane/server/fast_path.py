"""The fast path: reads every request's body within bounds, and responds to discovery requests and admission reviews.

It stands in front of FastAPI's middleware and routing. Thousands of sidecars poll one process, and the API server waits
for each review, while FastAPI's own work for a request costs about as much as the whole response.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.errors import BadInput
from control_plane.injector.admission import decide, decode_review, encode_json, review
from control_plane.injector.workloads import workload_warnings
from control_plane.server.console.pages import ROOT, Console
from control_plane.server.discovery_request import TYPE_URLS, RequestDecoder
from control_plane.server.fleet import Fleet
from control_plane.server.injections import Injections
from control_plane.server.metrics import Metrics
from control_plane.server.policy_file import PolicyFile
from control_plane.server.services import Services
from control_plane.server.settings import ServeSettings
from control_plane.server.tokens import ACCEPTED, TokenCheck, Verdict, bearer

MAX_BODY_BYTES = 4 * 2**20
"""Largest request body. Kubernetes limits an AdmissionReview to 3 MiB, and a poll has some 80 KB."""

_DISCOVERY = "/v3/discovery:"
_INJECT = "/inject"
_WORKLOADS = "/validate-workload"
_OPEN = ("/healthz", "/readyz")
"""What is served to everybody. All else needs a token: Starlette's routes match more than the path that they name."""
_NOT_MODIFIED: Message = {"type": "http.response.start", "status": 304, "headers": []}
_NO_STATUS_OVER_TLS = Verdict(
    403,
    "Status and metrics are served over TLS only with a token. Give the control plane a file of API tokens, or use its"
    " plain listener.",
)
_CHALLENGE = [(b"www-authenticate", b"Bearer")]
_END: Message = {"type": "http.response.body", "body": b""}


class FastPath:
    """An ASGI app that handles discovery and reviews itself, and passes all other requests on to `app`."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        policy: PolicyFile,
        services: Services | None,
        fleet: Fleet,
        injections: Injections,
        metrics: Metrics,
        poll_tokens: TokenCheck | None,
        api_tokens: TokenCheck | None,
        console: Console,
    ) -> None:
        self._app = app
        self._body_seconds = settings.body_seconds
        self._injector = settings.injector
        self._policy = policy
        self._services = services
        self._fleet = fleet
        self._injections = injections
        self._metrics = metrics
        self._poll_tokens = poll_tokens
        self._api_tokens = api_tokens
        self._console = console
        self._decoder = RequestDecoder()
        self._types = {f"{_DISCOVERY}{type_name}": type_name for type_name in TYPE_URLS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request, or leave it to the application (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        type_name = self._types.get(path)
        try:
            body = await _read_body(scope, receive, self._body_seconds)
        except _BodyRejected as rejected:
            self._metrics.requests.labels(type_name or "other", rejected.result).inc()
            await _reject_body(rejected, receive, send)
            return
        except ClientDisconnect:
            return
        if type_name is not None or path in (_INJECT, _WORKLOADS):
            if scope["method"] != "POST":
                detail = f"{scope['method']} is not supported here. Use POST."
                await _send_detail(send, 405, detail, [(b"allow", b"POST")])
            elif type_name is not None:
                await self._discover(type_name, scope, body, send)
            else:
                await self._review(path, body, send)
        elif path.startswith(_DISCOVERY):
            detail = f"{path[:200]!r} is not a valid discovery path. Use one of: {', '.join(self._types)}."
            await _send_detail(send, 404, detail)
        elif path == ROOT or path.startswith(f"{ROOT}/"):
            await self._console(scope, _replay(body, receive), send)
        elif path not in _OPEN:
            if self._api_tokens:
                verdict = await self._api_tokens.check(bearer(scope["headers"]))
            else:
                # The TLS listener is open to the whole cluster. The other one can be closed to all but Prometheus.
                verdict = _NO_STATUS_OVER_TLS if scope["scheme"] == "https" else ACCEPTED
            if verdict.status == 200:
                await self._app(scope, _replay(body, receive), send)
            else:
                await _send_detail(send, verdict.status, verdict.detail, _CHALLENGE if self._api_tokens else None)
        else:
            await self._app(scope, _replay(body, receive), send)

    async def _review(self, path: str, body: bytes, send: Send) -> None:
        """Respond to an AdmissionReview of admission.k8s.io/v1 with the review that has its response."""
        name = path.removeprefix("/")
        mutation = None
        try:
            with self._metrics.inject_seconds.time():
                request = decode_review(body)
                known = await self._services.of(request.namespace) if self._services else None
                policies = self._policy.snapshot.policies
                if path == _WORKLOADS:
                    warnings = workload_warnings(request, policies, self._injector, known)
                    response = encode_json(review(request.uid, warnings=warnings))
                else:
                    mutation = decide(request, policies, self._injector, known)
                    response = encode_json(review(request.uid, mutation))
        except BadInput as error:
            self._metrics.requests.labels(name, "bad_request").inc()
            await _send_detail(send, 400, str(error))
            return
        self._metrics.requests.labels(name, "reviewed").inc()
        await _send(send, 200, response)
        if mutation:
            self._injections.record(request, mutation)

    async def _discover(self, type_name: str, scope: Scope, body: bytes, send: Send) -> None:
        count = self._metrics.count
        verdict = await self._poll_tokens.check(bearer(scope["headers"])) if self._poll_tokens else ACCEPTED
        if verdict.status != 200:
            count[type_name, "unauthorized" if verdict.status == 401 else "not_reviewed"]()
            await _send_detail(send, verdict.status, verdict.detail, _CHALLENGE if verdict.status == 401 else None)
            return
        try:
            client, version = self._decoder.decode(type_name, body)
        except BadInput as error:
            count[type_name, "bad_request"]()
            await _send_detail(send, 400, str(error))
            return
        if verdict.node_id not in (None, client.node_id):
            count[type_name, "unauthorized"]()
            await _send_detail(send, 403, f"node.id: the token belongs to {verdict.node_id}, not to this node.")
            return
        response = self._policy.snapshot.respond(client, version)
        if not client.probe:
            self._fleet.record(client, version, response)
        count[type_name, response.state]()
        if response.state == "not_modified":
            await send(_NOT_MODIFIED)
            await send(_END)
        elif response.state == "found":
            await _send(send, 200, response.body)
        else:
            await _send_detail(send, 503 if response.state == "busy" else 404, response.reason)


class _BodyRejected(Exception):
    """The body is too large or too slow, so the rest of it is not read."""

    def __init__(self, status: int, result: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.result = result


async def _read_body(scope: Scope, receive: Receive, body_seconds: float) -> bytes:
    """Return the whole body. Stops reading as soon as the body exceeds the limit, so no more than that is held."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > MAX_BODY_BYTES:
            raise _too_large()
    try:
        async with asyncio.timeout(body_seconds):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body: bytes = message.get("body", b"")
            if not message.get("more_body", False):
                return body
            parts, size = [body], len(body)
            while message.get("more_body", False):
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY_BYTES:
                    raise _too_large()
            return b"".join(parts)
    except TimeoutError:
        detail = f"The request body did not arrive within {body_seconds:g} seconds."
        raise _BodyRejected(408, "timeout", detail) from None


def _too_large() -> _BodyRejected:
    return _BodyRejected(413, "too_large", f"The request body is too large. The limit is {MAX_BODY_BYTES} bytes.")


async def _reject_body(rejected: _BodyRejected, receive: Receive, send: Send) -> None:
    """Respond and close the connection. A client that is still sending gets a second to read the response first."""
    body = _detail(str(rejected))
    headers = [*_headers(body), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": rejected.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if rejected.status == 413:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                # Closing a connection with unread bytes resets it, and the client would lose the response.
                while (await receive()).get("more_body", False):
                    pass
    await send(_END)


def _replay(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _send_detail(send: Send, status: int, detail: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await _send(send, status, _detail(detail), headers)


async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*_headers(body), *(headers or ())]})
    await send({"type": "http.response.body", "body": body})


def _headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]


def _detail(text: str) -> bytes:
    """Return the body of an error response, in the shape that FastAPI uses too."""
    content: dict[str, Any] = {"detail": text}
    return encode_json(content)
