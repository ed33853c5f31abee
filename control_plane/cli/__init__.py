"""The command line.

Exit status: 0 success, 1 what was examined fails, 2 invalid input, reported as one line on standard error.
"""

from control_plane.cli.main import cli, main

__all__ = ["cli", "main"]
