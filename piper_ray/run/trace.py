"""A run as a trace in the simulator's form: the measured tracks, with the promised track of each place right below."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from piper_ray.run.job import Run
from piper_ray.simulate.result import PathPart
from piper_ray.simulate.trace import Event, document, simulation_events, stretch_event, track_names, write_document


def run_trace(run: Run) -> dict[str, object]:
    """The shown step in Chrome's trace format, and the simulated one if there is a simulation: both begin at 0.

    An asynchronous schedule has no step that begins at 0, so its simulation is left out.

    >>> import piper_ray
    >>> measured = piper_ray.run("models.py:small_gpt", "plan.json")  # doctest: +SKIP
    >>> events = piper_ray.run_trace(measured)["traceEvents"]  # doctest: +SKIP
    """
    job, events = run.job, list(_measured(run))
    if run.simulation is not None and not job.schedule.asynchronous:
        tracks = [place + job.rank_of(place, job.degrees[place]) for place in range(job.places)]
        events += simulation_events(run.simulation, tracks, "promised ")
    facts: Event = {
        "schedule": run.job.schedule.name.value,
        "step_s": run.steps_s[run.shown],
        "promised_s": run.promised_s,
        "microbatches": run.job.microbatches,
    }
    return document(events, facts)


def write_run_trace(run: Run, path: str | Path) -> None:
    """Writes ``run_trace`` as one line of JSON, completely or not at all. Raises UsageError if it cannot be written.

    >>> import piper_ray
    >>> piper_ray.write_run_trace(piper_ray.run("models.py:small_gpt", "plan.json"), "run.json")  # doctest: +SKIP
    """
    write_document(run_trace(run), path)


def _measured(run: Run) -> Iterator[Event]:
    chunks = run.job.schedule.v
    for number, rank in enumerate(run.ranks):
        track = number + run.job.seat(number)[0]
        yield from track_names(track, f"measured {rank.name}", 1, batch=True)
        for one in rank.stretches:
            part = PathPart(number, one.what, one.stage, one.microbatch, one.start_s, one.end_s)
            yield stretch_event(track, part, chunks)
