"""From stages and action lists to a timeline: laying out ranks, running the events, reading the results. Also the
memory of each rank over time: weights and optimizer, activations of microbatches in flight, versions of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, isnan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.model.errors import LimitError, UsageError
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind, Actions
from piper_ray.simulate.communication import on_one_stream, posted_by_torch, transfers_of
from piper_ray.simulate.kernels.events import Events, Floats, Integers, Program, simulate_events
from piper_ray.simulate.run import Transfers
from piper_ray.simulate.stages import Hop, StageLoad

MOST_ACTIONS = 20_000_000
"""About 2 GB; a larger simulation is refused."""


@dataclass(frozen=True)
class Rank:
    """A replica of one place in the pipeline, on t devices. stages: of the plan, by chunk."""

    place: int
    replica: int
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        stages = ", ".join(str(stage + 1) for stage in self.stages)
        return f"stage{'s' if len(self.stages) > 1 else ''} {stages}"


@dataclass(frozen=True)
class SimulatedRanks:
    """The simulated ranks: one of ``lanes`` equal pipelines, in which a stage has d / lanes replicas.

    Replica k mod d of each stage runs microbatch k of the batch. So microbatches with equal k mod lanes, where lanes is
    the greatest common divisor of all d, meet the same replicas, and no other microbatches do.
    """

    schedule: Schedule
    ranks: tuple[Rank, ...]
    replicas: tuple[int, ...]
    lanes: int

    @cached_property
    def first_rank(self) -> tuple[int, ...]:
        """For each stage the rank of its first replica."""
        found = {stage: number for number, rank in reversed([*enumerate(self.ranks)]) for stage in rank.stages}
        return tuple(found[stage] for stage in range(len(self.replicas)))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """For each stage the place of the pipeline that holds it."""
        return tuple(self.ranks[rank].place for rank in self.first_rank)


def layout(schedule: Schedule, figures: Sequence[StageLoad]) -> SimulatedRanks:
    """The ranks in order of places and, within one place, of replicas. figures: the stages, with their degrees d."""
    degrees = [stage.data_parallel_degree for stage in figures]
    lanes = gcd(*degrees)
    places = len(figures) // schedule.v
    ranks = []
    for place in range(places):
        stages = schedule.stages_of_rank(place, places)
        ranks += [Rank(place, replica, stages) for replica in range(degrees[stages[0]] // lanes)]
    return SimulatedRanks(schedule, tuple(ranks), tuple(d // lanes for d in degrees), lanes)


@dataclass(frozen=True, eq=False)
class PassSeconds:
    """The time of each kind of pass of each stage: float64[stages, 4], computation, and communication that delays
    it."""

    compute_s: Floats
    communication_s: Floats

    @property
    def duration_s(self) -> Floats:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, eq=False)
class Timeline:
    """The passes that ran: one entry for each action, rank after rank in the order of its list. first: int64[ranks +
    1].

    start_s, end_s: float64[actions], from the start of the step. cause, transit_s: see ``kernel.Events``.
    communication_s: float64[actions], the part of the action that is transfers.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> len(simulation.timeline.start_s) == len(simulation.timeline.end_s)
    True
    """

    layout: SimulatedRanks
    microbatches: int
    first: Integers
    kind: Integers
    stage: Integers
    microbatch: Integers
    start_s: Floats
    end_s: Floats
    cause: Integers
    transit_s: Floats
    communication_s: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def of_rank(self, rank: int) -> slice:
        """The range of a rank's passes in the arrays."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]))

    @cached_property
    def rank_of_action(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def ends_s(self, kind: ActionKind, stage: int) -> Floats:
        """float64[microbatches]: the end of each microbatch's pass of this kind at this stage."""
        ends = np.full(self.microbatches, np.nan)
        mine = (self.kind == kind) & (self.stage == stage)
        ends[self.microbatch[mine]] = self.end_s[mine]
        return ends


def run_program(
    placed: SimulatedRanks, program: Program, communication_s: Floats, transfers: Transfers = Transfers.IN_PASSES
) -> Timeline:
    """communication_s: float64[stages, 4], see ``PassSeconds``. Raises UsageError if the lists wait for each other."""
    events: Events = simulate_events(program)
    if transfers is Transfers.ONE_STREAM and events.run == len(program.kind):
        handed_over = transfers_of(program)
        events = on_one_stream(program, handed_over, posted_by_torch(program, handed_over))
    if events.run < len(program.kind):
        raise UsageError(_stuck_text(placed, program, events))
    return Timeline(
        placed,
        program.microbatches,
        program.first,
        program.kind,
        program.stage,
        program.microbatch,
        events.start_s,
        events.end_s,
        events.cause,
        events.transit_s,
        communication_s[program.stage, program.kind],
    )


def program_of(
    placed: SimulatedRanks,
    lists: Sequence[Actions],
    microbatches: int,
    seconds: PassSeconds,
    hops: Sequence[Hop],
    latency_s: float,
) -> Program:
    """The program for the event loop. lists: one for each rank, with the rank's own numbers of microbatches.

    Raises LimitError for more than ``MOST_ACTIONS`` actions.
    """
    first = np.concatenate([[0], np.cumsum([len(actions) for actions in lists])]).astype(np.int64)
    count = int(first[-1])
    if count > MOST_ACTIONS:
        raise LimitError(
            f"the simulation would have {count:,} passes, more than {MOST_ACTIONS:,}; give it fewer microbatches"
        )
    actions = np.concatenate(lists)
    rank_of = np.repeat(np.arange(len(lists)), np.diff(first))
    stages = np.array([rank.stages for rank in placed.ranks], np.int64)
    replica = np.array([rank.replica for rank in placed.ranks], np.int64)
    replicas = np.array(placed.replicas, np.int64)
    kind = np.ascontiguousarray(actions[:, 0])
    stage = stages[rank_of, actions[:, 1]]
    microbatch = actions[:, 2] * replicas[stage] + replica[rank_of]
    return Program(
        first,
        kind,
        stage,
        microbatch,
        seconds.duration_s[stage, kind],
        np.array(placed.first_rank, np.int64),
        replicas,
        microbatches,
        np.array([hop.source for hop in hops], np.int64),
        np.array([hop.target for hop in hops], np.int64),
        np.array([hop.forward_s for hop in hops], np.float64),
        np.array([hop.backward_s for hop in hops], np.float64),
        latency_s,
        np.zeros(count, np.bool_),
        np.zeros(count, np.bool_),
    )


def _stuck_text(placed: SimulatedRanks, program: Program, events: Events) -> str:
    waiting = []
    for number, rank in enumerate(placed.ranks):
        for action in range(program.first[number], program.first[number + 1]):
            if isnan(events.start_s[action]):
                what = f"{ActionKind(program.kind[action]).name}{program.microbatch[action]}"
                waiting.append(f"rank {number} ({rank.name}) at {what} of stage {program.stage[action] + 1}")
                break
    shown = "; ".join(waiting[:4]) + ("; ..." if len(waiting) > 4 else "")
    return (
        f"schedule {placed.schedule.name.value} stops, as ranks wait for each other: {shown}. Microbatches in flight, "
        "groups or the number of microbatches do not suit the pipeline"
    )


@dataclass(frozen=True, eq=False)
class MemorySteps:
    """Memory of one rank: bytes[i] from time_s[i] until time_s[i + 1]. float64[steps], times ascending from 0.

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
        """The most bytes at any time."""
        return float(self.bytes.max())

    @property
    def fixed_bytes(self) -> float:
        """The bytes that are held all the time."""
        return float(self.bytes[0])


@dataclass(frozen=True)
class Versions:
    """The most versions of its weights that a rank keeps under PipeDream.

    stashed: one for each microbatch in flight that began with another version, and the newest. vertical_sync: all from
    the newest back to the oldest that a microbatch may still need, if each microbatch uses in every stage the version
    that was the newest of the input stage when it entered. are_synced: vertical sync is in use, and counts in the
    rank's memory.

    >>> Versions(stashed=4, vertical_sync=7).kept, Versions(stashed=4, vertical_sync=7, are_synced=True).kept
    (4, 7)
    """

    stashed: int
    vertical_sync: int
    are_synced: bool = False

    @property
    def kept(self) -> int:
        """The number of versions that the rank's memory holds."""
        return self.vertical_sync if self.are_synced else self.stashed


class Held(NamedTuple):
    """The microbatches that a rank has in flight over time. time_s: float64[steps], as in ``memory_steps`` without the
    first. microbatches: for each of its stages int64[steps], from each of these times on.
    """

    time_s: Floats
    microbatches: tuple[Integers, ...]


def held_microbatches(timeline: Timeline, rank: int) -> Held:
    """A microbatch is in flight from the start of its forward pass to the end of its backward pass, or of W.

    Steps are in the order of the rank's list, which is the order of time: a pass that ends frees its memory before
    another starts at the same moment.
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
    """The memory of a rank over time. versions: those of PipeDream, held throughout at their largest number. held: the
    microbatches in flight, if known already.
    """
    stages = timeline.layout.ranks[rank].stages
    fixed_bytes = sum(figures[stage].fixed_bytes for stage in stages)
    if versions is not None:
        kept = (figures[stage].beside_bytes + versions.kept * figures[stage].weights_bytes for stage in stages)
        fixed_bytes = sum(kept)
    held = held or held_microbatches(timeline, rank)
    held_bytes = np.full(len(held.time_s), float(fixed_bytes))
    for stage, microbatches in zip(stages, held.microbatches, strict=True):
        held_bytes += figures[stage].activation_bytes * microbatches
    return MemorySteps(np.concatenate([[0.0], held.time_s]), np.concatenate([[fixed_bytes], held_bytes]))


def weight_versions(timeline: Timeline, rank: int, are_synced: bool = False) -> Versions:
    """The versions of a rank with one stage, whose replicas update their weights together after one microbatch each.

    A version is named by the number of microbatches that went into it: a multiple of the stage's replicas.
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
        return Versions(1, 1, are_synced)
    used = np.searchsorted(end_s, start_s, side="right")  # updates of this rank before each forward pass
    current = np.arange(1, len(end_s) + 1)
    # Just after the i-th backward pass: the versions of forward passes that have started, and the newest one.
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
    return Versions(stashed, max(1, int(kept.max())), are_synced)


def _input_stage(timeline: Timeline) -> tuple[Floats, Floats, int]:
    """When each microbatch entered the first stage, when backward passes ended there (ascending), and its replicas."""
    first = timeline.stage == 0
    entering = first & (timeline.kind == ActionKind.F)
    entered_s = np.full(timeline.microbatches, np.inf)
    entered_s[timeline.microbatch[entering]] = timeline.start_s[entering]
    return entered_s, np.sort(timeline.end_s[first & (timeline.kind == ActionKind.B)]), timeline.layout.replicas[0]
