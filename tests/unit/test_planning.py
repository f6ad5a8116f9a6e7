"""From traced stages to a plan, against trying every choice of TMPCs for each stage."""

from __future__ import annotations

from contextlib import closing
from fractions import Fraction

import pytest

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.knapsack import INFEASIBLE, TOO_HARD, least_cost
from piper_ray.engine.lattice.contraction import Contraction, without_contraction
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.engine.search import planning
from piper_ray.engine.search.neighbourhood import order_through
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.tables.problem import Problem
from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from tests.brute_force import brute_force, least_stage_time
from tests.instances import build, random_instance, tmpc, two_towers
from tests.lengths import long_after
from tests.solver_support import Tables, tables


def traced(problem: Problem, threshold_s: float) -> tuple[TracedStage, ...]:
    with closing(LocalBackend(1)) as backend:
        outcome = evaluate_threshold(problem, backend, threshold_s)
    assert outcome.feasible
    return outcome.stages


def layer_ids(instance: Instance, whole: Tables, stage: TracedStage) -> tuple[int, ...]:
    """Of a traced stage, with those that are merged into its vertices; in file order."""
    bits, groups = whole.lattice.arrays.bits, whole.contraction.members(instance)
    kept = [whole.graph.layer_ids[v] for v in members(bits[stage.outer] & ~bits[stage.inner])]
    merged = {layer for vertex in kept for layer in groups[vertex]}
    return tuple(layer.id for layer in instance.layers if layer.id in merged)


