"""On partitions an evaluation keeps what it keeps on one machine, and a solve has the same answer, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

import piper_ray
from piper_ray.cost.bounds import ceiling_s
from piper_ray.cost.variants import layer_without_choice
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.potentials import Potentials, StageCover
from piper_ray.engine.evaluation.reach import Reach, Room
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.lattice.downsets import listed_lattice
from piper_ray.engine.partition import listing
from piper_ray.engine.partition.evaluation import NoMachine, PartitionedEvaluation, PartitionLost
from piper_ray.engine.partition.partition import Evaluation, Partition
from piper_ray.engine.partition.setting import PartitionSetting, owners
from piper_ray.engine.preparation import Outline
from piper_ray.engine.search import wide
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.errors import ClusterError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy, StopSearch
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.link_rates import with_levels
from tests.partition_support import HereCrew, Log, little_room, same_result
from tests.solver_support import ONE_THREAD

AMPLE = Room(10**6, 10**9)


def go_on(done: int = 0) -> None:
    """Nothing ends it."""


@dataclass(frozen=True)
class Asked:
    """A threshold of an instance, with potentials for it."""

    setting: PartitionSetting
    threshold_s: float
    potentials: Potentials

    @classmethod
    def of(cls, instance: Instance, place: float) -> Asked:
        """place: of the threshold, from the lower bound (0) to what no plan is slower than (1)."""
        outline, degrees = Outline.of(instance, Restrictions()), Restrictions().data_parallel_degrees(instance)
        options = build_options(instance, outline.graph, outline.variants)
        setting = PartitionSetting(instance, outline.graph, options, tuple(degrees), wide.CELLS)
        chain = setting.chain()
        threshold_s = chain.lower_bound_s() ** (1.0 - place) * ceiling_s(instance) ** place
        cover = StageCover.of(chain, wide.CELLS)
        assert cover is not None
        return cls(setting, threshold_s, cover.potentials(threshold_s, rounds=20))

    def listed(self) -> np.ndarray:
        """By one machine."""
        cover = StageCover.of(self.setting.chain(), wide.CELLS)
        assert cover is not None
        found = Reach(self.setting.chain(), cover).downsets(self.potentials, AMPLE)
        assert found is not None
        return found

    def problem(self, found: np.ndarray) -> Problem:
        workload = LatticeTables.build(listed_lattice(self.setting.graph, found), self.setting.options)
        return build_problem(workload, self.setting.instance, self.setting.degrees)


def own_of(member: Partition) -> np.ndarray:
    """What is listed there."""
    assert member._own is not None
    return member._own


ASKED = [
    (two_towers(9, devices=8, memory_bytes=60.0), 0.1),
    (two_towers(9, devices=8, memory_bytes=60.0), 0.4),
    (parallel_branches(3, 4, devices=6), 0.3),
    (equal_chain(12, devices=5, memory_bytes=40.0), 0.5),
    *((random_instance(seed, most_layers=9, most_devices=12), 0.15 * (seed % 5)) for seed in range(400, 420)),
]


@pytest.mark.parametrize("partitions", [1, 2, 5])
@pytest.mark.parametrize("fewest_stages", [False, True])
def test_states_and_stages_are_those_of_one_machine(partitions: int, *, fewest_stages: bool) -> None:
    whole_lattices = 0
    for instance, place in ASKED:
        if layer_without_choice(instance, Outline.of(instance, Restrictions()).variants) is not None:
            continue
        asked = Asked.of(instance, place)
        found = asked.listed()
        crew = HereCrew(asked.setting, partitions)
        evaluation = PartitionedEvaluation(crew, asked.setting.graph.size)
        parts = evaluation.list_downsets(asked.potentials, go_on)
        assert parts is not None
        assert parts.total == found.shape[0]
        assert {row.tobytes() for row in found if row.any()} == {
            row.tobytes() for member in crew.members for row in own_of(member) if row.any()
        }
        evaluation.prepare(parts, go_on)
        size = asked.setting.graph.size
        weights = (size + 1, 1) if fewest_stages else (1, 0)
        got = evaluation.evaluate(parts, Evaluation(asked.threshold_s, *weights, asked.potentials), go_on)
        crew.close()
        if not parts.is_whole:
            assert not got.feasible
            continue
        whole_lattices += 1
        problem = asked.problem(found)
        backend = LocalBackend(1)
        completion = Completion.by_potentials(asked.potentials, problem)
        expected = evaluate_threshold(
            problem, backend, asked.threshold_s, fewest_stages=fewest_stages, completion=completion
        )
        backend.close()
        assert (got.feasible, got.devices) == (expected.feasible, expected.devices)
        assert (got.live_downsets, got.cells) == (expected.live_downsets, expected.cells)
        bits = problem.lattice.bits
        assert [
            (stage.outer.tolist(), stage.inner.tolist(), stage.variant, stage.data_parallel_degree, stage.later_sum)
            for stage in got.stages
        ] == [
            (
                bits[stage.outer].tolist(),
                bits[stage.inner].tolist(),
                stage.variant,
                stage.data_parallel_degree,
                stage.later_sum,
            )
            for stage in expected.stages
        ]
    assert whole_lattices >= 8


def test_each_has_about_as_many_of_every_size() -> None:
    asked = Asked.of(two_towers(30, devices=8), 0.6)
    found = asked.listed()
    of = owners(found, 4)
    assert np.array_equal(of, owners(found.copy(), 4))
    counts = np.bincount(of, minlength=4)
    assert counts.sum() == found.shape[0] > 400
    assert counts.max() < 1.3 * counts.min()


def test_what_is_found_is_sent_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where one downset leads to more than that."""
    asked = Asked.of(two_towers(12, devices=8), 0.5)
    monkeypatch.setattr(listing, "_SENT_AT_ONCE", 1)
    monkeypatch.setattr(listing, "AT_ONCE", 2)
    monkeypatch.setattr(listing, "STEPS_AT_ONCE", 3)
    crew = HereCrew(asked.setting, 2)
    parts = PartitionedEvaluation(crew, asked.setting.graph.size).list_downsets(asked.potentials, go_on)
    crew.close()
    assert parts is not None
    assert parts.total == asked.listed().shape[0]
    spread = sum(method == "spread" for _, method in crew.asked)
    assert spread > 4 * asked.setting.graph.size


