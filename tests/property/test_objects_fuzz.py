"""Objects built in Python, broken anywhere: refused with a list of faults, or as good as what a file holds."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import piper_ray
from piper_ray import Edge, InputError, Instance, InvalidPlan, Layer, Plan, Stage, Tmpc
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.instance import Batch, Tensor
from piper_ray.planners.published.paper_table import paper_table
from piper_ray.workloads.formats.documents import parse_toml
from piper_ray.workloads.formats.load import instance_of, load, to_toml, to_upstream
from tests.formats_support import assert_consistent
from tests.instances import random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD
from tests.support import assert_same_time

NASTY: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.5, 3.0, -0.0, 1e-300, 1e30, 1e31, 10**400, math.inf, -math.inf, math.nan, "", "1",
    "x", "\ud800", b"1", (), [], {}, (1,), [None], {0: 1.0}, {"0": 1.0}, {1: None}, object(), int, Decimal(1),
    Fraction(1, 2), 1j, np.float32(2), np.int64(3), np.bool_(True), np.array(4.0), np.array([1.0, 2.0]),
    np.float64("nan"), np.str_("y"), range(3), iter([1]), Edge(0, 1, 1.0), Layer(0, "a", {}),
    Tmpc("v", 1.0, 1.0, 1.0, 1.0),
]  # fmt: skip


def broken(rng: random.Random, thing: Any) -> Any:
    """The dataclass with some field, of it or of what it holds, replaced by something else."""
    field = rng.choice([field.name for field in fields(thing)])
    value = getattr(thing, field)
    return replace(thing, **{field: _broken_value(rng, value)})


def _broken_value(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.3:
        return rng.choice(NASTY)
    if isinstance(value, (Layer, Edge, Tensor, Tmpc, Stage, Cluster, Link, Batch)):
        return broken(rng, value)
    if isinstance(value, tuple) and value:
        index = rng.randrange(len(value))
        action = rng.choice(["change", "change", "change", "drop", "repeat"])
        if action == "drop":
            return value[:index] + value[index + 1 :]
        if action == "repeat":
            return (*value, value[index])
        return (*value[:index], _broken_value(rng, value[index]), *value[index + 1 :])
    if isinstance(value, Mapping) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {**value, rng.choice([-1, 0, 1, 3, 1.5, "1", None, True]): value[key]}
        return {**value, key: _broken_value(rng, value[key])}
    return rng.choice(NASTY)


def sound(instance: Instance) -> bool:
    try:
        instance_of(instance)
    except InputError as error:
        str(error).encode()  # whatever it was, the report can be printed
        return False
    return True


@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_what_is_not_refused_is_as_good_as_a_file(seed: int, few: bool) -> None:
    rng = random.Random(seed)
    outcomes: Counter[bool] = Counter()
    for number in range(260 if few else 400):
        instance = random_instance(1000 * seed + number)
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            instance = broken(rng, instance)
        outcomes[sound(instance)] += 1
        if instance.checked:
            again = load(to_upstream(instance))
            assert again == instance
            assert again.digest == instance.digest
            assert_consistent(again)
            assert load(parse_toml("toml", to_toml(instance))).layers == again.layers
        else:
            with pytest.raises(InputError):
                piper_ray.solve(instance, options=ONE_THREAD)
    # The changes are neither all fatal nor all harmless, so that both sides are put to the test.
    assert min(outcomes[True], outcomes[False]) > 40


@pytest.mark.parametrize("seed", long_after(6, range(12)))
def test_what_is_not_refused_is_solved(seed: int) -> None:
    instance = broken(random.Random(seed), random_instance(seed, most_layers=4))
    if sound(instance):
        solution = piper_ray.solve(instance, options=ONE_THREAD)
        assert_same_time(solution.time_per_sample_s, paper_table(instance).time_per_sample_s, instance)


@pytest.mark.parametrize("seed", long_after(1, range(4)))
def test_a_broken_plan_is_refused_or_valued(seed: int) -> None:
    rng = random.Random(seed)
    layers = tuple(Layer(v, "layer", {1: (Tmpc("v", 1.0, 1.0, 1.0, 1.0),)}) for v in range(2))
    instance = Instance(layers, (Edge(0, 1, 1.0),), 2, 2, 100.0, 10.0)
    outcomes: Counter[str] = Counter()
    for _ in range(400):
        plan: Any = Plan((Stage((0,), 1, 1, {0: "v"}), Stage((1,), 1, 1, {1: "v"})))
        for _ in range(rng.randint(0, 3)):
            plan = broken(rng, plan)
        try:
            piper_ray.evaluate(instance, plan)
            outcomes["valued"] += 1
        except (InputError, InvalidPlan) as error:
            str(error).encode()
            outcomes[type(error).__name__] += 1
    assert min(outcomes[kind] for kind in ("valued", "InputError", "InvalidPlan")) > 10
