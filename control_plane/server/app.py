"""The control plane as an ASGI app: its routes, and the task that watches the policy file and the certificate.

No response to a sidecar or to Kubernetes depends on state that the app holds, so all replicas respond alike.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive, Scope, Send

from control_plane.errors import BadInput
from control_plane.injector.admission import encode_json
from control_plane.kubernetes_api import in_cluster
from control_plane.policy.restart import listed
from control_plane.server.certificates import Certificate
from control_plane.server.console.access import Access
from control_plane.server.console.pages import Console
from control_plane.server.events import Events
from control_plane.server.fast_path import FastPath
from control_plane.server.fleet import ConfigStatus, Fleet
from control_plane.server.injections import Injections
from control_plane.server.metrics import CONTENT_TYPE, Metrics
from control_plane.server.policy_file import PolicyFile
from control_plane.server.services import Services
from control_plane.server.settings import ServeSettings
from control_plane.server.tokens import ReviewedTokens, TokenFile
from control_plane.vllm import ROLES

_log = logging.getLogger("vllm_priority.control_plane")


def create_app(settings: ServeSettings) -> FastAPI:
    """Create the control plane. BadInput where the policy file or the certificate is not valid."""
    policy = PolicyFile(settings.policy)
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
    api = in_cluster() if settings.read_services or settings.write_events or settings.token_audience else None
    services = Services(api) if api and settings.read_services else None
    events = Events(api) if api and settings.write_events else None
    reviews = ReviewedTokens(api, settings.token_audience) if api and settings.token_audience else None
    token_files = [
        TokenFile(path, field)
        for path, field in ((settings.token_file, "token_file"), (settings.api_token_file, "api_token_file"))
        if path
    ]
    api_tokens = token_files[-1] if settings.api_token_file else None
    fleet = Fleet()
    injections = Injections(events)
    metrics = Metrics(policy, fleet, injections, certificate)
    console = Console(Access(api_tokens, settings.console_proxies), policy, fleet, injections)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_watch(settings, policy, certificate, token_files, fleet, metrics))]
        tasks += [asyncio.create_task(_connect(client)) for client in (services, reviews) if client]
        tasks.append(asyncio.create_task(console.timeline.run()))
        if events:
            tasks.append(asyncio.create_task(events.run()))
        yield
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if services:
            await services.close()
        if reviews:
            await reviews.close()
        if events:
            await events.close()

    app = _App(title="vllm-priority control plane", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    poll_tokens = reviews or (token_files[0] if settings.token_file else None)
    app.fast_path = FastPath(
        app.serve_routes, settings, policy, services, fleet, injections, metrics, poll_tokens, api_tokens, console
    )
    app.state.policy, app.state.certificate, app.state.fleet = policy, certificate, fleet
    app.state.timeline = console.timeline

    @app.exception_handler(BadInput)
    async def bad_input(_: Request, error: BadInput) -> Response:
        return _json(400, {"detail": str(error)})

    @app.exception_handler(RequestValidationError)
    async def bad_query(_: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        return _json(400, {"detail": f"{problem['loc'][-1]}: {problem['msg']}"})

    @app.get("/healthz")
    async def healthz() -> Response:
        """Respond as long as the process can."""
        return _json(200, {"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        """Respond with 200, except until the Kubernetes API has accepted a request; the body lists all problems.

        The exception stops a rollout whose replicas cannot read Services. Later problems do not change the status,
        because they affect all replicas at the same time: a policy file that is not valid must not remove all of them
        from their Service while they still serve the last valid policy.
        """
        starting = any(client is not None and not client.connected for client in (services, reviews))
        certificate_problem = certificate.problem if certificate else None
        services_problem = services.problem if services else None
        events_problem = events.problem if events else None
        token_problems = [source.problem for source in (*token_files, reviews) if source]
        found = (policy.problem, certificate_problem, services_problem, events_problem, *token_problems)
        problems = [problem for problem in found if problem]
        return _json(
            503 if starting else 200,
            {
                "status": "starting" if starting else "degraded" if problems else "ready",
                "problems": problems,
                "policy": {"file": str(policy.path), "loaded": policy.loaded, "problem": policy.problem},
                "certificate": certificate
                and {
                    "file": str(certificate.cert),
                    "expires": certificate.expires.isoformat(),
                    "problem": certificate_problem,
                },
            },
        )

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Respond with all metrics in the Prometheus text format."""
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    @app.get("/api/policy")
    async def api_policy() -> Response:
        """List the policies in force. A version is that of the filter for sidecars whose bootstrap has that policy."""
        snapshot = policy.snapshot
        selectors = {entry.name: dict(entry.selector) for entry in snapshot.policies.named}
        return _json(
            200,
            {
                "file": str(policy.path),
                "loaded": policy.loaded,
                "problem": policy.problem,
                "policies": [
                    {
                        "name": name,
                        "selector": selectors.get(name, {}),
                        "versions": {role: snapshot.version(name, entry, role) for role in ROLES},
                        "policy": entry.model_dump(mode="json"),
                    }
                    for name, entry in snapshot.policies.by_name.items()
                ],
            },
        )

    @app.get("/api/sidecars")
    async def api_sidecars(
        status: ConfigStatus | None = None,
        limit: Annotated[int, Query(ge=1, le=2000)] = 500,
        offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    ) -> Response:
        """List the sidecars that poll this replica, most recent poll first. The counts are of all of them.

        `next_offset` is the offset of the next page, or null if there is none. A page may have fewer than `limit`.
        """
        counts, page = fleet.report(policy.snapshot, status, limit, offset)
        matching = counts[status] if status else sum(counts.values())
        end = offset + len(page)
        return _json(
            200,
            {
                "total": sum(counts.values()),
                **counts,
                "next_offset": end if page and end < matching else None,
                "now": time.time(),
                "sidecars": [sidecar._asdict() for sidecar in page],
            },
        )

    @app.get("/api/injections")
    async def api_injections() -> Response:
        """Count what this replica's webhook did to pods, and list the most recent ones, newest first."""
        return _json(200, injections.report())

    return app


