"""The command line: a skin over the library. Each command has a module of its own."""

from __future__ import annotations

import sys

from piper_ray.errors import EXIT_INTERRUPTED


def main() -> int:
    """Runs ``piper-ray`` with the process's arguments and returns its exit code."""
    try:
        from piper_ray.cli.app import app

        app(prog_name="piper-ray")
    except KeyboardInterrupt:
        print("piper-ray: interrupted", file=sys.stderr)  # noqa: T201 - nothing to print with may be loaded yet
        return EXIT_INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0
