"""What is refused from the config: nothing that ran, nothing that has a plan, and by figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

import piper_ray
from piper_ray import Restrictions, ScheduleName, Status
from piper_ray.calibrate.layouts import NotExpressible, laid_out
from piper_ray.calibrate.runs import read_runs
from piper_ray.model.mode import ALL_REPLICAS, Sharding
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.estimate.refusals import reasons_against
from tests.data import DATA
from tests.lengths import long_after

HARDWARE = load_hardware()
MEGATRON, TITAN, TORCH = (RUNTIMES[RuntimeName(name)] for name in ("megatron", "torchtitan", "torch"))


def refused(model: str, nodes: int, per_node: int | None = None) -> tuple[str, ...]:
    request = EstimateRequest(nodes=nodes, gpus_per_node=per_node)
    return reasons_against(read_model(model), HARDWARE, "H100-SXM", request, MEGATRON)


def test_deepseek_on_two_nodes() -> None:
    """18 bytes for each of 671 G parameters."""
    (reason,) = refused("deepseek-v3", 2)
    assert "no layout that fits on 16 GPUs" in reason
    assert "alone take 11.18 TiB" in reason
    assert pytest.approx(11.18 * 2**40, rel=0.001) == 18 * 683e9  # with the predictor of training
    assert "it takes 20 nodes or more" in reason
    assert refused("deepseek-v3", 19)
    assert not refused("deepseek-v3", 20)


def test_nodes_whose_own_memory_would_hold_the_optimizer_s_state_are_fewer() -> None:
    """6 bytes for each of 671 G parameters on the GPUs, and 16 in nodes' memory of 1.8 TB."""
    for asked in (None, True):

        def reasons(nodes: int, on_host: bool | None = asked) -> tuple[str, ...]:
            request = EstimateRequest(nodes=nodes, offer=Offer(zero=ALL_REPLICAS), optimizer_on_host=on_host)
            return reasons_against(read_model("deepseek-v3"), HARDWARE, "H100-SXM", request, MEGATRON)

        assert any("it takes 7 nodes or more" in reason for reason in reasons(2))
        assert reasons(6)
        assert not reasons(7)


def test_host_memory_that_would_do_is_told() -> None:
    """Of 16 bytes for each of 117 G parameters."""

    def reasons(host_bytes: float | None) -> tuple[str, ...]:
        request = EstimateRequest(nodes=1, offer=Offer(zero=ALL_REPLICAS), host_memory_bytes=host_bytes)
        return reasons_against(read_model("gpt-oss-120b"), HARDWARE, "MI300X", request, MEGATRON)

    assert reasons(2e12) == ()
    assert "the optimizer's state takes 1.7 TiB of host memory" in reasons(None)[1]


def test_models_that_a_runtime_does_not_know() -> None:
    assert "several rows of blocks" in refused("clip-vit-l-14", 2)[0]
    assert len(refused("t5-11b", 1, 1)) == 2
    assert refused("gemma-3-27b", 2) == ()  # its tower goes with the embedding
    assert "it takes 12 nodes or more" in refused("Llama-4-Maverick", 4)[0]
    request = EstimateRequest(nodes=2)
    assert reasons_against(read_model("gemma-3-27b"), HARDWARE, "H100-SXM", request, TORCH) == ()


def test_shared_weights_need_less() -> None:
    request = EstimateRequest(nodes=12)
    model = read_model("llama3-405b")
    assert reasons_against(model, HARDWARE, "H100-SXM", request, MEGATRON)
    assert not reasons_against(model, HARDWARE, "H100-SXM", request, TITAN)
    assert not reasons_against(model, HARDWARE, "H100-SXM", replace(request, nodes=2, lora=8), TITAN)


def test_where_it_refuses_there_is_no_plan() -> None:
    """On the most nodes that it refuses, with all that ``plan`` offers."""
    model = "llama3-8b"
    most = next(nodes for nodes in count(1) if not refused(model, nodes + 1, 1))
    assert refused(model, most, 1)
    instance = piper_ray.estimate(model, "H100-SXM", nodes=most, gpus_per_node=1, zero="all", microbatch_size=1)
    rules = MEGATRON.restricted(Restrictions(), instance, ScheduleName.ONE_F_ONE_B, 1)
    assert piper_ray.solve(instance, restrictions=rules, threads=1).status is Status.INFEASIBLE


@pytest.mark.parametrize("name", long_after(0, ["memory", "published", "moe"]))
def test_nothing_is_refused_that_ran(name: str) -> None:
    seen = 0
    for run in read_runs(DATA / "runs" / f"{name}.json"):
        try:
            laid = laid_out(run, HARDWARE)
        except NotExpressible:
            continue
        if laid.stack.gpu.memory_bytes != HARDWARE.gpu(str(run.gpu)).memory_bytes:
            continue
        layout = laid.layout
        per_node = min(layout.devices, laid.stack.domain)
        request = EstimateRequest(
            nodes=-(-layout.devices // per_node), gpus_per_node=per_node, tokens=layout.tokens, batch=layout.batch
        )
        runtime = TITAN if layout.sharding is Sharding.WEIGHTS else MEGATRON
        found = reasons_against(laid.model, HARDWARE, str(run.gpu), request, runtime)
        assert [reason for reason in found if "no layout" in reason] == [], run.id
        seen += 1
    assert seen > 50
