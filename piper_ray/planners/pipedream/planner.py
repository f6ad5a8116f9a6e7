"""PipeDream's planner on an instance: what it minimises, its parameters, and its partition as a plan of ours.

    A[i][j][c] = (T + 4 (c - 1) P / (B c w)) / c                 the first stage, alone
    A[i][j][c] = min over k, m of max(A[i][k][c - m], (T + 4 (m - 1) P / (B m)) / m,
                                      2 out_k / (B m r), 2 out_j / (B m r))

over states i < k < j (layers closed under predecessors), with T and P the time and the weights of the layers between
two states, out_k the activations that leave state k, c machines and B bytes per s. With levels of machines T is the
value of the level below on all its w machines (w = 1 at the lowest). Weights are synchronised with each minibatch.

So the published program has it. In the paper (section 3.1) weights are synchronised during the passes, and all replicas
share a link:

    S(k, j, m) = max(T, 2 (m - 1) P / (B m)) / m
    A[i][j][c] = min over k, m of max(A[i][k][c - m], S(k, j, m), 2 out_k / B)

The program's own rule of memory, by default off, is (activations + P) ceil(machines behind / m) <= M. ``propose`` has
the instance's a y + b in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby

from piper_ray.model import arguments
from piper_ray.model.cluster import Link
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.solution import Forecast
from piper_ray.planners.planner import Needs, Proposal, allowed, evaluated
from piper_ray.planners.runs import UniformChoice, uniform_choices
from piper_ray.workloads.formats.load import Source, instance_of


class States(str, Enum):
    """Where a partition may cut.

    DOWNSETS: everywhere. SINGLE_SOURCE: only the states that PipeDream itself grows, from the file's first source.
    ORDER: only along one topological order: n + 1 states for graphs with too many.
    """

    DOWNSETS = "downsets"
    SINGLE_SOURCE = "single-source"
    ORDER = "order"


class Recurrence(str, Enum):
    """PROGRAM: as the published program has it. PAPER: as its paper writes it."""

    PROGRAM = "program"
    PAPER = "paper"


@dataclass(frozen=True)
class Level:
    """Groups of ``machines`` devices, or groups of the level below, joined by links of ``bandwidth_bytes_per_s``."""

    machines: int
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        machines, bandwidth = arguments.whole(self.machines), arguments.number(self.bandwidth_bytes_per_s)
        if machines is None or machines < 1 or bandwidth is None or not bandwidth > 0.0:
            raise UsageError(
                f"a level needs at least 1 machine and a bandwidth above 0 in bytes per second, not {self}"
            )
        object.__setattr__(self, "machines", machines)
        object.__setattr__(self, "bandwidth_bytes_per_s", bandwidth)


@dataclass(frozen=True)
class Partition:
    """PipeDream's answer. stages: layer ids, front to back. replication: data-parallel degree of each.

    time_per_stage_s: the recurrence's value. states: what it ran over; as PipeDream counts, without that of no layers.
    """

    stages: tuple[tuple[int, ...], ...]
    replication: tuple[int, ...]
    time_per_stage_s: float
    states: int

    @property
    def noam(self) -> int:
        """The optimal number of minibatches in flight: machines / replicas of the first stage, rounded up."""
        return -(-sum(self.replication) // self.replication[0])


_PAIR_BYTES = 32
"""The bytes of a pair of states, with what each level keeps of it."""

_NO_CHOICE = (
    "a layer has no TMPC at tensor-parallel degree 1, the only one that PipeDream knows, that any number of replicas "
    "may run"
)


@dataclass(frozen=True)
class PipeDream:
    """levels: lowest first; empty: all devices in one level at the instance's bandwidth.

    activation_compression_ratio: r above; None leaves the activations out. recurrence: which of the two. straight: no
    stage is replicated. memory_bytes: M of the program's own rule, for ``partition`` on one level, of an instance whose
    activations are apart from its weights; None: any.
    """

    levels: tuple[Level, ...] = ()
    states: States = States.DOWNSETS
    activation_compression_ratio: float | None = 1.0
    recurrence: Recurrence = Recurrence.PROGRAM
    straight: bool = False
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", arguments.choice("states", self.states, States))
        object.__setattr__(self, "recurrence", arguments.choice("recurrence", self.recurrence, Recurrence))
        arguments.flag("straight", self.straight)
        if self.memory_bytes is not None:
            object.__setattr__(self, "memory_bytes", arguments.size("memory_bytes", self.memory_bytes))
            if len(self.levels) > 1:
                raise UsageError("memory_bytes counts with one level of machines only")
        levels: object = self.levels
        if not isinstance(levels, (tuple, list)) or not all(isinstance(level, Level) for level in levels):
            raise UsageError(f"levels must be Level objects, lowest first, not {arguments.shown(levels)}")
        object.__setattr__(self, "levels", tuple(levels))
        if self.activation_compression_ratio is not None:
            ratio = arguments.number(self.activation_compression_ratio)
            if ratio is None or not ratio > 0.0:
                given = arguments.shown(self.activation_compression_ratio)
                raise UsageError(f"the activation compression ratio must be above 0, not {given}")
            object.__setattr__(self, "activation_compression_ratio", ratio)

    def partition(self, instance: Instance | Source, restrictions: Restrictions = Restrictions()) -> Partition:
        """PipeDream's own answer: any replication, whether or not it divides N; memory by its own rule, if at all.

        Uses t = 1 and no recomputation, where there is the choice. A machine may stay idle if that is no slower.
        Raises InfeasibleError if a layer has no TMPC at t = 1 or nothing fits, and LimitError for too many states.
        """
        arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
        instance = instance_of(instance)
        choices = _choices(instance, restrictions)
        if not choices:
            raise InfeasibleError(_NO_CHOICE)
        levels = self._levels(instance, instance.devices)
        degrees = [self._degrees(restrictions, range(1, level.machines + 1)) for level in levels]
        limit_bytes = math.inf if self.memory_bytes is None else self.memory_bytes
        found, _ = self._partition(instance, choices[0], levels, degrees, None, limit_bytes)
        if found is None:
            raise InfeasibleError("no partition fits in memory by PipeDream's own rule")
        return found

    def _degrees(self, restrictions: Restrictions, all_degrees: Iterable[int]) -> list[int]:
        admits = restrictions.admits_data_parallel_degree
        return [d for d in all_degrees if admits(d) and (d == 1 or not self.straight)]

    def needs(self, lattice: Forecast, devices: int, microbatches: int) -> Needs:  # noqa: ARG002 - as the protocol has it
        """What the planner needs. With states along an order of the layers it needs less."""
        from piper_ray.planners.pipedream.optimum import PAIR_LIMIT

        return Needs.of_tables(_PAIR_BYTES * min(lattice.pairs or PAIR_LIMIT, PAIR_LIMIT))

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        """The best partition with replications that divide N and, with one level, stages that fit in memory.

        With several levels one that does not fit is no plan. PipeDream knows nothing of recomputation: it plans once
        without and once with it everywhere, and the better plan by ``evaluate`` stays,
        under the instance's schedule.
        """
        choices = _choices(instance, restrictions)
        levels = self._levels(instance, instance.data_parallel_limit)
        admitted = self._degrees(restrictions, divisors(instance.microbatches))
        degrees = [[d for d in admitted if d <= level.machines] for level in levels]
        best: tuple[float, Plan, str] | None = None
        tried = 0
        notes = [] if choices else [_NO_CHOICE]
        for choice in choices:
            found, pairs = self._partition(
                instance, choice, levels, degrees, instance.microbatches, instance.memory_bytes
            )
            tried += pairs
            if found is None:
                notes.append(f"{choice.recompute_words}: no partition fits in memory")
                continue
            note = (
                f"replication {_runs_text(found.replication)}, NOAM {found.noam}, {choice.recompute_words}, "
                f"{found.states:,} states; PipeDream's own estimate {found.time_per_stage_s:.6g} s"
            )
            plan = _plan(found, choice)
            proposed, evaluation = evaluated(instance, allowed(instance, restrictions, Proposal(plan, pairs, note)))
            if evaluation is None:
                notes.append(proposed.note)
                continue
            time_s = evaluation.time_per_sample_s
            if best is None or time_s < best[0]:
                best = (time_s, plan, note)
        return Proposal(None, tried, "; ".join(notes)) if best is None else Proposal(best[1], tried, best[2])

    def _levels(self, instance: Instance, most: int) -> tuple[Level, ...]:
        """The levels, of at most ``most`` machines together: the top one is cut down to that."""
        machines = math.prod(level.machines for level in self.levels)
        if machines > instance.devices:
            raise UsageError(f"the levels make {machines} machines, but there are {instance.devices} devices")
        if not self.levels:
            return (Level(most, instance.cluster.holding(instance.devices).bandwidth_bytes_per_s),)
        *lower, top = self.levels
        below = machines // top.machines
        return (*lower, replace(top, machines=max(1, min(top.machines, most // below))))

    def _partition(
        self,
        instance: Instance,
        choice: UniformChoice,
        levels: Sequence[Level],
        degrees: Sequence[Sequence[int]],
        microbatches: int | None,
        memory_bytes: float,
    ) -> tuple[Partition | None, int]:
        """The partition, None if nothing fits; and how many pairs of states were looked at."""
        # What follows compiles kernels: only when a partition is asked for.
        from piper_ray.planners.pipedream.optimum import LevelTask, best_partition, build_states

        states = build_states(instance, choice.tmpcs, self.states, stashes=self.memory_bytes is not None)
        ratio = self.activation_compression_ratio
        is_papers = self.recurrence is Recurrence.PAPER
        tasks = []
        below = 1
        for level, admitted in zip(levels, degrees, strict=True):
            link = Link(level.bandwidth_bytes_per_s)
            sync_s = link.transfer_s(2.0) if is_papers else link.resync_s(1.0, 1)
            front_sync_s = sync_s if is_papers else sync_s / below
            transfer_s = 0.0 if ratio is None else Link(level.bandwidth_bytes_per_s * ratio).transfer_s(2.0)
            tasks.append(LevelTask(level.machines, admitted, sync_s, front_sync_s, transfer_s, is_papers))
            below = level.machines
        found = best_partition(states, tasks, microbatches, memory_bytes)
        if found is None:
            return None, states.pairs.rest.size
        time_s, cuts = found
        partition = Partition(
            stages=tuple(states.layers_between(cut.front, cut.rest) for cut in cuts),
            replication=tuple(cut.degree for cut in cuts),
            time_per_stage_s=time_s,
            states=states.size - 1,
        )
        return partition, states.pairs.rest.size


def _choices(instance: Instance, restrictions: Restrictions) -> list[UniformChoice]:
    """The choices at t = 1, of TMPCs that any number of replicas may run: PipeDream's planner tries them all."""
    choices = uniform_choices(instance, restrictions)
    return [choice for choice in choices if choice.degree == 1 and choice.least_data_parallel_degree == 1]


def _plan(partition: Partition, choice: UniformChoice) -> Plan:
    tmpc_ids: Mapping[int, str] = {layer: tmpc.id for layer, tmpc in choice.tmpcs.items()}
    return Plan(
        tuple(
            Stage(layers, degree, 1, {layer: tmpc_ids[layer] for layer in layers})
            for layers, degree in zip(partition.stages, partition.replication, strict=True)
        )
    )


def _runs_text(degrees: Sequence[int]) -> str:
    """``3, 1 x4``: those that are alike together."""
    runs = [(degree, len(list(run))) for degree, run in groupby(degrees)]
    return ", ".join(str(degree) if count == 1 else f"{degree} x{count}" for degree, count in runs)
