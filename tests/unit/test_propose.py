"""What is proposed for a model: the best over microbatch sizes and schedules, with the figures that people ask for."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

import piper_ray.report.proposal as report_of_plans
from piper_ray.cli.interrupts import listening
from piper_ray.cli.plan_files import write_page
from piper_ray.cost.schedules import chunk_schedules
from piper_ray.engine.chunks.tasks import ChunkProblem
from piper_ray.engine.solve import solve
from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InfeasibleError
from piper_ray.model.events import DegreesSearched, EvaluationFinished, Event
from piper_ray.model.figures import held_text, plural, rounded, rounded_down, time_text
from piper_ray.model.headroom import Headroom
from piper_ray.model.instance import Tmpc
from piper_ray.model.mode import ALL_REPLICAS, Mode, Recomputation, Sharding
from piper_ray.model.one_mode import tmpcs_under
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import in_order
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.stop import Stop, StopSearch
from piper_ray.proposal.cells import LISTED, CellBegun, Cells, CellSearch, Closing, Extent, cells_of
from piper_ray.proposal.demand import PlanDemand, Proposed, figures_of
from piper_ray.proposal.each_pass import counts_on_one_sum
from piper_ray.proposal.layout_words import _common_recomputation, differences, layout_words
from piper_ray.proposal.offers import with_offers
from piper_ray.proposal.propose import FoundPlans, Help, Theirs, propose, what_would_help
from piper_ray.report.proposal import (
    AskedOfPlan,
    against_lines,
    change_text,
    gap_text,
    listed_plans,
    print_against,
    print_plan,
    proof_line,
    settling_lines,
    unfinished_text,
    verbose_lines,
)
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.build import EstimateRequest, estimate
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer

TOKENS, BATCH, HIDDEN, LAYERS, VOCABULARY = 512, 16, 1024, 6, 8192

CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": TOKENS,
}


def demand(folder: Path, samples: int | None = None, hidden: int = HIDDEN, gpu: str = "A100-80") -> PlanDemand:
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, "hidden_size": hidden}))
    request = EstimateRequest(nodes=1, gpus_per_node=4, tokens=TOKENS, samples=samples, batch=BATCH)
    megatron = RUNTIMES[RuntimeName.MEGATRON]
    return PlanDemand(read_model(str(config)), load_hardware(None), gpu, request, megatron, (ScheduleName.ONE_F_ONE_B,))


@pytest.fixture(scope="module")
def proposal(tmp_path_factory: pytest.TempPathFactory) -> FoundPlans:
    return propose(demand(tmp_path_factory.mktemp("model")))


def test_all_sensible_sizes_are_tried(proposal: FoundPlans) -> None:
    assert list(proposal.demand.microbatch_sizes()) == [1, 2, 4, 8, 16]
    assert {cell.samples for cell in proposal.cells.cells} == {1, 2, 4, 8, 16}
    of_96 = replace(proposal.demand, request=replace(proposal.demand.request, batch=96))
    assert list(of_96.microbatch_sizes()) == [1, 2, 3, 4, 6, 8, 12, 16, 32]
    assert [one.step_s for one in proposal.found] == sorted(one.step_s for one in proposal.found)
    assert len(proposal.found) >= 3


def test_plans_that_differ_in_sharding_over_one_replica_alone_are_the_same(proposal: FoundPlans) -> None:
    for one in proposal.found:
        offer = replace(proposal.demand.request.offer, zero=ALL_REPLICAS)
        request = replace(proposal.demand.request, offer=offer)
        sharded = replace(proposal.demand, request=request).estimated(one.samples)
        stages = [
            replace(stage, tmpc_ids={layer: f"{own}+zero" for layer, own in stage.tmpc_ids.items()})
            for stage in one.plan.stages
        ]
        other = replace(one, estimate=sharded, plan=replace(one.plan, stages=tuple(stages)))
        assert one.is_same(other) == (stages[0].data_parallel_degree == 1)
    assert {one.plan.stages[0].data_parallel_degree == 1 for one in proposal.found} == {True, False}


def test_a_plan_of_one_replica_is_written_as_a_launch_has_it(tmp_path: Path) -> None:
    """Not sharded, as a launch file of it is read back."""
    asked = demand(tmp_path)
    shared = replace(asked, request=replace(asked.request, batch=1, offer=Offer(zero=ALL_REPLICAS)))
    found = propose(shared).found
    assert found
    for one in found:
        for stage in one.plan.stages:
            assert stage.data_parallel_degree == 1
            assert not any("zero" in tmpc_id for tmpc_id in stage.tmpc_ids.values())
        assert one.as_run(asked.step) is one


def alone_s(asked: PlanDemand) -> float:
    """The best step of a solve of each cell at no gap. No cell's bound is above the cell's own."""
    found: list[float] = []
    for cell in cells_of(asked, asked.estimates()[0]).cells:
        solution = solve(
            cell.setting.instance, restrictions=cell.restrictions, schedule=cell.schedule, step=asked.step, gap=0.0
        )
        assert cell.lower_s <= solution.lower_bound_s * cell.microbatches * (1.0 + 1e-9)
        if solution.time_per_sample_s is not None:
            found.append(solution.time_per_sample_s * cell.microbatches)
    return min(found)


@pytest.mark.long
def test_one_search_finds_what_a_solve_of_each_cell_gives(tmp_path: Path) -> None:
    """At no gap, with chunks too, the best plan, its bound, and the order of the plans that are listed."""
    asked = replace(demand(tmp_path), schedules=(ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED))
    asked = replace(asked, request=replace(asked.request, offer=Offer(zero=ALL_REPLICAS, contexts=(1, 2))))
    found, least_s = propose(asked), alone_s(asked)
    assert found.best.step_s <= least_s * (1.0 + 2e-4)
    assert found.lower_s <= least_s
    assert found.gap < 0.01
    assert found.cells.count >= len(found.cells.cells) == len({cell.text for cell in found.cells.cells})


EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 512,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "gpu", "nodes", "node"),
    [(EXPERTS, "L40S", 3, 1), (LATENT, "RTX-4090", 2, 3), ({"hidden_size": 8192}, "MI300X", 1, 2)],
    ids=["experts", "latent", "wide"],
)
def test_one_search_finds_what_solves_give_on_odd_clusters(
    tmp_path: Path, keys: Mapping[str, object], gpu: str, nodes: int, node: int
) -> None:
    (tmp_path / "model.json").write_text(json.dumps({**CONFIG, **keys}))
    asked = replace(demand(tmp_path, 2, gpu=gpu), model=read_model(str(tmp_path / "model.json")))
    request = replace(asked.request, nodes=nodes, gpus_per_node=node, batch=24, offer=Offer(zero=ALL_REPLICAS))
    request = with_offers(request, asked.model, asked.runtime, node, (1,), None)
    asked = replace(asked, request=request)
    found, least_s = propose(asked), alone_s(asked)
    assert least_s * (1.0 - 1e-9) <= found.best.step_s <= least_s * (1.0 + 1e-4)
    assert found.lower_s <= least_s * (1.0 + 1e-9)


def test_each_cell_says_how_it_was_closed(proposal: FoundPlans) -> None:
    best_s = proposal.best.step_s
    assert {cell.closing for cell in proposal.cells.cells} <= {Closing.BOUND, Closing.SEARCHED, Closing.NO_PLAN}
    assert proposal.lower_s == min(best_s, *(cell.lower_s for cell in proposal.cells.cells))
    for cell in proposal.cells.cells:
        assert cell.lower_s >= proposal.lower_s
        assert (cell.closing is Closing.NO_PLAN) == (cell.lower_s == math.inf)
        assert cell.found is None or cell.lower_s <= cell.found.step_s * (1.0 + 1e-9)
        if cell.closing is Closing.BOUND:
            assert cell.lower_s >= proposal.found[LISTED - 1].step_s or cell.lower_s >= 1.25 * best_s


def test_best_is_what_each_size_by_itself_gives(proposal: FoundPlans, tmp_path: Path) -> None:
    for one in proposal.found:
        of_size = propose(demand(tmp_path, one.samples))
        assert of_size.best.step_s <= one.step_s * (1.0 + 1e-9)
    assert of_size.best.step_s >= proposal.best.step_s


@pytest.mark.parametrize("name", ["memory_bytes", "links"])
def test_known_plans_begin_a_search_on_another_cluster(proposal: FoundPlans, name: str) -> None:
    """And it comes to what a search without them comes to."""
    cluster = proposal.best.instance.cluster
    slower = tuple(replace(x, bandwidth_bytes_per_s=0.5 * x.bandwidth_bytes_per_s) for x in cluster.links)
    changed = replace(cluster, **{name: 0.7 * cluster.memory_bytes if name == "memory_bytes" else slower})  # type: ignore[arg-type]
    cells = replace(proposal.cells, cells=tuple(proposal.cells.on(lambda _: changed)))
    alone, helped = (
        CellSearch(proposal.demand, cells.cells),
        CellSearch(proposal.demand, cells.on(lambda _: changed), extent=Extent(listed=1)),
    )
    alone.run()
    helped.run()
    assert helped.ledger.upper_s == alone.ledger.upper_s >= proposal.best.step_s * (1.0 - 1e-9)


def test_passes_that_are_left_go_to_the_least_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_LEAST_PASSES": 1_000,
        "_FURTHER_PASSES": 2_000,
        "FURTHER_GAP": 0,
        "_STUCK_SHARE": 0,
    }.items():
        monkeypatch.setattr(f"piper_ray.proposal.cells.{name}", value)
    asked = replace(demand(tmp_path, 1), schedules=(ScheduleName.INTERLEAVED,), headroom=Headroom(share=0.985))

    def searched(passes: int) -> tuple[CellSearch, list[int]]:
        begun: list[int] = []

        def watch(event: CellBegun | Event) -> None:
            if isinstance(event, CellBegun):
                begun.append(event.number)

        search = CellSearch(
            asked, cells_of(asked, asked.estimates()[0]).cells, watch=watch, extent=Extent(passes=passes)
        )
        search.run()
        return search, begun

    (few, once), (many, often) = searched(0), searched(10**9)
    assert len(once) == len(set(once)) < len(often)
    assert few.ledger.lower_s < many.ledger.lower_s <= many.ledger.upper_s <= few.ledger.upper_s
    assert many.ledger.lower_s >= many.ledger.upper_s * 0.99
    assert len(many.found) <= sum(cell.found is not None for cell in many.cells)
    monkeypatch.setattr("piper_ray.proposal.cells._STUCK_SHARE", 2.0)
    stuck, begun = searched(10**9)
    assert len(begun) == len(once) + 1 < len(often), "a cell gets no more once its bound hardly rises"
    assert stuck.ledger.lower_s < many.ledger.lower_s


def test_no_clock_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that leaps by an hour at each look changes nothing, as a busy machine does not."""
    asked = replace(demand(tmp_path, 4), schedules=(ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED))
    before = propose(asked)
    hours = count(0.0, 3600.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(hours))
    found = propose(asked)
    assert [(one.step_s, one.plan) for one in found.found] == [(one.step_s, one.plan) for one in before.found]
    assert [cell.closing for cell in found.cells.cells] == [cell.closing for cell in before.cells.cells]
    assert found.lower_s == before.lower_s


