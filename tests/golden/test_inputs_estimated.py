"""The inputs that were estimated: made by the command in their header, and planned as an expert would expect."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import piper_ray
from piper_ray.cli.app import app
from piper_ray.evaluate import MEMORY_TOLERANCE, StageEvaluation
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.workloads.estimate.build import EstimateRequest, estimate
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer
from tests.lengths import long_after

INPUTS = Path(__file__).resolve().parents[2] / "inputs"
MODELS = [
    # name, two numbers of GPUs, least over greatest time of the stages that hold one of the model's repeated layers
    ("gpt3-175b", 128, 1024, 0.9),
    ("llama3-70b", 64, 512, 0.7),
    ("llama3-405b", 1024, 16384, 0.9),
    ("mixtral-8x22b", 64, 512, 0.8),
    ("t5-11b", 16, 128, 0.8),
    ("vit-22b", 32, 512, 0.9),
    ("clip-vit-l-14", 8, 64, 0.9),
    ("resnet50", 8, 64, 0.9),
    ("inception-v3", 8, 64, 0.9),
]
ESTIMATED = [*(row[0] for row in MODELS), "imagebind-huge"]
REPEATED = ("decoder layer", "encoder layer", "vision layer", "text layer", "conv", "decoder layer with experts")


def loaded(name: str, devices: int | None = None) -> Instance:
    return piper_ray.load(INPUTS / f"{name}.toml", devices=devices)


def optimum(
    instance: Instance, restrictions: Restrictions = Restrictions()
) -> tuple[Plan, tuple[StageEvaluation, ...], float]:
    """Under Piper's schedule the plan, what its stages cost by the independent check, and its time per sample."""
    solution = piper_ray.solve(instance, schedule="2bw", restrictions=restrictions)
    assert solution.status is piper_ray.Status.OPTIMAL
    assert solution.plan is not None
    evaluation = piper_ray.evaluate(instance, solution.plan, schedule="2bw")
    assert evaluation.time_per_sample_s == pytest.approx(solution.time_per_sample_s, rel=1e-9)
    return solution.plan, evaluation.stages, evaluation.time_per_sample_s


@pytest.mark.parametrize("name", long_after(4, ESTIMATED))
def test_the_header_s_command_makes_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (INPUTS / f"{name}.toml").read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if line.startswith("#   piper-ray estimate "))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs").mkdir()
    result = CliRunner().invoke(app, shlex.split(command)[2:])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "inputs" / f"{name}.toml").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(("name", "few", "many", "balance"), long_after(1, MODELS), ids=[row[0] for row in MODELS])
def test_planned_at_two_sizes(name: str, few: int, many: int, balance: float) -> None:
    times = []
    for devices in (few, many):
        instance = loaded(name, devices)
        # With places one stage may have less to do: a faster plan need not be more even.
        plan, stages, time_s = optimum(instance, Restrictions(constraints=[piper_ray.Unplaced()]))
        assert optimum(instance)[2] <= time_s * (1.0 + 1e-9)
        times.append(time_s)
        assert plan.devices <= devices
        assert max(stage.tensor_parallel_degree for stage in plan.stages) <= 8  # within a node
        loads = [
            found.time_s
            for stage, found in zip(plan.stages, stages, strict=True)
            if any(instance.layer_by_id[layer].name.startswith(REPEATED) for layer in stage.layers)
        ]
        assert min(loads) >= balance * max(loads)
        assert_recomputation_is_needed(instance, plan, stages)
    # Rounding to whole stages and degrees costs some of what the devices could do.
    assert few / many <= times[1] / times[0] <= 1.35 * few / many


def assert_recomputation_is_needed(instance: Instance, plan: Plan, stages: tuple[StageEvaluation, ...]) -> None:
    """No layer of a stage could do without its recomputation: with any faster way to run it memory would be short."""
    for stage, found in zip(plan.stages, stages, strict=True):
        for layer, chosen_id in stage.tmpc_ids.items():
            offered = instance.layer_by_id[layer].tmpcs[stage.tensor_parallel_degree]
            chosen = next(tmpc for tmpc in offered if tmpc.id == chosen_id)
            y = found.in_flight_microbatches
            kept = chosen.activation_bytes * y + chosen.fixed_bytes
            for faster in offered if chosen.recompute else ():
                if faster.time_per_sample_s < chosen.time_per_sample_s:
                    needed = found.memory_bytes - kept + faster.activation_bytes * y + faster.fixed_bytes
                    assert needed > instance.memory_bytes * (1 + MEMORY_TOLERANCE / 2)


