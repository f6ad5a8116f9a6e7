"""Transfers on one stream: against a plain twin, torch's own lists, and runs without such a stream."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest

from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.report.simulated import early_receives_text, overlapped_text
from piper_ray.run.lists import torch_lists
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.simulate.communication import (
    HandedOver,
    Posted,
    on_one_stream,
    posted_by_torch,
    posted_in_time,
    transfers_of,
)
from piper_ray.simulate.kernels.events import Program, simulate_events
from piper_ray.simulate.run import SimulationOptions, Transfers, simulate
from tests.lengths import long_after

SHAPES = [
    ("1f1b", 1, 4, 6), ("gpipe", 1, 3, 5), ("interleaved", 2, 4, 8), ("interleaved", 3, 2, 6), ("looped-bfs", 2, 3, 6),
    ("zb-h1", 1, 4, 6), ("zb-v", 2, 3, 7), ("dualpipe-v", 2, 3, 8),
]  # fmt: skip


def program(rng: Random, name: str, v: int, p: int, m: int) -> Program:
    schedule = Schedule(ScheduleName(name), v if v > 1 or name == "zb-h1" else None)
    lists = flush_lists(schedule, p, m)
    stages = [schedule.stages_of_rank(rank, p) for rank in range(p)]
    rank_of = {stage: rank for rank, own in enumerate(stages) for stage in own}
    actions = np.concatenate(lists)
    of_rank = np.repeat(np.arange(p), [len(one) for one in lists])
    stage = np.array([stages[rank][chunk] for rank, chunk in zip(of_rank, actions[:, 1], strict=True)])
    duration_s = np.array([[rng.uniform(0.5, 1.5) for _ in range(4)] for _ in range(p * v)])
    count = p * v - 1
    return Program(
        np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64),
        np.ascontiguousarray(actions[:, 0]),
        stage,
        np.ascontiguousarray(actions[:, 2]),
        duration_s[stage, actions[:, 0]],
        np.array([rank_of[one] for one in range(p * v)]),
        np.ones(p * v, np.int64),
        m,
        np.arange(count),
        np.arange(1, count + 1),
        np.array([rng.uniform(0.0, 0.3) for _ in range(count)]),
        np.array([rng.uniform(0.0, 0.3) for _ in range(count)]),
        rng.choice([0.0, 0.05]),
        np.zeros(len(stage), np.bool_),
        np.zeros(len(stage), np.bool_),
    )


def orders(one: Program) -> tuple[HandedOver, Posted, Posted]:
    """What is handed over, and the lists as torch has them and with receives just in time."""
    transfers = transfers_of(one)
    return transfers, posted_by_torch(one, transfers), posted_in_time(one, transfers)


def twin(one: Program, transfers: HandedOver, posted: Posted) -> list[float]:
    """The end of each pass: times rise until every rule holds. A pass waits for the pass before it and what it
    receives; a transfer, on both ranks, for the transfer before it and the passes that stand before it."""
    action_s = [0.0] * len(one.kind)
    transfer_s = [0.0] * len(transfers.seconds)
    while True:
        changed = False
        for rank in range(len(posted.first) - 1):
            before_pass, before_transfer = 0.0, 0.0
            for item in posted.item[posted.first[rank] : posted.first[rank + 1]].tolist():
                if item >= 0:
                    needed = [transfer_s[k] for k in np.flatnonzero(transfers.receiver == item)]
                    end_s = max([before_pass, *needed]) + one.duration_s[item]
                    changed |= end_s > action_s[item] + 1e-12
                    action_s[item] = max(action_s[item], end_s)
                    before_pass = action_s[item]
                else:
                    end_s = max(before_pass, before_transfer) + transfers.seconds[~item]
                    changed |= end_s > transfer_s[~item] + 1e-12
                    transfer_s[~item] = max(transfer_s[~item], end_s)
                    before_transfer = transfer_s[~item]
        if not changed:
            return action_s


@pytest.mark.parametrize(("name", "v", "p", "m"), SHAPES)
def test_one_stream_is_what_its_rules_say(name: str, v: int, p: int, m: int) -> None:
    rng = Random(f"{name} {v}")
    for _ in range(3):
        one = program(rng, name, v, p, m)
        transfers, by_torch, just = orders(one)
        for posted in (by_torch, just):
            found = on_one_stream(one, transfers, posted)
            assert found.run == len(one.kind)
            assert np.allclose(found.end_s, twin(one, transfers, posted), rtol=1e-12, atol=1e-9)
            assert (found.start_s >= found.end_s[found.cause] * (found.cause >= 0) - 1e-9).all()


@pytest.mark.parametrize("seed", long_after(3, range(20)))
def test_receives_in_time_hold_up_nothing_and_torchs_own_may(seed: int) -> None:
    """Where transfers are charged in passes, as plans are valued: so their bounds hold on one stream, too."""
    rng = Random(seed)
    for name, v, p, m in SHAPES:
        one = program(rng, name, v, p, m)
        one = one._replace(
            hop_forward_s=0.0 * one.hop_forward_s, hop_backward_s=0.0 * one.hop_backward_s, latency_s=0.0
        )
        charged = simulate_events(one)
        transfers, by_torch, just = orders(one)
        assert np.allclose(on_one_stream(one, transfers, just).end_s, charged.end_s, rtol=1e-12)
        assert (on_one_stream(one, transfers, by_torch).end_s >= charged.end_s - 1e-9).all()


@pytest.mark.parametrize("seed", long_after(2, range(15)))
def test_transfers_that_take_their_time_on_the_stream_end_no_later_than_promised(seed: int) -> None:
    """The promise charges each in the passes of both ranks, and the list's order is by these times."""
    rng = Random(seed)
    for name, v, p, m in SHAPES:
        one = program(rng, name, v, p, m)._replace(latency_s=0.0)
        transfers = transfers_of(one)
        charged_s = one.duration_s.copy()
        for passes in (transfers.sender, transfers.receiver):
            np.add.at(charged_s, passes, transfers.seconds)
        free = np.zeros_like(one.hop_forward_s)
        promised = one._replace(duration_s=charged_s, hop_forward_s=free, hop_backward_s=free)
        posted = posted_in_time(promised, transfers_of(promised))
        assert on_one_stream(one, transfers, posted).end_s.max() <= simulate_events(promised).end_s.max() + 1e-9


