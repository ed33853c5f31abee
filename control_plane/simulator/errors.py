"""vLLM's error responses, and the checks that precede every handler."""

import re
import secrets
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

# The prefixes that --api-key guards. Source: vllm/entrypoints/serve/middleware/authenticate.py.
_GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")

SCALE_OUT_OFF = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


class VllmError(Exception):
    """An error that the client gets in vLLM's form, `{"error": {message, type, param, code}}`."""

    def __init__(self, message: str, kind: str = "BadRequestError", code: int = 400, param: str | None = None) -> None:
        """Create an error with the HTTP status `code`; `param` names the request member that is wrong."""
        super().__init__(message)
        self.code = code
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def overflow_error() -> VllmError:
    """Return vLLM's error for a priority that its engine cannot encode."""
    return VllmError("", "InternalServerError", 500)


async def vllm_error_response(_: Request, error: Exception) -> JSONResponse:
    """Respond with a VllmError."""
    assert isinstance(error, VllmError)
    return JSONResponse(error.body, status_code=error.code)


async def validation_error_response(_: Request, error: Exception) -> JSONResponse:
    """Respond with a validation error: status 400, never 422, with long values cut.

    Source: vllm/entrypoints/serve/exception_handling.
    """
    assert isinstance(error, RequestValidationError)
    problems = [_problem(item) for item in error.errors()]
    title = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}:"
    lines = [title, *(f"  {item}" for item in problems[:10])]
    if len(problems) > 10:
        lines.append(f"  ...and {len(problems) - 10} more errors")
    first = problems[0]
    body = VllmError("\n".join(lines), "Bad Request", 400, first["loc"] if isinstance(first, dict) else None).body
    return JSONResponse(body, status_code=400)


def _problem(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    if item["loc"] == ("body",) and item.get("input") is None:
        # FastAPI changed its error for a null body after the version that vLLM 0.32 uses.
        item = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
    parts = [str(part) for part in item["loc"]]
    named = [part for part in parts if not re.search(r"[\[\]{}()]", part) and part not in {"str", "int", "list"}]
    return {**item, "loc": ".".join(named or parts), "input": _shortened(item.get("input"))}


def _shortened(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else text[:200] + "...[truncated]"


async def require_json(request: Request) -> None:
    """Reject a request whose media type is not application/json, with vLLM's validation error."""
    if request.headers.get("content-type", "").lower().split(";", maxsplit=1)[0] != "application/json":
        raise RequestValidationError(errors=["Unsupported Media Type: Only 'application/json' is allowed"])


class Authentication:
    """Middleware for `--api-key`: requires a bearer token on the guarded prefixes."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        """Guard `app` with this key."""
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or respond with 401."""
        guarded = (
            scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"].startswith(_GUARDED_PREFIXES)
        )
        if guarded:
            headers = dict(reversed(scope["headers"]))
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(token, self._api_key):
                await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
