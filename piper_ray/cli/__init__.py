"""The command line: a skin over the library. Each command has a module of its own."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from piper_ray.cli import outliving
from piper_ray.cli.interrupts import Interrupts, listening
from piper_ray.cli.process import begin_loading, lasting, open_standard_streams
from piper_ray.model.errors import EXIT_INTERRUPTED, UsageError
from piper_ray.version import __version__


def main() -> int:
    """Runs ``piper-ray`` with the process's arguments and returns its exit code."""
    open_standard_streams()
    with listening() as interrupts, lasting(closed=lambda: interrupts.stop(signal.SIGPIPE)) as output:
        code = _run(interrupts)
        interrupts.finish()
        sys.stdout.flush()
        if output.fault is not None:
            print(f"piper-ray: stdout cannot be written: {output.fault}", file=sys.stderr)  # noqa: T201
            code = code or UsageError.exit_code
        return code if interrupts.exit_code is None else interrupts.exit_code


def program() -> NoReturn:
    """``main`` as a process, which ends here and now: what Python does at its end may take long, and a signal that came
    then would have the last word."""
    begin_loading()
    open_standard_streams()
    if outliving.may_be_ended(sys.argv[1:], os.environ):
        outliving.outlive()
    with listening():
        code = main()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        outliving.end()
        os._exit(code)


def _run(interrupts: Interrupts) -> int:
    try:
        with interrupts.raising():
            if sys.argv[1:] in (["--version"], ["-V"]):  # at once, without what other commands need
                sys.stdout.write(f"piper-ray {__version__}\n")
                return 0

            from piper_ray.cli.app import app

            app(prog_name="piper-ray")
    except KeyboardInterrupt:
        interrupts.tell()
        return EXIT_INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0