def test_utilisation_is_of_the_products_of_a_step(proposal: FoundPlans) -> None:
    """6 FLOP a token for each parameter of the layers and the head; attention's products under a causal mask."""
    parameters = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * 2816) + HIDDEN * VOCABULARY
    attention = LAYERS * 6 * TOKENS * HIDDEN
    flop = BATCH * TOKENS * (6 * parameters + attention)
    figures = figures_of(proposal.best, tokens=1e9, price_per_hour=2.0)
    peak = figures.devices * 312e12 * figures.step_s
    assert figures.mfu == pytest.approx(flop / peak, rel=0.01)
    assert figures.hfu >= figures.mfu
    assert figures.tokens_per_s == pytest.approx(BATCH * TOKENS / figures.step_s)
    assert figures.days == pytest.approx(1e9 / (BATCH * TOKENS) * figures.step_s / 86400)
    assert figures.days is not None
    assert figures.cost == pytest.approx(figures.days * 24 * 4 * 2.0)


def test_more_never_hurts(proposal: FoundPlans) -> None:
    less, more, faster = what_would_help(proposal)
    assert more.found is not None
    assert faster.found is not None
    assert less.found is None or less.found.step_s >= proposal.best.step_s * (1.0 - 1e-4)
    assert max(more.found.step_s, faster.found.step_s) <= proposal.best.step_s * (1.0 + 1e-4)


