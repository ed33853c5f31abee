"""The render routes: does a priority in the header arrive in the rendered request?"""

from dataclasses import dataclass
from typing import Any, Self

import httpx

from control_plane.doctor.report import Verdict
from control_plane.doctor.responses import error_param, error_text, error_type, json_content, member, status_and_error
from control_plane.doctor.server import LOOK_AT_LOG, Server, StopExamination
from control_plane.report_header import parse_report
from control_plane.vllm import GENERATE_ROUTE, RENDER_ROUTES, RESPONSE_ROUTES

BODY_PRIORITY = 3
"""The body's priority in the request that has one in the header, too, so that the two can be told apart."""

_PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1},
    "/v1/completions/render": {"prompt": "ping", "max_tokens": 1},
    "/v1/responses/render": {"input": "ping", "max_output_tokens": 1},
    "/v1/messages/render": {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1},
}


@dataclass(frozen=True)
class _Rendered:
    """One response of a render route."""

    status: int
    priority: int | None
    tokens: list[int] | None
    report: str | None
    error: str
    error_param: str | None

    @classmethod
    def of(cls, response: httpx.Response, report_header: str) -> Self:
        content = json_content(response)
        items = content if isinstance(content, list) else [content]
        priorities = {member(item, "priority") for item in items}
        priority = next(iter(priorities)) if len(priorities) == 1 else None
        tokens = member(items[0], "token_ids") if items else None
        return cls(
            response.status_code,
            priority if isinstance(priority, int) else None,
            tokens if isinstance(tokens, list) else None,
            response.headers.get(report_header),
            error_text(response),
            error_param(response),
        )

    @property
    def shown(self) -> str:
        """The priority, or why there is none."""
        if self.status != 200:
            return f"missing (status {self.status}: {self.error})"
        return "unreadable" if self.priority is None else str(self.priority)


@dataclass(frozen=True)
class _Cases:
    """The responses of one route to a request without a priority, with one in the header, in the body, in both."""

    none: _Rendered
    header: _Rendered
    body: _Rendered
    both: _Rendered


async def check_render_routes(server: Server) -> list[int] | None:
    """Send four requests to each render route and add a row for each. Return the token ids of a rendered prompt."""
    tokens: list[int] | None = None
    for route in RENDER_ROUTES:
        try:
            cases = await _four_cases(server, route)
        except StopExamination:
            break
        except httpx.HTTPError as error:
            server.add(route, "unknown", f"A request failed: {server.reason(error)}.", LOOK_AT_LOG)
            continue
        if cases is not None:
            tokens = tokens or cases.none.tokens
            _judge(server, route, cases)
    if name := server.settings.class_name:
        try:
            await _check_class(server, name)
        except httpx.HTTPError as error:
            server.add(f"class {name}", "unknown", f"A request failed: {server.reason(error)}.", LOOK_AT_LOG)
    return tokens


async def _check_class(server: Server, name: str) -> None:
    """Add a row that says whether a class of the policy arrives as its number."""
    route, check = RENDER_ROUTES[0], f"class {name}"
    body = {"model": server.model, **_PROMPTS[route]}
    response = await server.client.post(route, json=body, headers={server.settings.header: name})
    rendered = _Rendered.of(response, server.settings.report_header)
    report = parse_report(rendered.report)
    seen = f"The rendered priority is {rendered.shown} with {name} in the header.{server.reported(rendered.report)}"
    evidence: dict[str, Any] = {"status": rendered.status, "priority": rendered.priority, "applied": rendered.report}
    if rendered.status != 200 and not report:
        server.add(check, "unknown", seen, LOOK_AT_LOG, **evidence)
    elif rendered.status == 400 and rendered.error_param == server.settings.header.lower():
        next_step = "The policy does not have this class, or not for this client. Look at classes in the policy."
        server.add(check, "warn", seen, next_step, **evidence)
    elif rendered.priority and (not report or (report.source == "class" and rendered.priority == report.priority)):
        # A policy can leave the report out. vLLM alone renders 0, whatever the header contains.
        server.add(check, "ok", seen, brief=f"priority {rendered.priority}", **evidence)
    else:
        server.add(check, "lost", seen, server.advice_for_lost_header(rendered.report), **evidence)


