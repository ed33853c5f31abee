"""Recognises vLLM servers, and SGLang servers, by the command lines and images of their containers."""

import re

from control_plane.vllm import Role

_RENDER = re.compile(r"(?:\bvllm|^)\s*launch\s+render\b")
_ENGINE = re.compile(r"\bvllm\s+serve\b|\bvllm\.entrypoints\b|\bsglang\.launch_server\b")
_HEADLESS = re.compile(r"--headless\b")
_SERVER_IMAGE = re.compile(r"vllm|sglang")
_PORT = re.compile(r"--port[= ]\s*(\d{1,5})\b")


def server_role(command_line: str, image: str, has_command: bool) -> Role | None:
    """Return the role of the server that a container runs. None: it is not a server that speaks HTTP.

    Args:
        command_line: the container's `command` and `args`, joined by spaces.
        image: the container's image.
        has_command: whether the container has a `command`, which replaces the image's entry point.
    """
    if _HEADLESS.search(command_line):  # A worker of an engine on several nodes has no HTTP server.
        return None
    if _RENDER.search(command_line):
        return "render"
    if _ENGINE.search(command_line):
        return "engine"
    # The entry point of these images is the server: vLLM's Dockerfile has ["vllm", "serve"].
    return "engine" if not has_command and _SERVER_IMAGE.search(image.rsplit("/", 1)[-1]) else None


def port_option(command_line: str) -> int | None:
    """Return the value of the command line's `--port`. None: it has none that is a port."""
    found = _PORT.search(command_line)
    return int(found[1]) if found and 0 < int(found[1]) < 65536 else None
