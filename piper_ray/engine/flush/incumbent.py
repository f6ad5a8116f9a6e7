"""The best plan of a search, and of the searches on chains that help it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from piper_ray.engine.flush.plans import ChosenStages
from piper_ray.engine.flush.task_search import TIE


@dataclass
class Incumbent:
    """on_better: is told what found each better plan ("chain", "search"), once it is the best."""

    on_better: Callable[[str], None]
    best: ChosenStages | None = None
    found: list[ChosenStages] = field(default_factory=list)

    @property
    def batch_s(self) -> float:
        """inf without a plan."""
        return np.inf if self.best is None else self.best.batch_s

    def offer(self, found: ChosenStages, origin: str) -> None:
        """Keeps it if it is the best."""
        self.found.append(found)
        before_s = self.batch_s
        if not self._is_better(found):
            return
        self.best = found
        if found.batch_s < before_s * (1.0 - TIE):
            self.on_better(origin)

    def _is_better(self, found: ChosenStages) -> bool:
        """Of plans that take the same but for rounding the preferred one."""
        if self.best is None or found.batch_s < self.best.batch_s * (1.0 - TIE):
            return True
        return found.batch_s <= self.best.batch_s * (1.0 + TIE) and _rank(found) < _rank(self.best)


def preference(chosen: ChosenStages) -> tuple[float, int, int, int]:
    """The least is the best: in time, then in devices, then in stages, then in d."""
    return (chosen.batch_s, *_rank(chosen))


def _rank(chosen: ChosenStages) -> tuple[int, int, int]:
    return chosen.devices, chosen.stages, chosen.task.data_parallel_degree
