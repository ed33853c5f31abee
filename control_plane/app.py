"""The control plane's HTTP: discovery for sidecars, injection for pods, and what it knows of both.

HTTP only: responses are worked out in xds.py, the injector and fleet.py. An app holds no state that an answer to
a sidecar or to Kubernetes depends on, so any number of replicas answer alike.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.certificates import Certificate
from control_plane.errors import BadInput, PriorityError
from control_plane.fleet import Fleet, Report, Standing
from control_plane.injector.admission import decode_review, encode_json, review
from control_plane.injector.settings import InjectorSettings
from control_plane.policy import ROLES, load_policies
from control_plane.render import Address
from control_plane.services import Services
from control_plane.xds import TYPES, Askers, Snapshot

_log = logging.getLogger("vllm_priority.control_plane")

MAX_BODY_BYTES = 4 * 2**20
"""Largest request body. An AdmissionReview is at most 3 MiB (Kubernetes' own limit of a request), a poll some 80 KB."""


@dataclass(frozen=True)
class ServeSettings:
    """What `vllm-priority serve` is told. TLS is served beside plain HTTP where a certificate is named."""

    policy: Path
    listen: Address = Address("0.0.0.0", 8080)
    tls_listen: Address = Address("0.0.0.0", 8443)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    injector: InjectorSettings = field(default_factory=InjectorSettings)
    read_services: bool = False
    """Whether Kubernetes' API is asked for the Services of a pod's namespace (needs the right to list them)."""
    reload_seconds: float = 1.0
    """How often the policy file and the certificate are looked at."""
    body_seconds: float = 10.0
    """How long a client may take to send a request's body."""


class PolicyFile:
    """The policies of a file: the last good ones, whatever became of the file since."""

    def __init__(self, path: Path) -> None:
        """PolicyError where the file is wrong: there is no good one to keep yet."""
        self.path = path
        self.version = ""
        self.problem: str | None = None
        self.earlier_versions: frozenset[str] = frozenset()
        self.snapshot, self.loaded = self._load()

    def reload(self) -> bool | None:
        """Look at the file: True where it was loaded, False where it was refused, None where nothing changed.

        By content, not by time or inode: a mounted ConfigMap changes by a swapped symlink.
        """
        version = _content_hash(self.path)
        if version == self.version:
            return None
        try:
            snapshot, loaded = self._load()
        except PriorityError as error:
            self.problem = str(error)
            self.version = version
            return False
        self.earlier_versions = frozenset(self.snapshot.versions())
        self.snapshot, self.loaded = snapshot, loaded
        self.problem = None
        return True

    def _load(self) -> tuple[Snapshot, float]:
        version = _content_hash(self.path)
        snapshot = Snapshot(load_policies(self.path))
        self.version = version
        return snapshot, time.time()


def _content_hash(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable: {error.strerror}"


class _Metrics:
    """A registry of its own for each app: two apps in one process do not share their counts."""

    def __init__(self, policy: PolicyFile, fleet: Fleet, certificate: Certificate | None) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vllm_priority_control_plane_requests", "Requests, by type and result", ["type", "result"],
            registry=self.registry,
        )  # fmt: skip
        self.reloads = Counter(
            "vllm_priority_control_plane_policy_reloads", "Changes of the policy file, by result", ["result"],
            registry=self.registry,
        )  # fmt: skip
        for result in ("loaded", "refused"):
            self.reloads.labels(result)
        Gauge(
            "vllm_priority_control_plane_policy_broken", "1 while the file is wrong and the last good policy is served",
            registry=self.registry,
        ).set_function(lambda: float(policy.problem is not None))  # fmt: skip
        Gauge(
            "vllm_priority_control_plane_policy_loaded_timestamp_seconds", "When the policy in force was loaded",
            registry=self.registry,
        ).set_function(lambda: policy.loaded)  # fmt: skip
        if certificate:
            Gauge(
                "vllm_priority_control_plane_certificate_expiry_timestamp_seconds", "When the served certificate ends",
                registry=self.registry,
            ).set_function(lambda: certificate.expires.timestamp())  # fmt: skip
        self.inject_seconds = Histogram(
            "vllm_priority_control_plane_inject_seconds", "Time to answer an admission review",
            registry=self.registry, buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
        )  # fmt: skip
        # One object a pair: looking labels up costs more than the rest of an unchanged poll's accounting.
        self.count = {
            (kind, result): self.requests.labels(kind, result).inc
            for kind in TYPES
            for result in ("found", "not_modified", "not_found", "bad_request")
        }
        ProcessCollector(registry=self.registry)
        self.registry.register(_FleetCollector(policy, fleet))


class _FleetCollector(Collector):
    def __init__(self, policy: PolicyFile, fleet: Fleet) -> None:
        self._policy = policy
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        # A sidecar's word for its version is text of its own: only those that were really served become a label.
        known = self._policy.earlier_versions.union(self._policy.snapshot.versions())
        counts: dict[tuple[str, ...], int] = {}
        for sidecar, _, standing in self._fleet.standings(self._policy.snapshot):
            version = sidecar.version if sidecar.version in known else "other" if sidecar.version else "none"
            role = sidecar.asker.role if sidecar.asker.role in ROLES else "other"
            key = sidecar.asker.kind, role, version, standing
            counts[key] = counts.get(key, 0) + 1
        family = GaugeMetricFamily(
            "vllm_priority_control_plane_sidecars",
            "Sidecars that poll this replica",
            labels=["type", "role", "version", "standing"],
        )
        for labels, count in sorted(counts.items()):
            family.add_metric(labels, count)
        yield family


def create_app(settings: ServeSettings) -> FastAPI:
    """The whole control plane as one ASGI app. PolicyError where the policy file is wrong."""
    policy = PolicyFile(settings.policy)
    certificate = _certificate(settings)
    services = Services.in_cluster() if settings.read_services else None
    fleet = Fleet()
    metrics = _Metrics(policy, fleet, certificate)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(_watch(settings, policy, certificate, fleet, metrics))
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if services:
            await services.close()

    app = _App(title="vllm-priority control plane", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.front = _Front(app.serve_routes, settings, policy, services, fleet, metrics)
    app.state.policy, app.state.certificate, app.state.fleet = policy, certificate, fleet

    @app.exception_handler(BadInput)
    async def bad_input(_: Request, error: BadInput) -> Response:
        return _json(400, {"detail": str(error)})

    @app.exception_handler(RequestValidationError)
    async def bad_query(_: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        return _json(400, {"detail": f"{problem['loc'][-1]}: {problem['msg']}"})

    @app.get("/healthz")
    async def healthz() -> Response:
        """The process answers."""
        return _json(200, {"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        """Ready while it has a policy to serve, which is always: the body says what is wrong besides.

        A broken edit must not take the replicas out of their Service: each serves the last good policy.
        """
        certificate_problem = certificate.problem if certificate else None
        services_problem = services.problem if services else None
        problems = [problem for problem in (policy.problem, certificate_problem, services_problem) if problem]
        return _json(
            200,
            {
                "status": "degraded" if problems else "ready",
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
        """Counts and gauges in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/api/policy")
    async def api_policy() -> Response:
        """The policies in force, and the version of each role's filter config in a sidecar that began with it."""
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
        standing: Standing | None = None,
        limit: Annotated[int, Query(ge=1, le=2000)] = 500,
        offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    ) -> Response:
        """Who has what, the sidecar that polled last first; the counts are of all."""
        counts, reports = fleet.reports(policy.snapshot, standing, limit, offset)
        now = time.time()
        return _json(
            200,
            {
                "total": sum(counts.values()),
                **counts,
                "now": now,
                "sidecars": [{name: getattr(report, name) for name in _REPORTED} for report in reports],
            },
        )

    return app


def _certificate(settings: ServeSettings) -> Certificate | None:
    if settings.tls_cert and settings.tls_key:
        return Certificate(settings.tls_cert, settings.tls_key)
    if settings.tls_cert or settings.tls_key:
        raise BadInput("tls: a certificate and a key are needed; allowed: both --tls-cert and --tls-key, or neither")
    return None


async def _watch(
    settings: ServeSettings, policy: PolicyFile, certificate: Certificate | None, fleet: Fleet, metrics: _Metrics
) -> None:
    while True:
        await asyncio.sleep(settings.reload_seconds)
        try:
            # In a thread: rendering a file of many policies takes longer than a poll may wait.
            loaded = await asyncio.to_thread(policy.reload)
            renewed = await asyncio.to_thread(certificate.reload) if certificate else None
            fleet.forget_silent()
        except Exception:
            # Whatever it is, the next look at the files must happen.
            _log.exception("policy or certificate: cannot be looked at")
            continue
        if loaded is not None:
            metrics.reloads.labels("loaded" if loaded else "refused").inc()
        if loaded:
            _log.info("policy %s: loaded", policy.path)
        elif loaded is False:
            _log.error("policy refused, the last good one is served: %s", policy.problem)
        if certificate and renewed:
            _log.info("certificate %s: loaded, valid until %s", certificate.cert, certificate.expires.isoformat())
        elif certificate and renewed is False:
            _log.error("certificate refused: %s", certificate.problem)


class _App(FastAPI):
    """FastAPI, with what must come before its own work on a request in front of it."""

    front: "_Front"

    async def serve_routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What FastAPI does with a request."""
        await super().__call__(scope, receive, send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)


class _Front:
    """Reads each request's body within bounds, and answers discovery and reviews.

    These are answered here, in front of FastAPI's middleware and routing: thousands of sidecars poll one process, a
    cluster waits for its reviews, and what FastAPI does with each request costs about as much as the whole answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        policy: PolicyFile,
        services: Services | None,
        fleet: Fleet,
        metrics: _Metrics,
    ) -> None:
        self._app = app
        self._seconds = settings.body_seconds
        self._injector = settings.injector
        self._policy = policy
        self._services = services
        self._fleet = fleet
        self._metrics = metrics
        self._askers = Askers()
        self._kinds = {f"{_DISCOVERY}{kind}": kind for kind in TYPES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        kind = self._kinds.get(path)
        try:
            body = await _read_body(scope, receive, self._seconds)
        except _RefusedError as refused:
            self._metrics.requests.labels(kind or "other", refused.result).inc()
            await _refuse(refused, receive, send)
            return
        except _GoneError:
            return
        if kind is not None or path == _INJECT:
            if scope["method"] != "POST":
                line = f"{scope['method']}: is not allowed here; allowed: POST"
                await _send_line(send, 405, line, [(b"allow", b"POST")])
            elif kind is not None:
                await self._discover(kind, body, send)
            else:
                await self._review(body, send)
        elif path.startswith(_DISCOVERY):
            allowed = ", ".join(TYPES)
            await _send_line(send, 404, f"{path}: this type is not served; allowed: {_DISCOVERY} and one of {allowed}")
        else:
            await self._app(scope, _replay(body, receive), send)

    async def _review(self, body: bytes, send: Send) -> None:
        """An AdmissionReview of admission.k8s.io/v1 -> the review with its response."""
        try:
            with self._metrics.inject_seconds.time():
                request = decode_review(body)
                known = await self._services.of(request.namespace) if self._services else None
                answer = encode_json(review(request, self._policy.snapshot.policies, self._injector, known))
        except BadInput as error:
            self._metrics.requests.labels("inject", "bad_request").inc()
            await _send_line(send, 400, str(error))
            return
        self._metrics.requests.labels("inject", "answered").inc()
        await _send(send, 200, answer)

    async def _discover(self, kind: str, body: bytes, send: Send) -> None:
        count = self._metrics.count
        try:
            asker, version = self._askers.read(kind, body)
        except BadInput as error:
            count[kind, "bad_request"]()
            await _send_line(send, 400, str(error))
            return
        answer = self._policy.snapshot.answer(asker, version)
        self._fleet.seen(asker, version, answer)
        count[kind, answer.state]()
        if answer.state == "not_modified":
            await send(_NOT_MODIFIED)
            await send(_END)
        elif answer.state == "found":
            await _send(send, 200, answer.body)
        else:
            await _send_line(send, 404, answer.reason)


_REPORTED = tuple(entry.name for entry in fields(Report))
_DISCOVERY = "/v3/discovery:"
_INJECT = "/inject"
_NOT_MODIFIED: Message = {"type": "http.response.start", "status": 304, "headers": []}
_END: Message = {"type": "http.response.body", "body": b""}


class _RefusedError(Exception):
    """A request's body is not read any further."""

    def __init__(self, status: int, result: str, line: str) -> None:
        super().__init__(line)
        self.status = status
        self.result = result


class _GoneError(Exception):
    """The client left before its body was there: nobody to answer."""


async def _read_body(scope: Scope, receive: Receive, seconds: float) -> bytes:
    """The whole body. Never holds more than the limit: what is longer is refused when that shows."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > MAX_BODY_BYTES:
            raise _too_large()
    try:
        async with asyncio.timeout(seconds):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            body: bytes = message.get("body", b"")
            if not message.get("more_body", False):
                return body
            parts, size = [body], len(body)
            while message.get("more_body", False):
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _GoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY_BYTES:
                    raise _too_large()
            return b"".join(parts)
    except TimeoutError:
        raise _RefusedError(
            408, "timeout", f"body: did not arrive within {seconds:g} s; next: send it faster"
        ) from None


def _too_large() -> _RefusedError:
    return _RefusedError(413, "too_large", f"body: is too large; allowed: at most {MAX_BODY_BYTES} bytes")


async def _refuse(refused: _RefusedError, receive: Receive, send: Send) -> None:
    """Answer, and close the connection. A client that is still sending gets a second to read the answer first."""
    body = _line(str(refused))
    headers = [*_headers(body), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if refused.status == 413:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                # Closing with unread bytes resets the connection, and the answer is lost with it.
                while (await receive()).get("more_body", False):
                    pass
    await send(_END)


def _replay(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _send_line(send: Send, status: int, line: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await _send(send, status, _line(line), headers)


async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*_headers(body), *(headers or ())]})
    await send({"type": "http.response.body", "body": body})


def _headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]


def _line(text: str) -> bytes:
    """An error in the shape of FastAPI's own."""
    return encode_json({"detail": text})


def _json(status: int, content: Any) -> Response:
    return Response(encode_json(content), status, media_type="application/json")
