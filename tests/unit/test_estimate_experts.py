"""How tokens reach experts, what that takes, and what may be said of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from piper_ray.calibrate.layouts import laid_out
from piper_ray.calibrate.measurements import simulated
from piper_ray.calibrate.runs import PublishedRun, read_runs
from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.build import EstimateRequest, estimate
from piper_ray.workloads.estimate.doubt import constants_in_use, doubt_of, load_doubt
from piper_ray.workloads.estimate.exchanges import Group, dispatch_s, dispatcher_for, dispatcher_word, moved_bytes
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.layout import priced
from piper_ray.workloads.estimate.modes import LayerMode, Offer
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.roofline import backward_s, summed_gradients_s
from piper_ray.workloads.estimate.software import (
    Overlap,
    Precision,
    Stack,
    TokenDispatcher,
    load_software,
    software_named,
    stack_of,
)
from tests.data import DATA
from tests.estimate_support import estimated, kind_of, model_of

HARDWARE = load_hardware()
MIXTURE = model_of(
    "mixtral", tokens=1024, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    intermediate_size=4096, vocab_size=1000, num_local_experts=32,
)  # fmt: skip


def stack(**changes: object) -> Stack:
    software = software_named("megatron-core").model_copy(update=changes)
    return stack_of(HARDWARE.gpu("H100-SXM"), software, Precision.BF16, 8)


def nodes_reached(nodes: int, copies: int) -> float:
    """Of the other nodes, over all ways in which a token's copies may go to nodes: how many get one, on average."""
    ways = [len(set(way) - {0}) for way in product(range(nodes), repeat=copies)]
    return sum(ways) / len(ways)


@pytest.mark.parametrize(("nodes", "copies"), [(2, 1), (2, 4), (4, 3), (3, 5)])
def test_a_token_crosses_the_network_once_for_each_node_that_it_goes_to(nodes: int, copies: int) -> None:
    whole = 1000.0 * copies
    near, far = moved_bytes(whole, copies, Group(8 * nodes), 8, TokenDispatcher.ONCE_PER_NODE)
    assert far == pytest.approx(1000.0 * nodes_reached(nodes, copies))
    copied = moved_bytes(whole, copies, Group(8 * nodes), 8, TokenDispatcher.ALL_TO_ALL)
    assert copied == pytest.approx((whole * 7 / (8 * nodes), whole * (nodes - 1) / nodes))
    assert near == pytest.approx(sum(copied))
    gathered = moved_bytes(whole, copies, Group(8 * nodes), 8, TokenDispatcher.ALL_GATHER)
    assert gathered == pytest.approx((7000.0, 1000.0 * 8 * (nodes - 1)))


def test_within_a_node_all_copies_go_over_its_links() -> None:
    for how in (TokenDispatcher.ALL_TO_ALL, TokenDispatcher.ONCE_PER_NODE):
        assert moved_bytes(800.0, 2, Group(8), 8, how) == (700.0, 0.0)
    assert dispatch_s(800.0, 2, Group(1), stack()) == 0.0


def test_the_dispatcher_is_the_one_that_is_asked_for_or_the_usual_one() -> None:
    usual = stack()
    assert dispatcher_for(8, usual) is TokenDispatcher.ALL_TO_ALL
    assert dispatcher_for(16, usual) is TokenDispatcher.ONCE_PER_NODE
    assert dispatcher_for(8, replace(usual, domain=72)) is TokenDispatcher.ONCE_PER_NODE
    on_pcie = replace(usual, gpu=usual.gpu.model_copy(update={"link": "PCIe 4"}))
    assert dispatcher_for(16, on_pcie) is TokenDispatcher.ALL_TO_ALL
    assert (dispatcher_word(on_pcie), dispatcher_word(usual)) == ("all-to-all", "")
    assert dispatcher_for(8, replace(usual, software=software_named("hai-llm"))) is TokenDispatcher.ONCE_PER_NODE
    times = [
        dispatch_s(8e8, 8, Group(32), stack(dispatcher=how))
        for how in (TokenDispatcher.ONCE_PER_NODE, TokenDispatcher.ALL_TO_ALL, TokenDispatcher.ALL_GATHER)
    ]
    assert times[0] < times[1] < times[2]


