"""Solves under schedules with chunks: constraints, numbers of chunks, limits, and what a listener hears."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from random import Random

import pytest

import piper_ray
from piper_ray.cost.schedules import chunk_schedules
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.chunks.nodes import Node, Turn, TurnOutcome
from piper_ray.engine.chunks.search import ChunkSearch
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.request import KeptSearches
from piper_ray.model.constraints import AllDevices, Restrictions, SameDegrees, StageCount, TensorParallelDegrees
from piper_ray.model.errors import CheckpointRefused
from piper_ray.model.events import DegreesAdvanced, Event, IncumbentFound
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy
from piper_ray.workloads.formats.load import to_toml
from tests.flush_instances import uneven_layers
from tests.instances import build, encoder_decoder, equal_chain, random_instance, tmpc, two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

TWO_THREADS = SolveOptions(threads=2)
INTERLEAVED = Schedule(ScheduleName.INTERLEAVED, 2)


def chain(length: int = 8, memory_bytes: float = 400.0) -> Instance:
    return equal_chain(length, devices=4, microbatches=8, memory_bytes=memory_bytes, bandwidth_bytes_per_s=64.0)


def degrees(solution: Solution) -> tuple[int, int, int]:
    """d, t and p of the plan."""
    assert solution.plan is not None
    ranks = solution.plan.by_rank(solution.schedule).stages
    return ranks[0].data_parallel_degree, ranks[0].tensor_parallel_degree, len(ranks)


def test_equal_layers_take_m_v_and_p_minus_1_times_a_chunk() -> None:
    instance = equal_chain(4, devices=2, microbatches=4, memory_bytes=1e6, bandwidth_bytes_per_s=1e12)
    rules = Restrictions(data_parallelism=False, constraints=[StageCount(2), TensorParallelDegrees((1,))])
    solution = piper_ray.solve(instance, schedule=INTERLEAVED, restrictions=rules, options=ONE_THREAD)
    assert degrees(solution) == (1, 1, 2)
    assert solution.time_per_sample_s == pytest.approx((4 * 2 + 1) * 6.0 / 4, rel=1e-6)
    assert solution.status is Status.OPTIMAL


TOWERS = two_towers(8, devices=6, microbatches=24, memory_bytes=60, bandwidth_bytes_per_s=3.0)


@cache
def towers(name: str) -> Solution:
    """Solved without a break; the number of threads changes nothing."""
    return piper_ray.solve(TOWERS, schedule=name, options=TWO_THREADS)


def test_constraints_are_kept() -> None:
    instance = chain()
    free = piper_ray.solve(instance, schedule=INTERLEAVED, options=ONE_THREAD)
    assert free.time_per_sample_s is not None
    for rules, expected in (
        (Restrictions(constraints=[StageCount(2)]), (None, None, 2)),
        (Restrictions(constraints=[StageCount(4), SameDegrees()]), (None, None, 4)),
        (Restrictions(constraints=[TensorParallelDegrees((2,))]), (None, 2, None)),
        (Restrictions(tensor_parallelism=False), (None, 1, None)),
        (Restrictions(data_parallelism=False), (1, None, None)),
    ):
        found = piper_ray.solve(instance, schedule=INTERLEAVED, restrictions=rules, options=ONE_THREAD)
        assert found.plan is not None
        assert [*rules.violations(instance, found.plan, found.schedule)] == []
        assert all(wanted in (None, is_) for wanted, is_ in zip(expected, degrees(found), strict=True))
        assert found.time_per_sample_s is not None
        assert found.time_per_sample_s >= free.lower_bound_s * (1 - 1e-9)


def test_a_kept_search_goes_on_where_it_ended() -> None:
    """After several limits of work it has come to the same answer as without any, by the same work."""
    instance, rules, kept = chain(), Restrictions(constraints=[StageCount(2)]), KeptSearches()

    def solved(options: SolveOptions, kept: KeptSearches | None = None) -> tuple[Solution, int]:
        found = piper_ray.solve(instance, schedule="interleaved", restrictions=rules, options=options, kept=kept)
        assert found.stats.degrees is not None
        return found, found.stats.degrees.passes

    whole, most = solved(ONE_THREAD)
    for turns in range(1, 100):
        found, passes = solved(replace(ONE_THREAD, passes_limit=turns * most // 4), kept)
        if found.stopped_by is not StoppedBy.WORK_LIMIT:
            break
    assert turns > 2
    assert passes == most
    assert (found.plan, found.time_per_sample_s, found.lower_bound_s) == (
        whole.plan,
        whole.time_per_sample_s,
        whole.lower_bound_s,
    )


def test_all_devices_counts_those_of_ranks() -> None:
    instance = chain()
    rules = Restrictions(constraints=[AllDevices(), StageCount(2)])
    found = piper_ray.solve(instance, schedule=INTERLEAVED, restrictions=rules, options=ONE_THREAD)
    d, t, p = degrees(found)
    assert (d * t * p, p) == (instance.devices, 2)
    assert found.plan is not None
    assert found.plan.devices == 2 * instance.devices  # chunks share theirs
    assert any(rules.violations(instance, found.plan))
    three = Restrictions(constraints=[AllDevices(), StageCount(3)])
    none = piper_ray.solve(instance, schedule=INTERLEAVED, restrictions=three, options=ONE_THREAD)
    assert none.status is Status.INFEASIBLE
    assert none.infeasibility is not None


def test_a_name_alone_leaves_the_number_of_chunks_open() -> None:
    instance = chain(4)
    found = piper_ray.solve(instance, schedule="interleaved", options=ONE_THREAD)
    given = [Schedule(ScheduleName.INTERLEAVED, v) for v in range(1, 5)]
    each = [piper_ray.solve(instance, schedule=schedule, options=ONE_THREAD) for schedule in given]
    assert found.time_per_sample_s is not None
    assert found.lower_bound_s <= min(x.time_per_sample_s for x in each if x.time_per_sample_s) * (1 + 1e-9)
    assert found.time_per_sample_s >= min(x.lower_bound_s for x in each) * (1 - 1e-9)
    for name, v in (("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)):
        assert piper_ray.solve(instance, schedule=name, options=ONE_THREAD).schedule.v == v


def test_a_file_that_names_no_number_of_chunks_leaves_it_open(tmp_path: Path) -> None:
    instance = chain(4)
    by_name = piper_ray.solve(instance, schedule="interleaved", options=ONE_THREAD)
    for schedule, chunks in ((Schedule(ScheduleName.INTERLEAVED), None), (Schedule(ScheduleName.INTERLEAVED, 3), 3)):
        path = tmp_path / "chain.toml"
        path.write_text(to_toml(replace(instance, schedule=schedule)))
        assert ("chunks" in path.read_text()) == (chunks is not None)
        found = piper_ray.solve(path, options=ONE_THREAD)
        if chunks is None:
            assert (found.schedule, found.time_per_sample_s) == (by_name.schedule, by_name.time_per_sample_s)
        else:
            assert found.schedule.v == chunks
    assert by_name.schedule.v != 2, "what the name alone stands for elsewhere"
    grouped = chunk_schedules(Schedule(ScheduleName.LOOPED_BFS))
    assert [schedule.v for schedule in grouped] == [*range(1, 9)]
    assert {x.group for x in chunk_schedules(Schedule(ScheduleName.INTERLEAVED, group=4))} == {4}


def test_where_nothing_fits_it_says_so() -> None:
    tight = piper_ray.solve(chain(memory_bytes=1.0), schedule=INTERLEAVED, options=ONE_THREAD)
    assert tight.status is Status.INFEASIBLE
    assert tight.infeasibility is not None
    assert tight.lower_bound_s == float("inf")
    short = piper_ray.solve(equal_chain(1, devices=2), schedule=INTERLEAVED, options=ONE_THREAD)
    assert short.status is Status.INFEASIBLE


@pytest.mark.parametrize(("name", "memory_bytes"), [("interleaved", 96.0), ("zb-v", 92.0)])
def test_where_memory_is_tight_whole_layers_are_shared_out(name: str, memory_bytes: float) -> None:
    """A third of the layers has to save memory, in the right chunks: no even cut fits."""
    rows = [tmpc(8, 2, 7, 4), tmpc(10, 2, 4, 6, "some"), tmpc(12, 2, 1, 8, "all")]
    instance = build({x: {1: rows} for x in range(26)}, {(x, x + 1): 1.0 for x in range(25)}, devices=3)
    options = replace(ONE_THREAD, gap=0.9, passes_limit=200_000_000)
    found = piper_ray.solve(instance, memory_bytes=memory_bytes, schedule=name, options=options)
    assert found.plan is not None
    simulation = piper_ray.simulate(instance.replace(memory_bytes=memory_bytes), found.plan, found.schedule)
    assert not simulation.memory_violations


def test_limits_end_a_search_with_what_it_has() -> None:
    instance = TOWERS
    loose = piper_ray.solve(instance, schedule="zb-h1", options=SolveOptions(threads=1, gap=0.9))
    assert loose.gap is not None
    assert loose.gap <= 0.9
    stop: Stop[Solution] = Stop()
    stop.request()
    none = piper_ray.solve(instance, schedule="zb-h1", options=ONE_THREAD, stop=stop)
    assert (none.status, none.stopped_by) == (Status.UNKNOWN, StoppedBy.INTERRUPT)
    assert none.lower_bound_s > 0.0
    answer = stop.answer()
    assert answer is not None
    assert answer.status is Status.UNKNOWN
    late = piper_ray.solve(instance, schedule="zb-h1", options=SolveOptions(threads=1, time_limit_s=1e-9))
    assert late.stopped_by is StoppedBy.TIME_LIMIT


def test_a_listener_hears_of_each_better_plan() -> None:
    heard: list[Event] = []

    def listener(event: Event) -> None:
        heard.append(event)

    found = piper_ray.solve(chain(), schedule="interleaved", options=ONE_THREAD, listener=listener)
    plans = [event for event in heard if isinstance(event, IncumbentFound)]
    assert plans[-1].time_per_sample_s == found.time_per_sample_s
    times = [event.time_per_sample_s for event in plans]
    assert times == sorted(times, reverse=True)
    assert all(event.bounds.lower_s <= event.time_per_sample_s for event in plans)


def test_the_same_input_gives_the_same_plan() -> None:
    instance = random_instance(11)
    found = [piper_ray.solve(instance, schedule="interleaved", options=ONE_THREAD) for _ in range(2)]
    assert found[0].plan == found[1].plan
    assert found[0].lower_bound_s == found[1].lower_bound_s


@pytest.mark.long
@pytest.mark.parametrize("name", long_after(1, ["interleaved", "zb-h1"]))
def test_keyboard_interrupt_ends_a_search_with_what_it_has(name: str) -> None:
    def interrupted(event: Event) -> None:
        if isinstance(event, IncumbentFound):
            raise KeyboardInterrupt

    found, whole = piper_ray.solve(TOWERS, schedule=name, options=TWO_THREADS, listener=interrupted), towers(name)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.INTERRUPT)
    assert found.time_per_sample_s is not None
    assert whole.time_per_sample_s is not None
    assert found.lower_bound_s <= whole.time_per_sample_s <= found.time_per_sample_s


def test_keyboard_interrupt_while_the_reason_is_sought_leaves_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("piper_ray.engine.chunks.solve.explain", interrupted)
    found = piper_ray.solve(chain(memory_bytes=1.0), schedule=INTERLEAVED, options=ONE_THREAD)
    assert found.status is Status.INFEASIBLE


@pytest.mark.parametrize(
    "seeds", long_after(1, [range(80, 90), range(90, 105), range(225, 240), range(316, 317)]), ids=str
)
@pytest.mark.parametrize("name", ["interleaved", "zb-h1"])
def test_the_number_of_threads_changes_nothing(name: str, seeds: range) -> None:
    """Random instances have many plans that take the same; those of 80 to 249 differed before in two."""
    for seed in seeds:
        instance = random_instance(seed)
        one, other = (
            piper_ray.solve(instance, schedule=name, options=SolveOptions(threads=threads)) for threads in (1, 3)
        )
        assert other.plan == one.plan, seed
        assert (other.time_per_sample_s, other.lower_bound_s) == (one.time_per_sample_s, one.lower_bound_s), seed
        assert (other.schedule, other.stopped_by) == (one.schedule, one.stopped_by), seed


@pytest.mark.long
def test_who_is_quick_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that end their efforts in any order."""
    random = Random(0)
    real = Node.take

    def slow(node: Node, turn: Turn, control: FloatArray) -> TurnOutcome:
        time.sleep(0.02 * random.random())
        return real(node, turn, control)

    alone = {seed: piper_ray.solve(random_instance(seed), schedule="interleaved", threads=1) for seed in range(2)}
    monkeypatch.setattr(Node, "take", slow)
    for seed, one in alone.items():
        found = piper_ray.solve(random_instance(seed), schedule="interleaved", threads=4)
        assert (found.plan, found.lower_bound_s) == (one.plan, one.lower_bound_s)
        assert found.stats.degrees == one.stats.degrees


