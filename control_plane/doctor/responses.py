"""What the doctor reads from a response, and how it quotes a response in a sentence."""

import math
import socket
import ssl
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


def json_content(response: httpx.Response) -> Any:
    """Return the response's JSON content, or None if it is not JSON."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def member(value: Any, name: str) -> Any:
    """Return the member of a JSON object, or None if the value is not an object or has no such member."""
    return value.get(name) if isinstance(value, dict) else None


def error_type(response: httpx.Response) -> str | None:
    """Return the type of a vLLM error, for example "PermissionDeniedError"."""
    kind = member(member(json_content(response), "error"), "type")
    return kind if isinstance(kind, str) else None


def error_param(response: httpx.Response) -> str | None:
    """Return the name of the header or member that the error is about, in lower case."""
    param = member(member(json_content(response), "error"), "param")
    return param.lower() if isinstance(param, str) else None


def error_text(response: httpx.Response) -> str:
    """Return the error message in one line, or the start of the response if it has none."""
    content = json_content(response)
    message = member(member(content, "error"), "message") or member(content, "detail") or member(content, "error")
    return one_line(message if isinstance(message, str) else response.text, 400)


def status_and_error(response: httpx.Response) -> str:
    """Return the status and the error message as the object of "returned"."""
    text = error_text(response)
    return (
        f'{response.status_code} with "{text.removesuffix(".")}"'
        if text
        else f"{response.status_code} with an empty body"
    )


def summarized(response: httpx.Response) -> str:
    """Return the start of the response's body in one line; HTML is only named, since its start says nothing."""
    if "html" in response.headers.get("content-type", ""):
        return "an HTML page"
    return one_line(response.text, 80) or "an empty body"


def one_line(text: str, length: int) -> str:
    """Return the text in one line of at most `length` characters, without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= length else line[: length - 3] + "..."


def gauge_values(metrics: str, name: str) -> list[float]:
    """Return the values of a gauge in Prometheus's text format, one for each set of labels.

    Only the gauge's own lines are parsed: vLLM's metrics have hundreds of others, which would take the parser tens of
    milliseconds at each of many reads. A line that cannot be parsed, and a value that is not finite, count as missing.
    """
    lines = [line for line in metrics.split("\n") if line.startswith(name)]
    try:
        samples = [s for family in text_string_to_metric_families("\n".join(lines) + "\n") for s in family.samples]
    except ValueError:
        return []
    return [sample.value for sample in samples if sample.name == name and math.isfinite(sample.value)]


_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE")
"""What OpenSSL says of a server that responds in plain HTTP."""


def failure_reason(error: BaseException, timeout: float) -> str:
    """Return in a clause why a request failed; `timeout` is the time that it was given, in seconds."""
    if isinstance(error, httpx.TimeoutException):
        return f"there was no response within {timeout:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
            return "it does not use TLS. Use http:// in the URL"
        if isinstance(cause, ConnectionRefusedError):
            return "the connection was refused"
        if isinstance(cause, socket.gaierror):
            return "the host name cannot be resolved"
        cause = cause.__cause__ or cause.__context__
    return one_line(str(error), 120) or type(error).__name__
