"""Pipelines of one kind each: the best sharing out is that of all, where each kind's plans are tried and simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

import piper_ray
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import AllReduce, ScheduleName, StepTerms
from piper_ray.planners.apart import kinds_apart
from piper_ray.workloads.formats.plans import plan_document
from tests.flush_brute_force import brute_force
from tests.instances import random_instance
from tests.kinds_brute_force import random_kinds
from tests.lengths import long_after


def alone(instance: Instance, kind: str, microbatches: int, kinds: int = 1) -> Instance:
    """The devices of one kind, by hand: at as many equal sites as there are kinds, with the microbatches of all."""
    layers = [
        replace(
            layer,
            tmpcs={
                t: tuple(
                    replace(x, kind="", least_data_parallel_degree=kinds * x.least_data_parallel_degree)
                    for x in row
                    if x.kind == kind
                )
                for t, row in layer.tmpcs.items()
            },
        )
        for layer in instance.layers
    ]
    (own,) = (x.cluster for x in instance.cluster.kinds if x.name == kind)
    if kinds > 1:
        names, rate = tuple(map(str, range(kinds))), instance.cluster.between_bytes_per_s
        own = replace(own, devices=kinds * own.devices, sites=names, between_bytes_per_s=rate)
    batch = replace(instance.batch, microbatches=kinds * microbatches)
    return Instance(layers, instance.edges, cluster=own, batch=batch, tensors=instance.tensors)


def least_batch_s(instance: Instance, schedule: str) -> float | None:
    """Over all numbers of microbatches that each kind may have."""
    names, total = instance.cluster.kind_names, instance.microbatches
    each_s: dict[tuple[str, int, int], float | None] = {}
    for name, n, kinds in product(names, range(1, total + 1), range(1, len(names) + 1)):
        found = brute_force(alone(instance, name, n, kinds), schedule)
        each_s[name, n, kinds] = None if found is None else found.batch_s
    values = []
    for split in product(range(total + 1), repeat=len(names)):
        used = [(name, n) for name, n in zip(names, split, strict=True) if n]
        some_s = [each_s[name, n, len(used)] for name, n in used]
        if sum(split) == total and None not in some_s:
            values.append(max(x for x in some_s if x is not None))
    return min(values, default=None)


def read_back(plan: Plan, instance: Instance) -> Plan:
    document = json.loads(json.dumps(plan_document(instance, plan, None)))
    assert document["schema_version"] == 2
    return piper_ray.load_plan(document, instance)


@pytest.mark.parametrize("schedule", long_after(1, ["1f1b", "gpipe"]))
@pytest.mark.parametrize("kinds", long_after(1, [2, 3]))
@pytest.mark.parametrize("seeds", long_after(1, [range(6), range(6, 14)]), ids=str)
def test_the_best_sharing_out(seeds: range, kinds: int, schedule: str) -> None:
    shared = 0
    for seed in seeds:
        made = random_kinds(seed, kinds=kinds)
        expected_s, found = least_batch_s(made, schedule), kinds_apart(made, schedule=ScheduleName(schedule))
        assert (found is None) is (expected_s is None)
        if found is not None:
            assert found.batch_s == pytest.approx(expected_s, rel=1e-9)
            assert found.least_s == pytest.approx(expected_s, rel=1e-6)
            assert sum(part.microbatches for part in found.parts) == made.microbatches
            shared += len(found.parts) > 1
            valued = piper_ray.evaluate(made, found.plan, schedule=schedule)
            assert valued.time_per_sample_s * made.microbatches == pytest.approx(expected_s, rel=1e-9)
            assert [stage.devices for stage in valued.stages] == [stage.devices for stage in found.plan.stages]
            assert read_back(found.plan, made) == found.plan
            slower = kinds_apart(made, schedule=ScheduleName(schedule), within_s=0.9 * found.batch_s)
            assert slower is not None
            assert slower.parts == ()
            assert 0.9 * found.batch_s <= slower.least_s <= found.batch_s
    assert shared


def test_gaps_of_plans_are_a_gap_of_the_sharing_out() -> None:
    """A search for the plan of a kind may end before its proof."""
    some_open = 0
    for seed in range(12):
        made = random_kinds(seed, kinds=2)
        expected_s, found = least_batch_s(made, "1f1b"), kinds_apart(made, options=SolveOptions(gap=0.5))
        assert (found is None) is (expected_s is None)
        if found is not None and expected_s is not None:
            assert found.least_s <= expected_s * (1.0 + 1e-9)
            assert found.batch_s >= expected_s * (1.0 - 1e-9)
            some_open += found.least_s < found.batch_s * (1.0 - 1e-3)
    assert some_open


def test_terms_of_a_step_are_charged_between_kinds_too() -> None:
    made = random_kinds(0)
    plain, quick = kinds_apart(made), kinds_apart(made, step=StepTerms(AllReduce.RING))
    assert plain is not None
    assert quick is not None
    assert quick.batch_s <= plain.batch_s


def test_what_has_no_kinds_to_share_among() -> None:
    with pytest.raises(UsageError, match="devices are of one kind"):
        kinds_apart(random_instance(0))
    with pytest.raises(UsageError, match="are for 1f1b and gpipe, not interleaved"):
        kinds_apart(random_kinds(0), schedule=ScheduleName.INTERLEAVED)