def test_no_partition_takes_more_than_it_has_room_for() -> None:
    asked = Asked.of(two_towers(12, devices=8), 0.5)
    most = int(np.bincount(owners(asked.listed(), 3)).max())
    for room in (1, most - 1, most, most + 1):
        crew = HereCrew(asked.setting, 3, room=room)
        parts = PartitionedEvaluation(crew, asked.setting.graph.size).list_downsets(asked.potentials, go_on)
        crew.close()
        assert (parts is not None) == (room >= most)


class Partitioned(LocalBackend):
    """With a crew in this process. deaths: the so manyth call of each of these crews is the last."""

    def __init__(self, partitions: int, room: int = 10**6, deaths: tuple[int, ...] = (), **lost: bool) -> None:
        super().__init__(1)
        self.partitions, self.part_room, self.deaths, self.lost = partitions, room, list(deaths), lost
        self.crews: list[HereCrew] = []
        self.open = 0

    @contextmanager
    def crew(
        self,
        setting: PartitionSetting,
        bytes_per_downset: float,
        check: Callable[[], None],
    ) -> Iterator[HereCrew]:
        assert bytes_per_downset > 0
        check()
        if self.partitions == 0:
            raise NoMachine("none has room")
        death = self.deaths.pop(0) if self.deaths else None
        crew = Mortal(setting, self.partitions, self.part_room, death, **self.lost)
        self.crews.append(crew)
        self.open += 1
        try:
            yield crew
        finally:
            crew.close()
            self.open -= 1


class Mortal(HereCrew):
    def __init__(
        self, setting: PartitionSetting, partitions: int, room: int, death: int | None, *, with_machine: bool = True
    ) -> None:
        super().__init__(setting, partitions, room)
        self.death, self.with_machine = death, with_machine

    def get(self, answers: list[object], check: Callable[[], None]) -> list[object]:  # type: ignore[override]
        if self.death is not None and len(self.asked) >= self.death:
            raise PartitionLost("machine 2 is gone", with_machine=self.with_machine)
        return super().get(answers, check)


def solved(
    instance: Instance, backend: Partitioned, monkeypatch: pytest.MonkeyPatch, log: Log | None = None, **options: float
) -> Solution:
    with little_room(monkeypatch):
        return piper_ray.solve(
            instance,
            options=SolveOptions(threads=1, **options),  # type: ignore[arg-type]
            backend=backend,
            listener=log or Log(),
        )


