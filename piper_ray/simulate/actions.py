"""The order of passes on each rank: the action lists of every schedule.

A list is int64[n, 3]: kind of pass, chunk on the rank (0 is nearest the input), microbatch (of the rank's own, from 0).
Lists depend only on the shape of the pipeline, never on times. For the schedules that torch.distributed.pipelining has,
the lists are the same as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName

Actions = npt.NDArray[np.int64]


class ActionKind(IntEnum):
    """F: forward pass. B: whole backward pass. I and W: its two parts, gradients of inputs and of weights."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's name
    W = 3


def stage_of_chunk(schedule: Schedule, ranks: int, rank: int, chunk: int) -> int:
    """The plan's stage that is chunk number ``chunk`` of a rank."""
    return schedule.stages_of_rank(rank, ranks)[chunk]


def flush_lists(schedule: Schedule, ranks: int, microbatches: int) -> list[Actions]:
    """The actions of each rank of a pipeline in which all ranks run all microbatches.

    Raises UsageError if the schedule cannot run this number of microbatches on this number of ranks.
    """
    check_shape(schedule, ranks, microbatches)
    p, m, v = ranks, microbatches, schedule.v
    name = schedule.name
    if name is ScheduleName.GPIPE:
        return [gpipe(m) for _ in range(p)]
    if name is ScheduleName.LOOPED_BFS:
        return [_looped_bfs(m, v) for _ in range(p)]
    if name in (ScheduleName.INTERLEAVED, ScheduleName.ZB_H1):
        group = group_size(p, m, schedule.group)
        if name is ScheduleName.INTERLEAVED:
            return [_interleaved(m, v, group, warm_up_passes(schedule, p, r, m)) for r in range(p)]
        return [_zero_bubble(p, r, m, v, group) for r in range(p)]
    if name is ScheduleName.ZB_V:
        return [_zb_v(p, r, m) for r in range(p)]
    if name is ScheduleName.DUALPIPE_V:
        return [_dualpipe_v(p, r, m) for r in range(p)]
    if name is ScheduleName.ONE_F_ONE_B:
        return [one_f_one_b(m, p - r) for r in range(p)]
    raise AssertionError(f"schedule {name.value} has no lists of passes between flushes")


def check_shape(schedule: Schedule, ranks: int, microbatches: int) -> None:
    """Raises UsageError if the schedule cannot run ``microbatches`` microbatches on ``ranks`` ranks."""
    if schedule.name is ScheduleName.DUALPIPE_V and microbatches < 2 * ranks:
        raise UsageError(
            f"schedule dualpipe-v on {ranks} ranks needs at least {2 * ranks} microbatches a replica, "
            f"not {microbatches}"
        )
    if schedule.group is not None:
        group_size(ranks, microbatches, schedule.group)


def gpipe(microbatches: int) -> Actions:
    """All forward passes, then all backward passes, both in order."""
    order = np.arange(microbatches)
    return _stacked([(ActionKind.F, 0, order), (ActionKind.B, 0, order)])


def one_f_one_b(microbatches: int, in_flight: int) -> Actions:
    """Forward passes until ``in_flight`` microbatches are in flight, then backward and forward in turn, then the
    rest."""
    m, y = microbatches, min(in_flight, microbatches)
    actions = np.zeros((2 * m, 3), np.int64)
    actions[y:, 0] = ActionKind.B
    actions[y + 1 : 2 * m - y : 2, 0] = ActionKind.F
    forward = actions[:, 0] == ActionKind.F
    actions[forward, 2] = np.arange(m)
    actions[~forward, 2] = np.arange(m)
    return actions


def group_size(ranks: int, microbatches: int, wanted: int | None) -> int:
    """Microbatches that pass through one chunk before the next. Either no microbatches are left over, or at least as
    many as there are ranks.

    The rule is Megatron's. For numbers of microbatches that torch allows, the smallest such group is torch's. Raises
    UsageError for a wanted group that breaks the rule.
    """
    p, m = ranks, microbatches

    def fits(group: int) -> bool:
        return group >= m or (group >= p and (m % group == 0 or m % group >= p))

    if wanted is None:
        return next(group for group in range(min(p, m), m + 1) if fits(group))
    if not fits(wanted):
        raise UsageError(
            f"groups of {wanted} microbatches do not suit {p} ranks and {m} microbatches a replica: a group has at "
            f"least {p}, and so has the last one, or nothing is left over"
        )
    return min(wanted, m)


def _looped_bfs(m: int, v: int) -> Actions:
    order = np.arange(m)
    return _stacked(
        [(ActionKind.F, chunk, order) for chunk in range(v)]
        + [(ActionKind.B, chunk, order[::-1]) for chunk in reversed(range(v))]
    )


def warm_up_passes(schedule: Schedule, ranks: int, rank: int, microbatches: int) -> int:
    """The number of forward passes before the steady phase in a rank's interleaved list, as in Megatron."""
    group = group_size(ranks, microbatches, schedule.group)
    ahead = (schedule.v - 1) * group + 2 * (ranks - 1 - rank) + schedule.ahead
    return min(ahead, microbatches * schedule.v)


