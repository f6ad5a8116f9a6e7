"""Layouts that people found by hand, and what is found here on the same GPUs under the same runtime's rules."""

from __future__ import annotations

import pytest

import piper_ray
from piper_ray.engine.solve import solve
from piper_ray.export.import_plan import import_plan
from piper_ray.export.run_as import RunAs
from piper_ray.model.constraints import Restrictions, StageCount, TensorParallelDegrees
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.simulate.run import simulate

BY_HAND = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"
"""Llama 3 70B on 64 H100: NVIDIA-NeMo/Megatron-Bridge, issue 5391."""


@pytest.mark.long
def test_llama3_70b_on_64_gpus() -> None:
    """As our layouts of memory go the one by hand takes 89.5 GiB a GPU: both may take as much."""
    instance = piper_ray.estimate("llama3-70b", "H100-SXM", nodes=8, microbatch_size=1, global_batch=128)
    instance = instance.replace(memory_bytes=91 * 2.0**30)
    schedule = Schedule(ScheduleName.INTERLEAVED, 5)
    run_as = RunAs(
        pipeline_ranks=8,
        tensor_parallel=4,
        data_parallel=2,
        schedule=schedule.name,
        sequence_parallel=True,
        optimizer_shards=2,
    )
    by_hand = import_plan(instance, BY_HAND, run_as)
    hand_s = simulate(instance, by_hand.plan, by_hand.schedule).step_s
    megatron = RUNTIMES[RuntimeName.MEGATRON]
    asked = Restrictions(constraints=[StageCount(8), TensorParallelDegrees((4,))])
    found = solve(
        instance,
        schedule=schedule,
        restrictions=megatron.restricted(asked, instance, schedule.name, gpus_per_node=8),
        options=SolveOptions(gap=0.03, threads=1),
    )
    assert found.plan is not None
    assert simulate(instance, found.plan, found.schedule).step_s <= hand_s