@pytest.mark.parametrize("bucket", range(4))
def test_solves_are_those_of_one_machine(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_partitions = 0
    for seed in range(200 + 10 * bucket, 210 + 10 * bucket):
        instance = with_levels(Random(seed), random_instance(seed, most_layers=9, most_devices=12, density=0.2))
        whole = piper_ray.solve(instance, options=ONE_THREAD)
        if whole.stats.downsets <= whole.stats.contracted_layers + 1:
            continue
        backend = Partitioned(3)
        log = Log()
        found = solved(instance, backend, monkeypatch, log)
        backend.close()
        assert backend.open == 0
        on_partitions += bool(backend.crews)
        if found.status is Status.INFEASIBLE:
            assert whole.status is Status.INFEASIBLE
        else:
            assert same_result(found, whole), seed
        if backend.crews:
            assert "more downsets count than fit here: 3 machines have a part each" in log.notes
            assert found.stats.evaluations
            assert found.stats.downsets <= whole.stats.downsets
    assert on_partitions >= 1


MANY = two_towers(9, devices=8, memory_bytes=60.0)


@pytest.mark.parametrize("deaths", [(1,), (40,), (400,), (40, 30, 20, 10)])
def test_a_lost_machine_costs_time_alone(deaths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, log = piper_ray.solve(MANY, options=ONE_THREAD), Log()
    backend = Partitioned(3, deaths=deaths)
    found = solved(MANY, backend, monkeypatch, log)
    backend.close()
    assert same_result(found, whole)
    lost = "machine 2 is gone; all downsets are listed anew on the machines that are left"
    assert log.notes.count(lost) == len(deaths)
    assert len(backend.crews) == len(deaths) + 1
    assert backend.open == 0


def test_what_ends_its_process_each_time_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is known by then is not lost."""
    backend, log = Partitioned(3, deaths=(30, 30, 30, 30), with_machine=False), Log()
    found = solved(MANY, backend, monkeypatch, log)
    backend.close()
    whole = piper_ray.solve(MANY, options=ONE_THREAD)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.NO_MACHINE)
    assert found.lower_bound_s <= whole.time_per_sample_s <= found.time_per_sample_s  # type: ignore[operator]
    assert "3 times in turn machine 2 is gone" in log.notes
    assert len(backend.crews) == 3
    assert backend.open == 0


@pytest.mark.parametrize(("partitions", "room"), [(0, 10), (1, 10), (3, 10)])
def test_machines_with_no_more_room_leave_a_plan_and_a_bound(
    partitions: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, log = Partitioned(partitions, room), Log()
    found = solved(MANY, backend, monkeypatch, log)
    backend.close()
    why = StoppedBy.NO_MACHINE if partitions == 0 else StoppedBy.TOO_MANY_DOWNSETS
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, why)
    if partitions == 0:
        assert "none has room" in log.notes
    else:
        assert "more downsets count than fit on all machines together" in log.notes
    assert backend.open == 0


def test_a_cluster_that_cannot_be_reached_does_not_cost_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Partitioned):
        @contextmanager
        def crew(self, setting: PartitionSetting, *_: object) -> Iterator[HereCrew]:
            if self.partitions > 0:
                raise ClusterError("nobody listens")
            yield HereCrew(setting, 1)

    backend, log = Unreachable(3), Log()
    found = solved(MANY, backend, monkeypatch, log)
    backend.close()
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.NO_MACHINE)
    assert "nobody listens" in log.notes


@pytest.mark.parametrize("seen", [50, 500, 2000])
def test_a_limit_leaves_a_bound_that_holds(seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, looks = piper_ray.solve(MANY, options=ONE_THREAD), 0
    real = HereCrew.get

    def get(self: HereCrew, answers: list[object], check: Callable[[], None]) -> list[object]:
        nonlocal looks
        looks += len(answers)
        if looks > seen:
            raise StopSearch(StoppedBy.TIME_LIMIT)
        return real(self, answers, check)

    monkeypatch.setattr(HereCrew, "get", get)
    backend = Partitioned(3)
    found = solved(MANY, backend, monkeypatch)
    backend.close()
    assert found.stopped_by is StoppedBy.TIME_LIMIT
    assert whole.time_per_sample_s is not None
    assert 0.0 < found.lower_bound_s <= whole.time_per_sample_s
    assert backend.open == 0


def test_a_gap_that_is_enough_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Partitioned(2)
    found = solved(MANY, backend, monkeypatch, gap=0.04)
    backend.close()
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.GAP)
    assert backend.crews
