"""Why does a priority do nothing? Asks a running deployment, route by route, and watches the order of its queue.

Nothing here changes a deployment: it reads, renders small prompts, and generates a few tokens. What will be
sent is announced first. How each question is put, and why the answer proves something, is in docs/doctor.md.
"""

import asyncio
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import httpx
from rich.table import Table
from rich.text import Text

from control_plane.errors import BadInput
from control_plane.policy import RENDER_ROUTES, RESPONSE_ROUTES, Role

GENERATE_ROUTE = "/inference/v1/generate"

Verdict = Literal["ok", "lost", "fail", "warn", "unknown"]

BODY_PRIORITY = 3
"""The body's own priority in the request that carries both, so that the two can be told apart."""

_FAILING: frozenset[Verdict] = frozenset({"lost", "fail"})

_EXAMPLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1},
    "/v1/completions/render": {"prompt": "ping", "max_tokens": 1},
    "/v1/responses/render": {"input": "ping", "max_output_tokens": 1},
    "/v1/messages/render": {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1},
}

# Ids that any vocabulary has; what they stand for does not matter, since no one reads the answer.
_SMALL_TOKENS = [1, 2, 3]


@dataclass(frozen=True)
class DoctorSettings:
    """What to examine, and how far to go.

    render, engine: root URLs, at least one of them. header: the request header that carries the priority;
    report_header: the response header in which a sidecar says what it did. model: as served; None is the first of
    /v1/models. priority: what is sent as urgent, negative. timeout: seconds for one ordinary answer.
    queue_timeout: seconds to wait for a change in the queue. max_fill: most long requests sent to fill the slots.
    """

    render: str | None = None
    engine: str | None = None
    api_key: str | None = None
    header: str = "x-vllm-priority"
    report_header: str = "x-vllm-priority-applied"
    model: str | None = None
    priority: int = -10
    timeout: float = 10.0
    queue_timeout: float = 20.0
    max_fill: int = 8
    poll: float = 0.02

    def __post_init__(self) -> None:
        if self.render is None and self.engine is None:
            raise BadInput("doctor: nothing to examine; allowed: --render URL, --engine URL, or both")
        for flag, url in (("--render", self.render), ("--engine", self.engine)):
            if url is not None:
                _check_url(flag, url)
        for flag, name in (("--header", self.header), ("report header", self.report_header)):
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
                raise BadInput(f"{flag}: {name!r} is no header name; allowed: such as X-Vllm-Priority")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise BadInput("--api-key: it cannot be sent in a header; allowed: printable ASCII without blanks")
        if self.priority >= 0:
            raise BadInput(f"--priority: {self.priority} is not more urgent than 0; allowed: a negative integer")
        for flag, number in (("--timeout", self.timeout), ("--queue-timeout", self.queue_timeout)):
            if not 0 < number < float("inf"):
                raise BadInput(f"{flag}: {number:g} is no time to wait; allowed: seconds above 0")
        if self.max_fill < 1:
            raise BadInput(f"--max-fill: {self.max_fill} fills nothing; allowed: 1 and up")


def _check_url(flag: str, url: str) -> None:
    allowed = "allowed: the server's root, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        wrong = True
    if wrong or parts.query or parts.fragment or any(c.isspace() for c in url):
        raise BadInput(f"{flag}: {url!r} is no URL of a server; {allowed}")
    if parts.username is not None:
        raise BadInput(f"{flag}: a URL with a password in it ends up in logs; allowed: --api-key")
    if re.search(r"/v1(/|$)", parts.path):
        raise BadInput(f"{flag}: {url!r} names an API path; {allowed}")


