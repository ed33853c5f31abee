"""A simulated vLLM server: the routes, responses, errors and queue that a priority meets, without a model.

The demo and quick tests use it. It follows vLLM 0.32.0 (vllm/entrypoints/scale_out, vllm/v1/core/sched), and the
end-to-end tests compare it with real vLLM, so that it cannot drift.
"""

from control_plane.simulator.app import create_app, run
from control_plane.simulator.protocol import DERENDER_ROUTES
from control_plane.simulator.settings import SimulatorSettings

__all__ = ["DERENDER_ROUTES", "SimulatorSettings", "create_app", "run"]
