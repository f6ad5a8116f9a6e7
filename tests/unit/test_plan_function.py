"""``piper_ray.plan``: what the command plans, without files."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import piper_ray
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.headroom import Headroom
from piper_ray.proposal.offers import with_offers
from piper_ray.proposal.propose import propose
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.doubt import load_doubt
from tests.export_support import ROOT
from tests.lengths import long_after
from tests.unit.test_propose import BATCH, CONFIG, TOKENS, demand

GPUS = {"gpus_per_node": 4, "tokens": TOKENS, "global_batch": BATCH}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_it_is_the_best_that_is_proposed(config: Path, tmp_path: Path) -> None:
    best = piper_ray.plan(
        config,
        "A100-80",
        schedule="1f1b",
        zero=1,
        train_tokens=1e9,
        price_per_hour=2.0,
        **GPUS,  # type: ignore[arg-type]
    )
    expected = propose(demand(tmp_path))
    assert best.step_s == expected.best.step_s
    assert best.plan == expected.best.plan
    assert [(one.microbatch, one.step_s) for one in best.runners_up] == [
        (one.samples, one.step_s) for one in expected.found[1:]
    ]
    assert best.figures.days is not None
    assert best.figures.cost == pytest.approx(best.figures.days * 24 * 4 * 2.0)
    piper_ray.evaluate(best.instance, best.plan, schedule=best.solution.schedule)
    assert repr(best).startswith("Planned(1f1b: step ")


def test_chunks_share_the_devices_that_are_told(config: Path) -> None:
    best = piper_ray.plan(config, "A100-80", schedule="interleaved", **GPUS)  # type: ignore[arg-type]
    assert best.simulation.schedule.v > 1
    assert f"; {best.figures.devices} devices; Plan(" in repr(best)
    assert best.figures.devices <= 4


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"runtime": "megaton"}, "megatron"),
        ({"schedule": "gpipe"}, "has no schedule gpipe"),
        ({"zero": 0}, "zero"),
        ({"context_parallel": [0]}, "context_parallel"),
        ({"nodes": "two"}, "nodes"),
        ({"train_tokens": "15T"}, "train_tokens must be a number of at least 1, not '15T'"),
        ({"train_tokens": -1}, "train_tokens must be a number of at least 1"),
        ({"train_tokens": 1e9, "price_per_hour": float("nan")}, "price_per_hour must be a number of at least 0"),
        ({"price_per_hour": 2.0}, "price_per_hour needs train_tokens"),
        ({"stop": "now"}, "stop must be a Stop"),
        ({"microbatch_size": 3}, "^global_batch 16 is no multiple of the microbatch's 3 samples"),
    ],
)
def test_what_makes_no_sense_is_said(config: Path, wrong: dict[str, object], word: str) -> None:
    with pytest.raises(piper_ray.UsageError, match=word):
        piper_ray.plan(config, "A100-80", **{**GPUS, **wrong})  # type: ignore[arg-type]


def test_of_several_precisions_the_fastest_is_planned(config: Path) -> None:
    best = piper_ray.plan(config, "H100-SXM", schedule="1f1b", precision=["bf16", "fp8"], **GPUS)  # type: ignore[arg-type]
    assert list(best.by_precision) == ["bf16", "fp8"]
    assert best.step_s == min(one.step_s for one in best.by_precision.values())
    alone = piper_ray.plan(config, "H100-SXM", schedule="1f1b", **GPUS)  # type: ignore[arg-type]
    assert alone.step_s == best.by_precision["bf16"].step_s


@pytest.mark.parametrize("headroom", long_after(1, ["97%", 0.97, "72.2GiB"]))
def test_headroom_is_left(config: Path, headroom: str | float) -> None:
    best = piper_ray.plan(config, "H100-SXM", schedule="1f1b", headroom=headroom, **GPUS)  # type: ignore[arg-type]
    assert best.simulation.peak_memory_bytes <= 0.03 * 74.5 * 2**30
    free = piper_ray.plan(config, "H100-SXM", schedule="1f1b", **GPUS)  # type: ignore[arg-type]
    assert best.step_s >= free.step_s


def test_headroom_that_is_none_is_refused(config: Path) -> None:
    for wrong in (1.0, "120%", "much"):
        with pytest.raises(UsageError):
            piper_ray.plan(config, "H100-SXM", headroom=wrong, **GPUS)  # type: ignore[arg-type]


def test_usual_room_is_what_published_peaks_ask_for_and_given_up_where_nothing_fits(config: Path) -> None:
    usual = load_doubt().memory["whole"].headroom
    best = piper_ray.plan(config, "H100-SXM", schedule="1f1b", **GPUS)  # type: ignore[arg-type]
    whole = piper_ray.plan(config, "H100-SXM", schedule="1f1b", headroom=0, **GPUS)  # type: ignore[arg-type]
    assert best.instance.memory_bytes == pytest.approx((1.0 - usual) * whole.instance.memory_bytes)


def test_usual_room_is_given_up_where_nothing_fits_and_that_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    asked = replace(demand(tmp_path), headroom=Headroom(share=0.999, is_usual=True))
    found = propose(asked, tell=told.append)
    assert not found.demand.headroom
    assert found.best.step_s == propose(demand(tmp_path)).best.step_s
    assert told == ["no plan leaves 99.9 % of each GPU free, as published peaks ask for: sought as with --headroom 0"]
    with pytest.raises(InfeasibleError):
        propose(replace(asked, headroom=Headroom(share=0.999)))


def test_degrees_that_are_asked_for_are_the_only_ones(config: Path) -> None:
    """Those of context parallelism are not counted."""
    with_chosen = {"tensor_parallel": [2], "stages": 2, "context_parallel": [2], "schedule": "1f1b", **GPUS}
    best = piper_ray.plan(config, "A100-80", **with_chosen)  # type: ignore[arg-type]
    for one in (best, *best.runners_up):
        assert len(one.plan.stages) == 2
        modes = {x.mode.context for row in one.instance.layers[1].tmpcs.values() for x in row}
        assert {stage.tensor_parallel_degree for stage in one.plan.stages} <= {2 * context for context in modes}
    every = {"schedule": "1f1b", "context_parallel": [2], **GPUS}
    assert piper_ray.plan(config, "A100-80", **every).step_s <= best.step_s  # type: ignore[arg-type]
    for wrong, words in (
        ({"tensor_parallel": [3]}, "tensor_parallel 3: 1, 2, 4 of"),
        ({"stages": 5}, "stages 5: "),
    ):
        with pytest.raises(UsageError, match=words):
            piper_ray.plan(config, "A100-80", **wrong, **GPUS)  # type: ignore[arg-type]


def test_all_options_of_the_command_are_there() -> None:
    """By the same names, but for those of files, of the screen, and of several plans."""
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    section = text.split("\n## plan\n")[1].split("\n## ")[0]
    given = set(re.findall(r"^- `(?:-o, )?--([a-z0-9-]+)", section, re.MULTILINE))
    assert len(given) > 30
    left_out = {"out", "dry-run", "json", "verbose", "candidates", "against", "spare", "help"}
    left_out |= {"all-reduce", "all-reduce-overlap", "optimizer"}  # which are ``step``
    left_out |= {"set", "launch", "recipe"}  # of ``--against``
    names = {"reserve": "reserve_bytes", "host-memory": "host_memory_bytes"}
    names |= {"unfused-attention": "fused_attention", "price": "price_per_hour"}
    wanted = {names.get(name, name.replace("-", "_")) for name in given - left_out}
    assert wanted <= set(inspect.signature(piper_ray.plan).parameters)


@pytest.mark.long
def test_several_kinds_and_sites_are_planned_as_by_the_command(config: Path) -> None:
    """One kind at two sites, at a rate that is none to speak of, is two kinds of it."""
    best = piper_ray.plan(config, {"A100-80": 1, "H100-SXM": 1}, between="20GB/s", tokens=TOKENS, global_batch=BATCH)
    assert best.instance.cluster.between_bytes_per_s == 20e9
    assert {stage.kind for stage in best.plan.stages} <= {"A100-80", "H100-SXM"}
    sites = piper_ray.plan(
        config, "A100-80", site={"east": 1, "west": 1}, between="1GB/s", tokens=TOKENS, global_batch=BATCH
    )
    assert sites.instance.cluster.kind_names == ("east", "west")
    assert sites.step_s >= best.step_s
    for wrong, word in (
        ({"site": {"east": 1}, "between": "1GB/s"}, "site must be several sites of one GPU"),
        ({"site": {"east": 1, "west": 1}}, "with the rate between"),
        ({"between": "1GB/s"}, "between must be a rate above 0"),
        ({"site": {"east": 1, "west": 0}, "between": "1GB/s"}, "nodes must be"),
    ):
        with pytest.raises(UsageError, match=word):
            piper_ray.plan(config, "A100-80", **wrong)
    with pytest.raises(UsageError, match="DeepSpeed runs no plan on devices of several kinds"):
        piper_ray.plan(config, {"A100-80": 1, "H100-SXM": 1}, runtime="deepspeed")


def test_context_is_exchanged_as_asked_where_the_runtime_can(config: Path, tmp_path: Path) -> None:
    model, request, said = read_model(str(config)), EstimateRequest(nodes=1), "all-to-all"
    megatron, titan = RUNTIMES[RuntimeName.MEGATRON], RUNTIMES[RuntimeName.TORCHTITAN]
    found = [with_offers(request, model, megatron, 4, (1, 2), None, exchange=said)]
    found += [with_offers(request, model, one, 4, (1, 2), None) for one in (megatron, titan)]
    assert [one.context_exchange for one in found] == [said, "ring", "all-gather"]
    with pytest.raises(UsageError, match="--context-exchange: torchtitan's is all-gather, not all-to-all"):
        with_offers(request, model, titan, 4, None, None, exchange=said)
    speed = RUNTIMES[RuntimeName.DEEPSPEED]
    for option, contexts, asked in (("exchange", None, "ring"), ("parallel", (1, 2), None)):
        with pytest.raises(UsageError, match=f"--context-{option}: DeepSpeed's launch files share no sequence"):
            with_offers(request, model, speed, 4, contexts, None, exchange=asked)
    with pytest.raises(UsageError, match=r"no latent attention .* expected --context-exchange ring"):
        with_offers(request, read_model("deepseek-v3"), megatron, 8, None, None, exchange=said)
    file = tmp_path / "windows.json"
    file.write_text(
        json.dumps({**CONFIG, "model_type": "mistral", "sliding_window": 1024, "max_position_embeddings": 8192})
    )
    windows = read_model(str(file))
    assert with_offers(request, windows, megatron, 8, None, None).offer.contexts == (1,)
    assert max(with_offers(request, windows, megatron, 8, None, None, exchange="all-gather").offer.contexts) > 1
    with pytest.raises(UsageError, match="takes no sliding windows"):
        with_offers(request, windows, megatron, 8, (1, 2), None)


@pytest.mark.parametrize(
    ("given", "word"),
    [({"fsdp": 4}, "fsdp: Megatron runs no plan"), ({"offload": True}, "offload: Megatron's launch files")],
)
def test_what_the_runtime_cannot_run_is_refused_as_by_the_command(
    config: Path, given: dict[str, object], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        piper_ray.plan(config, "H100-SXM", **GPUS, **given)  # type: ignore[arg-type]


def test_a_precision_that_is_said_twice_is_planned_once(config: Path) -> None:
    best = piper_ray.plan(config, "H100-SXM", schedule="1f1b", precision="bf16,bf16", microbatch_size=2, **GPUS)  # type: ignore[arg-type]
    assert list(best.by_precision) == ["bf16"]
