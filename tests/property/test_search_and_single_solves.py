"""The one search of ``plan`` against a solve of each mode by itself, at no gap: real models on small clusters."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle

import pytest

from piper_ray.engine.solve import solve
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.one_mode import OneMode
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import ScheduleName
from piper_ray.proposal.demand import PlanDemand
from piper_ray.proposal.propose import propose
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.simulate.run import simulate
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer

MODELS = ("llama3-8b", "Qwen3-0.6B", "gemma-3-4b", "gpt-oss-20b", "Qwen3-30B-A3B", "Qwen3-VL-8B")
CLUSTERS = (("A100-80", 1, 8), ("H100-SXM", 2, 8), ("L40S", 3, 4))
NAME = ScheduleName.ONE_F_ONE_B


def least_step_s(asked: PlanDemand) -> float:
    """Of all modes, each solved alone at no gap, with the optimizer's state on GPUs and in host memory; inf: none."""
    found_s = math.inf
    try:
        of_size = asked.estimated(asked.smallest)
    except UsageError:
        return found_s
    for instance in (of_size.instance, of_size.on_host.instance):
        rules = asked.restrictions(instance, NAME)
        rule = next(x for x in rules.constraints if isinstance(x, OneMode))
        for narrowed in rule.under_each(instance, rule.modes(instance)):
            one = solve(
                narrowed,
                restrictions=rules.without(OneMode),
                schedule=NAME,
                options=SolveOptions(gap=0.0, threads=1),
            )
            if one.plan is not None:
                found_s = min(found_s, simulate(narrowed, one.plan, one.schedule).step_s)
    return found_s


@pytest.mark.long
@pytest.mark.parametrize(("model", "cluster"), list(zip(MODELS, cycle(CLUSTERS), strict=False)))
def test_no_mode_by_itself_is_faster_and_none_is_below_the_bound(model: str, cluster: tuple[str, int, int]) -> None:
    (gpu, nodes, per_node), runtime = cluster, RUNTIMES[RuntimeName.MEGATRON]
    request = EstimateRequest(
        nodes=nodes, gpus_per_node=per_node, samples=1, batch=96, tokens=2048, offer=Offer(zero=ALL_REPLICAS)
    )
    asked = PlanDemand(read_model(model), load_hardware(), gpu, request, runtime, (NAME,))
    least_s = least_step_s(asked)
    try:
        found = propose(asked, threads=1)
    except InfeasibleError:
        assert least_s == math.inf
        return
    assert found.lower_s <= least_s * (1.0 + 1e-9)
    assert found.best.step_s == pytest.approx(least_s, rel=2e-4)
    without = replace(asked, request=replace(request, optimizer_on_host=False))
    if not found.best.on_host:
        assert propose(without, threads=1).best.step_s == pytest.approx(found.best.step_s, rel=2e-4)
