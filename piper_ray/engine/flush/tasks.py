"""The pairs (d, t) that a plan may have, with a lower bound on the time of their plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from piper_ray.cost.schedules import degree_choices, rank_counts, sync_s_per_byte
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.engine.flush.border_bound import BorderBound
from piper_ray.engine.flush.mixes import MixLimits, moves_between, share_within, with_mixes
from piper_ray.engine.flush.path_prices import PathPrices
from piper_ray.engine.flush.paths import room
from piper_ray.engine.flush.stand_ins import StandIns
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.kernels.flush_paths import empty_tail, least_batch_s
from piper_ray.engine.kernels.flush_stages import AheadArrays, in_flight, look_ahead
from piper_ray.engine.kernels.flush_types import GPIPE, ONE_F_ONE_B, SUM, TWO_BW, FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms

_NO_MIXES: IndexArray = np.empty((0, 0), np.int64)
_ROUNDING = 1e-9
"""Relative rounding error of sums of bytes."""
TASK_CODES = {ScheduleName.GPIPE: GPIPE, ScheduleName.ONE_F_ONE_B: ONE_F_ONE_B, ScheduleName.TWO_BW: TWO_BW}


@dataclass(frozen=True)
class DegreePair:
    """One (d, t); with devices of several kinds, one d and a t for each kind.

    order: its place among all pairs, by rising ``lower_s``: no batch of its plans takes less. mixes: limits on the
    mixes, which ``arrays`` lists once the pair is searched. prices: if they were computed. borders: given while it is
    bounded, on graphs with many downsets or layers and one kind of devices. stand_ins: given then too, on graphs of
    many layers whose downsets are listed, if they pay.
    """

    order: int
    tensor_parallel_degrees: tuple[int, ...]
    mixes: MixLimits
    arrays: FlushTask
    ahead: AheadArrays
    lower_s: float
    prices: PathPrices | None = None
    borders: BorderBound | None = None
    stand_ins: StandIns | None = None

    def with_mixes(self) -> DegreePair:
        """Returns the pair with its mixes, ready to be searched. With several kinds of devices there are many."""
        if self.arrays.next_cell.size > 0:
            return self
        return replace(self, arrays=frozen(with_mixes(self.arrays, self.mixes)))

    @property
    def has_kinds(self) -> bool:
        """Whether there are devices of several kinds. Prices of positions require one kind."""
        return len(self.tensor_parallel_degrees) > 1

    @property
    def degrees(self) -> tuple[int, ...]:
        """d, then t on each kind of devices."""
        return self.arrays.data_parallel_degree, *self.tensor_parallel_degrees

    @property
    def key(self) -> tuple[int, ...]:
        """Identifies the task: its degrees, and the fewest stages in all and on each kind of devices."""
        return *self.degrees, self.mixes.stages.start, *(found.start for found in self.mixes.of_kinds)


def list_tasks(
    instance: Instance,
    workload: FlushWorkload,
    schedule: Schedule,
    restrictions: Restrictions,
    step: StepTerms,
) -> list[DegreePair]:
    """Lists the pairs that fit the cluster and the constraints, by rising bound."""
    found: list[DegreePair] = []
    code, cluster, placed = TASK_CODES[schedule.name], instance.cluster, workload.placed
    is_fixed = restrictions.all_devices or restrictions.stage_count is not None
    of_kind = {name: cluster.of_kind(name) for name in cluster.kind_names}
    memory_bytes = np.array([of_kind[x.variant.kind].memory_bytes * (1.0 + MEMORY_TOLERANCE) for x in placed])
    tensor_parallel_degrees = np.array([x.variant.degree for x in placed])
    borders, has_kinds = workload.border_rates, len(of_kind) > 1
    kinds, last = borders.kinds, tuple(borders.last)
    ends_behind = np.array([kinds[x.behind] * len(of_kind) + x.kind for x in placed])
    ends_ahead = np.array([x.kind * len(of_kind) + kinds[x.ahead] for x in placed])
    moves_of = [(x.kind, x.behind, x.ahead) for x in placed]

    @cache
    def sync_of(d: int, fewest: tuple[int, ...]) -> FloatArray:
        counts = dict(zip(of_kind, fewest, strict=True)) if borders.by_stages else {}
        alike = {(x.variant.kind, x.variant.degree) for x in placed}
        found = {(kind, t): sync_s_per_byte(step, of_kind[kind], d, t, counts.get(kind)) for kind, t in alike}
        return np.array([found[x.variant.kind, x.variant.degree] for x in placed])

    for d, degrees, usable, (stages, of_kinds, of_borders) in _parts(instance, workload, schedule, restrictions):
        allowed = moves_between(of_borders, last)
        variants = tuple(r for r in usable if moves_of[r] in allowed)
        fastest = min(of_borders[0])
        bounding = variants
        if not has_kinds:
            bounding = tuple(r for r in usable if placed[r].behind == placed[r].ahead == fastest)
        moves = sorted({moves_of[r] for r in variants})
        number_of = {one: number for number, one in enumerate(moves)}
        move = np.array([number_of.get(one, -1) for one in moves_of])
        mixes = MixLimits(stages, of_kinds, of_borders, last, tuple(moves))
        arrays = FlushTask(
            schedule=code,
            data_parallel_degree=d,
            microbatches=instance.microbatches // d,
            most_stages=stages[-1],
            stages=stages[-1] if is_fixed else 0,
            most_memory_bytes=float(memory_bytes[list(variants)].max()),
            memory_bytes=memory_bytes,
            sync_s_per_byte=sync_of(d, tuple(max(1, found.start) for found in of_kinds)),
            tensor_parallel_degrees=tensor_parallel_degrees,
            variants=np.array(variants, np.int64),
            bounding=np.array(bounding, np.int64),
            ends=len(degrees) ** 2,
            ends_behind=ends_behind,
            ends_ahead=ends_ahead,
            move=move,
            next_cell=_NO_MIXES,
            previous_cell=_NO_MIXES,
            is_whole=np.zeros(0, np.uint8),
            share_of_s=_share_of_s(workload, variants) if has_kinds else np.empty(0),
            share_left=np.empty((0, 2)),
            work_s=0.0,
            room=np.empty(0) if has_kinds else room(code, instance.microbatches // d, stages[-1]),
        )
        if bounding not in workload.ahead_of:
            workload.ahead_of[bounding] = frozen(look_ahead(workload.arrays, frozen(arrays)))
        ahead = workload.ahead_of[bounding]
        work_s = float(ahead.ahead_s[0])
        arrays = frozen(arrays._replace(work_s=work_s))
        lower_s = least_batch_s(
            code,
            arrays.microbatches,
            0,
            arrays.most_stages,
            work_s,
            float(ahead.ahead_forward_s[0]),
            empty_tail(code),
        )
        if arrays.room.size > 0:
            lower_s = max(lower_s, work_s + work_s / arrays.room[-1])
        if has_kinds:
            lower_s = max(lower_s, ahead.ahead_share[0] / share_within(arrays, mixes))
        if lower_s < np.inf and _is_there_memory(workload, arrays):
            task = DegreePair(0, degrees, mixes, arrays, ahead, max(0.0, float(lower_s)))
            found.append(task if has_kinds else task.with_mixes())
    found.sort(key=lambda task: (task.lower_s, task.key))
    return [replace(task, order=order) for order, task in enumerate(found)]


def _parts(
    instance: Instance, workload: FlushWorkload, schedule: Schedule, restrictions: Restrictions
) -> Iterator[
    tuple[int, tuple[int, ...], tuple[int, ...], tuple[range, tuple[range, ...], tuple[tuple[int, ...], ...]]]
]:
    """Each choice of degrees with the numbers of its variants, for all numbers of stages with the same rates at their
    borders and of their replicas: see ``BorderRates.parts``."""
    for d, degrees, usable in degree_choices(instance, restrictions, [x.variant for x in workload.placed]):
        stages = rank_counts(instance, restrictions, *(d * t for t in degrees))
        if schedule.name is ScheduleName.TWO_BW:  # Piper's bound on the sum of d
            stages = range(stages.start, min(stages.stop, instance.data_parallel_limit // d + 1))
        if stages:
            for part in workload.border_rates.parts(instance.cluster, d, degrees, stages):
                yield d, degrees, usable, part


def _is_there_memory(workload: FlushWorkload, task: FlushTask) -> bool:
    """Whether all stages together may hold what all layers hold at least: if what does not depend on microbatches in
    flight is in the stages with most of these, activations have most room."""
    layers = workload.values.sums[list(task.variants)]
    shared = layers[:, :, SUM.least_shared] / task.data_parallel_degree
    fixed_bytes = float((layers[:, :, SUM.least_fixed] + shared).min(axis=0).sum())
    activation_bytes = float(layers[:, :, SUM.least_activation].min(axis=0).sum())
    room_bytes = 0.0
    for behind in reversed(range(task.most_stages)):
        here_bytes = min(fixed_bytes, task.most_memory_bytes)
        fixed_bytes -= here_bytes
        y = in_flight(task.schedule, task.microbatches, behind)
        room_bytes += (task.most_memory_bytes - here_bytes) / y
    return fixed_bytes <= 0.0 and activation_bytes <= room_bytes * (1.0 + _ROUNDING)


def _share_of_s(workload: FlushWorkload, variants: Sequence[int]) -> FloatArray:
    """Returns ``FlushTask.share_of_s``. It is the same for all variants of a kind; any figures give a bound."""
    first = {workload.placed[r].kind: r for r in reversed(variants)}
    all_s = {kind: float(workload.arrays.sums[r, -1, SUM.least_s]) or 1.0 for kind, r in first.items()}
    return np.array([1.0 / all_s.get(x.kind, 1.0) for x in workload.placed])
