"""The critical path of a step: from its end back to its start, each time to what could not have been later."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.result import Interval, PathPart
from piper_ray.simulate.timeline import Timeline


def critical_path(
    timeline: Timeline, all_reduces: Sequence[Interval], optimizers: Sequence[Interval]
) -> tuple[PathPart, ...]:
    """Parts back to back from 0 to the end of the step, those of no length left out.

    Where several ranks end last it is the first of them; where a pass had to wait for several things the earlier pass
    of its own rank goes first.
    """
    ends_s = [interval.end_s for interval in optimizers]
    rank = ends_s.index(max(ends_s))
    parts = [
        PathPart(rank, what, None, None, interval.start_s, interval.end_s)
        for what, interval in (("optimizer", optimizers[rank]), ("all-reduce", all_reduces[rank]))
    ]
    place = timeline.layout.ranks[rank].place
    together = [number for number, other in enumerate(timeline.layout.ranks) if other.place == place]
    action = max((int(timeline.first[number + 1]) - 1 for number in together), key=lambda last: timeline.end_s[last])
    while action >= 0:
        here = int(timeline.rank_of_action[action])
        start_s = float(timeline.start_s[action])
        parts.append(
            PathPart(
                here,
                ActionKind(timeline.kind[action]).name,
                int(timeline.stage[action]),
                int(timeline.microbatch[action]),
                start_s,
                float(timeline.end_s[action]),
                float(timeline.communication_s[action]),
            )
        )
        cause = int(timeline.cause[action])
        if cause >= 0 and float(timeline.end_s[cause]) < start_s:
            parts.append(PathPart(here, "transfer", None, None, float(timeline.end_s[cause]), start_s))
        action = cause
    return tuple(part for part in reversed(parts) if part.duration_s > 0.0)