@dataclass(frozen=True)
class Row:
    """One check: of which server, what was asked, the verdict, what was seen, and what to do about it."""

    server: Role
    check: str
    verdict: Verdict
    seen: str
    next_step: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The rows in the order in which they were asked."""

    rows: tuple[Row, ...]
    targets: dict[Role, str]

    @property
    def exit_status(self) -> int:
        """1 where a priority would be lost or something cannot be used, else 0."""
        return int(any(row.verdict in _FAILING for row in self.rows))

    @property
    def summary(self) -> str:
        """One sentence."""
        lost = [row.check for row in self.rows if row.verdict == "lost"]
        failed = [f"{row.server}: {row.check}" for row in self.rows if row.verdict == "fail"]
        unsure = [row.check for row in self.rows if row.verdict == "unknown"]
        if lost:
            return f"A priority is lost: {', '.join(lost)}."
        if failed:
            return f"A check fails: {', '.join(failed)}."
        return f"No priority is lost{'; not decided: ' + ', '.join(unsure) if unsure else ''}."

    def to_json(self) -> dict[str, Any]:
        """The same for machines: {exit_status, summary, targets, checks: [...]}."""
        checks = [
            {
                "server": row.server, "check": row.check, "verdict": row.verdict, "seen": row.seen,
                "next_step": row.next_step or None, "evidence": row.evidence,
            }
            for row in self.rows
        ]  # fmt: skip
        return {
            "exit_status": self.exit_status, "summary": self.summary, "targets": dict(self.targets), "checks": checks
        }  # fmt: skip


STYLES: dict[Verdict, str] = {
    "ok": "green",
    "lost": "bold red",
    "fail": "bold red",
    "warn": "yellow",
    "unknown": "cyan",
}


def table(report: Report) -> Table:
    """The report for a terminal: one row a check, each with its verdict and its next step."""
    shown = Table(show_lines=True, caption=Text(report.summary), caption_justify="left", caption_style="bold")
    for title, least in (("check", 12), ("verdict", 7), ("what was seen", 20), ("next step", 12)):
        shown.add_column(title, overflow="fold", min_width=least)
    above = ""
    for row in report.rows:
        verdict = Text(row.verdict, style=STYLES[row.verdict])
        next_step = "as above" if row.next_step and row.next_step == above else row.next_step
        shown.add_row(Text(f"{row.server}: {row.check}"), verdict, Text(row.seen), Text(next_step or "-"))
        above = row.next_step
    return shown


async def examine(settings: DoctorSettings, announce: Callable[[str], None] = lambda line: None) -> Report:
    """Ask every server named. `announce` is told, line by line, what will be sent, before it is."""
    rows: list[Row] = []
    targets: dict[Role, str] = {}
    tokens: list[int] | None = None
    if settings.render is not None:
        targets["render"] = settings.render
        async with _connect(settings, "render", settings.render, rows) as render:
            announce(_plan_of_basics(render))
            if await render.basics():
                announce(_plan_of_render(render))
                tokens = await render.render_routes()
    if settings.engine is not None:
        targets["engine"] = settings.engine
        async with _connect(settings, "engine", settings.engine, rows) as engine:
            announce(_plan_of_basics(engine))
            if await engine.basics():
                if settings.render is None:
                    announce(_plan_of_render(engine))
                    tokens = await engine.render_routes()
                announce(_plan_of_probe(engine))
                if await engine.generate_route():
                    announce(_plan_of_queue(engine))
                    await _Queue(engine, tokens or _SMALL_TOKENS).examine()
    return Report(tuple(rows), targets)


def _plan_of_basics(server: "_Server") -> str:
    return f"{server.role} {server.url}: GET /health, /version, /v1/models"


def _plan_of_render(server: "_Server") -> str:
    return (
        f"{server.role} {server.url}: POST to {len(RENDER_ROUTES)} render routes, 4 times each: without a priority, "
        f"with {server.priority} in the header {server.settings.header}, in the body, and with both"
    )


def _plan_of_probe(server: "_Server") -> str:
    return f"{server.role} {server.url}: POST {GENERATE_ROUTE} twice, with bodies that vLLM refuses, so nothing runs"


def _plan_of_queue(server: "_Server") -> str:
    return (
        f"{server.role} {server.url}: GET /metrics and /server_info; if it is idle, twice: up to "
        f"{server.settings.max_fill + 1} long requests to {GENERATE_ROUTE} until one waits, then two more behind them, "
        f"one with priority {server.priority}; all are aborted as soon as the order is seen"
    )


@asynccontextmanager
async def _connect(settings: DoctorSettings, role: Role, url: str, rows: list[Row]) -> AsyncIterator["_Server"]:
    host = urlsplit(url).hostname or ""
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"),
        headers=headers,
        timeout=httpx.Timeout(settings.timeout, connect=min(settings.timeout, 5.0)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
        trust_env=not _is_loopback(host),
    ) as client:
        yield _Server(settings, role, url, client, rows)


def _is_loopback(host: str) -> bool:
    """A proxy of the environment is for other machines."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _StopError(Exception):
    """The server cannot be asked any further; the row that says why is written."""