@pytest.mark.long
def test_devices_that_a_batch_does_not_divide_among_are_told(tmp_path: Path) -> None:
    """Of 3 devices 2 are used where no d that divides the batch is 3, with one rank; 15 samples or 18 use all."""
    tied = tmp_path / "config.json"
    tied.write_text(json.dumps({**CONFIG, "tie_word_embeddings": True, "max_position_embeddings": TOKENS}))
    request = EstimateRequest(nodes=1, gpus_per_node=3, tokens=TOKENS, samples=1, batch=64)
    titan = RUNTIMES[RuntimeName.TORCHTITAN]
    asked = PlanDemand(
        read_model(str(tied)), load_hardware(None), "A100-80", request, titan, (ScheduleName.ONE_F_ONE_B,)
    )
    found = propose(asked)
    assert found.best.idle_devices == 1
    figures = figures_of(found.best)
    assert figures.mfu == pytest.approx(found.best.estimate.model_flop / (3 * 312e12 * figures.step_s))
    assert figures.tokens_per_s_per_device == pytest.approx(64 * TOKENS / figures.step_s / 3)
    batch = list(what_would_help(found))[-1]
    assert batch.what == "a batch of 63"
    assert batch.found is not None
    assert batch.found.step_s / 63 < 0.8 * found.best.step_s / 64
    text = screen(found, [batch])
    assert "idle      1 of 3 GPUs: a plan uses DP x TP x CP x PP of them; DP divides the 64 microbatches," in text
    gain = change_text(63 / batch.found.step_s * found.best.step_s / 64 - 1.0)
    assert f"a batch of 63 uses all 3 GPUs: {gain} tokens/s" in text
    assert gain.startswith("+")


