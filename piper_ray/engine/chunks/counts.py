"""How many chunks of the model a rank may hold."""

from __future__ import annotations

from piper_ray.model.schedule import Schedule, ScheduleName

MOST_CHUNKS = 8
"""Of a rank, where nobody asks for more: runtimes seldom go further, as each chunk costs transfers and launches."""


def most_chunks(given: Schedule | ScheduleName | str) -> int | None:
    """Of a rank, where a solve looks for their number; None where that is given, by the schedule's own rule too."""
    schedules = chunk_schedules(given)
    return max(schedule.v for schedule in schedules) if len(schedules) > 1 else None


def chunk_schedules(given: Schedule | ScheduleName | str) -> tuple[Schedule, ...]:
    """A schedule as it is; where its chunks are open those with every number of them that may pay."""
    usual = Schedule.of(given)
    if not usual.chunks_are_open:
        return (usual,)
    return tuple(Schedule(usual.name, chunks, usual.group) for chunks in range(1, MOST_CHUNKS + 1))
