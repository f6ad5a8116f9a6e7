"""What is exported for DeepSpeed: what its config says, what is refused, and real steps of its engine over gloo, whose
losses and weights are those of the model in one piece."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Mode, Recomputation
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from tests.estimate_support import estimated, model_of
from tests.export_support import ROOT, llama, plan_of
from tests.run_support import results_of_ranks

ONE = Schedule(ScheduleName.ONE_F_ONE_B)
RANKS = 4


@dataclass(frozen=True)
class Case:
    """Of DeepSpeed's engine. given: the layers as planned, or what is wrong with them."""

    precision: str = "bf16"
    gradient_bytes: float = 4.0
    tied: bool = False
    recomputed: bool = False
    shared: bool = False
    replicas: int = 2
    given: str = "as planned"
    optimizer: str = "BF16_Optimizer"
    raised: str = ""


HALF = "DeepSpeedZeroOptimizer"
CASES = {
    "bf16": Case(shared=True),
    "recomputed": Case(recomputed=True, tied=True),
    "half sums": Case(gradient_bytes=2.0, optimizer=HALF),
    "fp16": Case(precision="fp16", recomputed=True, tied=True, optimizer=HALF),
    "few": Case(given="few", raised="the plan is of 5 layers, not 4"),
    "wide": Case(given="wide", raised="has 2256 parameters to train on a rank, and the plan is of 2208"),
    "untied": Case(tied=True, given="otherwise tied", raised="have a weight in common on different pipeline ranks"),
    "tied": Case(given="otherwise tied", raised="are given as tied, on different pipeline ranks"),
    "other ranks": Case(replicas=1, raised="the plan is of 2 ranks (pipeline 2, data 1, tensor 1), not 4"),
}


def tiny(case: Case) -> Instance:
    """The model of ``tests.deepspeed_ranks``."""
    model = model_of(
        "llama", tokens=4, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=24, vocab_size=32, tie_word_embeddings=case.tied,
    )  # fmt: skip
    shards, software = ALL_REPLICAS if case.shared else 1, "nemo" if case.gradient_bytes == 2.0 else "megatron-core"
    instance = estimated(
        model, "H100-SXM", nodes=1, samples=1, batch=8, precision=case.precision, zero_shards=shards, software=software
    ).instance
    assert instance.model is not None
    return replace(instance, model=replace(instance.model, gradient_bytes=case.gradient_bytes))


def exported(folder: Path, case: Case) -> None:
    recomputation = Recomputation.FULL if case.recomputed else Recomputation.NONE
    setting = Mode(recomputation, optimizer_shards=ALL_REPLICAS if case.shared else 1)
    instance = tiny(case)
    plan = plan_of(instance, [2, 3], d=case.replicas, setting=setting)
    export_plan(instance, plan, ONE, Target.DEEPSPEED, 8).write(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, by case."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    root = tmp_path_factory.mktemp("deepspeed")
    cases = {}
    for number, (name, case) in enumerate(CASES.items()):
        exported(root / str(number), case)
        cases[name] = {"folder": str(root / str(number)), "tied": case.tied, "given": case.given}
    return results_of_ranks("deepspeed_ranks", root, RANKS, {"cases": cases}, strict=False)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.raised])
def test_deepspeed_trains_the_model_that_was_planned(found: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    for results in found:
        one = results[name]
        assert "raised" not in one, one
        assert one["optimizer"] == case.optimizer
        assert one["losses"] == pytest.approx(one["expected"], rel=2e-3)
        assert one["moved"] > 0.01
        assert one["difference"] < 0.02 * one["moved"]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.raised])
def test_other_layers_than_those_planned_are_told(found: list[dict[str, Any]], name: str) -> None:
    for results in found:
        assert CASES[name].raised in results[name]["raised"]


@pytest.mark.long
def test_layers_run_again_where_the_plan_says_so(found: list[dict[str, Any]]) -> None:
    """Blocks twice; an embedding, and a head before the loss, once."""
    first, second = (found[rank]["recomputed"]["runs"] for rank in (0, 2))
    assert (first, second) == ({"0": 1, "1": 2}, {"2": 2, "3": 2, "4": 1})
    assert {*found[0]["bf16"]["runs"].values(), *found[2]["bf16"]["runs"].values()} == {1}


def config(instance: Instance, *, d: int = 2, t: int = 1, shards: int = 1, counts: tuple[int, ...] = (7, 7)) -> Any:
    plan = plan_of(instance, [*counts], d=d, t=t, setting=Mode(optimizer_shards=shards))
    return json.loads(export_plan(instance, plan, ONE, Target.DEEPSPEED, 8).files["ds_config.json"])


