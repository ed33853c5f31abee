"""The settings of one simulated server."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SimulatorSettings:
    """One simulated server.

    Args:
        kind: "render" simulates `vllm launch render`, "engine" simulates `vllm serve`.
        scale_out: `--enable-scale-out` of an engine. A render server always has the scale-out routes.
        scheduling: `--scheduling-policy`.
        slots: `--max-num-seqs`, the number of requests that run at the same time.
        tokens_per_second: The speed of each running request.
        api_key: `--api-key`, or None if the server does not require one.
        dev_mode: `VLLM_SERVER_DEV_MODE=1`, which adds /server_info.
        version: The version that /version reports.
        model: The name of the served model.
        root_path: `--root-path`: the routes are served below it, too.
        max_model_len: The context length in tokens.
    """

    kind: Literal["render", "engine"] = "engine"
    scale_out: bool = True
    scheduling: Literal["priority", "fcfs"] = "priority"
    slots: int = 1
    tokens_per_second: float = 400.0
    api_key: str | None = None
    dev_mode: bool = False
    version: str = "0.32.0"
    model: str = "simulated"
    root_path: str = ""
    max_model_len: int = 4096
