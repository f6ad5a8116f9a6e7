"""Lists of passes with all actions of torch's pipelines between them, in the format ``compute_comms`` that their
``_load_csv`` reads: sends, receives just in time, gathering and freeing weights, summing gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.communication import Lists, in_time
from piper_ray.simulate.kernels.events import Floats

_GATHERED_STAGES = 3
"""The most stages whose whole weights a rank has at a time: those of its next passes, as in torch's
``_add_unshard_reshard``."""


def torch_lists(lists: Lists, seconds: Floats | None = None) -> tuple[tuple[str, ...], ...]:
    """For each rank its actions, such as ``1RECV_F0``, ``1F0``, ``1SEND_F0``.

    lists: its passes. seconds: float64[stages, 4], the time of a pass by stage and kind. With these times, receives are
    posted when their data are produced, so that they delay nothing else on the stream; None: usual times.
    """
    found = []
    for own, handed in zip(lists, in_time(lists, seconds), strict=True):
        passes = _with_weights(own)
        texts = [next(passes) if one is None else [one.text] for one in handed]
        found.append(tuple(chain(*texts, *passes)))
    return tuple(found)


def _with_weights(own: Sequence[tuple[ActionKind, int, int]]) -> Iterator[list[str]]:
    """Each pass with the actions before it, and at the end the remaining ones. REDUCE_GRAD follows a stage's last
    backward pass."""
    needed, nearest = [], list[int]()
    for _, stage, _ in reversed(own):
        nearest = [stage, *(one for one in nearest if one != stage)]
        needed.append(nearest[:_GATHERED_STAGES])
    last = {stage: number for number, (kind, stage, _) in enumerate(own) if kind in (ActionKind.B, ActionKind.W)}
    gathered, before = list[int](), list[str]()
    for number, ((kind, stage, k), stages) in enumerate(zip(own, reversed(needed), strict=True)):
        before += [f"{one}RESHARD" for one in gathered if one not in stages]
        before += [f"{one}UNSHARD" for one in stages if one not in gathered]
        gathered = [*(one for one in gathered if one in stages), *(one for one in stages if one not in gathered)]
        yield [*before, f"{stage}{kind.name}{k}"]
        before = [f"{stage}REDUCE_GRAD"] if last.get(stage) == number else []
    yield [*before, *(f"{one}RESHARD" for one in gathered)]
