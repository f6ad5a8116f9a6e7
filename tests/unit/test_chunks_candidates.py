"""Quick plans of a shape, against all that share whole layers out to turns."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.chunks.candidates import Candidates
from piper_ray.engine.chunks.tables import ModelOrder
from piper_ray.engine.chunks.tasks import PlanSpace, list_tasks
from piper_ray.engine.kernels.chunk_moves import batch_seconds
from piper_ray.model.passes import with_passes
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from tests.instances import build, tmpc


@pytest.mark.parametrize(
    "schedule",
    [Schedule(ScheduleName.INTERLEAVED, 3), Schedule(ScheduleName.LOOPED_BFS, 2), Schedule(ScheduleName.ZB_V)],
    ids=str,
)
@pytest.mark.parametrize("light_s", [1, 3, 6])
def test_no_plan_whose_turns_take_whole_layers_is_better_than_the_quick_one(schedule: Schedule, light_s: int) -> None:
    """An encoder's eight layers, then a decoder's eight lighter ones."""
    tmpcs = {v: {1: [tmpc(6 if v < 8 else light_s)]} for v in range(16)}
    instance = with_passes(build(tmpcs, {(v, v + 1): 1 for v in range(15)}, devices=4, microbatches=8))
    space = PlanSpace([schedule], stage_variants(instance, Restrictions()), [1], ranks=4, all_devices=False)
    (task,) = list_tasks(instance, ModelOrder.of(instance), space)
    program = task.shape.program()
    assert program is not None
    candidates = Candidates(task, program)
    candidates.cut_evenly()
    assert candidates.best is not None
    layers = task.tables.layers(1)
    scratch = np.empty(16, np.int64), np.empty(program.kind.size + 1)
    found = []
    for turns in product(range(1, 5), repeat=schedule.v):
        if sum(turns) == 4:
            cuts = np.concatenate([[0], np.cumsum(np.repeat(turns, 4))]).astype(np.int64)
            choice = layers.option_start[:-1].copy()
            found.append(batch_seconds(layers, program, task.sync_s_per_byte, cuts, choice, *scratch))
    assert candidates.best.batch_s <= min(found) * (1 + 1e-12)
    assert len(set(found)) > 1
