"""The positions of sends and receives in a rank's list, for runtimes that put all of them on one stream in that order.

torch.distributed.pipelining on NCCL is such a runtime: a send or a receive begins when those before it on both ranks
have ended, and the passes before it in both lists. A transfer that waits at the head of the stream delays all later
ones.

Also overlaps: sends that overlap with passes during a part of the step, and two passes that run as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind, group_size, warm_up_passes
from piper_ray.simulate.kernels.events import (
    Events,
    Floats,
    Integers,
    OneStream,
    Program,
    simulate_events,
    simulate_one_stream,
)
from piper_ray.simulate.stages import Stages

Lists = Sequence[Sequence[tuple[ActionKind, int, int]]]
"""The passes of each rank in order: kind, stage, microbatch."""


class HandedOver(NamedTuple):
    """Transfers between ranks. sender, receiver: int64[transfers], actions. sender_rank, receiver_rank:
    int64[transfers], their ranks, which differ. seconds: float64[transfers]."""

    sender: Integers
    receiver: Integers
    sender_rank: Integers
    receiver_rank: Integers
    seconds: Floats


class Handing(NamedTuple):
    """A send or a receive of a stage, in a forward or a backward pass."""

    is_sent: bool
    is_forward: bool
    stage: int
    microbatch: int

    @property
    def text(self) -> str:
        """Its text in torch's lists: ``3SEND_F0``."""
        return f"{self.stage}{'SEND' if self.is_sent else 'RECV'}_{'F' if self.is_forward else 'B'}{self.microbatch}"


_USUAL_S = (1.0, 2.0, 1.0, 1.0)
"""Times of passes by kind if none are known: a backward pass makes two products for each one of the forward pass."""


class Posted(NamedTuple):
    """Lists with their communication. first: int64[ranks + 1], the start of each rank's list. item: int64, rank after
    rank: an action, or ~transfer where a transfer is sent or received."""

    first: Integers
    item: Integers


def transfers_of(program: Program) -> HandedOver:
    """The transfers of each microbatch over each hop between ranks, forwards and backwards.

    Raises UsageError if replicas take turns, because runtimes with one stream need equally many replicas of each stage.
    """
    if (program.replicas != 1).any():
        raise UsageError("transfers on one stream: stages of unequal data-parallel degrees, which torch has not")
    count = len(program.replicas), program.microbatches
    ran = np.full((2, *count), -1, np.int64)
    for action in range(len(program.kind)):
        if program.kind[action] != ActionKind.W:
            ran[int(program.kind[action] != ActionKind.F), program.stage[action], program.microbatch[action]] = action
    rank = program.stage_rank
    sender, receiver, seconds = [], [], []
    for source, target, forward_s, backward_s in zip(
        program.hop_source, program.hop_target, program.hop_forward_s, program.hop_backward_s, strict=True
    ):
        if rank[source] != rank[target]:
            sender += [ran[0, source], ran[1, target]]
            receiver += [ran[0, target], ran[1, source]]
            seconds += [np.full(program.microbatches, one + program.latency_s) for one in (forward_s, backward_s)]
    if not sender:
        nothing = np.empty(0, np.int64)
        return HandedOver(nothing, nothing, nothing, nothing, np.empty(0))
    of_rank = np.repeat(np.arange(len(program.first) - 1), np.diff(program.first))
    sent, received = np.concatenate(sender), np.concatenate(receiver)
    return HandedOver(sent, received, of_rank[sent], of_rank[received], np.concatenate(seconds))


def posted_in_time(program: Program, transfers: HandedOver) -> Posted:
    """Puts each transfer where its data are produced, on both ranks: a receive comes after the passes that have ended
    by then.

    Transfers that take no time then delay nothing. All ranks use one common order, so the lists never wait in a circle.
    """
    turn = torch_turns(program, transfers)
    place = np.empty(len(turn), np.int64)
    place[np.lexsort((turn, simulate_events(program).end_s))] = np.arange(len(turn))
    return _merged(program, transfers, 2 * place, 2 * place[transfers.sender] + 1)


