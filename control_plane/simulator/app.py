"""The application of one simulated server, and a way to run it in a thread."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware

from control_plane.errors import CheckFailed
from control_plane.simulator.anthropic import AnthropicRoute
from control_plane.simulator.errors import (
    SCALE_OUT_OFF,
    Authentication,
    VllmError,
    require_json,
    validation_error_response,
    vllm_error_response,
)
from control_plane.simulator.generate import GenerateRoute
from control_plane.simulator.openai import OpenAiRoutes
from control_plane.simulator.protocol import DERENDER_ROUTES
from control_plane.simulator.render import DerenderRoutes, RenderRoutes
from control_plane.simulator.server import SimulatedServer
from control_plane.simulator.settings import SimulatorSettings
from control_plane.simulator.status import StatusRoutes
from control_plane.vllm import GENERATE_ROUTE, RENDER_ROUTES

_Handlers = dict[str, Callable[..., Any]]


def create_app(settings: SimulatorSettings) -> FastAPI:
    """Return the ASGI application of one simulated server."""
    app = FastAPI(openapi_url=None)
    app.root_path = settings.root_path  # as vLLM sets it
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    if settings.api_key:
        app.add_middleware(Authentication, api_key=settings.api_key)
    app.add_exception_handler(VllmError, vllm_error_response)
    app.add_exception_handler(RequestValidationError, validation_error_response)

    server = SimulatedServer(settings)
    posts: _Handlers = {}
    if settings.kind == "engine":
        posts |= _coupled_routes(server)
    if settings.kind == "engine" and not settings.scale_out:
        for path in _scale_out_routes(server):
            app.add_api_route(path, _scale_out_off, methods=["POST"], response_model=None)
    else:
        posts |= _scale_out_routes(server)
    for path, handler in posts.items():
        app.add_api_route(path, handler, methods=["POST"], dependencies=[Depends(require_json)], response_model=None)
    for path, handler in _status_routes(server).items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    return app


def _scale_out_routes(server: SimulatedServer) -> _Handlers:
    render, derender = RenderRoutes(server), DerenderRoutes(server)
    paths = (*RENDER_ROUTES, *DERENDER_ROUTES)
    handlers: tuple[Callable[..., Any], ...] = (
        render.chat, render.completion, render.responses, render.messages, derender.chat, derender.completion,
    )  # fmt: skip
    routes = dict(zip(paths, handlers, strict=True))
    if server.settings.kind == "engine":
        routes[GENERATE_ROUTE] = GenerateRoute(server).generate
    return routes


def _coupled_routes(server: SimulatedServer) -> _Handlers:
    openai = OpenAiRoutes(server)
    return {
        "/v1/chat/completions": openai.chat,
        "/v1/completions": openai.completion,
        "/v1/responses": openai.responses,
        "/v1/messages": AnthropicRoute(server).messages,
    }


def _status_routes(server: SimulatedServer) -> _Handlers:
    status = StatusRoutes(server)
    routes: _Handlers = {
        "/health": status.health,
        "/ping": status.health,
        "/version": status.version,
        "/v1/models": status.models,
        "/metrics": status.metrics,
    }
    if server.settings.kind == "engine" and server.settings.dev_mode:
        routes["/server_info"] = status.server_info
    return routes


async def _scale_out_off() -> JSONResponse:
    return JSONResponse(VllmError(SCALE_OUT_OFF, "PermissionDeniedError", 403).body, status_code=403)


@contextmanager
def run(settings: SimulatorSettings, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Run a simulated server in a thread of its own during the block.

    Args:
        settings: What to simulate.
        host: The IP address to listen on.
        port: The port to listen on; 0 picks a free one.

    Yields:
        The root URL of the server.

    Raises:
        CheckFailed: The address cannot be bound, or the server does not start.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CheckFailed(f"The simulator cannot listen on {host}:{port}: {error.strerror}.") from None
    config = uvicorn.Config(
        create_app(settings), log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="simulator", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise CheckFailed(f"The simulator did not start on {host}:{port}.")
            time.sleep(0.005)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        # Open streams do not end by themselves, so the server must not wait for them.
        server.force_exit = server.should_exit = True
        thread.join(timeout=10)
        listener.close()
