"""Every capability under every schedule: what docs/explanation/schedules.md promises, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest

import piper_ray
from piper_ray.engine.preparation import prepare
from piper_ray.model.constraints import Restrictions, SameDegrees
from piper_ray.model.errors import UsageError
from piper_ray.model.events import DegreesAdvanced, EvaluationAdvanced, Event, IncumbentFound
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy
from piper_ray.sweep.dataset import read_dataset
from piper_ray.sweep.run import run_sweep
from tests.instances import two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

QUICK = [
    schedule.value
    for schedule in (ScheduleName.TWO_BW, ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1, ScheduleName.PIPEDREAM)
]
"""One of each kind of search, and the one that is restated as another."""

SCHEDULES = long_after(len(QUICK), sorted((name.value for name in ScheduleName), key=lambda name: name not in QUICK))
LARGER = two_towers(3, devices=4, microbatches=8, memory_bytes=60.0, bandwidth_bytes_per_s=8.0)
SMALLER = two_towers(2, devices=4, microbatches=8, memory_bytes=40.0, bandwidth_bytes_per_s=8.0)
"""Of which a search with chunks has more than one plan in a twentieth of the other one's time."""

_NOT_2BW = [name.value for name in ScheduleName if name is not ScheduleName.TWO_BW]
REFUSED = {
    (ScheduleName.PIPEDREAM.value, "certificate"): "bounds under pipedream have no certificate",
    (ScheduleName.PIPEDREAM.value, "frontier"): "no frontier under schedule pipedream",
    **dict.fromkeys(product(_NOT_2BW, ["prepared"]), "prepared has the lattice of 2bw"),
}
"""Cells that cannot be, each with the words that say why."""


@dataclass
class At:
    """A listener that does something at the first plan."""

    do: Callable[[], None]
    seen: int = 0
    progress: int = 0

    def __call__(self, event: Event) -> None:
        self.progress += isinstance(event, (EvaluationAdvanced, DegreesAdvanced))
        if isinstance(event, IncumbentFound):
            self.seen += 1
            if self.seen == 1:
                self.do()


def instance_of(schedule: str) -> Instance:
    return SMALLER if ScheduleName(schedule) in CHUNKED else LARGER


@cache
def solved(schedule: str) -> Solution:
    return piper_ray.solve(instance_of(schedule), schedule=schedule, options=ONE_THREAD)


def same(one: Solution, other: Solution) -> bool:
    """To the byte."""
    return (one.status, one.plan, one.time_per_sample_s, one.lower_bound_s, one.schedule) == (
        other.status,
        other.plan,
        other.time_per_sample_s,
        other.lower_bound_s,
        other.schedule,
    )


def ctrl_c(schedule: str, folder: Path) -> None:  # noqa: ARG001 - as all of them
    def interrupt() -> None:
        raise KeyboardInterrupt

    found = piper_ray.solve(instance_of(schedule), schedule=schedule, options=ONE_THREAD, listener=At(interrupt))
    assert found.plan is not None
    assert found.stopped_by is StoppedBy.INTERRUPT
    assert found.lower_bound_s <= solved(schedule).lower_bound_s


def wish_to_stop(schedule: str, folder: Path) -> None:  # noqa: ARG001
    """As signals to the command line make it."""
    stop: Stop[Solution] = Stop()
    found = piper_ray.solve(
        instance_of(schedule), schedule=schedule, options=ONE_THREAD, stop=stop, listener=At(stop.request)
    )
    assert found.plan is not None
    assert found.stopped_by in (StoppedBy.INTERRUPT, None)
    so_far = stop.answer()
    assert so_far is not None
    assert so_far.plan is not None


def progress(schedule: str, folder: Path) -> None:  # noqa: ARG001
    listener = At(lambda: None)
    piper_ray.solve(instance_of(schedule), schedule=schedule, options=ONE_THREAD, listener=listener)
    assert listener.seen > 0
    assert listener.progress > 0


def time_limit(schedule: str, folder: Path) -> None:  # noqa: ARG001
    found = piper_ray.solve(
        instance_of(schedule), schedule=schedule, options=SolveOptions(threads=1, time_limit_s=1e-9)
    )
    assert found.stopped_by is StoppedBy.TIME_LIMIT
    assert found.lower_bound_s <= solved(schedule).lower_bound_s