def trained(instance: Instance, **kept: Any) -> Instance:
    assert instance.model is not None
    return replace(instance, model=replace(instance.model, **kept))


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({}, ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "fp32", "fp32")),
        ({"software": "nemo"}, ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "fp32", "bf16")),
        ({"gradient_bytes": 2.0}, ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "bf16", "bf16")),
        (
            {"precision": "fp16"},
            ({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}, "fp16", "fp16"),
        ),
    ],
)
def test_precision_and_optimizer_are_said(kept: dict[str, Any], said: tuple[dict[str, Any], str, str]) -> None:
    precision, summed, reduced = said
    found = config(trained(llama(), **kept))
    assert {key: found[key] for key in found if key in ("bf16", "fp16", "fp8")} == precision
    assert (found["data_types"], found["communication_data_type"]) == ({"grad_accum_dtype": summed}, reduced)
    assert (found["optimizer"]["type"], found["gradient_clipping"]) == ("AdamW", 1.0)
    assert found["zero_optimization"] == {"stage": 1, "overlap_comm": False}
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [found[name] for name in batch] == [32, 1, 16]


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ({"precision": "fp8"}, "DeepSpeed trains in bf16 or fp16, and this plan in fp8"),
        ({"lora_rank": 16}, "DeepSpeed trains no adapters"),
        ({"weight_bytes": 4.0}, "DeepSpeed keeps weights in 2 bytes, and the plan in 4"),
        ({"gradient_bytes": 1.0}, "DeepSpeed sums gradients in 2 or 4 bytes, and the plan in 1"),
        ({"optimizer_bytes": 8.0}, "state of a parameter in 12 bytes, and the plan in 8"),
    ],
)
def test_what_deepspeed_cannot_keep_is_refused(kept: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        config(trained(llama(), **kept))


def test_a_model_that_nobody_knows_keeps_its_precision_to_itself() -> None:
    unknown = replace(llama(), model=None)
    assert "optimizer" not in config(unknown)
    assert config(unknown)["zero_optimization"] == {"stage": 0}
    found = export_plan(unknown, plan_of(unknown, [7, 7]), ONE, Target.DEEPSPEED, 8)
    assert any("add precision (bf16 or fp16) and optimizer" in note for note in found.notes)
    assert "PARAMETERS = None" in found.files["planned_module.py"]


def notes(instance: Instance, *, d: int = 2, t: int = 1, shards: int = 1) -> str:
    plan = plan_of(instance, [7, 7], d=d, t=t, setting=Mode(optimizer_shards=shards))
    return "\n".join(export_plan(instance, plan, ONE, Target.DEEPSPEED, 8).notes)


def test_what_deepspeed_does_otherwise_than_the_figures_is_told() -> None:
    hidden = "DeepSpeed's pipelines exchange them after the flush"
    assert hidden in notes(llama())
    assert hidden not in notes(llama(), d=1)
    assert hidden not in notes(llama(software="deepspeed-2021"))
    shared = "shares the optimizer's state among all 2 replicas, the plan among none"
    assert shared in notes(llama())
    assert shared not in notes(llama(zero_shards=ALL_REPLICAS), shards=ALL_REPLICAS)
    assert "counts scattering" not in notes(llama())
    assert "count scattering" in notes(llama(zero_shards=ALL_REPLICAS), shards=ALL_REPLICAS)
    assert "sum fp16 gradients in fp16, the plan in 4 bytes" in notes(trained(llama(), precision="fp16"))
    assert "a part of tensor parallelism's exchanges as hidden" in notes(llama(), t=2)


def test_what_the_pipeline_holds_beside_the_plans_figures_must_fit_too() -> None:
    """By hand: a border's 1024 x 1024 numbers of 2 bytes, for 2 and 1 microbatches in flight."""
    plan = plan_of(llama(), [7, 7])
    found = export_plan(llama(), plan, ONE, Target.DEEPSPEED, 8)
    assert found.beyond_bytes == (2 * 2.0 * 2**20, 2.0 * 2**20)
    peaks = [rank.peak_memory_bytes for rank in piper_ray.simulate(llama(), plan, ONE).ranks]
    (more, most), (roomy, peak) = sorted(zip(found.beyond_bytes, peaks, strict=True), key=lambda one: one[1])
    assert peak > roomy + most
    tight = llama().replace(memory_bytes=peak + 1.0)
    (told,) = export_plan(tight, plan, ONE, Target.DEEPSPEED, 8).excess
    assert "more for the runtime itself" in told
    assert f"(a plan made with --memory {(peak + 1.0 - roomy) // 2**20:.0f}MiB leaves room for as much)" in told
    assert more > 0.0
    assert export_plan(tight, plan, ONE, Target.YAML, 8).excess == ()
    assert export_plan(llama().replace(memory_bytes=peak + 2.0**23), plan, ONE, Target.DEEPSPEED, 8).excess == ()


@pytest.mark.parametrize("named", ["t5-11b", "clip-vit-l-14", "bert32-a100", "resnet50"])
def test_a_model_that_is_no_chain_is_refused(named: str) -> None:
    instance = piper_ray.load(ROOT / "inputs" / f"{named}.toml")
    with pytest.raises(UsageError, match="hands each layer what the one before it makes; here layer"):
        RUNTIMES[RuntimeName.DEEPSPEED].constraints(instance, ONE.name, 8)


@pytest.mark.parametrize("named", ["vit-22b", "gpt3-175b", "mixtral-8x22b"])
def test_a_chain_is_a_model_for_deepspeed(named: str) -> None:
    instance = piper_ray.load(ROOT / "inputs" / f"{named}.toml")
    assert RUNTIMES[RuntimeName.DEEPSPEED].constraints(instance, ONE.name, 8)


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
def test_the_launch_script_ends_with_words_where_something_is_missing(tmp_path: Path) -> None:
    plan = plan_of(llama(), [5, 5, 4], d=4)
    export_plan(llama(), plan, ONE, Target.DEEPSPEED, 8).write(tmp_path)
    for arguments, told in (([], "give your script"), (["train.py"], "NODE_RANK")):
        ended = subprocess.run(
            ["bash", str(tmp_path / "launch.sh"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"]},
        )
        assert ended.returncode != 0
        assert told in ended.stderr


def test_what_is_written_is_read_back() -> None:
    tied = llama(tied=True)
    for setting in (Mode(Recomputation.FULL), Mode()):
        plan = plan_of(tied, [2, 5, 3, 4], d=2, t=2, setting=setting)
        files = export_plan(tied, plan, ONE, Target.DEEPSPEED, 8).files
        assert import_plan(tied, files["stages.json"], RunAs()).plan == plan
        text = files["planned_module.py"]
        assert "TIED = [[0, 13]]" in text
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text)))