class _Server:
    """One server under examination: asks, and appends rows."""

    def __init__(
        self, settings: DoctorSettings, role: Role, url: str, client: httpx.AsyncClient, rows: list[Row]
    ) -> None:
        self.settings, self.role, self.url, self.client = settings, role, url, client
        self.priority = settings.priority
        self.model: str | None = settings.model
        self.max_model_len: int | None = None
        self._rows = rows

    def add(self, check: str, verdict: Verdict, seen: str, next_step: str = "", **evidence: Any) -> None:
        self._rows.append(Row(self.role, check, verdict, seen, next_step, evidence))

    def stop(self, check: str, seen: str, next_step: str, **evidence: Any) -> "_StopError":
        """Writes a failed row; to be raised."""
        self.add(check, "fail", seen, next_step, **evidence)
        return _StopError()

    @property
    def sidecar_command(self) -> str:
        """The command that puts a sidecar in front of this server."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        listen = 18000 if self.role == "render" else 18001
        return f"vllm-priority run --role {self.role} --upstream {parts.hostname}:{port} --listen 0.0.0.0:{listen}"

    @property
    def cure(self) -> str:
        """What to do where the header is not moved."""
        return f"put a sidecar in front and send clients to it: {self.sidecar_command}"

    # -- reachable, vLLM, allowed in

    async def basics(self) -> bool:
        """Whether it answers, is vLLM, lets us in and serves the model."""
        try:
            reached, code = await self._reachable()
            await self._is_vllm()
            self.add("reachable", "ok", reached, status=code)
            await self._models()
        except _StopError:
            return False
        except (httpx.HTTPError, ValueError) as error:
            self.add("reachable", "fail", _reason(error, self.settings.timeout), "look at the server's log")
            return False
        return True

    async def _reachable(self) -> tuple[str, int]:
        """What to say of it, and the status; whether it is vLLM comes first."""
        started = time.monotonic()
        try:
            answer = await self.client.get("/health")
        except httpx.HTTPError as error:
            flag = f"--{self.role}"
            next_step = f"start the server, or correct {flag}"
            raise self.stop("reachable", _reason(error, self.settings.timeout), next_step) from None
        code = answer.status_code
        if code in {502, 503, 504}:
            seen = f"GET /health: {code}, {_shown(answer)}"
            raise self.stop("reachable", seen, "a proxy answers, vLLM behind it does not: start vLLM", status=code)
        if answer.is_redirect:
            to = answer.headers.get("location", "")
            raise self.stop("reachable", f"GET /health: {code}, moved to {to}", f"use that URL for --{self.role}")
        return f"GET /health: {code} in {(time.monotonic() - started) * 1000:.0f} ms", code

    async def _is_vllm(self) -> None:
        answer = await self.client.get("/version")
        version = _member(_json(answer), "version")
        if isinstance(version, str):
            self.add("version", "ok", f"vLLM {version}", version=version)
            return
        listing = await self.client.get("/v1/models")
        cards = _member(_json(listing), "data")
        if listing.status_code == 401 or isinstance(cards, list):
            seen = f"GET /version: {answer.status_code}, but /v1/models is there"
            owner = _member(cards[0], "owned_by") if isinstance(cards, list) and cards else None
            if isinstance(owner, str) and owner != "vllm":  # vLLM's ModelCard has owned_by: "vllm"
                seen += f"; its models are owned by {owner[:40]!r}, vLLM's by 'vllm', so this may be another server"
            next_step = "ask the server itself, not a gateway in front of it, to see all there is"
            self.add("vLLM", "warn", seen, next_step)
            return
        kind = _one_line(answer.headers.get("server", ""), 40)
        seen = (
            f"this is not vLLM: GET /version answers {answer.status_code}, {_page(answer)}, and GET /v1/models "
            f"{listing.status_code}{f' (Server: {kind})' if kind else ''}; "
            'vLLM answers GET /version with {"version": ...}'
        )
        raise self.stop("vLLM", seen, f"correct --{self.role}: the root URL of a vLLM server, without a path")

    async def _models(self) -> None:
        answer = await self.client.get("/v1/models")
        if answer.status_code in {401, 403}:
            given = "the one given is refused" if self.settings.api_key else "none was given"
            raise self.stop("API key", f"{answer.status_code}: it wants an API key, {given}", "pass --api-key KEY")
        cards = _member(_json(answer), "data")
        if not isinstance(cards, list) or not cards:
            raise self.stop("model", f"GET /v1/models: {answer.status_code}, {_shown(answer)}", "pass --model NAME")
        names = [str(_member(card, "id")) for card in cards]
        wanted = self.model or names[0]
        if wanted not in names:
            raise self.stop("model", f"{wanted!r} is not served: {', '.join(names)}", f"pass --model {names[0]}")
        longest = _member(cards[names.index(wanted)], "max_model_len")
        self.model, self.max_model_len = wanted, longest if isinstance(longest, int) else None
        self.add("model", "ok", wanted, models=names)

    # -- the render routes

    async def render_routes(self) -> list[int] | None:
        """Ask each render route four times; gives the token ids of a rendered prompt."""
        tokens: list[int] | None = None
        for route in RENDER_ROUTES:
            try:
                cases = await self._four_cases(route)
            except _StopError:
                break
            except httpx.HTTPError as error:
                self.add(route, "unknown", _reason(error, self.settings.timeout), "look at the server's log")
                continue
            if cases is not None:
                tokens = tokens or cases["none"].tokens
                self._judge_route(route, cases)
        return tokens

    async def _four_cases(self, route: str) -> "dict[str, _Rendered] | None":
        """The answers without a priority, with the header, with the body's, with both; None where the route is out."""
        body = {"model": self.model, **_EXAMPLE[route]}
        header = {self.settings.header: str(self.priority)}
        asked: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
            "none": (body, {}),
            "header": (body, header),
            "body": ({**body, "priority": self.priority}, {}),
            "both": ({**body, "priority": BODY_PRIORITY}, header),
        }
        cases: dict[str, _Rendered] = {}
        for name, (content, headers) in asked.items():
            answer = await self.client.post(route, json=content, headers=headers)
            if answer.status_code == 403 and _error_type(answer) == "PermissionDeniedError":
                seen = f"403 on {route}: {_error_text(answer)}"
                next_step = "restart vllm serve with --enable-scale-out, or render with vllm launch render"
                raise self.stop("scale-out", seen, next_step, status=403)
            if name == "none":
                if route == RENDER_ROUTES[0] and answer.status_code != 404:
                    await self._kind()
                if answer.status_code != 200:
                    self.add(route, "unknown", f"{answer.status_code}: {_error_text(answer)}", _not_rendered(answer))
                    return None
            cases[name] = _Rendered.of(answer, self.settings.report_header)
        return cases

    async def _kind(self) -> None:
        """Scale-out is on: say on which kind of server. An empty body runs nothing."""
        answer = await self.client.post(GENERATE_ROUTE, json={})
        if answer.status_code == 404:
            seen = "on: a render-only server (vllm launch render), generate answers 404"
        else:
            seen = "on: vllm serve, generate is there too"
        self.add("scale-out", "ok", seen, generate_status=answer.status_code)

    def _judge_route(self, route: str, cases: "dict[str, _Rendered]") -> None:
        none, header, body, both = (cases[name] for name in ("none", "header", "body", "both"))
        seen = "; ".join(f"{name} {case.shown}" for name, case in cases.items())
        bodiless = route in RESPONSE_ROUTES
        if bodiless:
            seen += " (this route's body cannot carry a priority, only its answer can)"
        report = header.report
        if report:
            seen += f"; a sidecar says: {report}"
        evidence: dict[str, Any] = {
            name: {"status": case.status, "priority": case.priority} for name, case in cases.items()
        }  # fmt: skip
        evidence["applied"] = report
        # A sidecar may clamp, negate for another engine, or look a class up: its own word is what to expect.
        wanted = _applied(report) if _applied(report) is not None else self.priority
        verdict: Verdict = "ok"
        next_step = ""
        if header.status == 400 and header.refused_header(self.settings.header):
            verdict, next_step = "warn", "the sidecar's policy refuses this value: examine with --priority N within it"
        elif header.status != 200 or both.status != 200:
            verdict, next_step = "unknown", "look at the server's log for this answer"
        elif header.priority != wanted:
            verdict = "lost"
            next_step = f"a sidecar answers, yet the value is lost: {_LOOK_AT_SIDECAR}" if report else self.cure
        elif both.priority != wanted:
            verdict, next_step = "lost", f"the body's priority beats the header: {_LOOK_AT_SIDECAR}"
        elif not bodiless and body.priority != self.priority:
            verdict, next_step = "warn", "something on the way changes the body's own priority: look at its policy"
        elif none.priority != 0:
            next_step = "a request that names none gets a default: see the policy's `default`"
        self.add(route, verdict, seen, next_step, **evidence)

    # -- generate: the route, and whether the header reaches its body

    async def generate_route(self) -> bool:
        """Whether generate can be asked. Two bodies that vLLM refuses tell what reaches it."""
        try:
            answer = await self.client.post(GENERATE_ROUTE, json={})
            if answer.status_code == 404:
                seen = f"404 on {GENERATE_ROUTE}: a render-only server (vllm launch render) does not generate"
                raise self.stop("scale-out", seen, "name the engine (vllm serve --enable-scale-out) with --engine")
            if answer.status_code == 403:
                if not any(row.check == "scale-out" and row.server == self.role for row in self._rows):
                    seen = f"403 on {GENERATE_ROUTE}: {_error_text(answer)}"
                    raise self.stop("scale-out", seen, "restart vllm serve with --enable-scale-out", status=403)
                raise _StopError
            if answer.status_code != 400:
                seen = f"{answer.status_code} to an empty body on {GENERATE_ROUTE}: {_error_text(answer)}"
                raise self.stop("scale-out", seen, "look at the server's log", status=answer.status_code)
            if not any(row.check == "scale-out" and row.server == self.role for row in self._rows):
                self.add("scale-out", "ok", "on: generate is there", generate_status=400)
            await self._header_reaches_body()
        except _StopError:
            return False
        except httpx.HTTPError as error:
            self.add("scale-out", "unknown", _reason(error, self.settings.timeout), "look at the server's log")
            return False
        return True

    async def _header_reaches_body(self) -> None:
        """The body's own priority is no integer and sampling_params is missing, so vLLM refuses it in any case.

        Only where the header replaced the priority on the way does vLLM not name body.priority among the errors.
        """
        check = GENERATE_ROUTE
        content = {"model": self.model, "token_ids": _SMALL_TOKENS, "priority": "not-a-number"}
        headers = {self.settings.header: str(self.priority)}
        answer = await self.client.post(GENERATE_ROUTE, json=content, headers=headers)
        report, text = answer.headers.get(self.settings.report_header), _error_text(answer)
        said = f"; a sidecar says: {report}" if report else "; no sidecar says anything"
        evidence = {"status": answer.status_code, "error": text, "applied": report}
        if answer.status_code != 400 or "body." not in text:
            if _error_param(answer) == self.settings.header.lower():
                next_step = "the sidecar's policy refuses this value: examine with --priority N within it"
                self.add(check, "warn", f"400: {text}", next_step, **evidence)
            else:
                seen = f"{answer.status_code}: {text}{said}"
                self.add(check, "unknown", seen, "the order of the queue has to tell", **evidence)
        elif "body.priority" in text:
            seen = f"vLLM still sees the body's own priority{said}"
            self.add(check, "lost", seen, f"{_LOOK_AT_SIDECAR}" if report else self.cure, **evidence)
        else:
            self.add(check, "ok", f"vLLM no longer sees the body's own priority{said}", **evidence)


