"""vllm-priority: request priorities on the vLLM routes that ignore the header."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-priority")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
