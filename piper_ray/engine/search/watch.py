"""An evaluation under way: told to the user, and ended when a limit is reached."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piper_ray.engine.evaluation.backend import Display
from piper_ray.engine.kernels.types import IndexArray
from piper_ray.engine.ledger import Ledger
from piper_ray.model.events import EvaluationAdvanced


@dataclass(frozen=True)
class EvaluationWatch:
    """Called with the downsets done. index: of the evaluation, from 1.

    level_start: int64[levels + 1], first downset of each level. Raises StopSearch as ``Ledger.check``.
    """

    index: int
    threshold_s: float
    level_start: IndexArray
    ledger: Ledger[Any]
    display: Display
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.began_s

    def __call__(self, done: int) -> None:
        self.ledger.check()
        activity = self.display.activity()
        self.ledger.listener(
            EvaluationAdvanced(
                index=self.index,
                threshold_s=self.threshold_s,
                done=done,
                total=int(self.level_start[-1]),
                bounds=self.ledger.bounds(),
                seconds=self.seconds,
                level=int(np.searchsorted(self.level_start, done, side="right")) - 1,
                levels=self.level_start.size - 1,
                workers=activity.workers,
                chunks_in_flight=activity.chunks_in_flight,
            )
        )