def test_of_plans_that_take_the_same_that_of_fewest_devices() -> None:
    """A layer that takes most of the time keeps one rank busy, so further devices gain nothing."""
    for name in ("interleaved", "zb-h1"):
        for seed in (85, 232, 250, 316):
            found = piper_ray.solve(random_instance(seed), schedule=name, options=TWO_THREADS)
            assert found.plan is not None
            devices = found.plan.by_rank(found.schedule).devices
            for fewer in range(1, devices):
                other = piper_ray.solve(random_instance(seed).replace(devices=fewer), schedule=name, options=ONE_THREAD)
                assert other.time_per_sample_s is None or other.time_per_sample_s > found.lower_bound_s * (1 + 1e-12)


@pytest.mark.long
def test_a_resumed_search_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """It takes no turn again unless a later one of the same node needs what that left."""
    whole = towers("interleaved")
    resumed = SolveOptions(threads=2, resume=str(tmp_path / "kept"))
    advanced = count(1)

    def listener(event: Event) -> None:
        if isinstance(event, DegreesAdvanced) and next(advanced) == 12:
            raise KeyboardInterrupt

    stopped = piper_ray.solve(TOWERS, schedule="interleaved", options=resumed, listener=listener)
    assert stopped.stopped_by is StoppedBy.INTERRUPT
    assert stopped.lower_bound_s <= whole.lower_bound_s
    for options in (resumed, replace(resumed, threads=1)):
        found = piper_ray.solve(TOWERS, schedule="interleaved", options=options)
        assert (found.plan, found.time_per_sample_s) == (whole.plan, whole.time_per_sample_s)
        assert (found.lower_bound_s, found.stopped_by) == (whole.lower_bound_s, whole.stopped_by)
        assert found.stats.degrees == whole.stats.degrees