def _interleaved(m: int, v: int, group: int, ahead: int) -> Actions:
    forward, backward = _grouped_order(m, v, group)
    actions = np.zeros((2 * m * v, 3), np.int64)
    actions[ahead:, 0] = ActionKind.B
    actions[ahead : 2 * m * v - ahead : 2, 0] = ActionKind.F
    is_forward = actions[:, 0] == ActionKind.F
    actions[is_forward, 1:] = forward
    actions[~is_forward, 1:] = backward
    return actions


def _zero_bubble(p: int, r: int, m: int, v: int, group: int) -> Actions:
    """The interleaved order with fewer forward passes ahead. Gradients of weights lag by r passes, and fill the end."""
    forward, backward = _grouped_order(m, v, group)
    ahead = min((v - 1) * group + p - 1 - r, m * v)
    number = np.arange(m * v)
    # Turn i: the forward pass that is `ahead` passes further, the i-th I, and the W of the I that was r turns before.
    turns = [
        (ActionKind.F, number - ahead, forward),
        (ActionKind.I, number, backward),
        (ActionKind.W, number + r, backward),
    ]
    passes = np.concatenate([np.column_stack([np.full(m * v, kind), of_pass]) for kind, _, of_pass in turns])
    turn = np.concatenate([turn for _, turn, _ in turns])
    return passes[np.lexsort((passes[:, 0], turn))]


def _grouped_order(m: int, v: int, group: int) -> tuple[Actions, Actions]:
    """(chunk, microbatch) of the forward passes and of the backward passes, by group and then by chunk."""
    number = np.arange(m * v)
    first = number // (group * v) * group
    size = np.minimum(group, m - first)  # the last group may be smaller
    chunk, place = np.divmod(number - first * v, size)
    microbatch = first + place
    return np.stack([chunk, microbatch], axis=1), np.stack([v - 1 - chunk, microbatch], axis=1)


_F0, _F1, _B0, _B1, _I0, _I1, _W0, _W1 = range(8)
"""A pass of one of two chunks, encoded as 2 kind + chunk; its microbatch is found by counting."""


def _zb_v(p: int, r: int, m: int) -> Actions:
    """The list for at least 2 p - 1 microbatches, without the passes of microbatches that do not exist."""
    length = max(2 * p - 1, m)
    ahead = [_F0] * (2 * (p - r) - 1) + [_F1, _F0] * r + [_F1, _I1, _W1] * (p - r)
    steady = [_F0, _I0, _W0, _F1, _I1, _W1] * (length - 2 * p + r + 1) + [_I0, _W0, _F1, _I1, _W1] * (p - r - 1)
    left = [_I0, _I1] * r + [_I0, _W0] * (p - r) + [_W1] * r + [_W0] * r
    return _counted([*ahead, *steady, *left], m)


def _dualpipe_v(p: int, r: int, m: int) -> Actions:
    """Passes that run as one (a forward of one chunk with a backward of the other) are consecutive in the list."""
    after = p - r - 1
    passes = [_F0] * (2 * after) + [_F0, _F1] * (r + 1) + [_I1, _W1, _F1] * after
    passes += [_F0, _B1, _F1, _B0] * (m - 2 * p + r + 1) + [_B1, _F1, _B0] * after
    # After half of the remaining passes, gradients of weights are postponed: first of chunk 1 on odd ranks, of chunk 0
    # on even ones.
    whole = 2 * ((r + 1) // 2) + (r % 2 == 0)
    split = [_I1, _I0] * (r + 1)
    passes += ([_B1, _B0] * (r + 1))[:whole] + split[whole:]
    waiting = [{_I0: _W0, _I1: _W1}[one] for one in split[whole:]] + [_W0] * after
    for turn in range(after):
        passes += [waiting[turn], _I0]
    return _counted(passes + waiting[after:], m)


def _counted(passes: Sequence[int], microbatches: int) -> Actions:
    """Numbers the passes: in each chunk, passes of a kind take the microbatches in order. B counts as an I and a W."""
    kind, chunk = np.divmod(np.array(passes, np.int64), 2)
    microbatch = np.zeros(len(kind), np.int64)
    whole = kind == ActionKind.B
    for of_chunk in (0, 1):
        for counted, numbered in (
            (kind == ActionKind.F, kind == ActionKind.F),
            ((kind == ActionKind.I) | whole, (kind == ActionKind.I) | whole),
            ((kind == ActionKind.W) | whole, kind == ActionKind.W),
        ):
            mine = chunk == of_chunk
            before = np.cumsum(mine & counted) - 1
            microbatch[mine & numbered] = before[mine & numbered]
    return np.column_stack([kind, chunk, microbatch])[microbatch < microbatches]


def _stacked(parts: list[tuple[ActionKind, int, npt.NDArray[np.int64]]]) -> Actions:
    return np.concatenate(
        [
            np.stack([np.full(len(order), kind), np.full(len(order), chunk), order], axis=1)
            for kind, chunk, order in parts
        ]
    )
