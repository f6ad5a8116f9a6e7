"""From a kernel's stages to a plan, with the seconds of each stage as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.kernels.flush_choices import FEW, MANY, NONE_FITS, choice_front, least_time_choice, stage_items
from piper_ray.engine.kernels.flush_closing import StageList
from piper_ray.engine.kernels.flush_paths import simulate_step, step_s
from piper_ray.engine.kernels.flush_stages import in_flight, least_figures
from piper_ray.engine.kernels.flush_types import FASTEST, LEAST_TIME, TWO_BW, FlushTables, FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage

_MOST_PASSES = 10_000_000
"""Forward passes of a step that are simulated one by one; of longer steps the formula tells the same."""


@dataclass(frozen=True)
class ChosenStages:
    """Stages with all choices made. value_s: of a batch, simulated. seconds: float64[p, 3], each stage's forward and
    backward seconds for a microbatch and its synchronisation, front to back.

    options: for each stage int64[k, 2], its vertices, ascending, and for each the number of its option.
    """

    task: FlushTask
    variant: IndexArray
    options: tuple[IndexArray, ...]
    seconds: FloatArray
    value_s: float

    @property
    def stages(self) -> int:
        return len(self.options)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Of plans that take the same: fewest devices, then stages, then the least d."""
        return self.devices, self.stages, self.task.data_parallel_degree

    @property
    def devices(self) -> int:
        return self.stages * self.task.data_parallel_degree * self.task.tensor_parallel_degree


def choose(tables: FlushTables, task: FlushTask, stages: StageList) -> ChosenStages:
    """Makes the TMPC choices that the stages name, or where they name none quick ones that fit."""
    p = stages.outer.size
    seconds = np.zeros((p, 3))
    options = []
    for k in range(p):
        stage = StageKey(int(stages.outer[k]), int(stages.inner[k]), int(stages.variant[k]))
        y = in_flight(task.schedule, task.microbatches, p - 1 - k)
        vertices, start, items = stage_items(stage, y, tables, task)
        least = least_figures(stage, tables, task)
        items[:, 2] *= task.sync_s_per_byte
        wanted = stages.seconds[k] - np.array([least.tensor_forward_s, least.tensor_backward_s, 0.0])
        chosen = _chosen(int(stages.choice[k]), wanted, start, items, task.memory_bytes)
        totals = items[chosen].sum(axis=0)
        seconds[k, 0] = totals[0] + least.tensor_forward_s
        seconds[k, 1] = totals[1] + least.tensor_backward_s
        seconds[k, 2] = totals[2]
        options.append(np.stack([vertices, chosen - start[:-1]], axis=1))
    columns = [seconds[:, column].copy() for column in range(3)]
    quick = task.schedule != TWO_BW and p * task.microbatches <= _MOST_PASSES
    batch_s = float((simulate_step if quick else step_s)(task.schedule, task.microbatches, *columns))
    return ChosenStages(task, stages.variant, tuple(options), seconds, batch_s)


def build_flush_plan(instance: Instance, workload: FlushWorkload, chosen: ChosenStages) -> Plan:
    """Layers in file order."""
    position = {layer.id: index for index, layer in enumerate(instance.layers)}
    graph = workload.lattice.graph
    built = []
    for r, options in zip(chosen.variant.tolist(), chosen.options, strict=True):
        tmpc_ids = {graph.layer_ids[v]: workload.tmpcs[r][v][o].id for v, o in options.tolist()}
        layers = tuple(sorted(tmpc_ids, key=position.__getitem__))
        built.append(
            Stage(
                layers,
                chosen.task.data_parallel_degree,
                workload.variants[r].degree,
                {layer: tmpc_ids[layer] for layer in layers},
            )
        )
    return Plan(tuple(built))


def _chosen(choice: int, wanted: FloatArray, start: IndexArray, items: FloatArray, memory_bytes: float) -> IndexArray:
    """The option of each layer, as an index into ``items``. wanted: the seconds to take, or to come close to."""
    chosen = start[:-1].copy()
    if choice == FASTEST:
        return chosen
    if choice == LEAST_TIME:
        least_time_choice(start, items, memory_bytes, chosen)
        return chosen
    most_s = (wanted[0] + wanted[1]) * (1.0 + 1e-9)
    status, rows, ids, before, taken = choice_front(start, items, memory_bytes, most_s, MANY)
    if status == NONE_FITS:  # what is wanted is a bound
        _, rows, ids, before, taken = choice_front(start, items, memory_bytes, np.inf, FEW)
    at = int(ids[np.argmin(np.abs(rows - wanted).sum(axis=1))])
    for k in range(chosen.size - 1, -1, -1):
        chosen[k] = taken[at]
        at = int(before[at])
    return chosen
