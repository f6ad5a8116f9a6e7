"""Lists of passes with all that torch's pipelines do between them, as their ``_load_csv`` reads the format
``compute_comms``: sends, receives just in time, weights gathered and let go, gradients summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.communication import Lists, in_time
from piper_ray.simulate.kernels.events import Floats

_GATHERED_STAGES = 3
"""That a rank has whole weights of at a time: those of its next passes, as torch's ``_add_unshard_reshard`` has it."""


def torch_lists(lists: Lists, seconds: Floats | None = None) -> tuple[tuple[str, ...], ...]:
    """For each rank its actions, such as ``1RECV_F0``, ``1F0``, ``1SEND_F0``.

    lists: its passes. seconds: float64[stages, 4], what a pass of each stage and kind takes: by these, receives are
    posted when their data are made, and hold up nothing that is on the same stream; None: usual times.
    """
    found = []
    for own, handed in zip(lists, in_time(lists, seconds), strict=True):
        passes = _with_weights(own)
        texts = [next(passes) if one is None else [one.text] for one in handed]
        found.append(tuple(chain(*texts, *passes)))
    return tuple(found)


def _with_weights(own: Sequence[tuple[ActionKind, int, int]]) -> Iterator[list[str]]:
    """Each pass with what stands before it; then what is left. REDUCE_GRAD follows a stage's last backward pass."""
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
