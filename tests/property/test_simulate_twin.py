"""The compiled event loop against the plain one, on random pipelines of every schedule."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from piper_ray.model.schedule import V_SHAPED, Schedule, ScheduleName
from piper_ray.simulate.actions import ActionKind, Actions, flush_lists, gpipe, group_size, one_f_one_b
from piper_ray.simulate.communication import joined_passes, sends_waited_for, with_buffers, with_joined_passes
from piper_ray.simulate.stages import Hop, Message, StageLoad, Stages
from piper_ray.simulate.steady import rule_in_flight
from piper_ray.simulate.timeline import (
    PassSeconds,
    SimulatedRanks,
    Timeline,
    Versions,
    memory_steps,
    program_of,
    run_program,
    weight_versions,
)
from tests.lengths import long_after
from tests.simulate_support import FLUSHED, placed, random_seconds, run, twin_of
from tests.simulate_twin import Pipeline, peak_bytes


def _random_hops(rng: random.Random, where: SimulatedRanks, *, overlapped: bool) -> list[Hop]:
    """Each stage to the next, and some that jump; between ranks they take time if transfers are overlapped."""
    stages = len(where.replicas)
    pairs = [(j, j + 1) for j in range(stages - 1)]
    pairs += [(i, k) for i in range(stages) for k in range(i + 2, stages) if rng.random() < 0.2]

    def seconds(pair: tuple[int, int]) -> float:
        apart = where.places[pair[0]] != where.places[pair[1]]
        return rng.choice([0.0, rng.random(), 1.0]) if overlapped and apart else 0.0

    return [Hop(*pair, seconds(pair), seconds(pair)) for pair in sorted(pairs)]


def _assert_alike(timeline: Timeline, twin: Pipeline) -> None:
    times_s = twin.run()
    assert len(times_s) == len(timeline)
    for rank in range(len(timeline.layout.ranks)):
        mine = timeline.of_rank(rank)
        plain = [times_s[rank, number] for number in range(mine.stop - mine.start)]
        assert timeline.start_s[mine].tolist() == pytest.approx([start for start, _ in plain], rel=1e-12, abs=1e-12)
        assert timeline.end_s[mine].tolist() == pytest.approx([end for _, end in plain], rel=1e-12, abs=1e-12)


def _assert_same_memory(rng: random.Random, timeline: Timeline, twin: Pipeline) -> None:
    stages = len(timeline.layout.replicas)
    activations = [rng.choice([1.0, 2.0, 5.0]) for _ in range(stages)]
    figures = [StageLoad(0, 0, 0, activations[j], 10.0 * (j + 1), 0, 0, 1, 1) for j in range(stages)]
    for rank, held in enumerate(timeline.layout.ranks):
        times_s = [twin.times_s[rank, number] for number in range(len(twin.lists[rank]))]
        fixed = sum(10.0 * (stage + 1) for stage in held.stages)
        expected = peak_bytes(twin.lists[rank], times_s, activations, fixed)
        assert memory_steps(timeline, figures, rank).peak_bytes == expected


@pytest.mark.parametrize("name", long_after(1, FLUSHED))
@pytest.mark.parametrize("overlapped", [False, True])
def test_flushed(name: ScheduleName, overlapped: bool) -> None:
    rng = random.Random(f"{name.value} {overlapped}")
    for _ in range(15):
        ranks, chunks = rng.randint(1, 5), rng.randint(1, 3)
        one = name in (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)
        schedule = Schedule(name, None if name in V_SHAPED else 1 if one else chunks)
        microbatches = rng.randint(2 * ranks if name is ScheduleName.DUALPIPE_V else 1, 14)
        where = placed(schedule, [1] * (ranks * schedule.v))
        lists = flush_lists(schedule, ranks, microbatches)
        seconds = random_seconds(rng, ranks * schedule.v) + 1e-3  # passes of no time share their moment with others
        hops = _random_hops(rng, where, overlapped=overlapped)
        latency_s = rng.choice([0.0, 0.3])
        timeline = run(where, lists, microbatches, seconds, hops, latency_s)
        twin = twin_of(where, lists, seconds, hops, latency_s)
        _assert_alike(timeline, twin)
        _assert_same_memory(rng, timeline, twin)


@pytest.mark.parametrize("seed", long_after(2, range(12)))
def test_sends_that_passes_wait_for(seed: int) -> None:
    """In Megatron's warm-up and flush, which are as long as Megatron says."""
    rng = random.Random(seed)
    ranks, schedule = rng.randint(2, 5), Schedule(ScheduleName.INTERLEAVED, rng.randint(1, 3), ahead=rng.randint(0, 1))
    microbatches = rng.randint(1, 14)
    where = placed(schedule, [1] * (ranks * schedule.v))
    lists = flush_lists(schedule, ranks, microbatches)
    seconds = random_seconds(rng, ranks * schedule.v) + 1e-3
    hops = _random_hops(rng, where, overlapped=True)
    group = group_size(ranks, microbatches, None)
    waited_for = set()
    for rank, own in enumerate(lists):
        ahead = min((schedule.v - 1) * group + 2 * (ranks - 1 - rank) + schedule.ahead, microbatches * schedule.v)
        waited_for |= {(rank, place) for place in range(len(own)) if not ahead <= place < len(own) - ahead}
    none = np.zeros_like(seconds)
    program = program_of(where, lists, microbatches, PassSeconds(seconds, none), hops, 0.1)
    timeline = run_program(where, program._replace(waited_for=sends_waited_for(program, schedule, microbatches)), none)
    twin = dataclasses.replace(twin_of(where, lists, seconds, hops, 0.1), waited_for=waited_for)
    _assert_alike(timeline, twin)