_WITH_ONE_SLOT = "raise --max-fill, or test a copy started with --max-num-seqs 1"
_LOOK_AT_SIDECAR = "look at the sidecar's policy (vllm-priority explain) and log"


@dataclass(frozen=True)
class _Rendered:
    """One answer of a render route."""

    status: int
    priority: int | None
    tokens: list[int] | None
    report: str | None
    error: str
    error_param: str | None

    @classmethod
    def of(cls, answer: httpx.Response, report_header: str) -> Self:
        content = _json(answer)
        items = content if isinstance(content, list) else [content]
        priorities = {_member(item, "priority") for item in items}
        priority = next(iter(priorities)) if len(priorities) == 1 else None
        tokens = _member(items[0], "token_ids") if items else None
        return cls(
            answer.status_code,
            priority if isinstance(priority, int) else None,
            tokens if isinstance(tokens, list) else None,
            answer.headers.get(report_header),
            _error_text(answer),
            _error_param(answer),
        )

    @property
    def shown(self) -> str:
        """In a few words."""
        if self.status != 200:
            return f"{self.status} ({self.error})"
        return "?" if self.priority is None else str(self.priority)

    def refused_header(self, header: str) -> bool:
        """Whether a sidecar refused the header's value."""
        return (self.error_param or "").lower() == header.lower()


