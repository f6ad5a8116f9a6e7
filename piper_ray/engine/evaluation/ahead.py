"""One evaluation ahead of need: the next threshold, should the present one turn out infeasible, at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.evaluation.outcome import Outcome

_POLL_S = 0.1


class _NotWanted(Exception):
    """Ends an evaluation from inside."""


@dataclass
class Ahead:
    """Runs ``evaluate`` (given a progress callback) for ``threshold_s`` in a thread of its own, until cancelled."""

    threshold_s: float
    evaluate: Callable[[OnProgress], Outcome]
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _done: int = 0

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="piper-ray-ahead")
        self._outcome = self._thread.submit(self.evaluate, self._on_progress)

    def result(self, on_progress: OnProgress) -> Outcome:
        """The outcome, when it is there; what ``on_progress`` raises meanwhile ends the evaluation."""
        try:
            while not wait([self._outcome], timeout=_POLL_S).done:
                on_progress(self._done)
            return self._outcome.result()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """It ends at its next report; nobody waits for that but the end of the thread."""
        self._cancelled.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _on_progress(self, done: int) -> None:
        self._done = done
        if self._cancelled.is_set():
            raise _NotWanted
