"""The command line, but each event of the solve waits on stdin until the test lets it pass.

Run as a program with the arguments of ``piper-ray``. Events go to stderr, a line of JSON each. An empty line on stdin
lets the solve go on; any other is a question, how many workers there are, and is answered as an event. Workers get all
levels, however fast or slow this machine is just now.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import piper_ray.cli
from piper_ray.backends.ray import RayBackend, pacing
from piper_ray.progress import Event, Listener
from piper_ray.report.log import SolverLog

EVENT = "event "

_log = SolverLog.__call__
_listen = RayBackend.listen
_backends: list[RayBackend] = []


def _say(kind: str, facts: dict[str, Any]) -> None:
    print(EVENT + json.dumps({"kind": kind, **facts}), file=sys.stderr, flush=True)  # noqa: T201 - for the test


def _stepped(log: SolverLog, event: Event) -> None:
    _log(log, event)
    _say(type(event).__name__, asdict(event))
    while sys.stdin.readline().strip():
        _say("Workers", {"workers": _backends[-1].activity().workers})


def _remembered(backend: RayBackend, listener: Listener) -> None:
    _backends.append(backend)
    _listen(backend, listener)


if __name__ == "__main__":
    SolverLog.__call__ = _stepped  # type: ignore[method-assign, assignment]
    RayBackend.listen = _remembered  # type: ignore[method-assign, assignment]
    pacing.LEAST_BATCH_S = 0.0
    sys.exit(piper_ray.cli.main())
