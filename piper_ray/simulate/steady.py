"""The steady state of an asynchronous pipeline, found by simulating until it repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.kernels.events import Floats
from piper_ray.simulate.timeline import Layout, Timeline

_TOLERANCE = 1e-9
_LONGEST_PERIOD = 1_000
_DOUBLINGS = 7
_MOST_ACTIONS = 3_000_000


@dataclass(frozen=True)
class SteadyState:
    """microbatch_s: between one microbatch and the next, in the long run. window_s: whole periods of the timeline.
    periodic: a period was found; False: microbatch_s is the average over the second half of the longest run."""

    timeline: Timeline
    microbatch_s: float
    window_s: tuple[float, float]
    periodic: bool


def steady_state(run: Callable[[int], Timeline], placed: Layout, in_flight: Sequence[int]) -> SteadyState:
    """run: the timeline of a number of microbatches. What comes last is left out: there the pipeline drains."""
    depth = max(y * d for y, d in zip(in_flight, placed.replicas, strict=True))
    microbatches = 6 * depth + 96
    for _ in range(_DOUBLINGS):
        timeline = run(microbatches)
        left_s = timeline.ends_s(ActionKind.B, 0)[: microbatches - depth]
        period = _period(left_s)
        if period is not None or 2 * len(timeline) > _MOST_ACTIONS:
            break
        microbatches *= 2
    last = len(left_s) - 1
    # Whole periods, and as many microbatches for each replica of a stage where the run is long enough for that.
    turns = lcm(period or 1, *placed.replicas)
    unit = turns if turns <= last // 2 else period or 1
    count = last // 2 // unit * unit
    window_s = float(left_s[last - count]), float(left_s[last])
    return SteadyState(timeline, (window_s[1] - window_s[0]) / count, window_s, period is not None)


def _period(left_s: Floats) -> int | None:
    """The least number of microbatches after which the last two thirds of the times repeat, three times at least."""
    tail_s = left_s[len(left_s) // 3 :]
    allowed_s = _TOLERANCE * max(float(left_s[-1]), 0.0)
    for period in range(1, min(_LONGEST_PERIOD, len(tail_s) // 4) + 1):
        steps_s = tail_s[period:] - tail_s[:-period]
        if float(steps_s.max() - steps_s.min()) <= allowed_s:
            return period
    return None
