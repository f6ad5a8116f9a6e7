"""Solves under a flush that are resumed: the same plan, bound and bytes as without an end in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Restrictions, SameDegrees, StageCount
from piper_ray.model.errors import CheckpointRefused
from piper_ray.model.events import DegreesAdvanced, DegreesSearched, Event, Note
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop
from tests.flush_instances import uneven_layers
from tests.instances import random_instance, two_towers
from tests.lengths import long_after

INSTANCES = [uneven_layers(3), uneven_layers(11), random_instance(5), two_towers(12, devices=16, memory_bytes=60.0)]


class Killed(BaseException):
    """As by SIGKILL, but for what is written on the way out."""


class Ending:
    """A listener that ends the solve at the event of a number among those of its search."""

    def __init__(self, at: int, stop: Stop[Solution] | None = None) -> None:
        self.at, self.stop, self.seen, self.notes = at, stop, 0, list[str]()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)
        if isinstance(event, (DegreesAdvanced, DegreesSearched)):
            self.seen += 1
            if self.seen == self.at and self.stop is not None:
                self.stop.request()
            elif self.seen == self.at:
                raise Killed


def figures(solution: Solution) -> tuple[object, ...]:
    """All but what it took."""
    plan = None if solution.plan is None else solution.plan.to_dict()
    degrees = solution.stats.degrees
    return solution.status, solution.time_per_sample_s, solution.lower_bound_s, plan, degrees, solution.stopped_by


@pytest.mark.parametrize("stopped", long_after(1, [True, False]), ids=["stopped", "killed"])
@pytest.mark.parametrize("schedule", long_after(1, ["1f1b", "gpipe"]))
@pytest.mark.parametrize("instance", INSTANCES)
def test_resumed_at_every_moment(instance: Instance, schedule: str, stopped: bool, tmp_path: Path) -> None:
    whole = solve(instance, schedule=schedule, options=SolveOptions(threads=1))
    options = SolveOptions(threads=1, resume=str(tmp_path / "kept"))
    for at in range(2, 200, 3):
        stop: Stop[Solution] = Stop()
        ending = Ending(at, stop if stopped else None)
        try:
            found = solve(instance, schedule=schedule, options=options, listener=ending, stop=stop)
        except Killed:
            continue
        if found.stopped_by is None:
            assert figures(found) == figures(whole)
            break
        assert found.lower_bound_s <= whole.lower_bound_s
    again = solve(instance, schedule=schedule, options=options)
    assert figures(again) == figures(whole)


def test_what_is_on_record_is_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, options = uneven_layers(3), SolveOptions(threads=1, resume=str(tmp_path))
    whole = solve(instance, schedule="1f1b", options=options)
    assert whole.status is Status.OPTIMAL
    monkeypatch.setattr("piper_ray.engine.flush.task_search.run_task", None)
    listener = Ending(-1)
    assert figures(solve(instance, schedule="1f1b", options=options, listener=listener)) == figures(whole)
    assert any("searches of degrees are on record" in note for note in listener.notes)


def test_another_schedule_or_constraint_is_refused_by_name(tmp_path: Path) -> None:
    instance, options = random_instance(5), SolveOptions(threads=1, resume=str(tmp_path))
    solve(instance, schedule="1f1b", options=options)
    with pytest.raises(CheckpointRefused, match="schedule 1f1b there, gpipe here"):
        solve(instance, schedule="gpipe", options=options)
    with pytest.raises(CheckpointRefused, match="schedule 1f1b there, 2bw here"):
        solve(instance, schedule="2bw", options=options)
    with pytest.raises(CheckpointRefused, match="StageCount"):
        solve(instance, schedule="1f1b", options=options, restrictions=Restrictions(constraints=[StageCount(1)]))
    with pytest.raises(CheckpointRefused, match="memory"):
        solve(instance.replace(memory_bytes=7.0), schedule="1f1b", options=options)
    other = SolveOptions(threads=1, resume=str(tmp_path / "2bw"))
    solve(instance, schedule="2bw", options=other)
    with pytest.raises(CheckpointRefused, match="schedule 2bw there, 1f1b here"):
        solve(instance, schedule="1f1b", options=other)
    with pytest.raises(CheckpointRefused, match="SameDegrees unknown there"):
        solve(instance, schedule="2bw", options=other, restrictions=Restrictions(constraints=[SameDegrees()]))