def test_llama3_405b_does_not_fit_on_8_gpus_and_is_told_what_would_do() -> None:
    solution = piper_ray.solve(loaded("llama3-405b", 8), schedule="2bw")
    assert solution.status is piper_ray.Status.INFEASIBLE
    reason = solution.infeasibility
    assert reason is not None
    assert "no 8 devices of 72.6 GiB hold all stages" in reason.reason
    assert reason.least_memory_bytes is not None
    assert 7.3e12 / 8 < reason.least_memory_bytes < 7.5e12 / 8  # 18 bytes for each of 405 G parameters, and a little
    enough = loaded("llama3-405b", 8).replace(memory_bytes=reason.least_memory_bytes)
    optimum(enough)


def test_llama3_405b_from_a_config_of_hugging_face_to_a_plan_on_16384_gpus(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126,
        "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "use_cache": True,
    }  # fmt: skip
    path, out = tmp_path / "config.json", tmp_path / "workload.toml"
    path.write_text(json.dumps(config))
    arguments = ["estimate", str(path), "--gpu", "H100-SXM", "--nodes", "2048", "--batch", "2048", "-o", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    instance = piper_ray.load(out)
    assert (instance.devices, instance.microbatches) == (16384, 2048)
    plan, stages, _ = optimum(instance)
    assert {stage.tensor_parallel_degree for stage in plan.stages} == {4, 8}
    assert plan.devices > 0.98 * 16384
    assert max(stage.compute_s / stage.time_s for stage in stages) > 0.9


@pytest.mark.parametrize("devices", [1024, 16384])
def test_with_memory_to_spare_nothing_is_recomputed(devices: int) -> None:
    plan, _, _ = optimum(loaded("llama3-405b", devices).replace(memory_bytes=1e14))
    assert {tmpc_id for stage in plan.stages for tmpc_id in stage.tmpc_ids.values()} <= {"plain", "sp"}


def test_llama3_405b_takes_tensor_parallelism_for_its_memory() -> None:
    tight = optimum(loaded("llama3-405b", 1024))[0]
    degrees = {stage.tensor_parallel_degree for stage in tight.stages if holds_layers(stage)}
    assert degrees <= {4, 8}
    roomy = optimum(loaded("llama3-405b", 1024).replace(memory_bytes=1e14))[0]
    alone = [stage for stage in roomy.stages if holds_layers(stage) and stage.tensor_parallel_degree <= 2]
    assert sum(len(stage.layers) for stage in alone) > 0.9 * 126


def holds_layers(stage: Stage) -> bool:
    return any(1 <= layer <= 126 for layer in stage.layers)


def test_six_towers_are_refused_where_nothing_can_be_listed() -> None:
    instance = loaded("imagebind-huge")
    with pytest.raises(
        piper_ray.LimitError, match=r"28,704,376 downsets, which take about \d+\.\d GiB; the limit is 0.2"
    ):
        piper_ray.solve(instance, options=piper_ray.SolveOptions(memory_limit_bytes=1.7e8), schedule="2bw")


def test_sharding_and_offload_are_used_where_memory_binds_and_only_there() -> None:
    request = EstimateRequest(nodes=128, offer=Offer(zero=2, offload=True))
    instance = estimate(read_model("llama3-405b"), load_hardware(), "H100-SXM", request).instance
    plan, _, time_s = optimum(instance)
    used = {option for stage in plan.stages for tmpc_id in stage.tmpc_ids.values() for option in tmpc_id.split("+")}
    assert used >= {"zero2", "offload"}
    assert time_s < optimum(loaded("llama3-405b", 1024))[2]
    roomy = optimum(instance.replace(memory_bytes=1e14))[0]
    # A sharded optimizer's gradients and weights are fewer bytes than gradients reduced in fp32.
    assert {tmpc_id for stage in roomy.stages for tmpc_id in stage.tmpc_ids.values()} <= {"plain+zero2", "sp+zero2"}