def exposed_s(**changes: object) -> float:
    asked = EstimateRequest(nodes=4, offer=Offer(experts=(32,)))
    found = estimate(MIXTURE, HARDWARE, "H100-SXM", replace(asked, **changes))  # type: ignore[arg-type]
    return found.costs(kind_of(found), LayerMode(degree=1, experts=32)).passes.talk.forward_s


def test_what_is_said_of_experts_changes_what_they_take() -> None:
    usual = exposed_s()
    assert exposed_s(overlaps=("experts",)) == pytest.approx(0.1 * usual)
    assert exposed_s(overlaps=("tensor", "context")) == usual
    assert exposed_s(dispatcher="all-to-all") > usual
    assert exposed_s(expert_imbalance=1.0) < usual
    for wrong in ({"overlaps": ("expert",)}, {"dispatcher": "post"}):
        with pytest.raises(UsageError, match="expected one of"):
            exposed_s(**wrong)
    with pytest.raises(UsageError, match="--expert-imbalance inf: expected at most 100,000"):
        exposed_s(expert_imbalance=math.inf)


def idle_s(experts: int = 8, **changes: object) -> float:
    """What GPUs wait for the host in a layer's passes of few tokens."""
    asked = EstimateRequest(nodes=4, tokens=64, offer=Offer(experts=(experts,)))
    found = estimate(MIXTURE, HARDWARE, "H100-SXM", replace(asked, **changes))  # type: ignore[arg-type]
    costs = found.costs(kind_of(found), LayerMode(degree=1, experts=experts))
    return costs.passes.idle_forward_s + costs.passes.idle_backward_s


@pytest.mark.long
def test_the_host_waits_less_for_what_graphs_capture_and_more_where_exchanges_overlap() -> None:
    """It launches each expert's product five times as often where passes are launched piece by piece."""
    usual = idle_s()
    routing, all_else = idle_s(graphs=("moe_router",)), idle_s(graphs=("attn",))
    assert max(routing, all_else) < usual
    assert idle_s(graphs=("attn", "moe_router")) < min(routing, all_else)
    assert idle_s(graphs=("full_iteration",)) == 0.0
    overlapped = idle_s(overlaps=("experts",))
    assert overlapped > usual > idle_s(experts=32)
    assert overlapped - usual > 2.0 * (idle_s(experts=32, overlaps=("experts",)) - idle_s(experts=32))
    with pytest.raises(UsageError, match="expected one of attn, moe_router, full_iteration"):
        idle_s(graphs=("attention",))


def test_sorting_tokens_does_not_hide_beside_passes() -> None:
    asked = EstimateRequest(nodes=4, offer=Offer(experts=(8,)), overlaps=("experts",), expert_imbalance=1.0)
    found = estimate(MIXTURE, HARDWARE, "H100-SXM", asked)
    exposed = found.costs(kind_of(found), LayerMode(degree=1, experts=8)).passes.talk.forward_s
    assert exposed > 1024 * 2 * HARDWARE.gpu("H100-SXM").sorting_s > 0.5 * exposed