class _UndecidedError(Exception):
    """The order cannot be told; its text says why, `next_step` what to do."""

    def __init__(self, seen: str, next_step: str) -> None:
        super().__init__(seen)
        self.next_step = next_step


@dataclass(frozen=True)
class _Order:
    """In which order B and C came out of the queue."""

    urgent_first: bool
    report: str | None
    filled: int


class _Queue:
    """The order test: A holds the slots, B (0) and then C (urgent) wait behind it; who comes out first?

    Each step waits for the gauges to show the last one, never for a time: a busy machine makes it slower, not wrong.
    """

    def __init__(self, server: _Server, tokens: list[int]) -> None:
        self._server, self._tokens = server, tokens
        self._settings = server.settings
        self._policy: str | None = None
        self._slots: int | None = None

    async def examine(self) -> None:
        """Append the rows about scheduling and order."""
        await self._server_info()
        body, header = "order, by the body", "order, by the header"
        if self._policy == "fcfs":
            self._say_fcfs("/server_info says fcfs")
            return
        told = "/server_info says priority" if self._policy else ""
        try:
            by_body = await self._order(in_body=True)
        except _UndecidedError as reason:
            said: Verdict = "ok" if told else "unknown"
            self._server.add("scheduling policy", said, told or f"not told, and {reason}", reason.next_step)
            self._server.add(body, "unknown", str(reason), reason.next_step)
            self._server.add(header, "unknown", str(reason), reason.next_step)
            return
        if not by_body.urgent_first:
            if not told:
                self._say_fcfs("a priority in the body did not change the order")
                return
            seen = f"A, B, C: B with 0 started before C with {self._server.priority} in the body"
            next_step = f"{told}: something on the way removes the body's priority"
            self._server.add("scheduling policy", "ok", told, policy=self._policy)
            self._server.add(body, "lost", seen, next_step)
            return
        policy_seen = told or "priority: the order shows it"
        self._server.add("scheduling policy", "ok", policy_seen, policy="priority", slots=by_body.filled)
        self._server.add(body, "ok", f"A, C, B: C with {self._server.priority} in the body started before B with 0")
        try:
            by_header = await self._order(in_body=False)
        except _UndecidedError as reason:
            self._server.add(header, "unknown", str(reason), reason.next_step)
            return
        report = f"; a sidecar says: {by_header.report}" if by_header.report else ""
        if by_header.urgent_first:
            seen = f"A, C, B: C with {self._server.priority} in the header started before B with 0{report}"
            self._server.add(header, "ok", seen, applied=by_header.report)
        else:
            seen = f"A, B, C: B with 0 started before C with {self._server.priority} in the header{report}"
            next_step = _LOOK_AT_SIDECAR if by_header.report else self._server.cure
            self._server.add(header, "lost", seen, next_step, applied=by_header.report)

    def _say_fcfs(self, why: str) -> None:
        seen = f"fcfs, first come first served: {why}. Any priority is ignored, whatever carries it"
        next_step = "restart vllm serve with --scheduling-policy priority"
        self._server.add("scheduling policy", "lost", seen, next_step, policy="fcfs")
        unknown = "under fcfs the order proves nothing about the header"
        self._server.add("order, by the header", "unknown", unknown, next_step)

    async def _server_info(self) -> None:
        """The policy and the slots, where VLLM_SERVER_DEV_MODE=1 tells them."""
        try:
            answer = await self._server.client.get("/server_info", params={"config_format": "json"})
        except httpx.HTTPError:
            return
        scheduler = _member(_member(_json(answer), "vllm_config"), "scheduler_config")
        policy, slots = _member(scheduler, "policy"), _member(scheduler, "max_num_seqs")
        self._policy = policy if isinstance(policy, str) else None
        self._slots = slots if isinstance(slots, int) else None

    # -- one round

    async def _order(self, in_body: bool) -> _Order:
        """One round of A, B, C. _UndecidedError where it would prove nothing."""
        if self._slots is not None and self._slots > self._settings.max_fill:
            raise self._too_many_slots(f"{self._slots} slots (/server_info)")
        held: list[_Held] = []
        try:
            await self._until_idle()
            return await self._watched(held, in_body)
        except httpx.HTTPError as error:
            reason = _reason(error, self._settings.timeout)
            raise _UndecidedError(f"a request failed: {reason}", "look at the server's log") from None
        finally:
            for request in held:
                await request.abort()

    async def _watched(self, held: "list[_Held]", in_body: bool) -> _Order:
        slots = await self._fill(held)
        # B names 0 itself, so that no default of a sidecar's applies to it.
        b = self._send(held, {"priority": 0}, {})
        await self._gauges(slots, 1, "B waits", held)
        if in_body:
            c = self._send(held, {"priority": self._server.priority}, {})
        else:
            c = self._send(held, {}, {self._settings.header: str(self._server.priority)})
        await self._gauges(slots, 2, "C waits too", held)
        # One slot comes free: whoever takes it was first in the queue, and holds it, so the other cannot start.
        await held[0].abort()
        deadline = time.monotonic() + self._settings.queue_timeout
        while not (b.started or c.started):
            for request in (b, c):
                request.check()
            if time.monotonic() > deadline:
                raise _UndecidedError("neither B nor C started when A was gone", "look at the server's log")
            await asyncio.sleep(self._settings.poll)
        if b.started and c.started:
            raise _UndecidedError("B and C started at once: the slot was not the only one", _WITH_ONE_SLOT)
        return _Order(c.started, c.report, slots)

    async def _fill(self, held: "list[_Held]") -> int:
        """Send long requests until one waits, and take that one back; gives how many run."""
        for count in range(1, self._settings.max_fill + 2):
            self._send(held, {}, {})
            running, waiting = await self._settled(count, held)
            if waiting == 0:
                continue
            if waiting > 1 or running != count - 1:
                raise self._someone_else(running, waiting)
            await held.pop().abort()
            await self._gauges(count - 1, 0, "the request that waited is taken back", held)
            return count - 1
        raise self._too_many_slots(f"more than {self._settings.max_fill} slots")

    def _too_many_slots(self, seen: str) -> _UndecidedError:
        return _UndecidedError(f"{seen}: nothing waits, so the order proves nothing", _WITH_ONE_SLOT)

    def _someone_else(self, running: int, waiting: int) -> _UndecidedError:
        seen = f"other requests are in its queue ({running} running, {waiting} waiting): cannot tell"
        return _UndecidedError(seen, "examine it again while nobody else uses it")

    async def _until_idle(self) -> None:
        """_UndecidedError where other people's requests stay in the queue, or the gauges cannot be read."""
        deadline = time.monotonic() + min(3.0, self._settings.queue_timeout)
        while True:
            running, waiting = await self._read()
            if running == waiting == 0:
                return
            if time.monotonic() > deadline:
                raise self._someone_else(running, waiting)
            await asyncio.sleep(self._settings.poll)

    async def _settled(self, total: int, held: "list[_Held]") -> tuple[int, int]:
        """(running, waiting) once they add up to `total`: all that were sent have arrived."""
        deadline = time.monotonic() + self._settings.queue_timeout
        while True:
            running, waiting = await self._read()
            if running + waiting == total and running > 0:
                return running, waiting
            self._check(held, deadline, (running, waiting), total, "the long requests arrived")
            await asyncio.sleep(self._settings.poll)

    async def _gauges(self, running: int, waiting: int, step: str, held: "list[_Held]") -> None:
        """Wait until the gauges show exactly this."""
        deadline = time.monotonic() + self._settings.queue_timeout
        while (seen := await self._read()) != (running, waiting):
            self._check(held, deadline, seen, running + waiting, step)
            await asyncio.sleep(self._settings.poll)

    def _check(self, held: "list[_Held]", deadline: float, seen: tuple[int, int], total: int, step: str) -> None:
        """_UndecidedError where waiting on is of no use: a request ended, or it took too long."""
        for request in held:
            request.check()
        if time.monotonic() > deadline:
            if sum(seen) > total:
                raise self._someone_else(*seen)
            text = f"the gauges never showed that {step}: {seen[0]} running, {seen[1]} waiting"
            raise _UndecidedError(text, "ask the engine itself: behind a load balancer the gauges may be another's")

    async def _read(self) -> tuple[int, int]:
        """(running, waiting) from /metrics."""
        answer = await self._server.client.get("/metrics")
        counts = {}
        for name in ("running", "waiting"):
            sample = rf"^vllm:num_requests_{name}(?:{{[^}}]*}})? ([0-9.]+(?:e[+-]?[0-9]+)?)$"
            values = re.findall(sample, answer.text, re.MULTILINE)
            if not values:
                seen = f"GET /metrics: {answer.status_code}, without vllm:num_requests_{name}"
                raise _UndecidedError(seen, "name the engine itself with --engine, with its /metrics")
            if len(values) > 1:
                seen = f"{len(values)} engines behind this URL, each with a queue of its own"
                raise _UndecidedError(f"{seen}: their order proves nothing", "test a copy with --data-parallel-size 1")
            counts[name] = int(float(values[0]))
        return counts["running"], counts["waiting"]

    # -- the requests

    def _send(self, held: "list[_Held]", more: dict[str, Any], headers: dict[str, str]) -> "_Held":
        """Send a request as long as the context allows, and keep it."""
        longest = self._server.max_model_len or 2048
        params = {"max_tokens": max(longest - len(self._tokens), 1), "ignore_eos": True, "temperature": 0}
        body = {
            "model": self._server.model, "token_ids": self._tokens, "stream": True, "sampling_params": params, **more
        }  # fmt: skip
        held.append(_Held(self._server, body, headers))
        return held[-1]