@pytest.mark.parametrize(("name", "v", "p", "m"), SHAPES)
def test_torchs_order_is_torchs(name: str, v: int, p: int, m: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    one = program(Random(1), name, v, p, m)
    transfers, by_torch, just = orders(one)
    passes = {ActionKind.F: "F", ActionKind.B: "B", ActionKind.I: "I", ActionKind.W: "W"}

    def text(item: int, rank: int) -> str:
        if item >= 0:
            return f"{one.stage[item]}{passes[ActionKind(one.kind[item])]}{one.microbatch[item]}"
        sender, receiver = transfers.sender[~item], transfers.receiver[~item]
        way = "F" if one.kind[sender] == ActionKind.F else "B"
        is_sent = transfers.sender_rank[~item] == rank
        of = sender if is_sent else receiver
        return f"{one.stage[of]}{'SEND' if is_sent else 'RECV'}_{way}{one.microbatch[of]}"

    def lists(posted: Posted) -> dict[int, list[str]]:
        return {
            rank: [text(item, rank) for item in posted.item[posted.first[rank] : posted.first[rank + 1]].tolist()]
            for rank in range(p)
        }

    compute = {
        rank: [schedules._Action.from_str(one) for one in own if "SEND" not in one and "RECV" not in one]
        for rank, own in lists(by_torch).items()
    }
    stage_to_rank = one.stage_rank.tolist().__getitem__
    expected = schedules._add_send_recv(compute, stage_to_rank, p * v)
    assert lists(by_torch) == {rank: list(map(str, own)) for rank, own in expected.items()}
    # torch's own dry run of the other order ends, which it does not where ranks wait for each other.
    read = {rank: list(map(schedules._Action.from_str, own)) for rank, own in lists(just).items()}
    done = schedules._simulate_comms_compute(read, stage_to_rank, p * v)
    assert all(len([x for x in done[rank] if x is not None]) == len(own) for rank, own in lists(just).items())


@pytest.mark.parametrize(("name", "v", "p", "m"), [*SHAPES, ("interleaved", 5, 2, 4)])
def test_lists_are_torchs_with_receives_just_in_time(name: str, v: int, p: int, m: int) -> None:
    """By torch's own lists of all that is no transfer, and by its dry run of all."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

    one = program(Random(2), name, v, p, m)
    lists = [
        [
            (ActionKind(one.kind[i]), int(one.stage[i]), int(one.microbatch[i]))
            for i in range(one.first[r], one.first[r + 1])
        ]
        for r in range(p)
    ]
    seconds = np.zeros((p * v, 4))
    seconds[one.stage, one.kind] = one.duration_s
    stage_to_rank = one.stage_rank.tolist().__getitem__
    by_torch = {}
    for rank, passes in enumerate(lists):
        actions = [schedules._Action.from_str(f"{stage}{kind.name}{k}") for kind, stage, k in passes]
        by_torch[rank] = schedules._add_reduce_grad(schedules._add_unshard_reshard(actions), m)
    by_torch = schedules._add_send_recv(by_torch, stage_to_rank, p * v)
    for own in (torch_lists(lists), torch_lists(lists, seconds)):
        read = {rank: [*map(schedules._Action.from_str, texts)] for rank, texts in enumerate(own)}
        for rank, actions in read.items():
            assert [*map(str, actions)] == [*own[rank]]
            assert sorted(own[rank]) == sorted(map(str, by_torch[rank]))
            kept = [one for one in own[rank] if "SEND" not in one and "RECV" not in one]
            assert kept == [str(one) for one in by_torch[rank] if "SEND" not in str(one) and "RECV" not in str(one)]
        handed = {
            rank: [one for one in actions if not any(word in str(one) for word in ("SHARD", "REDUCE"))]
            for rank, actions in read.items()
        }
        schedules._simulate_comms_compute(handed, stage_to_rank, p * v)


def test_plans_are_simulated_on_one_stream() -> None:
    from tests.export_support import llama, plan_of

    instance, plan = llama(), plan_of(llama(), [2, 2, 2, 2, 2, 2, 1, 1])
    schedule = Schedule(ScheduleName.INTERLEAVED, 2)
    found = {how: simulate(instance, plan, schedule, options=SimulationOptions(transfers=how)) for how in Transfers}
    order = (Transfers.OVERLAPPED, Transfers.OVERLAPPED_STEADY, Transfers.IN_PASSES, Transfers.ONE_STREAM)
    times_s = [found[how].step_s for how in order]
    assert times_s == sorted(set(times_s))
    with pytest.raises(UsageError, match="no runtime that has one runs schedule 2bw"):
        simulate(instance, plan_of(instance, [7, 7]), "2bw", options=SimulationOptions(transfers=Transfers.ONE_STREAM))


def test_what_early_receives_cost_is_told() -> None:
    from tests.export_support import llama, plan_of

    instance, plan = llama(), plan_of(llama(), [2, 2, 2, 2, 2, 2, 1, 1])
    interleaved = simulate(instance, plan, Schedule(ScheduleName.INTERLEAVED, 2))
    told = early_receives_text(instance, plan, interleaved)
    assert told.startswith("are posted in time by the exported list; torch's own order posts them early")
    assert "% longer (modelled)" in told
    assert early_receives_text(instance, plan, simulate(instance, plan, "1f1b")) == ""
    told = overlapped_text(instance, plan, interleaved)
    assert re.search(r"except in warm-up and flush, and so takes [\d.]+ \w+ \(modelled\)", told)