def screen(found: FoundPlans, helps: Iterable[Help] = (), others: Mapping[str, Proposed | None] | None = None) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    print_plan(console, found, helps, AskedOfPlan(others=others or {}))
    return console.export_text()


def test_the_screen_fits_and_says_each_change_with_its_sign(proposal: FoundPlans) -> None:
    best = proposal.best
    slower = max(proposal.found, key=lambda one: one.step_s)
    faster = replace(best, simulation=replace(best.simulation, step_s=0.5 * best.step_s))
    helps = [Help("8 % less memory", slower), Help("links of twice the rate", best), Help("25 % more memory", None)]
    helps += [Help(f"{name} in place of bf16", one, name) for name, one in (("fp8", faster), ("fp16", best))]
    helps += [Help("a batch of 32", replace(best, samples=2 * best.samples))]
    text = screen(proposal, helps, {"fp16": slower})
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    change = change_text(slower.step_s / best.step_s - 1.0)
    assert change.startswith("+")
    assert f"with 8 % less memory: step {change}" in lines
    assert "with links of twice the rate: step the same" in lines
    assert "with 25 % more memory: no plan fits" in lines
    assert "with a batch of 32: +100 % tokens/s" in lines  # nothing of GPUs, as none is idle
    assert (
        f"in fp8 {time_text(faster.step_s, 3)} a step, {change_text(faster.step_s / best.step_s - 1.0)}: not chosen, "
        "because it changes the training (--precision fp8)"
    ) in lines
    assert f"in fp16 {time_text(best.step_s, 3)} a step, no faster" in lines
    words = layout_words(best)
    assert f"layout    {words.text}" in lines
    stage = best.plan.stages[0]
    assert (words.data, words.tensor * words.context) == (stage.data_parallel_degree, stage.tensor_parallel_degree)
    assert words.pipeline == len(best.plan.stages)
    assert f"gap {gap_text(proposal.gap)}" in text
    assert sum(line.endswith("the plan") for line in lines) == 1
    assert not re.search(r"\d\.\d\d\d", text), "four digits or more"


def test_plans_that_differ_only_in_recomputation_are_listed_where_they_leave_more_free(proposal: FoundPlans) -> None:
    def that_holds(share: float) -> Proposed:
        ranks = (replace(rank, peak_memory_bytes=share * rank.memory_limit_bytes) for rank in best.simulation.ranks)
        return replace(best, simulation=replace(best.simulation, ranks=tuple(ranks)))

    best, other = proposal.best, proposal.found[-1]
    full, hardly_roomier, roomier = map(that_holds, (1.0, 0.995, 0.9))
    listed = listed_plans(proposal, (full, hardly_roomier, roomier, full, other))
    assert [one for _, one in listed] == [full, roomier, other]


