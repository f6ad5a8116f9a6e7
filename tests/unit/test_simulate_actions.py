"""Action lists: those of torch where torch has them, the published ones elsewhere, and what each keeps in flight."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _ComputationType

from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.actions import ActionKind, Actions, flush_lists, group_size, one_f_one_b
from piper_ray.simulate.run import simulate
from tests.lengths import long_after
from tests.simulate_support import FLUSHED, stage_passes
from tests.simulate_twin import B, F, I, Pass, W
from tests.simulate_twin import one_f_one_b as plain_one_f_one_b

KINDS = {
    _ComputationType.FORWARD: F,
    _ComputationType.FULL_BACKWARD: B,
    _ComputationType.BACKWARD_INPUT: I,
    _ComputationType.BACKWARD_WEIGHT: W,
}
OF_TORCH = [
    (ScheduleName.GPIPE, 1, "GPipe"),
    (ScheduleName.INTERLEAVED, 2, "Interleaved1F1B"),
    (ScheduleName.INTERLEAVED, 3, "Interleaved1F1B"),
    (ScheduleName.LOOPED_BFS, 2, "LoopedBFS"),
    (ScheduleName.LOOPED_BFS, 3, "LoopedBFS"),
    (ScheduleName.ZB_H1, 2, "InterleavedZeroBubble"),
    (ScheduleName.ZB_H1, 3, "InterleavedZeroBubble"),
    (ScheduleName.ZB_V, 2, "ZBVZeroBubble"),
    (ScheduleName.DUALPIPE_V, 2, "DualPipeV"),
]
TORCH_SHAPES = [(p, m) for p in (1, 2, 4, 5) for m in (1, 3, 4, 6, 8, 12)]
SHAPES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 6, 7, 8, 10, 12, 16, 17)]


def _of_torch(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[Pass]] | None:
    """Without bubbles and with what runs as one apart; None for shapes that torch refuses."""
    try:
        ops = get_schedule_ops(name, ranks, microbatches, chunks)
    except ValueError:
        return None
    return [
        [
            (KINDS[part.computation_type], part.stage_index, part.microbatch_index)
            for action in rank
            if action is not None
            for part in (action.sub_actions or (action,))
            if part.computation_type in KINDS and part.microbatch_index is not None
        ]
        for rank in ops
    ]


@pytest.mark.parametrize("name", ScheduleName)
def test_schedules_with_a_flush_have_lists_and_no_others(name: ScheduleName) -> None:
    schedule = Schedule(name)
    if not schedule.asynchronous:
        assert len(flush_lists(schedule, 2, 4)) == 2
        return
    with pytest.raises(AssertionError, match=name.value):
        flush_lists(schedule, 2, 4)


@pytest.mark.parametrize(("name", "chunks", "torch_name"), long_after(3, OF_TORCH))
def test_lists_are_torchs(name: ScheduleName, chunks: int, torch_name: str) -> None:
    compared = 0
    schedule = Schedule(name, chunks)
    for ranks, microbatches in TORCH_SHAPES:
        theirs = _of_torch(torch_name, ranks, microbatches, chunks)
        if theirs is not None:
            lists = flush_lists(schedule, ranks, microbatches)
            ours = [stage_passes(schedule, ranks, rank, actions) for rank, actions in enumerate(lists)]
            assert ours == theirs, (ranks, microbatches)
            compared += 1
    assert compared >= 10


def test_1f1b_is_as_it_is_written() -> None:
    schedule = Schedule(ScheduleName.ONE_F_ONE_B)
    for ranks, microbatches in SHAPES:
        lists = flush_lists(schedule, ranks, microbatches)
        ours = [stage_passes(schedule, ranks, rank, actions) for rank, actions in enumerate(lists)]
        assert ours == plain_one_f_one_b(ranks, microbatches)


@pytest.mark.parametrize("name", FLUSHED)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_each_pass_is_there_once_and_after_what_it_needs(name: ScheduleName, chunks: int) -> None:
    try:
        schedule = Schedule(name, chunks)
    except UsageError:
        return
    for ranks, microbatches in SHAPES:
        if name is ScheduleName.DUALPIPE_V and microbatches < 2 * ranks:
            continue
        for actions in flush_lists(schedule, ranks, microbatches):
            passes = [tuple(action) for action in actions.tolist()]
            assert len(set(passes)) == len(passes)
            place = {one: number for number, one in enumerate(passes)}
            for chunk in range(chunks):
                for k in range(microbatches):
                    whole, parts = (ActionKind.B, chunk, k) in place, (ActionKind.I, chunk, k) in place
                    assert whole != parts
                    back = place[ActionKind.B if whole else ActionKind.I, chunk, k]
                    assert place[ActionKind.F, chunk, k] < back
                    assert ((ActionKind.W, chunk, k) in place) == parts
                    assert not parts or back < place[ActionKind.W, chunk, k]
            assert len(passes) == chunks * microbatches * 2 + sum(one[0] == ActionKind.W for one in passes)


def _most_in_flight(actions: Actions) -> int:
    held = most = 0
    for kind, _, _ in actions.tolist():
        held += {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: 0, ActionKind.W: -1}[ActionKind(kind)]
        most = max(most, held)
    return most


@pytest.mark.parametrize("p", dict.fromkeys(p for p, _ in SHAPES))
def test_what_is_in_flight(p: int) -> None:
    for m in (m for ranks, m in SHAPES if ranks == p):
        assert_in_flight(p, m)


def assert_in_flight(p: int, m: int) -> None:
    """The published figures, chunks together."""

    def most(name: ScheduleName, chunks: int | None = None) -> list[int]:
        return [_most_in_flight(actions) for actions in flush_lists(Schedule(name, chunks), p, m)]

    assert most(ScheduleName.GPIPE) == [m] * p
    assert most(ScheduleName.ONE_F_ONE_B) == [min(m, p - r) for r in range(p)]
    assert most(ScheduleName.LOOPED_BFS, 3) == [3 * m] * p
    g = group_size(p, m, None)
    for v in (2, 3):
        assert most(ScheduleName.INTERLEAVED, v) == [min(m * v, (v - 1) * g + 2 * (p - 1 - r) + 1) for r in range(p)]
    assert all(y <= min(m, p) for y in most(ScheduleName.ZB_H1))
    if m >= 2 * p:
        assert most(ScheduleName.ZB_H1) == [p] * p
        assert most(ScheduleName.ZB_V) == [2 * p] * p
        assert max(most(ScheduleName.DUALPIPE_V)) <= 2 * p + 1


@pytest.mark.parametrize(("in_flight", "expected"), [(1, "FBFBFB"), (2, "FFBFBB"), (3, "FFFBBB"), (9, "FFFBBB")])
def test_one_f_one_b_keeps_what_it_is_told(in_flight: int, expected: str) -> None:
    actions = one_f_one_b(3, in_flight)
    assert "".join(ActionKind(kind).name for kind in actions[:, 0]) == expected
    for kind in (ActionKind.F, ActionKind.B):
        assert actions[actions[:, 0] == kind, 2].tolist() == [0, 1, 2]


def test_groups_have_megatrons_rule() -> None:
    assert [group_size(4, m, None) for m in (1, 3, 4, 8, 10, 11, 12, 14, 15, 21)] == [1, 3, 4, 4, 5, 6, 4, 5, 5, 7]
    assert group_size(4, 14, 5) == 5  # groups of 5, 5 and 4
    assert group_size(4, 8, 100) == 8
    with pytest.raises(UsageError, match="groups of 5 microbatches do not suit 4 ranks and 12 microbatches"):
        group_size(4, 12, 5)
    with pytest.raises(UsageError, match="groups of 3 microbatches"):
        group_size(4, 12, 3)


def test_a_last_smaller_group_comes_last() -> None:
    actions = flush_lists(Schedule(ScheduleName.INTERLEAVED, 2), 2, 5)[1]
    forward = [(chunk, k) for kind, chunk, k in actions.tolist() if kind == ActionKind.F]
    assert forward == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (0, 4), (1, 3), (1, 4)]


def test_no_pass_is_doubled_among_the_ranks() -> None:
    schedule = Schedule(ScheduleName.DUALPIPE_V)
    lists = flush_lists(schedule, 3, 7)
    passes = Counter(one for rank, actions in enumerate(lists) for one in stage_passes(schedule, 3, rank, actions))
    assert set(passes.values()) == {1}
    assert {stage for _, stage, _ in passes} == set(range(6))


def test_dualpipe_needs_enough_microbatches() -> None:
    with pytest.raises(UsageError, match="dualpipe-v on 4 ranks needs at least 8 microbatches a replica, not 7"):
        flush_lists(Schedule(ScheduleName.DUALPIPE_V), 4, 7)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks"), [(1, 3, 2), (2, 5, 3), (4, 14, 2), (3, 12, 3), (4, 21, 1)]
)
def test_groups_pass_through_chunk_after_chunk(ranks: int, microbatches: int, chunks: int) -> None:
    """A slow twin of the order of passes: group after group, chunk after chunk, microbatch after microbatch."""
    group = group_size(ranks, microbatches, None)
    expected = [
        (chunk, microbatch)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]
    for actions in flush_lists(Schedule(ScheduleName.INTERLEAVED, chunks), ranks, microbatches):
        passes = actions.tolist()
        assert [(chunk, one) for kind, chunk, one in passes if kind == ActionKind.F] == expected
        assert [(chunks - 1 - chunk, one) for kind, chunk, one in passes if kind == ActionKind.B] == expected


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (3, 3, 2)])
def test_experts_that_overlap_take_a_pass_more_ahead(p: int, m: int, v: int) -> None:
    """As many as Megatron counts; each backward pass then comes with a forward pass of another microbatch."""
    usual, more = (flush_lists(Schedule(ScheduleName.INTERLEAVED, v, ahead=ahead), p, m) for ahead in (0, 1))
    for rank, (before, after) in enumerate(zip(usual, more, strict=True)):
        assert sorted(map(tuple, before.tolist())) == sorted(map(tuple, after.tolist()))
        first = [int(np.argmax(one[:, 0] == ActionKind.B)) for one in (before, after)]
        warm_up = (p - rank - 1) * 2 + (v - 1) * p  # get_pp_rank_microbatches of megatron-core 0.16
        assert first == [min(warm_up + 1, m * v), min(warm_up + 2, m * v)]
    with pytest.raises(UsageError, match="ahead must be 0, or more for interleaved, not 1 for zb-h1"):
        Schedule(ScheduleName.ZB_H1, ahead=1)


def test_a_pass_more_ahead_is_held_in_memory() -> None:
    from tests.export_support import llama, plan_of

    instance, plan = llama(), plan_of(llama(), [2, 2, 2, 2, 2, 2, 1, 1])
    usual, more = (simulate(instance, plan, Schedule(ScheduleName.INTERLEAVED, 2, ahead=ahead)) for ahead in (0, 1))
    assert more.step_s >= usual.step_s
    assert sum(more.ranks[-1].in_flight) > sum(usual.ranks[-1].in_flight)
    assert more.ranks[-1].peak_memory_bytes > usual.ranks[-1].peak_memory_bytes
