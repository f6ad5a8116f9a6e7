"""The command line, but each event of the solve waits on stdin until the test lets it pass.

Run as a program with the arguments of ``piper-ray``. Events go to stdout, a line of JSON each: on stderr Ray's own
lines could come between. An empty line on stdin
lets the solve go on; any other is a question, how many workers there are and how many machines are
left out, and is answered as an event. All workers get some of all
levels, however fast or slow this machine is just now, and no bounds over cells leave them with hardly a level.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from typing import Any

import piper_ray.cli
from piper_ray.engine.backends.ray import RayBackend, pacing
from piper_ray.engine.search import search
from piper_ray.model.events import Event, Listener
from piper_ray.report.log import SolverLog

EVENT = "event "

_log = SolverLog.__call__
_listen = RayBackend.listen
_backends: list[RayBackend] = []
_events = os.fdopen(os.dup(1), "w", encoding="utf-8")  # wherever stdout is sent meanwhile


def _say(kind: str, facts: dict[str, Any]) -> None:
    _events.write(EVENT + json.dumps({"kind": kind, **facts}) + "\n")
    _events.flush()


def _stepped(log: SolverLog, event: Event) -> None:
    _log(log, event)
    _say(type(event).__name__, asdict(event))
    while sys.stdin.readline().strip():
        dispatcher = _backends[-1]._dispatcher  # not by activity(), which passes notes on
        known = (0, 0) if dispatcher is None else (dispatcher.workers, len(dispatcher._machines.left_out))
        _say("Workers", dict(zip(("workers", "left_out"), known, strict=True)))


def _remembered(backend: RayBackend, listener: Listener) -> None:
    _backends.append(backend)
    _listen(backend, listener)


def _two_each(_pacing: pacing.Pacing, _seconds: float, workers: int, _threads: int, downsets: int) -> int:
    return max(1, min(downsets, 2 * workers))


if __name__ == "__main__":
    SolverLog.__call__ = _stepped  # type: ignore[method-assign, assignment]
    RayBackend.listen = _remembered  # type: ignore[method-assign, assignment]
    pacing.Pacing.pays = pacing.Pacing.pays_ahead = lambda *_: True  # type: ignore[method-assign, assignment]
    pacing.Pacing.chunks = _two_each  # type: ignore[method-assign, assignment]
    search._DEAR_S = math.inf
    sys.exit(piper_ray.cli.main())
