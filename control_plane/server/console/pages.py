"""The console's routes. Each page is rendered here from what this process knows; none changes anything."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from control_plane.errors import BadInput
from control_plane.policy.difference import policy_yaml
from control_plane.server.console.access import SECURITY_HEADERS, Access
from control_plane.server.console.playground import MAX_BODY_BYTES, Playground, Typed, routes_of
from control_plane.server.console.sidecars import Filter, page_of
from control_plane.server.console.templates import STATIC, render, static
from control_plane.server.console.timeline import BOTTOM, HEIGHT, LEFT, SAMPLE_SECONDS, WIDTH, Timeline
from control_plane.server.fleet import Fleet
from control_plane.server.injections import Injections
from control_plane.server.policy_file import PolicyFile
from control_plane.vllm import ROLES

ROOT = "/console"
MAX_YAML_CHARS = 24_000
VERSIONS_ON_A_PAGE = 5
MAX_CHOICES = 200
SAMPLES_IN_THE_TABLE = 12
PODS_ON_A_PAGE = 25
POLICIES_ON_A_PAGE = 20
COUNTS_ON_A_PAGE = 50


class Console:
    """The console of one replica (ASGI). Serves what is below ROOT, to those whom `access` lets in."""

    def __init__(self, access: Access, policy: PolicyFile, fleet: Fleet, injections: Injections) -> None:
        self._access = access
        self._policy = policy
        self._fleet = fleet
        self._injections = injections
        self.timeline = Timeline(policy, fleet, injections)
        self._playground = Playground()
        self._app = Starlette(
            routes=[
                Route(ROOT, self._root, methods=["GET"]),
                Route(f"{ROOT}/", self._show_fleet, methods=["GET"]),
                Route(f"{ROOT}/policy", self._show_policy, methods=["GET"]),
                Route(f"{ROOT}/timeline", self._show_timeline, methods=["GET"]),
                Route(f"{ROOT}/injections", self._show_injections, methods=["GET"]),
                Route(f"{ROOT}/playground", self._show_playground, methods=["GET", "POST"]),
                *(Route(f"{ROOT}/{name}", _file(name), methods=["GET"]) for name in STATIC),
            ]
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        denial = await self._access.denial(scope)
        if denial:
            headers = {**SECURITY_HEADERS, **denial.headers}
            response = Response(f"{denial.detail}\n", denial.status, headers, media_type="text/plain")
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _root(self, _: Request) -> Response:
        return RedirectResponse(f"{ROOT}/", headers=SECURITY_HEADERS)

    async def _show_fleet(self, request: Request) -> Response:
        query = request.query_params
        wanted = Filter.of(query)
        page = page_of(self._fleet, self._policy.snapshot, wanted, _number(query))
        kept = {"q": wanted.search, "status": wanted.status, "role": wanted.role}

        def link(**changed: object) -> str:
            return _link("", {**kept, **changed})

        return _page(
            "fleet",
            "",
            list=page,
            wanted=wanted,
            roles=ROLES,
            link=link,
            number_link=lambda number: link(page=number),
        )

    async def _show_policy(self, request: Request) -> Response:
        query = request.query_params
        snapshot = self._policy.snapshot
        policies = snapshot.policies
        name = query.get("policy", "default")
        if name not in policies.by_name:
            name = "default"
        pages, number, shown = _part(list(policies.by_name.items()), POLICIES_ON_A_PAGE, _number(query))
        selectors = {entry.name: entry.selector for entry in policies.named}
        names = [
            {
                "name": each,
                "selector": ", ".join(f"{key}={value}" for key, value in selectors.get(each, {}).items()),
                **{role: snapshot.version(each, policy, role) for role in ROLES},
            }
            for each, policy in shown
        ]
        older = _part(list(self._policy.history), VERSIONS_ON_A_PAGE, _number(query, "history"))
        # In a thread: a policy may have thousands of classes, and sidecars poll meanwhile.
        text = await asyncio.to_thread(policy_yaml, policies, name)
        return _page(
            "policy",
            "policy",
            policy=self._policy,
            history_pages=older[0],
            history_number=older[1],
            history=older[2],
            name=name,
            names=names,
            pages=pages,
            number=number,
            yaml=text[:MAX_YAML_CHARS],
            cut=len(text) > MAX_YAML_CHARS,
            history_link=lambda other: _link("policy", {"policy": name, "page": number, "history": other}),
            name_link=lambda each: _link("policy", {"policy": each, "page": number}),
            number_link=lambda other: _link("policy", {"policy": name, "page": other}),
        )

    async def _show_timeline(self, _: Request) -> Response:
        return _page(
            "timeline",
            "timeline",
            sidecars=self.timeline.sidecars(),
            injections=self.timeline.injections(),
            samples=list(self.timeline.samples)[: -SAMPLES_IN_THE_TABLE - 1 : -1],
            seconds=SAMPLE_SECONDS,
            width=WIDTH,
            height=HEIGHT,
            left=LEFT,
            bottom=BOTTOM,
        )

    async def _show_injections(self, request: Request) -> Response:
        report = self._injections.report()
        counts = self._injections.counts.most_common(COUNTS_ON_A_PAGE)
        pages, number, recent = _part(report["recent"], PODS_ON_A_PAGE, _number(request.query_params))
        return _page(
            "injections",
            "injections",
            counts=counts,
            more_counts=len(self._injections.counts) - len(counts),
            recent=[{**entry, "detail": _without_warnings(entry)} for entry in recent],
            pages=pages,
            number=number,
            number_link=lambda other: _link("injections", {"page": other}),
        )

    async def _show_playground(self, request: Request) -> Response:
        policies = self._policy.snapshot.policies
        typed, problem, result = Typed(), "", None
        if request.method == "POST":
            try:
                typed = Typed.of(await request.body())
                result = await self._playground.run(typed, policies)
            except BadInput as error:
                problem = str(error)
        return _page(
            "playground",
            "playground",
            400 if problem else 200,
            typed=typed,
            problem=problem,
            result=result,
            names=list(policies.by_name)[:MAX_CHOICES],
            roles=ROLES,
            routes=routes_of(policies.by_name.get(typed.policy, policies.default)),
            max_body_bytes=MAX_BODY_BYTES,
        )


def _without_warnings(entry: Mapping[str, Any]) -> str:
    """Return what was done to a pod. The text goes on with the warnings, which the page lists."""
    detail: str = entry["detail"]
    return detail.partition(f" {entry['warnings'][0]['code']}: ")[0] if entry["warnings"] else detail


def _page(template: str, page: str, status: int = 200, **values: Any) -> Response:
    html = render(template, page=page, now=time.time(), **values)
    return Response(html.encode("utf-8", "backslashreplace"), status, SECURITY_HEADERS, media_type="text/html")


def _file(name: str) -> Callable[[Request], Any]:
    async def respond(_: Request) -> Response:
        headers = {**SECURITY_HEADERS, "cache-control": "private, max-age=3600"}
        return Response(static(name), 200, headers, media_type=STATIC[name])

    return respond


def _link(page: str, query: Mapping[str, object]) -> str:
    shown = urlencode({key: value for key, value in query.items() if value not in ("", None)}, errors="replace")
    return f"{ROOT}/{page}?{shown}" if shown else f"{ROOT}/{page}"


def _number(query: Mapping[str, str], key: str = "page") -> int:
    text = query.get(key, "1")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 1


def _part(entries: list[Any], size: int, number: int) -> tuple[int, int, list[Any]]:
    """Return the number of pages, the number of this one, and its entries."""
    pages = max(1, -(-len(entries) // size))
    number = min(max(1, number), pages)
    return pages, number, entries[(number - 1) * size : number * size]
