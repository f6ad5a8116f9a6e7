"""How a solve runs, when it may stop, and whether layers are merged first. Nothing here changes which plans are
valid."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from enum import Enum

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.units import size

EXACT = "piper"
"""The name of the exact planner, ``solve``, among the planners."""


class Contract(str, Enum):
    """SAFE: layers that cost nothing join a neighbour, and no plan is lost. OPERATORS: further layers are merged into
    blocks, so that graphs of thousands of operators can be planned; the possible loss is bounded and reported.

    >>> SolveOptions(contract="operators").contract
    <Contract.OPERATORS: 'operators'>
    """

    SAFE = "safe"
    OPERATORS = "operators"


@dataclass(frozen=True)
class SolveOptions:
    """Limits of one solve. Raises UsageError for figures that make no sense.

    memory_limit_bytes may be a text such as "16GiB", and contract may be its text.

    >>> SolveOptions(gap=0.01, time_limit_s=600, threads=2).gap
    0.01
    """

    gap: float = 0.0
    """The search may stop at this gap, (time_per_sample_s - lower_bound_s) / time_per_sample_s; 0 requires a proof."""
    time_limit_s: float | None = None
    """The search stops after this time with the best plan so far; null: no limit. How far it gets depends on the
    machine."""
    passes_limit: int | None = None
    """A search under a schedule with a flush stops with its best plan after this many simulated passes, of about 2 ns
    each, or work counted as such. The plan is the same on every machine; null: no limit."""
    threads: int | None = None
    """Worker threads; null: one per available core."""
    memory_limit_bytes: float | None = None
    """A solve that is forecast to need more memory is refused; null: the machine's free memory."""
    resume: str | None = None
    """Folder or URI (file, s3, gs) that keeps the state of the search. The search continues from the state found
    there."""
    contract: Contract = Contract.SAFE
    """Which layers are merged before the solve."""
    within_s: float | None = None
    """The search stops once it is proved that no plan has at most this time per sample; null: it does not."""

    def __post_init__(self) -> None:
        gap = arguments.number(self.gap)
        if gap is None or not 0.0 <= gap < 1.0:
            raise UsageError(f"gap must be at least 0 and below 1 (0.01 is 1 %), not {arguments.shown(self.gap)}")
        found: dict[str, object] = {"gap": gap, "contract": arguments.choice("contract", self.contract, Contract)}
        if self.time_limit_s is not None:
            found["time_limit_s"] = limit_s = arguments.number(self.time_limit_s)
            if limit_s is None or not (math.isfinite(limit_s) and limit_s > 0):
                given = arguments.shown(self.time_limit_s)
                raise UsageError(f"the time limit must be a positive number of seconds, not {given}")
        if self.passes_limit is not None:
            found["passes_limit"] = arguments.positive("the limit of passes", self.passes_limit)
        if self.within_s is not None:
            found["within_s"] = within_s = arguments.number(self.within_s)
            if within_s is None or not within_s >= 0:
                raise UsageError(f"within_s must be a number of seconds, not {arguments.shown(self.within_s)}")
        if self.threads is not None:
            found["threads"] = arguments.positive("threads", self.threads)
        if self.memory_limit_bytes is not None:
            found["memory_limit_bytes"] = limit_bytes = arguments.number(size(self.memory_limit_bytes))
            if limit_bytes is None or not limit_bytes > 0:
                expected = "a positive number of bytes, or a text as 16GiB"
                raise UsageError(f"the memory limit must be {expected}, not {arguments.shown(self.memory_limit_bytes)}")
        if self.resume is not None:
            found["resume"] = arguments.location("resume", self.resume)
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def changed(
        self,
        *,
        gap: float | None = None,
        time_limit: float | str | None = None,
        threads: int | None = None,
        memory_limit: float | str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        contract: Contract | str | None = None,
    ) -> SolveOptions:
        """The options with new values where these are not None. Times and sizes may be texts. Raises UsageError."""
        given = {"gap": gap, "threads": threads, "resume": checkpoint, "contract": contract}
        if time_limit is not None:
            given["time_limit_s"] = arguments.seconds("time_limit", time_limit)
        if memory_limit is not None:
            given["memory_limit_bytes"] = arguments.size("memory_limit", memory_limit)
        return replace(self, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
