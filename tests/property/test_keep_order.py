"""Plans that keep the layers' order: against every one of them, valued from the definition, relays and all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest

import piper_ray
from piper_ray.model.constraints import KeepOrder, Recompute, Restrictions, SameDegrees
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import in_order, layers_in_order
from tests.brute_force import file_order
from tests.flush_brute_force import simulated_batch_s
from tests.instances import random_instance
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

KEEP = Restrictions(constraints=[KeepOrder()])
Chosen = dict[int, Tmpc]


def runs(order: list[int]) -> Iterator[list[list[int]]]:
    for count in range(len(order)):
        for cuts in combinations(range(1, len(order)), count):
            ends = [0, *cuts, len(order)]
            yield [order[a:b] for a, b in pairwise(ends)]


def moved_bytes(instance: Instance, stages: list[Chosen]) -> list[tuple[float, float]]:
    """What each stage receives and sends, forwards and backwards: for itself, and for those that it lies between."""
    stage_of = {layer: number for number, stage in enumerate(stages) for layer in stage}
    forward, backward = [0.0] * len(stages), [0.0] * len(stages)
    for edge in instance.edges:
        source, target = stage_of[edge.source], stage_of[edge.target]
        for number in range(source, target + 1) if source != target else ():
            size = edge.communication_bytes * (1 if number in (source, target) else 2)
            if number == source:
                size += stages[number][edge.source].backward_sync_bytes.get(edge.target, 0.0)
            if number == target:
                size += stages[number][edge.target].forward_sync_bytes.get(edge.source, 0.0)
            forward[number] += size
            backward[number] += size
    for tensor in instance.tensors:
        ends = [stage_of[layer] for layer in tensor.layers]
        for number in range(min(ends), max(ends) + 1) if min(ends) != max(ends) else ():
            times = 1 if number in (min(ends), max(ends)) else 2
            forward[number] += times * tensor.forward_bytes
            backward[number] += times * tensor.backward_bytes
    return list(zip(forward, backward, strict=True))


def value_s(instance: Instance, stages: list[Chosen], degrees: list[tuple[int, int]], schedule: str) -> float | None:
    """None: over memory."""
    p, bandwidth, n = len(stages), instance.bandwidth_bytes_per_s, instance.microbatches
    times, passes = [], []
    for number, (stage, (d, _), (forward, backward)) in enumerate(
        zip(stages, degrees, moved_bytes(instance, stages), strict=True)
    ):
        y = -(-sum(d for d, _ in degrees[number:]) // d)
        if schedule != "2bw":
            y = n // d if schedule == "gpipe" else min(n // d, p - number)
        held = sum(x.activation_bytes * y + x.fixed_bytes + x.shared_bytes / d for x in stage.values())
        if held > instance.memory_bytes * (1 + 1e-9):
            return None
        weights = sum(x.weights_bytes for x in stage.values())
        work_s = sum(x.time_per_sample_s for x in stage.values())
        times.append((work_s + (forward + backward) / bandwidth) / d + 4 * (d - 1) / d * weights / (n * bandwidth))
        forward_s = sum(
            x.time_per_sample_s * (0.25 if x.recompute else 1 / 3) if x.forward_s is None else x.forward_s
            for x in stage.values()
        )
        sync_s = 4 * (d - 1) / d * weights / bandwidth
        passes.append((forward_s + forward / bandwidth, work_s - forward_s + backward / bandwidth, sync_s))
    return max(times) if schedule == "2bw" else simulated_batch_s(schedule, passes, n // degrees[0][0]) / n


def best_s(instance: Instance, schedule: str) -> float | None:
    found: list[float] = []
    n, devices = instance.microbatches, instance.devices
    pairs = [(d, t) for d in range(1, n + 1) if n % d == 0 for t in instance.degrees if d * t <= devices]
    for cut in runs(file_order(instance)):
        all_degrees = product(pairs, repeat=len(cut)) if schedule == "2bw" else ([pair] * len(cut) for pair in pairs)
        for degrees in all_degrees:
            if sum(d * t for d, t in degrees) > devices:
                continue
            if schedule == "2bw" and sum(d for d, _ in degrees) > min(n, devices):
                continue
            offered = [
                [
                    [x for x in instance.layer_by_id[layer].tmpcs.get(t, ()) if x.least_data_parallel_degree <= d]
                    for layer in stage
                ]
                for stage, (d, t) in zip(cut, degrees, strict=True)
            ]
            for choice in product(*(product(*of_stage) for of_stage in offered)):
                stages = [dict(zip(stage, tmpcs, strict=True)) for stage, tmpcs in zip(cut, choice, strict=True)]
                value = value_s(instance, stages, list(degrees), schedule)
                found += [] if value is None else [value]
    return min(found, default=None)


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", "1f1b", "gpipe"]))
def test_the_best_of_all_that_keep_the_order(schedule: str, few: bool) -> None:
    feasible = relayed = 0
    for seed in range(45 if few else 60):
        instance = random_instance(seed, most_layers=4, most_devices=4)
        expected = best_s(instance, schedule)
        solution = piper_ray.solve(instance, schedule=schedule, restrictions=KEEP, options=ONE_THREAD)
        if expected is None:
            assert solution.status is piper_ray.Status.INFEASIBLE
            continue
        feasible += 1
        assert solution.status is piper_ray.Status.OPTIMAL
        assert solution.plan is not None
        assert solution.plan.keeps_order
        assert solution.time_per_sample_s == pytest.approx(expected, rel=1e-9)
        found = piper_ray.evaluate(instance, solution.plan, schedule=schedule, restrictions=KEEP)
        assert found.time_per_sample_s == pytest.approx(expected, rel=1e-9)
        simulated = piper_ray.simulate(instance, solution.plan, schedule)
        if schedule != "2bw":
            assert simulated.time_per_sample_s == pytest.approx(expected, rel=1e-9)
        free = piper_ray.solve(instance, schedule=schedule, options=ONE_THREAD)
        assert (free.time_per_sample_s or 0.0) <= expected * (1 + 1e-9)
        relayed += (free.time_per_sample_s or 0.0) < expected * (1 - 1e-9)
    assert feasible >= 30
    assert relayed >= 1


def test_relays_by_hand() -> None:
    """Layers 0, 1, 2 of a second each; 3 bytes from 0 to 1, 2 from 0 to 2 over 1, and a tensor of all three."""
    layers = [Layer(v, f"layer {v}", {1: (Tmpc("x", 1.0),)}) for v in range(3)]
    edges = [Edge(0, 1, 3.0), Edge(0, 2, 2.0), Edge(1, 2, 0.0)]
    tensors = [Tensor((0, 1, 2), 1.0, 0.5)]
    instance = Instance(layers, edges, 3, 4, 1e9, 1.0, tensors=tensors)
    chain = in_order(instance)
    assert chain.edges == (Edge(0, 1, 5.0), Edge(1, 2, 2.0), Edge(0, 2, 0.0))
    assert chain.tensors == (Tensor((0, 1), 1.0, 0.5), Tensor((1, 2), 1.0, 0.5))
    plan = Plan(tuple(Stage((v,), 1, 1, {v: "x"}) for v in range(3)), keeps_order=True)
    found = piper_ray.evaluate(instance, plan)
    # Edges count twice, for both directions: 2 (3 + 2) + 1.5, then 2 (3 + 2 + 2) + 3 and 2 * 2 + 1.5.
    assert [stage.communication_s for stage in found.stages] == [11.5, 17.0, 5.5]
    free = piper_ray.evaluate(instance, Plan(plan.stages))
    assert [stage.communication_s for stage in free.stages] == [11.5, 7.5, 5.5]
    simulated = piper_ray.simulate(instance, plan, "1f1b")
    assert simulated.step_s > piper_ray.simulate(instance, Plan(plan.stages), "1f1b").step_s


def test_an_order_where_the_file_has_none() -> None:
    """Layer 1 stands before what it needs; the rest keeps the file's order."""
    layers = [Layer(v, "", {1: (Tmpc("x", 1.0),)}) for v in (1, 7, 3)]
    assert layers_in_order(Instance(layers, [Edge(3, 1, 0.0)], 1, 1, 1.0, 1.0)) == (7, 3, 1)
    assert layers_in_order(Instance(layers, [], 1, 1, 1.0, 1.0)) == (1, 7, 3)


