"""The pairs (d, t) that a plan may have, with a bound on what any plan of theirs takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from piper_ray.cost.schedules import degree_pairs, rank_counts, sync_s_per_byte
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.engine.flush.border_bound import BorderBound
from piper_ray.engine.flush.path_prices import PathPrices
from piper_ray.engine.flush.paths import room
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.kernels.flush_paths import empty_tail, least_batch_s
from piper_ray.engine.kernels.flush_stages import AheadArrays, look_ahead
from piper_ray.engine.kernels.flush_types import GPIPE, ONE_F_ONE_B, TWO_BW, FlushTask
from piper_ray.engine.kernels.types import frozen
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms

_CODES = {ScheduleName.GPIPE: GPIPE, ScheduleName.ONE_F_ONE_B: ONE_F_ONE_B, ScheduleName.TWO_BW: TWO_BW}


@dataclass(frozen=True)
class DegreePair:
    """One (d, t). order: among all, by rising ``lower_s``: no batch of such a plan takes less.
    prices: where they were worth finding. borders: where all downsets are too many.
    """

    order: int
    arrays: FlushTask
    ahead: AheadArrays
    lower_s: float
    prices: PathPrices | None = None
    borders: BorderBound | None = None

    @property
    def degrees(self) -> tuple[int, int]:
        """d and t."""
        return self.arrays.data_parallel_degree, self.arrays.tensor_parallel_degree


def list_tasks(
    instance: Instance,
    workload: FlushWorkload,
    schedule: Schedule,
    restrictions: Restrictions,
    step: StepTerms,
) -> list[DegreePair]:
    """Those that fit the cluster and the constraints, by rising bound."""
    found: list[DegreePair] = []
    code = _CODES[schedule.name]
    is_fixed = restrictions.all_devices or restrictions.stage_count is not None
    for d, t, variants in degree_pairs(instance, restrictions, workload.variants):
        stages = rank_counts(instance, restrictions, d * t)
        if schedule.name is ScheduleName.TWO_BW:  # Piper's bound on the sum of d
            stages = range(stages.start, min(stages.stop, instance.data_parallel_limit // d + 1))
        if not stages:
            continue
        arrays = frozen(
            FlushTask(
                schedule=code,
                data_parallel_degree=d,
                tensor_parallel_degree=t,
                microbatches=instance.microbatches // d,
                most_stages=stages[-1],
                stages=stages[-1] if is_fixed else 0,
                memory_bytes=instance.memory_bytes * (1.0 + MEMORY_TOLERANCE),
                sync_s_per_byte=sync_s_per_byte(step, instance.cluster, d, t),
                variants=np.array(variants, np.int64),
                work_s=0.0,
                room=room(code, instance.microbatches // d, stages[-1]),
            )
        )
        if variants not in workload.ahead_of:
            workload.ahead_of[variants] = frozen(look_ahead(workload.arrays, arrays))
        ahead = workload.ahead_of[variants]
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
        if lower_s < np.inf:
            found.append(DegreePair(0, arrays, ahead, max(0.0, float(lower_s)), borders=workload.borders(variants)))
    found.sort(key=lambda x: (x.lower_s, x.arrays.data_parallel_degree, x.arrays.tensor_parallel_degree))
    return [replace(task, order=order) for order, task in enumerate(found)]
