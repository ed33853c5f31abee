"""The examination: which checks are made, in which order, and what is announced before each."""

from collections.abc import Callable
from urllib.parse import urlsplit

from control_plane.doctor.checks import check_basics
from control_plane.doctor.generate_route import SMALL_TOKENS, check_generate_route
from control_plane.doctor.queue_order import check_queue_order
from control_plane.doctor.render_routes import check_render_routes
from control_plane.doctor.report import Report, Row
from control_plane.doctor.server import Server, connect
from control_plane.doctor.settings import DoctorSettings
from control_plane.vllm import GENERATE_ROUTE, RENDER_ROUTES, Role


async def examine(
    settings: DoctorSettings,
    announce: Callable[[str], None] = lambda line: None,
    spell: Callable[[str], str] = str,
) -> Report:
    """Examine every server in the settings.

    Args:
        settings: What to examine.
        announce: Receives one line about each group of requests before it is sent.
        spell: Returns how the user writes a field of the settings, for example "--api-key" for "api_key". The advice
            in the report uses it.

    Returns:
        The report. A server that cannot be reached or used is a row in it, not an error.
    """
    rows: list[Row] = []
    targets: dict[Role, str] = {}
    tokens: list[int] | None = None
    if settings.render is not None:
        targets["render"] = settings.render
        async with connect(settings, "render", settings.render, rows, spell) as render:
            announce(_plan_of_basics(render))
            if await check_basics(render):
                announce(_plan_of_render_routes(render))
                tokens = await check_render_routes(render)
    if settings.engine is not None:
        targets["engine"] = settings.engine
        async with connect(settings, "engine", settings.engine, rows, spell) as engine:
            announce(_plan_of_basics(engine))
            if await check_basics(engine):
                if settings.render is None:
                    announce(_plan_of_render_routes(engine))
                    tokens = await check_render_routes(engine)
                announce(_plan_of_generate_route(engine))
                if await check_generate_route(engine):
                    announce(_plan_of_queue_order(engine))
                    await check_queue_order(engine, tokens or SMALL_TOKENS)
    return Report(tuple(rows), targets)


def _plan_of_basics(server: Server) -> str:
    plan = f"{server.role} {server.url}: GET /health, /version and /v1/models."
    has_prefix = urlsplit(server.url).path.strip("/")
    return plan + (" POST an empty object with and without the URL's path." if has_prefix else "")


def _plan_of_render_routes(server: Server) -> str:
    return (
        f"{server.role} {server.url}: POST to {len(RENDER_ROUTES)} render routes, four times each: without a priority, "
        f"with {server.priority} in the header {server.settings.header}, in the body, and with both"
        + (f"; and once with the class {name}." if (name := server.settings.class_name) else ".")
    )


def _plan_of_generate_route(server: Server) -> str:
    return (
        f"{server.role} {server.url}: POST {GENERATE_ROUTE} twice, with bodies that vLLM rejects, so that nothing is "
        "generated."
    )


def _plan_of_queue_order(server: Server) -> str:
    return (
        f"{server.role} {server.url}: GET /metrics and /server_info. If the engine is idle, do this twice: send up to "
        f"{server.settings.max_fill + 1} long requests to {GENERATE_ROUTE} until one waits, then two more, one of them "
        f"with priority {server.priority}, and abort all of them as soon as the order is visible."
    )
