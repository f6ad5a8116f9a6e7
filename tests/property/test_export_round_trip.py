"""A plan that is exported and imported is the plan."""

from __future__ import annotations

from random import Random

import pytest

from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.megatron_layout import layout_text, parse_layout
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.errors import UsageError
from tests.export_support import random_case
from tests.lengths import long_after


@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 15) for start in range(0, 30, 15)]), ids=str)
def test_plans_through_megatron_and_torchtitan(seeds: range) -> None:
    there = 0
    for seed in seeds:
        for target, name, software in (
            (Target.MEGATRON, "megatron.args", "megatron-core"),
            (Target.TORCHTITAN, "torchtitan.json", "fsdp"),
        ):
            instance, plan, schedule = random_case(Random(f"round trip {seed}"), software=software)
            degrees = RunAs(data_parallel=plan.stages[0].data_parallel_degree)
            try:
                text = export_plan(instance, plan, schedule, target, 8).files[name]
            except UsageError:
                assert target is Target.TORCHTITAN  # which has one setting for all layers
                continue
            found = import_plan(instance, text, degrees)
            assert (found.plan, found.schedule) == (plan, schedule), (seed, target)
            there += 1
    assert there > len(seeds)


def test_layout_strings() -> None:
    for seed in range(500):
        rng = Random(seed)
        stages = ["t" * rng.choice([0, 1, 1, 2, 2, 2, 3, 12]) for _ in range(rng.randint(1, 12))]
        stages[0] = "E" + stages[0]
        stages[-1] += "L"
        text = layout_text(tuple(stages))
        assert parse_layout(text) == tuple(stages)
        assert len(text) <= len("|".join(stages)) + 8 * len(stages)