def test_what_a_search_has_ended_with_is_answered_without_another_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, kept = uneven_layers(3), SolveOptions(threads=1, resume=str(tmp_path / "kept"))
    first = piper_ray.solve(instance, schedule="zb-h1", options=kept)

    def never(*_: object) -> TurnOutcome:
        raise AssertionError("a turn was taken again")

    monkeypatch.setattr(Node, "take", never)
    again = piper_ray.solve(instance, schedule="zb-h1", options=kept)
    assert (again.plan, again.lower_bound_s) == (first.plan, first.lower_bound_s)


def test_a_checkpoint_is_of_its_numbers_of_chunks(tmp_path: Path) -> None:
    kept = SolveOptions(threads=1, resume=str(tmp_path / "kept"))
    piper_ray.solve(uneven_layers(1), schedule=Schedule(ScheduleName.INTERLEAVED, 2), options=kept)
    with pytest.raises(CheckpointRefused, match="interleaved with 2 chunks there, interleaved with 1 or 2 or 3"):
        piper_ray.solve(uneven_layers(1), schedule="interleaved", options=kept)


@pytest.mark.parametrize("seeds", long_after(1, [range(2), range(2, 4)]), ids=str)
def test_bounds_for_larger_gaps_come_first(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    """What holds for one of these does not hold for the next, and no bound is above the best of all plans."""
    instances = [encoder_decoder(seed, 3, 3) for seed in seeds]
    every = [piper_ray.solve(instance, schedule="interleaved", options=ONE_THREAD) for instance in instances]
    assert all(whole.status is Status.OPTIMAL for whole in every)
    returned = list[bool]()
    real = ChunkSearch._return_to

    def told(search: ChunkSearch, kept: Mapping[int, Node]) -> None:
        before = {index: node.lower_s for index, node in kept.items()}
        real(search, kept)
        assert all(node.lower_s >= before[index] for index, node in search._nodes.items())
        assert all(node.done == kept[index].done for index, node in search._nodes.items())
        returned.append(search._bounds.lower_s < search._target_s * (1.0 - PROOF))

    monkeypatch.setattr(ChunkSearch, "_return_to", told)
    monkeypatch.setattr("piper_ray.engine.chunks.search._GOALS", (0.5, 0.3, 0.1, 0.02))
    monkeypatch.setattr("piper_ray.engine.chunks.nodes._FEW_LAYERS", 0)  # plans are not enumerated
    for instance, whole in zip(instances, every, strict=True):
        one, other = (piper_ray.solve(instance, schedule="interleaved", threads=threads) for threads in (1, 2))
        assert one.time_per_sample_s is not None
        assert whole.time_per_sample_s is not None
        assert one.lower_bound_s <= whole.time_per_sample_s * (1.0 + 1e-9)
        assert one.time_per_sample_s >= whole.time_per_sample_s * (1.0 - 1e-9)
        assert (one.plan, one.lower_bound_s, one.stopped_by) == (other.plan, other.lower_bound_s, other.stopped_by)
    assert any(returned)
