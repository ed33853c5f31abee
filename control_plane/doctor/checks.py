"""The first checks: the server responds, it is vLLM, it accepts the API key, and it serves the model."""

import asyncio
import ssl
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx

from control_plane.doctor.responses import json_content, member, one_line, summarized
from control_plane.doctor.server import LOOK_AT_LOG, Server, StopExamination
from control_plane.vllm import GENERATE_ROUTE, RENDER_ROUTES

_ENDS_SOON = timedelta(days=14)


async def check_basics(server: Server) -> bool:
    """Add the rows of the first checks. Return whether the server can be examined further.

    The server's `model` and `max_model_len` are set on success.
    """
    try:
        reached, status = await _check_reachable(server)
        # Whether it is vLLM comes first: a person who entered the wrong URL must not read that it was reached.
        await _check_is_vllm(server)
        server.add("reachable", "ok", reached, status=status)
        await _check_model(server)
        await _check_prefix(server)
    except StopExamination:
        return False
    except (httpx.HTTPError, ValueError) as error:
        server.add("reachable", "fail", f"A request failed: {server.reason(error)}.", LOOK_AT_LOG)
        return False
    return True


async def _check_reachable(server: Server) -> tuple[str, int]:
    """Return what was seen and the HTTP status."""
    option = server.spell(server.role)
    started = time.monotonic()
    try:
        response = await server.client.get("/health")
    except (httpx.HTTPError, ssl.SSLError) as error:  # httpx lets some errors of TLS through.
        seen = f"The server cannot be reached: {server.reason(error)}."
        if server.url.startswith("https:") and isinstance(
            error, (httpx.ReadError, httpx.RemoteProtocolError, ssl.SSLError)
        ):
            # With TLS 1.3, a client hears that its certificate is missing only when it reads.
            cure = f"If it requires a client certificate, use {server.spell('client_cert')}. If not, look at its log."
            if server.settings.client_cert:
                cure = f"Check that it trusts the client's certificate. {LOOK_AT_LOG}"
            closed = "The server closed the connection after the TLS handshake."
            raise server.stop("TLS", closed, cure) from None
        if await _serves_https(server):
            raise server.stop("TLS", "The server serves HTTPS.", f"Use https:// in {option}.") from None
        raise server.stop("reachable", seen, f"Start the server, or correct {option}.") from None
    _check_certificate(server, response)
    status = response.status_code
    if status in {502, 503, 504}:
        seen = f"GET /health returned {status}: {summarized(response)}."
        next_step = "A proxy responded, and vLLM behind it did not. Start vLLM."
        raise server.stop("reachable", seen, next_step, status=status)
    if response.is_redirect:
        seen = f"GET /health returned {status}, a redirect to {response.headers.get('location', '')}."
        raise server.stop("reachable", seen, f"Use that URL for {option}.")
    return f"GET /health returned {status} in {(time.monotonic() - started) * 1000:.0f} ms.", status


async def _serves_https(server: Server) -> bool:
    """Return whether a server that does not respond to HTTP responds to TLS."""
    parts = urlsplit(server.url)
    if parts.scheme != "http":
        return False
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    try:
        connecting = asyncio.open_connection(parts.hostname, parts.port or 80, ssl=unverified)
        _, writer = await asyncio.wait_for(connecting, server.settings.timeout)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _check_certificate(server: Server, response: httpx.Response) -> None:
    """Add a row about the certificate of a server with HTTPS, which the connection has verified."""
    connection = response.extensions.get("network_stream")
    tls = connection.get_extra_info("ssl_object") if connection else None
    certificate = tls.getpeercert() if tls else None
    if not certificate:
        return
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
    seen = f"The certificate is trusted, and valid until {end:%Y-%m-%d %H:%M} UTC."
    if end - datetime.now(UTC) < _ENDS_SOON:
        server.add("TLS", "warn", seen, "Renew it.", not_after=end.isoformat())
    else:
        server.add("TLS", "ok", seen, not_after=end.isoformat())


