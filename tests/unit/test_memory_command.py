"""``piper-ray memory``: what ranks hold by figures worked out by hand, and by simulation of the same layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import piper_ray
from piper_ray import PiperRayError, UsageError
from piper_ray.calibrate.layouts import Untold, laid_out
from piper_ray.calibrate.measurements import simulated
from piper_ray.calibrate.memory import run_of_words
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.doubt import load_doubt
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.layout import priced
from tests.cli_cases import run as run_command

H, F, A, G, D, V, S = 8192, 28672, 64, 8, 128, 128256, 8192
"""Llama 3 70B, 80 layers."""


def layer_numbers(t: int) -> float:
    return (H * (A + 2 * G) * D + A * D * H + 3 * H * F) / t + 2 * H


def test_terms_by_hand() -> None:
    """t = 4 with sequence parallelism, 10 layers a rank, 2 replicas: 8 - r microbatches are in flight on rank r."""
    found = piper_ray.memory("llama3-70b", "tp=4,pp=8,dp=2,mbs=1,gbs=128,seq=8192")
    kept = 4 * (2.0 * S * H / 4) + (4.0 * S * (A + G) * D + 4.0 * S * A) / 4 + 3 * (2.0 * S * F / 4)
    for place, rank in enumerate(found.ranks):
        numbers = 10 * layer_numbers(4) + V * H / 4 * (place in (0, 7)) + H * (place == 7)
        assert rank.parameters == numbers
        assert rank.terms["weights"] == 2 * numbers
        assert rank.terms["gradients"] == 4 * numbers
        assert rank.terms["optimizer state"] == 12 * numbers / 2
        ids = 8.0 * S / 4 * (place == 0) * 8
        assert rank.terms["activations"] == pytest.approx((8 - place) * 10 * kept + ids, rel=1e-4)
        assert rank.in_flight == (8 - place,)
        assert rank.layers == (10 + (place in (0, 7)),)
    logits = 2 * (2.0 * S * H / 4) + 4.0 * S * V / 4
    assert found.ranks[-1].terms["logits and loss"] == pytest.approx(logits)
    assert [rank.terms["logits and loss"] for rank in found.ranks[:-1]] == [0.0] * 7
    for rank in found.ranks:
        assert rank.allocated_bytes == pytest.approx(sum(rank.terms.values()))
        parts = rank.context_bytes + rank.communicators_bytes + rank.stuck_bytes
        assert rank.outside_bytes == pytest.approx(parts)
    assert found.needed_bytes == found.ranks[0].device_bytes
    assert (found.fits, found.gpu) == (None, None)


LAYOUTS = [
    ("llama3-8b", "tp=2,pp=4,dp=2,mbs=1,gbs=64,seq=4096"),
    ("llama3-8b", "tp=1,pp=4,dp=2,mbs=2,gbs=64,seq=2048,recompute=full"),
    ("llama3-70b", "tp=8,pp=4,dp=1,cp=2,mbs=1,gbs=16,seq=8192,recompute=core_attn+mlp"),
    ("llama3-8b", "tp=4,pp=2,vpp=4,dp=2,mbs=1,gbs=64,seq=4096"),
    ("mixtral-8x7b", "tp=2,pp=4,dp=4,ep=4,mbs=1,gbs=64,seq=4096"),
]


@pytest.mark.parametrize(("model", "words"), LAYOUTS)
def test_states_and_microbatches_in_flight_are_what_the_simulation_finds(model: str, words: str) -> None:
    """Besides these ``memory`` has one layer's backward pass and what runtimes hold; a workload sets that aside.
    What an interleaved rank receives into, an input and a gradient in bf16, is among its buffers."""
    received_bytes = 2 * 4096 * 4096 * 2 / 4 if "vpp" in words else 0.0
    hardware = load_hardware()
    run = run_of_words(f"{words},sp=true,zero=1,software=megatron-core,precision=bf16")
    laid = laid_out(run, hardware, Untold(model=read_model(model), gpu="H100-SXM"))
    simulation = simulated(priced(laid.model, laid.stack, hardware.training, laid.layout))
    found = piper_ray.memory(model, words)
    assert len(found.ranks) == len(simulation.ranks)
    for rank, expected in zip(found.ranks, simulation.ranks, strict=True):
        terms = ("weights", "gradients", "optimizer state", "activations", "logits and loss")
        held = sum(rank.terms[term] for term in terms) + received_bytes
        assert held == pytest.approx(expected.peak_memory_bytes, rel=1e-6)


MEGATRON = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer "
    "--micro-batch-size 1 --global-batch-size 128 --seq-length 4096 --num-layers-per-virtual-pipeline-stage 4"
)


def test_launch_arguments_say_the_same_as_words() -> None:
    flags = piper_ray.memory("llama3-8b", MEGATRON, gpus=64)
    words = piper_ray.memory("llama3-8b", "tp=4,pp=4,vpp=2,dp=4,sp,zero=1,mbs=1,gbs=128,seq=4096")
    assert flags.ranks == words.ranks
    assert flags.layout == words.layout


def test_first_layers_of_a_stage_recompute() -> None:
    def held(more: str) -> float:
        return piper_ray.memory("llama3-8b", f"{MEGATRON} {more}", gpus=64).ranks[0].terms["activations"]

    full = "--recompute-granularity full --recompute-method"
    none, all_layers = held(""), held(f"{full} uniform --recompute-num-layers 1")
    half = held(f"{full} block --recompute-num-layers 2")
    assert all_layers < half < none
    assert half - all_layers == pytest.approx((none - all_layers) / 2)


def test_a_vision_tower_is_whole_on_the_first_rank() -> None:
    """24 layers of the tower, its embedding, a projector and an embedding, 40 layers and a head on 4 ranks."""
    found = piper_ray.memory("Mistral-Small-3.1-24B", "tp=2,pp=4,dp=2")
    assert [rank.layers for rank in found.ranks] == [(24 + 1 + 1 + 1 + 10,), (10,), (10,), (11,)]


def test_torchtitan_s_configuration() -> None:
    text = json.dumps({
        "parallelism": {"data_parallel_shard_degree": 8, "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1},
        "training": {"local_batch_size": 1, "seq_len": 8192},
    })  # fmt: skip
    found = piper_ray.memory("llama3-8b", text, gpus=8)
    assert found.software == "torchtitan"
    numbers = found.parameters / 8
    assert [found.ranks[0].terms[term] for term in ("weights", "gradients")] == pytest.approx([4 * numbers] * 2)
    assert found.ranks[0].terms["optimizer state"] == pytest.approx(8 * numbers)


def test_what_nobody_says_is_told() -> None:
    found = piper_ray.memory("llama3-8b", "tp=2,dp=4", gpu="H100")
    assert "microbatches of 1 sample (mbs=)" in found.assumed
    assert any("sequence parallelism" in text for text in found.assumed)
    assert found.device_bytes is not None
    assert found.fits is (found.needed_bytes <= found.device_bytes)
    said = "tp=2,pp=1,dp=4,mbs=1,gbs=16,seq=8192,sp=true,zero=1,recompute=none,precision=bf16,software=megatron-core"
    assert piper_ray.memory("llama3-8b", said).assumed == ()
    assert piper_ray.memory("llama3-8b", said).ranks == found.ranks


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp=2", "expected dp=8 or gpus=64"),
        ("tp=2,ppp=4,dp=2", "ppp: is no word of a layout"),
        ("tp=2,tp=4,dp=1", "tp: is said twice"),
        ("fsdp=8", "fsdp: takes no value, as all replicas share weights; say fsdp,dp=8"),
        ("tp=2,dp=x", 'dp: not a whole number ("x")'),
        ("tp=3,dp=2", "32 heads cannot be divided over 3 devices"),
        ("tp=2,dp=2,recompute=norms", "'norms': expected none, full, or parts of a layer"),
        ("tp=2,dp=2,software=megatron-cor", "did you mean megatron-core?"),
        ("tp=x,dp=2,precision=fp9", "precision 'fp9' is unknown"),
        ("tp=2,dp=2,gpus=6,software=nemi", "did you mean nemo?; tp 2 x pp 1 x cp 1 x dp 2 is 4, not 6 gpus"),
        ("tp=2,dp=3,mbs=2,gbs=32", "do not divide 32"),
        ("tp=2,dp=2,zero=7", "optimizer_sharding: 7; expected one of"),
        ("Et|tL", "2 transformer layers (t); the model has 32"),
    ],
)
def test_errors_say_what_to_do(layout: str, words: str) -> None:
    with pytest.raises(PiperRayError) as caught:
        piper_ray.memory("llama3-8b", layout)
    assert words in str(caught.value)


def test_what_is_said_twice_must_agree() -> None:
    with pytest.raises(UsageError, match="it says seq=4096, and seq=8192 is given as well; leave one out"):
        piper_ray.memory("llama3-8b", "tp=2,dp=2,seq=4096", tokens=8192)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp=2,ep=7,dp=8", "ep=7 does not divide the model's 128 experts"),
        ("tp=2,ep=64,dp=8", "ep=64 takes whole groups of 64 GPUs, and a stage has 16 "),
        ("tp=2,ep=16,etp=2,dp=8", "ep=16 x etp=2 takes whole groups of 32 GPUs"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(layout: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        piper_ray.memory("qwen3-30b-a3b", layout)
    assert piper_ray.memory("qwen3-30b-a3b", "ep=8,gpus=16").needed_bytes > 0.0


def test_a_script_takes_variables_and_its_precision_is_held_against_the_answer(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $TP --fp8-format hybrid\n"
    )
    asked = ("memory", "llama3-8b", "--layout", str(script), "--set", "TP=4")
    assert "tp 4, dp 2: 8 GPUs" in (shown := run_command(*asked).stdout)
    assert "the launch trains in fp8, and times and memory are for bf16" in shown
    assert "the launch trains" not in run_command(*asked, "--precision", "fp8").stdout


def test_command() -> None:
    words = "tp=4,pp=8,dp=2,mbs=1,gbs=128"
    shown = run_command("memory", "llama3-70b", "--layout", words, "--gpu", "H100-SXM").stdout
    assert "rank  layers  in flight  weights  grads  optim   acts" in shown
    assert "NVIDIA H100 SXM5 80 GB" in shown
    document = json.loads(run_command("memory", "llama3-70b", "--layout", words, "--json").stdout)
    found = piper_ray.memory("llama3-70b", words)
    assert document["needed_bytes"] == found.needed_bytes
    least, most = document["likely_bytes"]
    known = load_doubt().memory["whole"]
    assert (least, most) == (found.needed_bytes * known.least, found.needed_bytes * known.most)
    assert [rank["terms_bytes"] for rank in document["ranks"]] == [rank.terms for rank in found.ranks]
    assert sum(document["ranks"][0]["items_bytes"].values()) == document["ranks"][0]["allocated_bytes"]
