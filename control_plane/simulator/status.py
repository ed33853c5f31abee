"""The routes that describe the server: health, version, models, metrics and configuration."""

import time
from typing import Any, Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from control_plane.simulator.server import SimulatedServer
from control_plane.simulator.tokens import random_id


class StatusRoutes:
    """The GET routes."""

    def __init__(self, server: SimulatedServer) -> None:
        """Create the handlers of this server."""
        self._server = server
        self._settings = server.settings

    async def health(self) -> Response:
        """Handle /health and /ping."""
        return Response()

    async def version(self) -> JSONResponse:
        """Handle /version."""
        return JSONResponse({"version": self._settings.version})

    async def models(self) -> JSONResponse:
        """Handle /v1/models."""
        permission = {
            "id": f"modelperm-{random_id()}", "object": "model_permission", "created": int(time.time()),
            "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
            "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False, "organization": "*",
            "group": None, "is_blocking": False,
        }  # fmt: skip
        card = {
            "id": self._settings.model, "object": "model", "created": int(time.time()), "owned_by": "vllm",
            "root": self._settings.model, "parent": None, "max_model_len": self._settings.max_model_len,
            "permission": [permission],
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(self) -> Response:
        """Handle /metrics."""
        return Response(generate_latest(self._server.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def server_info(self, config_format: Literal["text", "json"] = "text") -> JSONResponse:
        """Handle /server_info, which vLLM has only if VLLM_SERVER_DEV_MODE=1 is set."""
        scheduler = {"policy": self._settings.scheduling, "max_num_seqs": self._settings.slots}
        config: Any = {"scheduler_config": scheduler}
        if config_format == "text":
            config = f"model='{self._settings.model}', max_seq_len={self._settings.max_model_len}"
        return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})
