"""A referee of ``search.json`` that knows nothing of the planner: what the file's own figures say of each combination,
and plans made by hand that no claim may forbid.

Not checked: that modes under ``never_better`` are never better, that the best plan of a search within a combination is
its best, and bounds beyond the plans that are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.run import simulate

RUNNERS_UP, LISTED, CHUNKS = 1.25, 5, 2


def faults_of(document: Mapping[str, Any]) -> Iterator[str]:
    """What of the file does not follow from its own figures."""
    cells, best_s = document["cells"], document["step_s"]
    bounds_s = [math.inf if cell["lower_bound_s"] is None else cell["lower_bound_s"] for cell in cells]
    steps_s = sorted(cell["step_s"] for cell in cells if cell["step_s"] is not None)
    if min(steps_s) != best_s:
        yield "the step is not the least of the combinations'"
    if min(best_s, *bounds_s) != document["lower_bound_s"]:
        yield "the bound is not the least of the combinations'"
    if document["gap"] != 1.0 - document["lower_bound_s"] / best_s:
        yield "the gap is not the one between step and bound"
    others = document["never_better"]
    if document["combinations"] != len(cells) + len(document["schedules"]) * len(others):
        yield "combinations are missing"
    listed = {(cell["microbatch"], cell["optimizer_on_host"], cell["mode"]) for cell in cells}
    than = ((x, (x["microbatch"], x["optimizer_on_host"], x["than"])) for x in others)
    yield from (f"{x} is no combination" for x, better in than if better not in listed)
    last_s = steps_s[LISTED - 1] if len(steps_s) >= LISTED else math.inf
    for cell, bound_s in zip(cells, bounds_s, strict=True):
        enough_s = best_s if cell["schedule"] == "interleaved" else min(RUNNERS_UP * best_s, last_s)
        if cell["closing"] == "no plan" and bound_s != math.inf:
            yield f"{cell}: there may be a plan"
        if cell["closing"] == "bound" and not enough_s <= bound_s < math.inf:
            yield f"{cell}: its bound does not close it"
        if cell["step_s"] is not None and (cell["closing"] != "searched" or cell["step_s"] < bound_s * (1.0 - 1e-9)):
            yield f"{cell}: its plan is faster than its bound"


def disproofs_of(
    document: Mapping[str, Any],
    instances: Mapping[tuple[int, bool], Instance],
    rules: Mapping[ScheduleName, Restrictions],
) -> Iterator[str]:
    """Combinations of which a plan of stages as equal as can be is faster than what the file says that none is."""
    for cell in document["cells"]:
        instance, name = instances[cell["microbatch"], cell["optimizer_on_host"]], ScheduleName(cell["schedule"])
        for plan, schedule in equal_plans(instance, name, cell["mode"].split(", ")):
            if any(rules[name].violations(instance, plan, schedule)):
                continue
            run = simulate(instance, plan, schedule)
            claimed_s = math.inf if cell["lower_bound_s"] is None else cell["lower_bound_s"]
            if run.peak_memory_bytes <= run.memory_limit_bytes and run.step_s < claimed_s * (1.0 - 1e-9):
                yield f"{cell}: {plan} takes {run.step_s} s"


def equal_plans(instance: Instance, name: ScheduleName, mode: Sequence[str]) -> Iterator[tuple[Plan, Schedule]]:
    """For all degrees that there are devices for. mode: its configurations, of which each layer has the first that it
    can have, as most layers run in the first ones."""
    layers, devices = instance.layers, range(1, instance.devices + 1)
    chunks = CHUNKS if name is ScheduleName.INTERLEAVED else 1
    for d, t, p in product(devices, instance.degrees, devices):
        rows = {layer.id: {x.id for x in layer.tmpcs.get(t, ())} for layer in layers}
        ids = {layer: [x for x in mode if x in row] for layer, row in rows.items()}
        stages = p * chunks
        if d * t * p > instance.devices or instance.microbatches % d or stages > len(layers) or not all(ids.values()):
            continue
        ends = [round(len(layers) * stage / stages) for stage in range(stages + 1)]
        pieces = [[layer.id for layer in layers[a:b]] for a, b in pairwise(ends)]
        made = [Stage(tuple(piece), d, t, {layer: ids[layer][0] for layer in piece}) for piece in pieces]
        yield Plan(tuple(made), keeps_order=True), Schedule(name, chunks) if chunks > 1 else Schedule(name)