def posted_by_torch(program: Program, transfers: HandedOver) -> Posted:
    """Puts transfers in torch's own order: passes of all ranks in turns, each followed by its send and, on the other
    rank, by its receive."""
    turn = torch_turns(program, transfers)
    return _merged(program, transfers, 2 * turn, 2 * turn[transfers.sender] + 1)


def _merged(program: Program, transfers: HandedOver, of_action: Integers, of_transfer: Integers) -> Posted:
    """Merges actions and transfers into lists sorted by keys. The keys of actions must rise along a rank's list."""
    ranks = len(program.first) - 1
    lists = []
    for rank in range(ranks):
        actions = np.arange(program.first[rank], program.first[rank + 1])
        own = np.flatnonzero((transfers.sender_rank == rank) | (transfers.receiver_rank == rank))
        items = np.concatenate([actions, ~own])
        keys = np.concatenate([of_action[actions], of_transfer[own]])
        lists.append(items[np.argsort(keys, kind="stable")])
    first = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
    return Posted(first, np.concatenate(lists))


def torch_turns(program: Program, transfers: HandedOver) -> Integers:
    """int64[actions]: the order in which torch's ``_add_send_recv`` takes the passes. In each round it takes one pass
    of each rank, if everything that the pass receives has been sent."""
    needs: list[list[int]] = [[] for _ in program.kind]
    for sender, receiver in zip(transfers.sender.tolist(), transfers.receiver.tolist(), strict=True):
        needs[receiver].append(sender)
    turn = np.full(len(program.kind), -1, np.int64)
    position, ends = program.first[:-1].tolist(), program.first[1:].tolist()
    taken = 0
    while taken < len(turn):
        before = taken
        for rank, action in enumerate(position):
            if action < ends[rank] and all(turn[other] >= 0 for other in needs[action]):
                turn[action] = taken
                taken += 1
                position[rank] += 1
        if taken == before:
            raise UsageError("the lists of passes wait for each other")
    return turn


def program_of_lists(lists: Lists, seconds: Floats | None = None) -> Program:
    """A program with the passes of each rank's list. seconds: float64[stages, 4], by kind; None: usual times."""
    passes = [one for own in lists for one in own]
    kind, stage, microbatch = (np.array(column, np.int64) for column in zip(*passes, strict=True))
    stages = int(stage.max()) + 1
    rank_of = np.zeros(stages, np.int64)
    for rank, own in enumerate(lists):
        rank_of[[stage for _, stage, _ in own]] = rank
    hops = np.arange(stages - 1)
    free = np.zeros(stages - 1)
    first = np.concatenate([[0], np.cumsum([len(own) for own in lists])]).astype(np.int64)
    duration_s = np.array(_USUAL_S)[kind] if seconds is None else seconds[stage, kind]
    count, ones = int(microbatch.max()) + 1, np.ones(stages, np.int64)
    never = np.zeros(len(kind), np.bool_)
    return Program(
        first, kind, stage, microbatch, duration_s, rank_of, ones, count, hops, hops + 1, free, free, 0.0, never, never
    )


def in_time(lists: Lists, seconds: Floats | None = None) -> list[list[Handing | None]]:
    """Each rank's list with its sends and receives just in time. None stands for the rank's next pass. seconds: see
    ``program_of_lists``."""
    program = program_of_lists(lists, seconds)
    transfers = transfers_of(program)
    posted = posted_in_time(program, transfers)
    found = []
    for rank in range(len(lists)):
        items = posted.item[posted.first[rank] : posted.first[rank + 1]].tolist()
        found.append([None if item >= 0 else _handing(program, transfers, ~item, rank) for item in items])
    return found


def _handing(program: Program, transfers: HandedOver, transfer: int, rank: int) -> Handing:
    sender, receiver = int(transfers.sender[transfer]), int(transfers.receiver[transfer])
    is_sent = int(transfers.sender_rank[transfer]) == rank
    stage = int(program.stage[sender if is_sent else receiver])
    return Handing(is_sent, program.kind[sender] == ActionKind.F, stage, int(program.microbatch[sender]))