def test_plans_much_slower_than_the_best_are_not_listed(proposal: FoundPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    near_s = proposal.found[2].step_s
    monkeypatch.setattr("piper_ray.proposal.propose.RUNNERS_UP", near_s / proposal.best.step_s)
    assert proposal.listed == tuple(one for one in proposal.found[:LISTED] if one.step_s <= near_s)
    assert len(proposal.listed) < LISTED


def test_what_estimates_do_not_tell_apart_is_to_be_measured(
    proposal: FoundPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = proposal.best
    _, most_s = best.estimate.doubt.range_s(best.step_s)
    close = sum(one.step_s <= most_s for one in proposal.listed)
    assert close >= 3
    told = f"{close} plans lie within the range of the first; to measure the first 3: --candidates 3 -o DIR"
    assert told in screen(proposal).splitlines()
    assert settling_lines(proposal, 20) == [f"{close} plans lie within the range of the first"]
    assert settling_lines(replace(proposal, found=(best,))) == []
    least, most = (
        held_text(size) for size in best.estimate.doubt.memory.range_bytes(best.simulation.peak_memory_bytes)
    )
    assert f"({least} to {most}, as 9 in 10 of 91 published peaks)" in " ".join(screen(proposal).split())
    monkeypatch.setattr(report_of_plans, "exportable", lambda *_: "no launch file says this model")
    assert settling_lines(proposal) == settling_lines(proposal, 20)


def test_the_parts_of_both_steps_add_up_to_them(proposal: FoundPlans) -> None:
    def table(own: Proposed) -> list[list[str]]:
        console = Console(width=100, record=True, file=io.StringIO())
        print_against(console, proposal, Theirs("mine.sh", own, ()))
        _, *rows = console.export_text().partition(" of a step ")[2].splitlines() or [""]
        return [row.split()[-3:] for row in rows]

    slower = proposal.found[-1]
    *parts, steps = [[float(cell) for cell in row] for row in table(slower)]
    assert len(parts) == 4
    assert [sum(column) for column in zip(*parts, strict=True)] == pytest.approx(steps, rel=1e-3, abs=1e-3)
    assert steps[2] == pytest.approx(steps[1] - steps[0], abs=1e-3)
    assert table(proposal.best) == []


def test_a_plan_of_people_s_own_says_why_not(proposal: FoundPlans) -> None:
    best, slower = proposal.best, proposal.found[-1]
    lines = " ".join(" ".join(against_lines(proposal, Theirs("mine.sh", slower, ("a flag is left aside",)))).split())
    change = change_text(slower.step_s / best.step_s - 1.0)
    assert f"mine.sh: {time_text(slower.step_s, 3)} a step, {change}, " in lines
    assert f"it has {differences(layout_words(slower), layout_words(best))}" in lines
    assert "why it is not the plan: the plan has" in lines
    assert "note: a flag is left aside" in lines
    (rank,) = slower.simulation.ranks
    half = replace(slower, simulation=replace(slower.simulation, ranks=(replace(rank, devices=1),)))
    text = " ".join(" ".join(against_lines(proposal, Theirs("mine.sh", half, ()))).split())
    assert f"mine.sh: on {half.devices} GPUs, where the plan uses {best.devices}: " in text
    assert f"it uses {half.devices} of {best.instance.devices} GPUs; --nodes 1 plans for as many" in text
    full = replace(slower, simulation=replace(slower.simulation, ranks=(replace(rank, memory_limit_bytes=1.0),)))
    assert "why it is not the plan: it does not fit: " in " ".join(against_lines(proposal, Theirs("mine.sh", full, ())))
    equal = replace(best, plan=slower.plan)
    assert "why it is not the plan: it takes the same" in " ".join(
        against_lines(proposal, Theirs("mine.sh", equal, ()))
    )
    assert list(against_lines(proposal, Theirs("mine.sh", best, ())))[-1] == "it is the plan"


def test_a_rank_s_chunks_share_its_row(tmp_path: Path) -> None:
    asked = replace(demand(tmp_path, samples=1), schedules=(ScheduleName.INTERLEAVED,))
    found = propose(asked)
    chunked = max(found.found, key=lambda one: layout_words(one).chunks)
    words = layout_words(chunked)
    assert words.chunks > 1
    lines = screen(replace(found, found=(chunked,))).splitlines()
    assert max(map(len, lines)) <= 100
    assert f"interleaved, {words.chunks} chunks" in lines[3]
    rows = [line for line in lines if " | " in line]
    assert [line.count(" | ") for line in rows] == [words.chunks - 1] * words.pipeline


def test_what_was_tried_has_a_line_for_each_cell(proposal: FoundPlans) -> None:
    lines = list(verbose_lines(proposal))
    assert len(lines) == len(proposal.cells.cells) + len(proposal.refused)
    assert sum(": searched, at least" in line for line in lines) == sum(
        cell.closing is Closing.SEARCHED for cell in proposal.cells.cells
    )


def test_numbers_have_three_digits() -> None:
    assert [rounded(x) for x in (73_037.4, 1141.2, 8.916, 999.6)] == ["73,000", "1,140", "8.92", "1,000"]
    assert [held_text(x * 2**20) for x in (1019, 72.2 * 1024, 15.26)] == ["0.995 GiB", "72.2 GiB", "15.3 MiB"]
    assert [change_text(x) for x in (0.0131, -0.0073, 0.74, 2e-4, 0.0996)] == [
        "+1.3 %", "-0.7 %", "+74 %", "the same", "+10 %",
    ]  # fmt: skip


def test_a_layout_in_words_says_what_is_simpler(proposal: FoundPlans) -> None:
    mine = layout_words(proposal.best)
    wide = replace(mine, context=2, tensor=4, pipeline=4, chunks=2, recomputation=Recomputation.FULL)
    plain = replace(mine, context=1, tensor=2, pipeline=1, chunks=1, recomputation=Recomputation.NONE)
    assert plain.simpler_in(wide) == ["no CP", "less TP", "no PP", "no chunks", "no recomputation"]
    assert wide.simpler_in(plain) == []
    assert "CP 2, not 1" in differences(wide, plain)
    assert "stages on" not in differences(replace(plain, kinds=("",) * 6), plain)
    assert replace(plain, microbatch=3, data=2).short == "mbs 3, TP 2, DP 2, 1f1b"
    assert "CP 2, PP 4" in wide.short
    assert wide.short.endswith("full recomputation")


def test_a_usual_batch_is_one_that_the_devices_divide(tmp_path: Path) -> None:
    asked = demand(tmp_path)
    told: list[str] = []
    for nodes, batch in ((1, 1024), (3, 1008)):
        request = replace(asked.request, nodes=nodes, batch=None, samples=16)
        found = propose(replace(asked, request=request), tell=told.append)
        assert found.best.batch == batch
    (text,) = (text for text in told if "batch" in text.split())
    assert text.startswith("a batch of 1,008 samples: 3 divides the 12 GPUs, but not the usual batch of 1,024 (--")


def test_who_watches_hears_of_each_solve_and_its_bounds(tmp_path: Path) -> None:
    heard: list[CellBegun | Event] = []

    def watch(event: CellBegun | Event) -> None:
        heard.append(event)

    found = propose(demand(tmp_path), watch=watch)
    searches = [one for one in heard if isinstance(one, CellBegun)]
    searched = [cell for cell in found.cells.cells if cell.closing is Closing.SEARCHED]
    assert {one.what for one in searches} == {cell.text for cell in searched}
    assert [one.number for one in searches] == sorted({one.number for one in searches})
    assert {one.total for one in searches} == {len(found.cells.cells)}
    assert searches[0].best_s is None
    assert searches[-1].best_s == found.best.step_s
    assert any(isinstance(one, (EvaluationFinished, DegreesSearched)) for one in heard)


def test_nothing_is_said_of_what_an_interrupt_leaves_open(proposal: FoundPlans, tmp_path: Path) -> None:
    stop: Stop[object] = Stop()
    told: list[str] = []

    def watch(event: CellBegun | Event) -> None:
        if isinstance(event, CellBegun) and event.best_s is not None:
            stop.request()

    found = propose(demand(tmp_path), stop, told.append, watch)
    assert len(found.found) == 1
    assert found.gap > 0.01
    assert {cell.closing for cell in found.cells.cells} >= {Closing.LEFT_OPEN}
    near_s = found.best.step_s * 0.995
    held = [cell for cell in found.cells.cells if cell.lower_s < near_s]
    unsearched = sum(cell.closing is Closing.LEFT_OPEN for cell in held)
    left = f"left by {plural(len(held), 'combination')} under 1f1b, of which {unsearched:,} were not searched"
    assert proof_line(found).endswith(f"gap {gap_text(found.gap)}, {left}")
    closed = replace(found, lower_s=found.best.step_s, cells=replace(found.cells, cells=()))
    assert proof_line(closed).endswith("gap 0 %")
    step_s, one = found.best.step_s, found.cells.cells[0]
    near = replace(one, schedule=ScheduleName.INTERLEAVED, lower_s=0.998 * step_s, closing=Closing.SEARCHED)
    close = replace(found, lower_s=near.lower_s, cells=replace(found.cells, cells=(near,)))
    assert proof_line(close).endswith("gap 0.2 %: a search under interleaved stops once its gap is below 0.5 %")
    assert list(what_would_help(proposal, stop)) == []


def tight(folder: Path) -> PlanDemand:
    """Layers that fit on all devices together, and on none of them as plans without tensor parallelism share them."""
    asked = demand(folder, samples=1, hidden=22528)
    return replace(asked, request=replace(asked.request, nodes=4, gpus_per_node=1))


def test_recomputation_is_what_is_asked_of_layers_that_have_not_all_parts() -> None:
    """Experts recompute their activation; the dense layers of the same model have none to recompute."""
    none, acts, norms = (Recomputation.of_parts(parts) for parts in ((), ("moe_act",), ("layernorm", "moe_act")))
    plain, act, norm, full = (
        Tmpc(f"{number}", 1.0, mode=Mode(recomputation=kind))
        for number, kind in enumerate((none, acts, norms, Recomputation.FULL))
    )
    dense, experts = (plain, full), (plain, act, norm, full)
    for of_dense, of_experts, wanted in (
        (plain, plain, none), (plain, act, acts), (plain, norm, norms), (full, full, Recomputation.FULL),
        (plain, full, None), (full, act, None),
    ):  # fmt: skip
        assert _common_recomputation([(0, dense, of_dense), (1, experts, of_experts)]) == wanted
    assert _common_recomputation([(0, experts, plain), (1, experts, act)]) is None


def test_what_fits_nowhere_is_said_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match=r"more nodes.*\n.*fits on 4 devices .*B would do"):
        propose(tight(tmp_path))


def test_layers_that_are_more_than_all_memory_are_said_before_any_search(tmp_path: Path) -> None:
    heard: list[CellBegun | Event] = []

    def watch(event: CellBegun | Event) -> None:
        heard.append(event)

    words = r"of 1, one of them in flight, the layers need at least 6.895 TiB, 96 GPUs or more: they do not fit on 4\n"
    with pytest.raises(InfeasibleError, match=words):
        propose(demand(tmp_path, hidden=131072), watch=watch)
    assert heard == []


def test_an_interrupt_before_the_first_plan_is_no_proof(tmp_path: Path) -> None:
    stop: Stop[object] = Stop()
    stop.request()
    with pytest.raises(StopSearch):
        propose(demand(tmp_path), stop)
    known = stop.answer()
    assert isinstance(known, FoundPlans)
    assert known.found == ()
    count = len(known.cells.cells)
    looked = sum(cell.closing is not Closing.LEFT_OPEN for cell in known.cells.cells)
    least = time_text(rounded_down(known.lower_s), 3)
    told = f"no plan yet: {looked} of {count} combinations were looked at, and none takes less than {least} a step"
    assert unfinished_text(known) == told
    priced = replace(known, cells=Cells((), (), ()))
    assert unfinished_text(priced) == "no plan yet: the combinations were still being priced"


@pytest.mark.parametrize("name", [RuntimeName.MEGATRON, RuntimeName.TORCHTITAN])
def test_what_is_interleaved_has_several_chunks(tmp_path: Path, name: RuntimeName) -> None:
    """With one on each rank Megatron runs 1f1b, and torchtitan refuses it."""
    asked = replace(demand(tmp_path, 4), runtime=RUNTIMES[name])
    instance = in_order(asked.estimated(4).instance)
    rules = asked.restrictions(instance, ScheduleName.INTERLEAVED)
    for asked_of, others in ((Restrictions(), {(True, False)}), (rules, set())):
        tasks = ChunkProblem.of(instance, asked_of, chunk_schedules("interleaved")).tasks(instance)
        assert {(x.shape.ranks > 1, x.shape.chunks > 1) for x in tasks} == {(False, False), (True, True)} | others


def test_a_tied_model_has_one_rank_under_torchtitan(tmp_path: Path) -> None:
    config = tmp_path / "tied.json"
    config.write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    asked = demand(tmp_path, 2)
    schedules = (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED)
    titan = RUNTIMES[RuntimeName.TORCHTITAN]
    told: list[str] = []
    found = propose(replace(asked, model=read_model(str(config)), runtime=titan, schedules=schedules), tell=told.append)
    assert {len(one.plan.stages) for one in found.found} == {1}
    assert sum("tie_word_embeddings" in text for text in told) == 1


def titan_demand(folder: Path, samples: int = 1, batch: int = BATCH) -> PlanDemand:
    asked, titan = demand(folder, samples), RUNTIMES[RuntimeName.TORCHTITAN]
    request = with_offers(
        replace(asked.request, batch=batch, offer=Offer(zero=ALL_REPLICAS)), asked.model, titan, 4, None, None
    )
    return replace(asked, request=request, runtime=titan)


def test_plan_prices_the_runtime_s_own_software() -> None:
    model, request = read_model("llama3-8b"), EstimateRequest(nodes=2, offer=Offer(zero=ALL_REPLICAS))
    expected = {
        "megatron": ("megatron-core", ALL_REPLICAS, ()), "flagscale": ("megatron-core", ALL_REPLICAS, ()),
            "megatron-bridge": ("megatron-core", ALL_REPLICAS, ()),
        "torchtitan": ("fsdp", ALL_REPLICAS, (16, 8)), "torch": ("fsdp", 1, ()),
        "deepspeed": ("deepspeed-2021", ALL_REPLICAS, ()),
    }  # fmt: skip
    for name, runtime in RUNTIMES.items():
        found = with_offers(request, model, runtime, 8, None, None)
        assert (found.software, found.offer.zero, found.offer.sharded_over) == expected[name.value]


@pytest.mark.long
def test_torchtitan_shards_as_it_is_priced(tmp_path: Path) -> None:
    """Weights on one rank, by all replicas; state alone, kept gathered, on several. No note says that more is shared,
    and each plan comes back from its files."""
    kinds = set()
    for samples, batch, stages in ((1, 16, None), (2, 32, 2), (8, 64, None)):
        found = propose(replace(titan_demand(tmp_path, samples, batch), stages=stages)).best
        stage, ranks = found.plan.stages[0], len(found.plan.stages)
        d, t = stage.data_parallel_degree, stage.tensor_parallel_degree
        assert found.instance.microbatches > d > 1
        expected = f"fsdp{4 // t}" if ranks == 1 else "zero"
        assert all(expected in tmpc_id.split("+") for tmpc_id in stage.tmpc_ids.values())
        launch = export_plan(found.instance, found.plan, found.solution.schedule, Target.TORCHTITAN, 4)
        assert not any("shard" in note or "reduces gradients" in note for note in launch.notes)
        parallelism = json.loads(launch.files["torchtitan.json"])["parallelism"]
        assert parallelism["data_parallel_shard_degree"] == d
        assert parallelism["fsdp_reshard_after_forward"] == ("always" if ranks == 1 else "never")
        again = import_plan(found.instance, launch.files["torchtitan.json"], RunAs())
        assert (again.plan, again.notes) == (found.plan, ())
        kinds.add(ranks == 1)
    assert kinds == {True, False}


def test_what_torchtitan_reduces_in_every_pass_is_not_taken_for_once(tmp_path: Path) -> None:
    """ZeRO-1 on one rank is cheaper on paper: the search goes on from it to plans that run as they are priced."""
    asked = titan_demand(tmp_path)
    instance = propose(asked).best.instance
    row = {layer.id: next(x.id for x in layer.tmpcs[1] if x.id in ("zero", "plain")) for layer in instance.layers}
    alone = Plan((Stage(tuple(row), 4, 1, row),), True)
    assert counts_on_one_sum(instance, alone)
    once = replace(instance, batch=replace(instance.batch, microbatches=4))
    assert not counts_on_one_sum(once, alone)  # with one microbatch for each replica
    notes = export_plan(instance, alone, Schedule(ScheduleName.ONE_F_ONE_B), Target.TORCHTITAN, 4).notes
    assert any("reduces gradients for every microbatch" in note for note in notes)
    ids = list(row)
    halves = [Stage(tuple(part), 2, 1, {x: row[x] for x in part}) for part in (ids[:4], ids[4:])]
    assert not counts_on_one_sum(instance, Plan(tuple(halves), True))


def test_a_layer_shares_rather_than_keeps_what_is_gathered() -> None:
    """The vocabulary projection of Llama has not both: torchtitan shards it as all others."""
    model, titan = read_model("llama3-8b"), RUNTIMES[RuntimeName.TORCHTITAN]
    request = EstimateRequest(nodes=1, batch=16, offer=Offer(zero=ALL_REPLICAS))
    request = with_offers(request, model, titan, 8, None, None)
    head = estimate(model, load_hardware(None), "H100-SXM", request).instance.layers[-1]
    asked = Mode(sequence_parallel=True, optimizer_shards=4, sharding=Sharding.WEIGHTS, gathered=True)
    assert [x.id for x in tmpcs_under(head.tmpcs[2], asked)] == ["sp+fsdp4"]


def test_a_tied_model_is_sharded_on_its_one_rank(tmp_path: Path) -> None:
    asked = titan_demand(tmp_path, 1)
    tied = tmp_path / "tied.json"
    tied.write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    best = propose(replace(asked, model=read_model(str(tied)))).best
    (stage,) = best.plan.stages
    assert stage.data_parallel_degree > 1
    assert not counts_on_one_sum(best.instance, best.plan)


def test_a_bound_is_never_told_as_more_than_it_is() -> None:
    for bound_s, told in (
        (114.855, 114.0),
        (33.1983, 33.1),
        (33.2, 33.2),
        (0.00899, 0.00899),
        (0.012349, 0.0123),
        (0.0, 0.0),
        (math.inf, math.inf),
    ):
        assert rounded_down(bound_s) == pytest.approx(told)
        assert rounded_down(bound_s) <= bound_s * (1.0 + 1e-9)


def test_without_matplotlib_a_plan_has_no_page(
    proposal: FoundPlans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("piper_ray.model.errors.find_spec", lambda _: None)
    with listening():
        assert write_page(proposal, figures_of(proposal.best), tmp_path) == []
    assert "report.html needs matplotlib, which is not installed" in " ".join(capsys.readouterr().err.split())