class _App(FastAPI):
    """FastAPI with the fast path in front of it."""

    fast_path: FastPath

    async def serve_routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request by FastAPI's own middleware and routes."""
        await super().__call__(scope, receive, send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.fast_path(scope, receive, send)


async def _connect(client: Services | ReviewedTokens) -> None:
    """Connect to the Kubernetes API, and log each new reason why that fails."""
    logged = None
    while not await client.connect():
        if client.problem != logged:
            logged = client.problem
            _log.error("Not ready: %s", logged)
        await asyncio.sleep(1)
    _log.info("Connected to the Kubernetes API.")


async def _watch(
    settings: ServeSettings,
    policy: PolicyFile,
    certificate: Certificate | None,
    token_files: list[TokenFile],
    fleet: Fleet,
    metrics: Metrics,
) -> None:
    while True:
        await asyncio.sleep(settings.reload_seconds)
        try:
            # In a thread, because rendering a file with many policies takes longer than a poll may wait.
            loaded = await asyncio.to_thread(policy.reload)
            renewed = await asyncio.to_thread(certificate.reload) if certificate else None
            for tokens in token_files:
                await asyncio.to_thread(tokens.reload)
            fleet.forget_silent()
        except Exception:
            # Whatever went wrong must not end the watch.
            _log.exception("Cannot look at the policy file or the certificate.")
            continue
        if loaded is not None:
            metrics.reloads.labels("loaded" if loaded else "rejected").inc()
        if loaded:
            _log.info("Loaded the policy file %s.", policy.path)
            for name, keys in policy.restart_for.items():
                _log.warning(
                    "Policy %s: %s has no effect in running sidecars that started without it. Restart them. "
                    "/api/sidecars lists them under restart_for.",
                    name,
                    listed(keys),
                )
        elif loaded is False:
            _log.error("The policy file is not valid; the last valid policy stays in force: %s", policy.problem)
        if certificate and renewed:
            _log.info("Loaded the certificate %s, valid until %s.", certificate.cert, certificate.expires.isoformat())
        elif certificate and renewed is False:
            _log.error("The new certificate cannot be used: %s", certificate.problem)


def _json(status: int, content: Any) -> Response:
    return Response(encode_json(content), status, media_type="application/json")
