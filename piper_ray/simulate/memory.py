"""What each rank holds at each moment: weights and optimizer, activations of microbatches in flight, versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.kernels.events import Floats, Integers
from piper_ray.simulate.stages import StageLoad
from piper_ray.simulate.timeline import Timeline

VERSIONS_IN_FIXED = 2
"""What an input's fixed bytes hold of the weights: those in use and 2BW's second version, or the gradients."""


@dataclass(frozen=True, eq=False)
class MemorySteps:
    """Memory of one rank: bytes[i] from time_s[i] on, until the next. float64[steps], times ascending from 0.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> steps = simulation.memory(0)
    >>> bool(steps.bytes.max() == simulation.ranks[0].peak_memory_bytes)
    True
    """

    time_s: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.float64]

    @property
    def peak_bytes(self) -> float:
        """The most at any time."""
        return float(self.bytes.max())

    @property
    def fixed_bytes(self) -> float:
        """What is there all the time."""
        return float(self.bytes[0])


@dataclass(frozen=True)
class Versions:
    """The most versions of its weights that a rank keeps under PipeDream.

    stashed: one for each microbatch in flight that saw another, and the newest. vertical_sync: all from the newest back
    to the oldest that a microbatch may still ask for, if each meets in every stage the version that was the input
    stage's newest when it came in.

    >>> Versions(stashed=4, vertical_sync=7).stashed
    4
    """

    stashed: int
    vertical_sync: int


class Held(NamedTuple):
    """What a rank has in flight over time. time_s: float64[steps], ``memory_steps``'s without its first.

    microbatches: for each of its stages int64[steps], from each of these times on.
    """

    time_s: Floats
    microbatches: tuple[Integers, ...]


def held_microbatches(timeline: Timeline, rank: int) -> Held:
    """A microbatch is in flight from the start of its forward pass to the end of its backward pass, or of W.

    In the order of the rank's list, which is that of time: what ends frees its room for what starts at the same moment.
    """
    mine = timeline.of_rank(rank)
    kind = timeline.kind[mine]
    counts = kind != ActionKind.I
    forward = kind == ActionKind.F
    time_s = np.where(forward, timeline.start_s[mine], timeline.end_s[mine])[counts]
    stage, change = timeline.stage[mine][counts], np.where(forward, 1, -1)[counts]
    stages = timeline.layout.ranks[rank].stages
    return Held(time_s, tuple(np.cumsum(np.where(stage == one, change, 0)) for one in stages))


def memory_steps(
    timeline: Timeline,
    figures: Sequence[StageLoad],
    rank: int,
    versions: Versions | None = None,
    held: Held | None = None,
) -> MemorySteps:
    """versions: those of PipeDream's weight stashing, at their most; they are held throughout. held: where it is known
    already.
    """
    stages = timeline.layout.ranks[rank].stages
    fixed_bytes = sum(figures[stage].fixed_bytes for stage in stages)
    if versions is not None:
        more = max(0, versions.stashed - VERSIONS_IN_FIXED)
        fixed_bytes += more * sum(figures[stage].weights_bytes for stage in stages)
    held = held or held_microbatches(timeline, rank)
    held_bytes = np.full(len(held.time_s), float(fixed_bytes))
    for stage, microbatches in zip(stages, held.microbatches, strict=True):
        held_bytes += figures[stage].activation_bytes * microbatches
    return MemorySteps(np.concatenate([[0.0], held.time_s]), np.concatenate([[fixed_bytes], held_bytes]))


def weight_versions(timeline: Timeline, rank: int) -> Versions:
    """Of a rank with one stage, whose replicas update their weights together, after one microbatch each.

    A version is named by the microbatches that went into it: multiples of the stage's replicas.
    """
    placed = timeline.layout.ranks[rank]
    (stage,) = placed.stages
    replicas = timeline.layout.replicas[stage]
    mine = timeline.of_rank(rank)
    forward = timeline.kind[mine] == ActionKind.F
    start_s = timeline.start_s[mine][forward]
    end_s = timeline.end_s[mine][~forward]
    microbatch = timeline.microbatch[mine][~forward]
    if not len(end_s):
        return Versions(1, 1)
    used = np.searchsorted(end_s, start_s, side="right")  # updates of this rank before each forward pass
    current = np.arange(1, len(end_s) + 1)
    # Just after the i-th backward pass: those of forward passes that have started, and the newest.
    stashed = 1
    for i in range(len(end_s)):
        started = int(np.searchsorted(start_s, end_s[i], side="right"))
        stashed = max(stashed, len({*used[i + 1 : started].tolist(), i + 1}))
    entered_s, input_end_s, input_replicas = _input_stage(timeline)
    input_label = np.searchsorted(input_end_s, entered_s, side="right") // input_replicas * input_replicas
    label_now = np.searchsorted(input_end_s, end_s, side="right") // input_replicas * input_replicas
    next_in = microbatch + replicas
    there = next_in < timeline.microbatches
    next_in = np.where(there, next_in, 0)
    oldest = np.where(there & (entered_s[next_in] <= end_s), input_label[next_in], label_now)
    kept = current - oldest // replicas + 1
    return Versions(stashed, max(1, int(kept.max())))


def _input_stage(timeline: Timeline) -> tuple[Floats, Floats, int]:
    """When each microbatch entered the first stage, when backward passes ended there (ascending), and its replicas."""
    first = timeline.stage == 0
    entering = first & (timeline.kind == ActionKind.F)
    entered_s = np.full(timeline.microbatches, np.inf)
    entered_s[timeline.microbatch[entering]] = timeline.start_s[entering]
    return entered_s, np.sort(timeline.end_s[first & (timeline.kind == ActionKind.B)]), timeline.layout.replicas[0]
