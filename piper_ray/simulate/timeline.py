"""From stages and action lists to what each rank does when: laying out ranks, running the events, reading them off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, isnan

import numpy as np
import numpy.typing as npt

from piper_ray.model.errors import LimitError, UsageError
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind, Actions, stage_of_chunk
from piper_ray.simulate.kernels.events import Events, Floats, Integers, Program, simulate_events
from piper_ray.simulate.stages import Hop, StageLoad

MOST_ACTIONS = 20_000_000
"""Some 2 GB of them; refused above."""


@dataclass(frozen=True)
class Rank:
    """A replica of what one place in the pipeline holds, on t devices. stages: of the plan, by chunk."""

    place: int
    replica: int
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        stages = ", ".join(str(stage + 1) for stage in self.stages)
        return f"stage{'s' if len(self.stages) > 1 else ''} {stages}"


@dataclass(frozen=True)
class Layout:
    """The ranks that are simulated: one of ``lanes`` equal pipelines, in which a stage has its d / lanes replicas.

    Microbatch k of the batch is run by replica k mod d of each stage, so those with the same k mod lanes (the greatest
    common divisor of all d) meet the same replicas, and no others do.
    """

    schedule: Schedule
    ranks: tuple[Rank, ...]
    replicas: tuple[int, ...]
    lanes: int

    @cached_property
    def first_rank(self) -> tuple[int, ...]:
        """For each stage its first replica."""
        found = {stage: number for number, rank in reversed([*enumerate(self.ranks)]) for stage in rank.stages}
        return tuple(found[stage] for stage in range(len(self.replicas)))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """For each stage the place that holds it."""
        return tuple(self.ranks[rank].place for rank in self.first_rank)


def layout(schedule: Schedule, figures: Sequence[StageLoad]) -> Layout:
    """Ranks place by place and, within one, replica by replica; ``figures`` say each stage's degree d."""
    degrees = [stage.data_parallel_degree for stage in figures]
    lanes = gcd(*degrees)
    places = len(figures) // schedule.v
    ranks = []
    for place in range(places):
        stages = tuple(stage_of_chunk(schedule, places, place, chunk) for chunk in range(schedule.v))
        ranks += [Rank(place, replica, stages) for replica in range(degrees[stages[0]] // lanes)]
    return Layout(schedule, tuple(ranks), tuple(d // lanes for d in degrees), lanes)


@dataclass(frozen=True, eq=False)
class PassSeconds:
    """What each kind of pass of each stage takes: float64[stages, 4], compute, and communication that it holds up."""

    compute_s: Floats
    communication_s: Floats

    @property
    def duration_s(self) -> Floats:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, eq=False)
class Timeline:
    """What was run: one entry for each action, rank after rank and in each rank's order. first: int64[ranks + 1].

    start_s, end_s: float64[actions], from the start of the step. cause, transit_s: see ``kernel.Events``.
    communication_s: float64[actions], the part of the action that is transfers and not work.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> len(simulation.timeline.start_s) == len(simulation.timeline.end_s)
    True
    """

    layout: Layout
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
        """Where a rank's passes stand in the arrays."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]))

    @cached_property
    def rank_of_action(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def ends_s(self, kind: ActionKind, stage: int) -> Floats:
        """float64[microbatches]: when the passes of a kind ended at a stage."""
        ends = np.full(self.microbatches, np.nan)
        mine = (self.kind == kind) & (self.stage == stage)
        ends[self.microbatch[mine]] = self.end_s[mine]
        return ends


def run_lists(
    placed: Layout,
    lists: Sequence[Actions],
    microbatches: int,
    seconds: PassSeconds,
    hops: Sequence[Hop],
    latency_s: float,
) -> Timeline:
    """Runs one list for each rank, whose microbatches are numbered as the rank's own.

    Raises UsageError if the lists wait for each other, LimitError for more than ``MOST_ACTIONS``.
    """
    program = program_of(placed, lists, microbatches, seconds, hops, latency_s)
    events: Events = simulate_events(program)
    if events.run < len(program.kind):
        raise UsageError(_stuck_text(placed, program, events))
    return Timeline(
        placed,
        microbatches,
        program.first,
        program.kind,
        program.stage,
        program.microbatch,
        events.start_s,
        events.end_s,
        events.cause,
        events.transit_s,
        seconds.communication_s[program.stage, program.kind],
    )


def program_of(
    placed: Layout,
    lists: Sequence[Actions],
    microbatches: int,
    seconds: PassSeconds,
    hops: Sequence[Hop],
    latency_s: float,
) -> Program:
    """The lists as the event loop takes them. Raises LimitError for more than ``MOST_ACTIONS``."""
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
    )


def _stuck_text(placed: Layout, program: Program, events: Events) -> str:
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