class _Held:
    """A long request in flight: holds a slot, or a place in the queue, until it is aborted."""

    def __init__(self, server: _Server, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.started = False
        self.report: str | None = None
        # A stream is silent while it waits in the queue.
        patient = httpx.Timeout(server.settings.timeout, read=3 * server.settings.queue_timeout)
        request = server.client.stream("POST", GENERATE_ROUTE, json=body, headers=headers, timeout=patient)
        self._task = asyncio.create_task(self._read(request, server.settings.report_header))

    async def _read(self, request: AbstractAsyncContextManager[httpx.Response], report_header: str) -> None:
        async with request as answer:
            self.report = answer.headers.get(report_header)
            if answer.status_code != 200:
                await answer.aread()
                raise _UndecidedError(f"{answer.status_code}: {_error_text(answer)}", "look at the server's log")
            async for _ in answer.aiter_raw():
                self.started = True

    def check(self) -> None:
        """Raises why it ended, if it did."""
        if self._task.done():
            self._task.result()
            raise _UndecidedError("a long request ended before the order could be seen", _WITH_ONE_SLOT)

    async def abort(self) -> None:
        """Close the connection: vLLM aborts the request then."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


# ---- reading answers


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _error_type(answer: httpx.Response) -> str | None:
    kind = _member(_member(_json(answer), "error"), "type")
    return kind if isinstance(kind, str) else None


def _error_param(answer: httpx.Response) -> str | None:
    param = _member(_member(_json(answer), "error"), "param")
    return param.lower() if isinstance(param, str) else None


def _error_text(answer: httpx.Response) -> str:
    """vLLM's error message in one line, or the start of the answer."""
    content = _json(answer)
    message = _member(_member(content, "error"), "message") or _member(content, "detail") or _member(content, "error")
    return _one_line(message if isinstance(message, str) else answer.text, 400)


def _shown(answer: httpx.Response) -> str:
    return _one_line(answer.text, 80) or "empty"


def _page(answer: httpx.Response) -> str:
    return "an HTML page" if "html" in answer.headers.get("content-type", "") else _shown(answer)


def _one_line(text: str, most: int) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 3] + "..."


def _not_rendered(answer: httpx.Response) -> str:
    if answer.status_code == 404 and _error_type(answer) is None:
        return "this vLLM has no such route: nothing to do, unless clients use it"
    return "vLLM does not render this prompt: see its message"


def _applied(report: str | None) -> int | None:
    """The value in a sidecar's report: `-10; source=header; outcome=inserted`."""
    value = (report or "").partition(";")[0].strip()
    return int(value) if re.fullmatch(r"-?[0-9]{1,20}", value) else None


def _reason(error: BaseException, timeout: float) -> str:
    """Why a request failed, in a few words."""
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {timeout:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message}"
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        if isinstance(cause, socket.gaierror):
            return "no such host"
        cause = cause.__cause__ or cause.__context__
    return _one_line(str(error), 120) or type(error).__name__
