"""Contender (g): a reverse proxy on FastAPI and httpx that edits the body.

python reverse_proxy.py PORT UPSTREAM_PORT
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

HEADER = "x-vllm-priority"
OF_ONE_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "trailer", "upgrade"}


def create_app(upstream: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
        async with httpx.AsyncClient(base_url=upstream, timeout=None, limits=limits) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> StreamingResponse:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in OF_ONE_HOP}
        priority = headers.pop(HEADER, None)
        if priority is not None:
            document = json.loads(body)
            document["priority"] = int(priority)
            body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        client: httpx.AsyncClient = request.app.state.client
        onward = client.build_request(request.method, f"/{path}", headers=headers, content=body)
        answer = await client.send(onward, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in OF_ONE_HOP}

        async def chunks() -> AsyncIterator[bytes]:
            async for chunk in answer.aiter_raw():
                yield chunk
            await answer.aclose()

        return StreamingResponse(chunks(), answer.status_code, kept)

    return app


if __name__ == "__main__":
    port, upstream_port = (int(argument) for argument in sys.argv[1:3])
    uvicorn.run(
        create_app(f"http://127.0.0.1:{upstream_port}"),
        host="127.0.0.1",
        port=port,
        log_level="warning",
        access_log=False,
    )
