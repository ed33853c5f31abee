"""Runs the command line: `python -m control_plane.cli`."""

from control_plane.cli.main import main

main()