@pytest.mark.parametrize("contraction", [None, without_contraction()], ids=["contracted", "as it is"])
@pytest.mark.parametrize("seed", long_after(4, range(14)))
def test_each_stage_runs_as_fast_as_its_memory_allows(seed: int, contraction: Contraction | None) -> None:
    instance = random_instance(seed, most_layers=4, most_devices=8)
    best = brute_force(instance)
    if best is None:
        return
    threshold_s = 2.0 * float(best.time_per_sample_s)
    whole = tables(instance, contraction=contraction)
    stages = traced(whole.problem, threshold_s)
    plan = Planning(instance, whole.contraction).plan(whole.problem, stages)
    evaluation = evaluate(instance, plan)
    assert len(plan.stages) == len(stages)
    behind = 0
    for found, stage, value in reversed(list(zip(plan.stages, stages, evaluation.stages, strict=True))):
        assert found.layers == layer_ids(instance, whole, stage)
        assert found.data_parallel_degree == stage.data_parallel_degree
        assert stage.later_sum == behind
        behind += stage.data_parallel_degree
        y = -(-behind // stage.data_parallel_degree)
        least = least_stage_time(instance, found.layers, found.data_parallel_degree, found.tensor_parallel_degree, y)
        assert least is not None
        assert value.time_s == pytest.approx(float(least), rel=1e-9, abs=1e-12)
        assert least <= Fraction(threshold_s) * (1 + Fraction(1e-9))


def test_merged_layers_run_as_they_cost_nothing() -> None:
    """A free layer at an end has its free TMPC, in whichever stage it ends, whatever else it could run."""
    free = {1: [tmpc(0), tmpc(3, name="activation recomp")]}
    costly = {1: [tmpc(6, 1, 2, 2), tmpc(8, 1, 1, 2, "activation recomp")]}
    instance = build({0: free, 1: costly, 2: costly, 3: free}, {(0, 1): 0, (1, 2): 1, (2, 3): 0}, devices=2)
    for recompute in (Recompute.AUTO, Recompute.NEVER):
        whole = tables(instance, Restrictions(recompute=recompute))
        assert whole.graph.size == 2
        plan = Planning(instance, whole.contraction).plan(whole.problem, traced(whole.problem, 100.0))
        assert {layer for stage in plan.stages for layer in stage.layers} == {0, 1, 2, 3}
        for stage in plan.stages:
            assert all(stage.tmpc_ids[layer] == "vanilla" for layer in stage.layers)


def test_a_planning_makes_each_plan_as_if_it_were_its_first() -> None:
    """Of several thresholds, which share stages, and of problems whose stages have the same numbers."""
    for seed in range(10):
        instance = random_instance(seed, most_layers=5, most_devices=8)
        best = brute_force(instance)
        if best is None:
            continue
        whole = tables(instance)
        shared = Planning(instance, whole.contraction)
        roomy = whole.problem.with_cluster(whole.problem.cluster._replace(memory_bytes=1e12))
        for factor in (4.0, 2.0, 1.5, 1.0, 1.0):
            stages = traced(whole.problem, factor * float(best.time_per_sample_s) + 1e-9)
            for problem in (whole.problem, roomy):
                alone = Planning(instance, whole.contraction).plan(problem, stages)
                assert shared.plan(problem, stages) == alone


def test_a_plan_that_is_known_keeps_its_value() -> None:
    instance = two_towers(2, devices=4, memory_bytes=60.0)
    whole = tables(instance)
    shared, stages = Planning(instance, whole.contraction), traced(whole.problem, 30.0)
    known = shared.valued(whole.problem, stages)
    assert shared.chose_best(whole.problem, stages)
    assert shared.valued(whole.problem, stages, known) is known
    other = ValuedPlan(Plan(()), 1.0)
    assert shared.valued(whole.problem, stages, other) == known


def test_the_choice_that_was_found_does_where_the_best_is_too_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = two_towers(2, devices=4, memory_bytes=60.0)
    whole = tables(instance)
    stages = traced(whole.problem, 30.0)
    expected = Planning(instance, whole.contraction).plan(whole.problem, stages)
    asked = []

    def too_hard(*arguments: object) -> float:
        budget_s, any_within = arguments[2:4]
        asked.append(budget_s)
        return least_cost(*arguments) if any_within else TOO_HARD  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "least_cost", too_hard)
    found = Planning(instance, whole.contraction).plan(whole.problem, stages)
    assert [stage.layers for stage in found.stages] == [stage.layers for stage in expected.stages]
    at_once = Planning(instance, whole.contraction)
    assert at_once.plan(whole.problem, stages) == at_once.plan(whole.problem, stages)
    assert not at_once.chose_best(whole.problem, stages)
    assert len(asked) == 6 * len(stages), "a choice within another budget may be another"
    del asked[2 * len(stages) :]
    assert asked[1::2] == [stage.budget_s for stage in stages]
    for stage, value in zip(stages, evaluate(instance, found).stages, strict=True):
        assert value.time_s * stage.data_parallel_degree <= stage.budget_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("answer", "fault", "text"),
    [
        (INFEASIBLE, LimitError, "not exact enough: a stage that is to fit does not"),
        (TOO_HARD, AssertionError, "a stage of the plan has no choice"),
    ],
)
def test_a_stage_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, answer: float, fault: type[Exception], text: str
) -> None:
    """Sums over layers that lost the small figures say that it does; else it is a fault of ours."""
    instance = two_towers(1, memory_bytes=60.0)
    whole = tables(instance)
    stages = traced(whole.problem, 30.0)
    monkeypatch.setattr(planning, "least_cost", lambda *_: answer)
    with pytest.raises(fault, match=text):
        Planning(instance, whole.contraction).plan(whole.problem, stages)


def test_a_chain_passes_between_all_stages() -> None:
    several = 0
    for seed in range(20):
        instance = random_instance(seed, most_layers=5, most_tmpcs=1, density=0.3).replace(devices=8, memory_bytes=1e6)
        best = brute_force(instance)
        if best is None or best.time_per_sample_s == 0:
            continue
        whole = tables(instance)
        stages = traced(whole.problem, float(best.time_per_sample_s))
        several += len(stages) > 2
        order = order_through(whole.problem, stages)
        assert sorted(order) == list(range(whole.graph.size))
        place = {v: at for at, v in enumerate(order)}
        assert all(place[head] < place[tail] for tail, head, _ in whole.graph.edges), "successors first"
        passed = {tuple(row) for row in chain_lattice(whole.graph, order).arrays.bits.tolist()}
        assert passed >= {tuple(whole.lattice.arrays.bits[stage.outer].tolist()) for stage in stages}
    assert several > 0