async def _four_cases(server: Server, route: str) -> _Cases | None:
    """Return the four responses, or None if the route cannot be examined; the row that says why has been added."""
    body = {"model": server.model, **_PROMPTS[route]}
    header = {server.settings.header: str(server.priority)}
    requests: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "none": (body, {}),
        "header": (body, header),
        "body": ({**body, "priority": server.priority}, {}),
        "both": ({**body, "priority": BODY_PRIORITY}, header),
    }
    found: dict[str, _Rendered] = {}
    for name, (content, headers) in requests.items():
        response = await server.client.post(route, json=content, headers=headers)
        if response.status_code == 403 and error_type(response) == "PermissionDeniedError":
            seen = f"POST {route} returned {status_and_error(response)}."
            next_step = "Restart vllm serve with --enable-scale-out, or render with vllm launch render."
            raise server.stop("scale-out", seen, next_step, status=403)
        if name == "none":
            if route == RENDER_ROUTES[0] and response.status_code != 404:
                await _add_kind_of_server(server)
            if response.status_code != 200:
                seen = f"POST {route} returned {status_and_error(response)}."
                server.add(route, "unknown", seen, _advice_for_error(response))
                return None
        found[name] = _Rendered.of(response, server.settings.report_header)
    return _Cases(**found)


def _advice_for_error(response: httpx.Response) -> str:
    if response.status_code == 404 and error_type(response) is None:
        return "This version of vLLM does not have the route. There is nothing to do unless clients use it."
    return "vLLM cannot render this prompt. Its message says why."


async def _add_kind_of_server(server: Server) -> None:
    """Scale-out is enabled; add a row that says on which kind of server. An empty body generates nothing."""
    response = await server.client.post(GENERATE_ROUTE, json={})
    if response.status_code == 404:
        seen = "Scale-out is enabled. This is a render-only server (vllm launch render), which cannot generate."
    else:
        seen = "Scale-out is enabled. This is vllm serve, which can generate, too."
    server.add("scale-out", "ok", seen, generate_status=response.status_code)


def _judge(server: Server, route: str, cases: _Cases) -> None:
    """Add the row of one route."""
    none, header, body, both = cases.none, cases.header, cases.body, cases.both
    seen = (
        f"The rendered priority is {none.shown} without a priority, {header.shown} with {server.priority} in the "
        f"header, {body.shown} with {server.priority} in the body, and {both.shown} with {server.priority} in the "
        f"header and {BODY_PRIORITY} in the body."
    )
    body_is_ignored = route in RESPONSE_ROUTES
    if body_is_ignored:
        seen += " The body of this route cannot carry a priority; only its response can."
    seen += server.reported(header.report)
    evidence: dict[str, Any] = {
        name: {"status": case.status, "priority": case.priority} for name, case in vars(cases).items()
    }  # fmt: skip
    evidence["applied"] = header.report
    report = parse_report(header.report)
    expected = server.priority
    # A policy can clamp the value, negate it for another engine, or look it up in its classes. So if the sidecar
    # reports which value it applied, that value is the expected one, unless it is the policy's default: then the
    # header did not reach the sidecar.
    if report and report.priority is not None and report.source != "default":
        expected = report.priority
    verdict: Verdict = "ok"
    next_step = ""
    if header.status == 400 and header.error_param == server.settings.header.lower():
        verdict, next_step = "warn", server.use_accepted_priority
    elif header.status != 200 or both.status != 200:
        verdict = "unknown"
        sidecar_rejected = report is not None and report.priority is None
        next_step = server.advice_for_lost_header(header.report) if sidecar_rejected else LOOK_AT_LOG
    elif header.priority != expected:
        verdict, next_step = "lost", server.advice_for_lost_header(header.report)
    elif both.priority != expected:
        verdict, next_step = "lost", f"The body's priority overrides the header. {server.check_sidecar}"
    elif not body_is_ignored and body.priority != server.priority:
        verdict = "warn"
        next_step = f"Something in front of vLLM changes the body's own priority. {server.check_sidecar}"
    elif none.priority != 0:
        next_step = "There is nothing to do: a request without a priority gets the policy's default."
    brief = f"priority {header.priority}" if header.status == 200 else f"status {header.status}"
    server.add(route, verdict, seen, next_step, brief=brief, **evidence)