def resumed(schedule: str, folder: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    kept = SolveOptions(threads=1, resume=str(folder / "kept"))
    piper_ray.solve(instance_of(schedule), schedule=schedule, options=kept, listener=At(interrupt))
    for _ in range(2):
        assert same(piper_ray.solve(instance_of(schedule), schedule=schedule, options=kept), solved(schedule))


def threads(schedule: str, folder: Path) -> None:  # noqa: ARG001
    assert same(
        piper_ray.solve(instance_of(schedule), schedule=schedule, options=SolveOptions(threads=3)), solved(schedule)
    )


def prepared(schedule: str, folder: Path) -> None:  # noqa: ARG001
    made = prepare(instance_of(schedule), Restrictions())
    assert same(
        piper_ray.solve(instance_of(schedule), schedule=schedule, options=ONE_THREAD, prepared=made), solved(schedule)
    )


def restrictions(schedule: str, folder: Path) -> None:  # noqa: ARG001
    rules = Restrictions(data_parallelism=False, constraints=[SameDegrees()])
    found = piper_ray.solve(instance_of(schedule), schedule=schedule, options=ONE_THREAD, restrictions=rules)
    assert found.plan is not None
    assert {stage.data_parallel_degree for stage in found.plan.stages} == {1}


def contract(schedule: str, folder: Path) -> None:  # noqa: ARG001
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("piper_ray.engine.blocks.block_instance.MOST_DOWNSETS", 8)
        options = SolveOptions(threads=1, contract=Contract.OPERATORS)
        found = piper_ray.solve(instance_of(schedule), schedule=schedule, options=options)
    assert found.blocks is not None
    assert found.blocks.downsets <= 8
    known_s = solved(schedule).time_per_sample_s
    assert known_s is not None
    assert found.lower_bound_s <= known_s


def frontier(schedule: str, folder: Path) -> None:  # noqa: ARG001
    found = piper_ray.frontier(instance_of(schedule), devices=range(1, 5), schedule=schedule, options=ONE_THREAD)
    for devices in (2, 4):
        alone = piper_ray.solve(instance_of(schedule), devices=devices, schedule=schedule, options=ONE_THREAD)
        (point,) = [point for point in found.points() if point.devices == devices]
        if point.status is Status.OPTIMAL and alone.status is Status.OPTIMAL:
            assert point.time_per_sample_s == pytest.approx(alone.time_per_sample_s, rel=1e-9)
        assert alone.time_per_sample_s is None or point.lower_bound_s <= alone.time_per_sample_s * (1 + 1e-9)


def sweep_point(schedule: str, folder: Path) -> None:
    piper_ray.dump(instance_of(schedule), folder / "towers.json")
    points = '[workloads]\ntowers = "towers.json"\n\n[[points]]\nworkload = "towers"\n'
    (folder / "sweep.toml").write_text(f'{points}schedule = "{schedule}"\n')
    run_sweep(folder / "sweep.toml", folder / "dataset")
    (row,) = read_dataset(folder / "dataset").to_pylist()
    point = Schedule.of(schedule)  # whose chunks a sweep takes as they usually are
    alone = piper_ray.solve(instance_of(schedule), schedule=Schedule(point.name, point.v), options=ONE_THREAD)
    assert (row["time_per_sample_s"], row["status"]) == (alone.time_per_sample_s, alone.status.value)


def certificate(schedule: str, folder: Path) -> None:  # noqa: ARG001
    solution = solved(schedule)
    proved = piper_ray.verify_certificate(instance_of(schedule), piper_ray.certify(instance_of(schedule), solution))
    assert 0.0 < proved.bound_s <= solution.lower_bound_s


def cluster(schedule: str, folder: Path) -> None:  # noqa: ARG001
    with piper_ray.RayBackend("auto") as backend:
        assert same(piper_ray.solve(instance_of(schedule), schedule=schedule, backend=backend), solved(schedule))


CAPABILITIES = [
    ctrl_c, wish_to_stop, progress, time_limit, resumed, threads, prepared, restrictions, contract, frontier,
    sweep_point, certificate,
]  # fmt: skip


def check(schedule: str, capability: Callable[[str, Path], None], folder: Path) -> None:
    words = REFUSED.get((schedule, capability.__name__))
    if words is None:
        capability(schedule, folder)
        return
    with pytest.raises(UsageError, match=words):
        capability(schedule, folder)


def test_the_page_has_each_refusal() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/explanation/schedules.md").read_text("utf-8")
    assert all(words in page for words in REFUSED.values())


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: capability.__name__)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_capability(schedule: str, capability: Callable[[str, Path], None], tmp_path: Path) -> None:
    check(schedule, capability, tmp_path)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cluster_has_the_same_answers(schedule: str, tmp_path: Path) -> None:
    check(schedule, cluster, tmp_path)