def on_one_stream(program: Program, transfers: HandedOver, posted: Posted) -> Events:
    """The events if all sends and receives of a rank are on one stream, in the order of the lists."""
    order = np.argsort(transfers.receiver, kind="stable")
    needs = np.concatenate([[0], np.cumsum(np.bincount(transfers.receiver, minlength=len(program.kind)))])
    lists = OneStream(
        posted.first,
        posted.item,
        needs.astype(np.int64),
        order.astype(np.int64),
        transfers.sender,
        transfers.sender_rank,
        transfers.receiver_rank,
        transfers.seconds,
    )
    return simulate_one_stream(program.duration_s, program.first, lists)


def sends_waited_for(program: Program, schedule: Schedule, microbatches: int) -> npt.NDArray[np.bool_]:
    """bool[actions]: the passes of interleaved lists in a warm-up or a flush. Without
    --overlap-p2p-communication-warmup-flush, Megatron's next pass waits there until their sends have finished."""
    waited = np.zeros(len(program.kind), np.bool_)
    ranks = len(program.first) - 1
    for rank, (first, end) in enumerate(zip(program.first[:-1], program.first[1:], strict=True)):
        ahead = warm_up_passes(schedule, ranks, rank, microbatches)
        waited[first : first + ahead] = waited[end - ahead : end] = True
    return waited


def joined_passes(program: Program) -> npt.NDArray[np.bool_]:
    """bool[actions]: the forward passes that DualPipeV runs as one with the following backward pass of another chunk.

    The last rank runs its first such pair one after the other, which shortens the bubble.
    """
    backward, forward = program.kind == ActionKind.B, program.kind == ActionKind.F
    joined: npt.NDArray[np.bool_] = forward & np.append(backward[1:], False)  # no list ends with a forward pass
    first = int(program.first[-2])
    joined[first + int(joined[first:].argmax())] = False
    return joined


def with_joined_passes(program: Program, compute_s: Floats, overlap: float) -> Program:
    """DualPipeV's program in which the share ``overlap`` of the shorter of two joined passes overlaps with the other
    pass.

    compute_s: float64[stages, 4], the part of each pass that is computation. The saved time is divided between the two
    passes in proportion to their computation.
    """
    joined = joined_passes(program)
    pair = np.flatnonzero(joined)
    work_s = compute_s[program.stage, program.kind]
    together_s = work_s[pair] + work_s[pair + 1]
    saved_s = overlap * np.minimum(work_s[pair], work_s[pair + 1])
    saved = np.divide(saved_s, together_s, out=np.zeros(len(pair)), where=together_s > 0)
    duration_s = program.duration_s.copy()
    duration_s[pair] -= saved * work_s[pair]
    duration_s[pair + 1] -= saved * work_s[pair + 1]
    return program._replace(duration_s=duration_s, joined=joined)


def with_buffers(stages: Stages, schedule: Schedule, microbatches: int) -> Stages:
    """The stages of an interleaved plan, with Megatron's buffers for inputs and gradients that arrive before their
    passes, charged to the first stage of each rank. A rank has one buffer of each; where chunks hand over from the last
    rank to the first, it has one more for each microbatch of a group beyond the number of ranks. Raises UsageError as
    ``group_size`` does."""
    figures = list(stages.figures)
    ranks = len(figures) // schedule.v
    forward, backward = [0.0] * ranks, [0.0] * ranks
    for message in stages.messages:
        source, target = message.source % ranks, message.target % ranks
        if source != target:
            forward[target] = max(forward[target], message.received_bytes)
            backward[source] = max(backward[source], message.sent_bytes)
    group = group_size(ranks, microbatches // figures[0].data_parallel_degree, schedule.group)
    more = max(0, group - ranks)
    for rank in range(ranks):
        held = forward[rank] * (1 + more * (rank == 0)) + backward[rank] * (1 + more * (rank == ranks - 1))
        of = figures[rank]
        figures[rank] = replace(of, fixed_bytes=of.fixed_bytes + held, beside_bytes=of.beside_bytes + held)
    return replace(stages, figures=tuple(figures))