@pytest.mark.parametrize("seed", long_after(2, range(12)))
def test_passes_that_are_run_as_one(seed: int) -> None:
    """Those that torch's DualPipeV runs as one start when both can, and send when both have ended."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rng = random.Random(seed)
    schedule, ranks = Schedule(ScheduleName.DUALPIPE_V), rng.randint(1, 5)
    microbatches = rng.randint(2 * ranks, 14)
    where = placed(schedule, [1] * (2 * ranks))
    lists = flush_lists(schedule, ranks, microbatches)
    seconds = random_seconds(rng, 2 * ranks) + 1e-3
    hops = _random_hops(rng, where, overlapped=rng.random() < 0.5)
    none = np.zeros_like(seconds)
    program = program_of(where, lists, microbatches, PassSeconds(seconds, none), hops, 0.1)
    joined = set()
    for rank, own in enumerate(visualizer.get_schedule_ops("DualPipeV", ranks, microbatches, 2)):
        place = 0
        for action in filter(None, own):
            joined |= {(rank, place)} if action.sub_actions else set()
            place += len(action.sub_actions or (action,))
    timeline = run_program(where, program._replace(joined=joined_passes(program)), none)
    _assert_alike(timeline, dataclasses.replace(twin_of(where, lists, seconds, hops, 0.1), joined=joined))
    overlap = rng.random()
    shorter = with_joined_passes(program, seconds, overlap)
    for rank, place in joined:
        pair = program.duration_s[program.first[rank] + place :][:2]
        together_s = shorter.duration_s[program.first[rank] + place :][:2].sum()
        assert together_s == pytest.approx(pair.sum() - overlap * pair.min())
    saved = np.flatnonzero(shorter.duration_s < program.duration_s).tolist()
    assert set(saved) <= {program.first[rank] + place + more for rank, place in joined for more in (0, 1)}


def test_buffers_of_what_comes_in_ahead() -> None:
    """One input and one gradient on each rank; three where a group has two microbatches more than ranks."""
    messages = (Message(0, 1, 5.0, 7.0), Message(1, 2, 1.0, 1.0), Message(2, 3, 5.0, 7.0))
    stages = Stages((StageLoad(0, 0, 0, 0, 10.0, 0, 0, 2, 1),) * 4, messages, ())
    for group, held in ((None, [1 + 5, 7 + 1]), (4, [3 * 1 + 5, 7 + 3 * 1])):
        found = with_buffers(stages, Schedule(ScheduleName.INTERLEAVED, 2, group), 8).figures
        assert [stage.fixed_bytes - 10.0 for stage in found] == [*held, 0.0, 0.0]


@pytest.mark.parametrize("in_turn", long_after(1, [False, True]))
def test_replicas_of_uneven_degrees(in_turn: bool, few: bool) -> None:
    rng = random.Random(f"uneven {in_turn}")
    schedule = Schedule(ScheduleName.TWO_BW if in_turn else ScheduleName.GPIPE)
    for _ in range(25 if few else 60):
        where = placed(schedule, [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 5))])
        in_flight = [y + rng.randint(0, 1) * rng.randint(0, 2) for y in rule_in_flight(where.replicas)]
        in_flight = [max(in_flight[j:]) for j in range(len(in_flight))] if rng.random() < 0.3 else in_flight
        microbatches = rng.randint(1, 30)
        lists: list[Actions] = []
        for rank in where.ranks:
            own = len(range(rank.replica, microbatches, where.replicas[rank.stages[0]]))
            lists.append(one_f_one_b(own, in_flight[rank.stages[0]]) if in_turn else gpipe(own))
        seconds = random_seconds(rng, len(where.replicas)) + 1e-3
        hops = _random_hops(rng, where, overlapped=rng.random() < 0.5)
        twin = twin_of(where, lists, seconds, hops, 0.0)
        if len(twin.run()) < sum(map(len, lists)):
            continue  # a y that stops the pipeline: told of elsewhere
        timeline = run(where, lists, microbatches, seconds, hops)
        _assert_alike(timeline, twin)
        _assert_same_memory(rng, timeline, twin)


def _plain_versions(timeline: Timeline, rank: int) -> Versions:
    """Counted at every moment at which a pass of the pipeline starts or has just ended."""
    stage = timeline.layout.ranks[rank].stages[0]
    replicas = timeline.layout.replicas

    def passes(kind: ActionKind, of_stage: int, of_rank: int | None = None) -> list[tuple[int, float, float]]:
        """Microbatch, start and end."""
        mine = (timeline.kind == kind) & (timeline.stage == of_stage)
        if of_rank is not None:
            mine &= timeline.rank_of_action == of_rank
        return list(zip(timeline.microbatch[mine], timeline.start_s[mine], timeline.end_s[mine], strict=True))

    forward, backward = passes(ActionKind.F, stage, rank), passes(ActionKind.B, stage, rank)
    ended_s = {k: end for k, _, end in backward}

    def updates(now_s: float) -> int:
        return sum(end <= now_s for _, _, end in backward)

    def input_version(now_s: float) -> int:
        """The newest of the first stage, by the microbatches in it."""
        return sum(end <= now_s for _, _, end in passes(ActionKind.B, 0)) // replicas[0] * replicas[0]

    entered_s = {k: start for k, start, _ in passes(ActionKind.F, 0)}
    stashed = synced = 1
    for now_s in sorted({time for _, start, end in [*forward, *backward] for time in (start, end)}):
        in_use = {updates(start) for k, start, _ in forward if start <= now_s < ended_s[k]}
        stashed = max(stashed, len(in_use | {updates(now_s)}))
        asked = [input_version(now_s)]  # by those that have not come in yet, at the least
        asked += [input_version(entered_s[k]) for k, end in ended_s.items() if entered_s[k] <= now_s < end]
        oldest = min(asked) // replicas[stage]
        synced = max(synced, updates(now_s) - oldest + 1)
    return Versions(stashed, synced)


def test_versions_of_the_weights() -> None:
    rng = random.Random("versions")
    schedule = Schedule(ScheduleName.PIPEDREAM)
    most = 0
    for _ in range(25):
        where = placed(schedule, [rng.choice([1, 1, 2, 3]) for _ in range(rng.randint(1, 4))])
        in_flight = rule_in_flight(where.replicas)
        microbatches = 12
        lists = [
            one_f_one_b(len(range(rank.replica, microbatches, where.replicas[rank.place])), in_flight[rank.place])
            for rank in where.ranks
        ]
        timeline = run(where, lists, microbatches, random_seconds(rng, len(where.replicas)) + 1e-3)
        for rank in range(len(where.ranks)):
            found = weight_versions(timeline, rank)
            assert found == _plain_versions(timeline, rank)
            most = max(most, found.stashed, found.vertical_sync)
    assert most >= 4


def test_what_an_action_waited_for() -> None:
    """Its cause ended at its start, or sent what arrived then; and nothing else was missing meanwhile but a message."""
    rng = random.Random("causes")
    schedule = Schedule(ScheduleName.INTERLEAVED, 2)
    for _ in range(20):
        ranks, microbatches = rng.randint(2, 4), rng.randint(2, 9)
        where = placed(schedule, [1] * (2 * ranks))
        lists = flush_lists(schedule, ranks, microbatches)
        seconds = random_seconds(rng, 2 * ranks) + 1e-3
        hops = _random_hops(rng, where, overlapped=True)
        timeline = run(where, lists, microbatches, seconds, hops)
        own = np.maximum(np.arange(len(timeline)) - 1, 0)
        first = timeline.start_s == 0.0
        assert (timeline.cause[~first] >= 0).all()
        assert (timeline.end_s[timeline.cause[~first]] <= timeline.start_s[~first] + 1e-12).all()
        same_rank = timeline.rank_of_action[own] == timeline.rank_of_action
        idle_s = timeline.start_s - np.where(same_rank, timeline.end_s[own], 0.0)
        assert (timeline.transit_s[1:] >= -1e-12).all()
        assert (timeline.transit_s[1:][same_rank[1:]] <= idle_s[1:][same_rank[1:]] + 1e-12).all()
