"""``piper-ray estimate``: files, words, and the explanation of figures."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import piper_ray
from piper_ray.cli.app import app
from piper_ray.model.plan import Plan
from piper_ray.workloads.formats.load import load

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["estimate", *map(str, arguments)])


def test_a_workload_that_loads_and_says_how_it_was_made(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.toml"
    result = run(config, "--gpu", "H100-SXM", "--nodes", 2, "--global-batch", 64, "-o", out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Model     tiny: 128,459,776 parameters, 6 layers of 3 kinds" in result.output
    assert "Sample    1 sequence of 2,048 tokens; 64 microbatches in a batch" in result.output
    assert "x NVIDIA H100 SXM5 80 GB, 78.8 GiB found\n" in result.output
    assert (
        "Links     network between nodes, 42.5 GB/s a GPU each way, so B = 85 GB/s; NVLink 4 within 8, 351 GB/s, so "
        "702 GB/s\n" in result.output
    )
    assert re.search(
        r"Memory    at least [\d.]+ GiB with one microbatch in flight: 1 GPU or more; of 91 published peaks 9 in 10",
        result.output,
    )
    text = out.read_text()
    assert f"#   piper-ray estimate {config} --gpu H100-SXM --nodes 2 --out {out} --global-batch 64\n" in text
    instance = load(out)
    assert (instance.devices, instance.microbatches, instance.degrees) == (16, 64, (1, 2, 4, 8))
    assert len(text.splitlines()) < 100


@pytest.mark.parametrize("shards", [2, 8])
def test_shards_of_the_optimizer_state_do_not_lessen_what_all_gpus_need(
    config: Path, tmp_path: Path, shards: int
) -> None:
    """The GPUs hold no less together where replicas share it out: each has the rest of its own."""
    arguments = (config, "--gpu", "H100-SXM", "--nodes", 2, "-o", tmp_path / "tiny.toml")
    sharded, whole = (run(*arguments, *more).output.splitlines()[-1] for more in (("--zero", shards), ()))
    assert sharded == whole
    assert whole.startswith("Memory    at least ")


def test_the_same_on_stdout_and_as_json(config: Path, tmp_path: Path) -> None:
    arguments = (config, "--gpu", "H100-SXM", "--nodes", 2)
    printed, out = run(*arguments).output, tmp_path / "tiny.json"
    toml = tmp_path / "printed.toml"
    toml.write_text(printed)
    assert run(*arguments, "-o", out).exit_code == 0
    assert load(out).digest == load(toml).digest


def test_options_reach_the_figures(config: Path, tmp_path: Path) -> None:
    hardware = tmp_path / "mine.toml"
    hardware.write_text("[training]\ngradient_bytes = 2\n")
    out = tmp_path / "all.toml"
    result = run(
        config, "--gpu", "a100-80", "--nodes", 1, "--gpus-per-node", 4, "--global-batch", 32, "--microbatch-size", 2,
        "--tokens", 512, "--unfused-attention", "--zero", 4, "--offload", "--hardware", hardware, "-o", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    instance, text = load(out), out.read_text()
    assert (instance.devices, instance.microbatches, instance.degrees) == (4, 16, (1, 2, 4))
    ids = {tmpc.id for tmpc in instance.layers[1].tmpcs[4]}
    assert len(ids) == 2 * 4 * 2 * 2
    assert {"plain", "sp+selective-core_attn-mlp+zero4+offload", "full+zero4"} <= ids
    assert "zero4: optimizer state over 4 replicas, in stages of as many replicas or more; offload: activations" in text
    assert "gradients, 2 bytes a parameter" in text
    assert "16 bytes a parameter" in text
    assert "# links          468 GB/s in and out together: NVLink 3 within 4, 234 GB/s each way\n" in text


@pytest.mark.parametrize("shards", ["all", "8"])
def test_the_command_in_the_file_can_be_run_again(config: Path, tmp_path: Path, shards: str) -> None:
    out = tmp_path / "workload.toml"
    command = ("estimate", str(config), "--gpu", "H100-SXM", "--nodes", "1", "--out", str(out), "--zero", shards)
    assert run(*command[1:]).exit_code == 0
    first = out.read_text()
    told = first.splitlines()[1].removeprefix("#   ")
    assert shlex.split(told) == ["piper-ray", *command]


def test_sharded_optimizers_are_planned_only_where_there_are_as_many_replicas(tmp_path: Path) -> None:
    out = tmp_path / "z.toml"
    assert run("llama3-8b", "--gpu", "H100-SXM", "--nodes", 1, "--zero", 8, "-o", out).exit_code == 0
    instance = load(out).replace(memory_bytes=40e9)
    assert any(x.id.endswith("zero8") for x in instance.layers[1].tmpcs[1])
    solution = piper_ray.solve(instance)
    assert solution.plan is not None
    piper_ray.evaluate(instance, solution.plan)
    sharded = [
        stage.data_parallel_degree
        for stage in solution.plan.stages
        if any("zero8" in tmpc_id for tmpc_id in stage.tmpc_ids.values())
    ]
    assert all(d >= 8 for d in sharded)
    first = solution.plan.stages[0]
    assert first.data_parallel_degree < 8
    ids = {
        layer: next(x.id for x in instance.layers[layer].tmpcs[first.tensor_parallel_degree] if "zero8" in x.id)
        for layer in first.layers
    }
    invalid = Plan((replace(first, tmpc_ids=ids), *solution.plan.stages[1:]))
    with pytest.raises(piper_ray.InvalidPlan, match="needs a data-parallel degree of at least 8"):
        piper_ray.evaluate(instance, invalid)


def test_a_model_that_cannot_fit_is_said_to_with_the_gpus_it_takes(tmp_path: Path) -> None:
    result = run("llama3-405b", "--gpu", "H100-SXM", "--nodes", 1, "-o", tmp_path / "large.toml")
    assert result.exit_code == 0
    assert "Memory    at least 6.6" in result.output
    assert "95 GPUs or more; the model does not fit on 8" in result.output


@pytest.mark.parametrize("layer", ["block", "decoder layer", "1"])
def test_each_figure_is_explained(config: Path, layer: str) -> None:
    result = run(config, "--gpu", "H100-SXM", "--nodes", 2, "--explain", layer)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "decoder layer (block): layers 1-4 of tiny"
    assert "  g = 8  key-value heads" in lines
    assert "  queries, keys, values: h a d + 2 h g d = 1024*16*64 + 2*1024*8*64 = 2,097,152, 1/t on each" in lines
    assert "  attention output: 2 s b a d = 2*2048*1*16*64 = 4,194,304, 1/t on each" in lines
    assert any("(s b) x (h) x (2 f), columns / t = 2048 x 1024 x 1024: 4.295e+09 FLOP at" in line for line in lines)
    exchange = "reduce-scatter and all-gather, attention: 2 s b h = 2*2048*1*1024 = 4,194,304 bytes"
    assert f"  {exchange}: 95.91 us, 1 forward and 1 backward; gathered again backward: 27.96 us" in lines
    assert "  TMPC sp+selective-mlp at t = 8" in lines
    assert any(line.startswith("    p = forward ") and " + again " in line for line in lines)
    assert "    w = 15,730,688 x 4 = 62,922,752 bytes" in lines
    assert any("x (2 weights + 4 gradients + 12 optimizer)" in line for line in lines)
    assert "    a = 4,194,304 / 8 = 524,288 bytes" in lines  # full recomputation with sequence parallelism


def test_the_options_are_explained_too(config: Path) -> None:
    options = (
        "--gpu",
        "H100-SXM",
        "--nodes",
        2,
        "--global-batch",
        64,
        "--zero",
        4,
        "--offload",
        "--microbatch-size",
        4,
    )
    lines = run(config, *options, "--explain", "block").output.splitlines()
    w = "15,730,688 x (4 of a gradient scattered + 2 of a weight gathered) / 2 = 47,192,064 bytes"
    assert f"    w = {w}" in lines
    assert any(line.startswith("        offload: ") and "/ (64 GB/s x 0.8) = " in line for line in lines)
    assert any(line.startswith("    a = 0; in host memory ") for line in lines)


def test_the_explained_times_are_those_of_the_file(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.toml"
    explained = run(config, "--gpu", "H100-SXM", "--nodes", 2, "--explain", "0", "-o", out).output
    times = re.findall(r"TMPC (\S+) at t = (\d)\n    p = .* = ([\d.]+) (us|ms)$", explained, re.MULTILINE)
    tmpcs = load(out).layers[0].tmpcs
    assert len(times) == sum(map(len, tmpcs.values()))
    for tmpc_id, t, number, unit in times:
        tmpc = next(tmpc for tmpc in tmpcs[int(t)] if tmpc.id == tmpc_id)
        assert tmpc.time_per_sample_s == pytest.approx(float(number) * {"us": 1e-6, "ms": 1e-3}[unit], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gpu", "H1000", "--nodes", 1), 2, "--gpu H1000: unknown; expected one of A100-40"),
        (("--gpu", "L40S", "--nodes", 0), 2, "--nodes"),
        (("--gpu", "L40S"), 2, "--nodes"),
        (("--gpu", "L40S", "--nodes", 1, "--global-batch", "many"), 2, "--global-batch"),
        (("--gpu", "L40S", "--nodes", 1, "--tokens", 4096), 2, "has positions for 2048"),
        (("--gpu", "L40S", "--nodes", 1, "--microbatch-size", 7), 2, "no multiple of the microbatch's 7 samples"),
        (("--gpu", "L40S", "--nodes", 1, "-o", "x.yaml"), 2, "expected a path that ends in .json or .toml"),
        (("--gpu", "L40S", "--nodes", 1, "-o", "/nowhere/x.toml"), 2, "cannot be written: No such file"),
        (("--gpu", "L40S", "--nodes", 1, "--explain", "neck"), 2, "from 0 to 5 or one of embedding, block, head"),
        (("--gpu", "L40S", "--nodes", 1, "--hardware", "none.toml"), 3, "none.toml: 1 fault found"),
    ],
)
def test_bad_input_is_a_message_and_a_code(config: Path, arguments: tuple[object, ...], code: int, words: str) -> None:
    result = run(config, *arguments)
    assert result.exit_code == code
    assert words in " ".join((result.output + result.stderr).split())
    assert "Traceback" not in result.output + result.stderr


def test_a_bad_config_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"model_type": "unheard-of"}')
    result = run(path, "--gpu", "L40S", "--nodes", 1)
    assert result.exit_code == 3
    assert 'model_type: unknown ("unheard-of"); expected one of gpt2' in result.stderr