async def _check_prefix(server: Server) -> None:
    """Where the URL has a path, add a row that says whether a sidecar edits the requests below it.

    The bodies are empty objects, which vLLM rejects. A sidecar reports what it did on such responses, too.
    """
    parts = urlsplit(server.url)
    prefix = parts.path.rstrip("/")
    if not prefix:
        return
    route = RENDER_ROUTES[0] if server.role == "render" else GENERATE_ROUTE
    reports: list[str | None] = []
    for url in (route, f"{parts.scheme}://{parts.netloc}{route}"):
        request = server.client.build_request("POST", url, json={}, headers={server.settings.header: "-1"})
        if reports:  # Outside the prefix, it could be another server's path.
            for name in ("authorization", *(name for name, _ in server.settings.headers)):
                request.headers.pop(name, None)
        reports.append((await server.client.send(request)).headers.get(server.settings.report_header))
    evidence: dict[str, Any] = {"applied": reports[0], "applied_without_prefix": reports[1]}
    if reports[0]:
        server.add("prefix", "ok", f"The sidecar edits requests below {prefix}.", **evidence)
    elif reports[1]:
        seen = f"The sidecar reported what it did to {route}, and nothing of {prefix}{route}: it does not edit that."
        server.add(
            "prefix",
            "lost",
            seen,
            f"If one sidecar serves both, set routes.root_path to {prefix} in its policy.",
            **evidence,
        )


async def _check_is_vllm(server: Server) -> None:
    response = await server.client.get("/version")
    version = member(json_content(response), "version")
    if isinstance(version, str):
        server.add("version", "ok", f"The server is vLLM {version}.", version=version)
        return
    listing = await server.client.get("/v1/models")
    cards = member(json_content(listing), "data")
    if listing.status_code == 401 or isinstance(cards, list):
        seen = f"GET /version returned {response.status_code}, but the server has /v1/models."
        owner = member(cards[0], "owned_by") if isinstance(cards, list) and cards else None
        if isinstance(owner, str) and owner != "vllm":  # Every model card of vLLM has owned_by: "vllm".
            seen += f" Its models are owned by {owner[:40]!r}, vLLM's by 'vllm', so this may be another server."
        next_step = "Examine the vLLM server itself instead of a gateway in front of it."
        server.add("vLLM", "warn", seen, next_step)
        return
    kind = one_line(response.headers.get("server", ""), 40)
    seen = (
        f"This is not vLLM: GET /version returned {response.status_code} with {summarized(response)}, and GET "
        f"/v1/models returned {listing.status_code}{f' (Server: {kind})' if kind else ''}. "
        'vLLM responds to GET /version with {"version": ...}.'
    )
    next_step = f"Correct {server.spell(server.role)}: use the root URL of a vLLM server, without a path."
    raise server.stop("vLLM", seen, next_step)


async def _check_model(server: Server) -> None:
    response = await server.client.get("/v1/models")
    if response.status_code in {401, 403}:
        given = "it rejected the one that was given" if server.settings.api_key else "none was given"
        seen = f"GET /v1/models returned {response.status_code}: the server requires an API key, and {given}."
        raise server.stop("API key", seen, f"Use {server.spell('api_key')} with the key that vLLM was started with.")
    cards = member(json_content(response), "data")
    if not isinstance(cards, list) or not cards:
        seen = f"GET /v1/models returned {response.status_code} without a list of models: {summarized(response)}."
        raise server.stop("model", seen, f"Check that the server has loaded its model. {LOOK_AT_LOG}")
    names = [str(member(card, "id")) for card in cards]
    model = server.model or names[0]
    if model not in names:
        seen = f"The model {model!r} is not served. The server has: {', '.join(names)}."
        raise server.stop("model", seen, f"Use {server.spell('model')} with one of them.")
    longest = member(cards[names.index(model)], "max_model_len")
    server.model, server.max_model_len = model, longest if isinstance(longest, int) else None
    server.add("model", "ok", f"The server has the model {model!r}.", models=names)