@pytest.mark.long
def test_with_other_constraints() -> None:
    """One d and one t, and one recomputation for all layers: as good as the better of both settings."""
    for seed in range(20):
        instance = random_instance(seed, most_layers=5)
        rules = Restrictions(recompute="one-for-all", constraints=[KeepOrder(), SameDegrees()])
        settings = [rules.with_recompute(rule) for rule in (Recompute.NEVER, Recompute.ALWAYS)]
        values = [piper_ray.solve(instance, restrictions=x, options=ONE_THREAD).time_per_sample_s for x in settings]
        solution = piper_ray.solve(instance, restrictions=rules, options=ONE_THREAD)
        assert solution.time_per_sample_s == min((x for x in values if x is not None), default=None)
        if solution.plan is not None:
            piper_ray.evaluate(instance, solution.plan, restrictions=rules)


def test_a_plan_says_that_it_keeps_the_order_and_a_document_too() -> None:
    for seed in range(10):
        instance = random_instance(seed, most_layers=4)
        plan = piper_ray.solve(instance, restrictions=KEEP, options=ONE_THREAD).plan
        if plan is None:
            continue
        assert piper_ray.load_plan(plan.to_dict(), instance) == plan
        forgot = Plan(plan.stages)
        with pytest.raises(InvalidPlan, match="does not say that it keeps the layers' order"):
            piper_ray.evaluate(instance, forgot, restrictions=KEEP)


def test_a_plan_that_breaks_the_order_that_it_says_it_keeps() -> None:
    """What is wrong is told in the user's layers, once: edges of the chain are none of theirs."""
    layers = [Layer(v, "", {1: (Tmpc("x", 1.0),)}) for v in range(4)]
    edges = [Edge(u, v, 1.0) for u, v in ((0, 1), (0, 2), (1, 3), (2, 3))]
    instance = Instance(layers, edges, 4, 4, 1e9, 1.0)
    stages = tuple(Stage(cut, 1, 1, dict.fromkeys(cut, "x")) for cut in ((0, 2), (1, 3)))
    said = "layer 2 comes after layer 1 in the layers' order, but stands before it, in stage 1"
    for schedule in ("2bw", "1f1b"):
        piper_ray.simulate(instance, Plan(stages), schedule)
        for restrictions in (Restrictions(), KEEP):
            with pytest.raises(InvalidPlan) as broken:
                piper_ray.evaluate(
                    instance, Plan(stages, keeps_order=True), schedule=schedule, restrictions=restrictions
                )
            assert broken.value.violations == (said,)
        with pytest.raises(InvalidPlan) as broken:
            piper_ray.simulate(instance, Plan(stages, keeps_order=True), schedule)
        assert broken.value.violations == (said,)