@pytest.mark.parametrize(
    ("run", "degrees", "least"),
    [
        ("modelzoo-h100-q235-ep32-overlap", (8, 16), 32),
        ("bridge2602-h100-q235-fp8", (8, 16), 32),
        ("bridge2602-gb200-q235-fp8", (8, 16), 32),
        ("bridge2509-h100-dsv3-fp8", (8, 16, 32), 64),
        ("bridge2602-gb200-dsv3-fp8", (8, 16, 32), 64),
        ("bridge2602-gb200-oss", (8,), 64),
        ("bridge2602-b200-oss", (16, 32, 64), 8),
    ],
)
def test_experts_are_spread_as_published_runs_spread_them(run: str, degrees: tuple[int, ...], least: int) -> None:
    """What a release of Megatron-Bridge takes, or its next one (gpt-oss on B200), is the fastest of such degrees."""
    told = next(one for one in read_runs(DATA / "runs" / "moe.json") if one.id == run)
    times = {ranks: simulated_s(told.model_copy(update={"ep": ranks})) for ranks in (*degrees, least)}
    assert min(times, key=times.__getitem__) == least


def test_four_layouts_of_one_mixture_are_in_the_order_of_their_measured_steps() -> None:
    measured = [
        run for run in read_runs(DATA / "runs" / "moe.json") if run.id.startswith("modelzoo") and run.seq == 4096
    ]
    assert len(measured) == 4
    assert sorted(measured, key=simulated_s) == sorted(measured, key=lambda run: run.step_s or 0.0)


def simulated_s(run: PublishedRun) -> float:
    laid = laid_out(run, HARDWARE)
    return simulated(priced(laid.model, laid.stack, HARDWARE.training, laid.layout)).step_s


def test_tensor_exchanges_hide_as_far_as_software_is_told_and_never_less() -> None:
    core = software_named("megatron-core")
    told = core.overlapping([Overlap.TENSOR])
    assert told.forward_overlap == core.asked_tensor_overlap > core.forward_overlap
    assert core.overlapping([]) == core
    titan = software_named("torchtitan")
    assert (titan.forward_overlap, titan.overlapping([Overlap.TENSOR]).forward_overlap) == (0.0, 0.5)


def test_sums_of_experts_gradients_go_through_memory_once_for_each_microbatch() -> None:
    found = estimated(MIXTURE, "H100-SXM")
    kind: LayerKind = kind_of(found)
    mode, of = LayerMode(degree=1, experts=8), found.setting.stack
    experts = [operator for operator in kind.operators if operator.routed]
    summed_s = sum(summed_gradients_s(operator, kind, mode, of) for operator in experts)
    assert summed_s == pytest.approx(3 * 1024 * 4096 * 4 * 8 / (3350e9 * 0.85))
    assert all(
        backward_s(operator, kind, mode, of) > summed_gradients_s(operator, kind, mode, of) for operator in experts
    )
    others = [operator for operator in kind.operators if not operator.routed]
    assert not any(summed_gradients_s(operator, kind, mode, of) for operator in others)


def test_the_slowest_of_many_gpus_and_a_full_node_count() -> None:
    few, many = stack(), replace(stack(), devices=1024)
    assert few.efficiency == replace(few, devices=256).efficiency
    assert many.efficiency == pytest.approx(few.efficiency / (1 + 2 * few.software.straggling))
    assert few.launch_s(8) == pytest.approx(few.software.full_node_host * few.launch_s(4))


def test_what_hardly_any_run_backs_is_said() -> None:
    sure = doubt_of(stack(), False, constants_in_use(stack(), experts=False, scans=False, tensor=True, sharded=False))
    assert not sure.few
    least_s, most_s = sure.range_s(10.0)
    assert least_s < 10.0 < most_s
    rare = stack_of(load_hardware().gpu("MI300X"), software_named("megascale"), Precision.BF16, 8)
    odd = doubt_of(rare, True, constants_in_use(rare, experts=True, scans=False, tensor=True, sharded=False))
    constants = ("matrix_fraction 0.47", "link_fraction 0.7", "forward_overlap 0.7", "backward_overlap 0.7")
    named = ("AMD Instinct MI300X 192 GB", "MegaScale", *(f"the constant {one}" for one in constants))
    assert odd.few == dict.fromkeys(named, 0)
    assert odd.lines[1].startswith("no measured run backs AMD Instinct MI300X 192 GB, MegaScale, the constant")
    assert set(load_doubt().software) <= set(load_software())
