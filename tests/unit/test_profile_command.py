"""``piper-ray profile``: from a factory to a file that solves; what a user does wrong; stopping and going on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import piper_ray
from piper_ray.cli.app import app
from piper_ray.engine.solve import solve
from piper_ray.evaluate import evaluate
from piper_ray.workloads.formats.load import load
from piper_ray.workloads.measure import session
from piper_ray.workloads.measure.graph import TracedLayer
from piper_ray.workloads.measure.passes import passes_of
from tests.profile_models import GPT, HERE

QUICK = ("--repeats", 2, "--warm-up", 0)
SMALL = ("--arg", "width=32", "--arg", "heads=4", "--arg", "tokens=16", "--arg", "words=64")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_a_gpt_of_96_equal_blocks_is_profiled_and_planned(tmp_path: Path, device: str) -> None:
    out = tmp_path / "gpt.toml"
    result = run(GPT, "--microbatch-size", 2, "--device", device, *SMALL, "--arg", "layers=96", "--global-batch", 64,
                 *QUICK, "-o", out)  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Model     small_gpt: 1,224,256 parameters, 100 layers of 5 kinds" in result.output
    assert "N = 32" in result.output
    text = out.read_text()
    (command,) = [line for line in text.splitlines() if line.startswith(f"#   piper-ray profile {GPT} ")]
    assert " --microbatch-size 2 " in command
    assert f" --out {out}" in command
    assert "# 2-97    blocks.0 " in text
    assert len(text.splitlines()) < 75
    assert not list(tmp_path.glob("*.partial"))
    instance = load(out, devices=8)
    assert len({layer.tmpcs[1][0].time_per_sample_s for layer in instance.layers if layer.name == "Block"}) == 1
    block = instance.layers[2].tmpcs[1]
    numbers = 12 * 32 * 32 + 13 * 32
    assert [tmpc.id for tmpc in block] == ["plain", "full"]
    assert [tmpc.recompute for tmpc in block] == [False, True]
    assert {tmpc.weights_bytes for tmpc in block} == {4.0 * numbers}
    assert {tmpc.fixed_bytes for tmpc in block} == {16.0 * numbers}
    assert block[1].activation_bytes == 2 * 16 * 32 * 4 < block[0].activation_bytes
    assert {edge.communication_bytes for edge in instance.edges} == {2 * 16 * 32 * 4.0}
    solution = solve(instance)
    assert solution.status == "optimal"
    assert solution.plan is not None
    assert len(solution.plan.stages) > 0
    assert solution.time_per_sample_s == pytest.approx(evaluate(instance, solution.plan).time_per_sample_s)


@pytest.mark.parametrize(("model", "layers", "edges"), [("small_resnet", 7, 6), ("two_towers", 8, 10)])
def test_other_models(tmp_path: Path, model: str, layers: int, edges: int) -> None:
    out = tmp_path / "model.json"
    assert run(f"{HERE}:{model}", "--microbatch-size", 3, *QUICK, "-o", out).exit_code == 0
    instance = load(out, devices=4)
    assert (len(instance.layers), len(instance.edges)) == (layers, edges)
    assert solve(instance).status == "optimal"


def test_shards_are_measured_where_the_factory_makes_them(tmp_path: Path) -> None:
    out = tmp_path / "gpt.toml"
    result = run(GPT, "--microbatch-size", 2, *SMALL, "--arg", "layers=3", *QUICK, "--tensor-parallel", "4,2,1",
                 "--gpu", "H100-SXM", "--devices", 4, "--memory", "1GB", "--bandwidth", "10GB/s",
                 "-o", out)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    text = out.read_text()
    assert "# plain-shard, full-shard: measured on one of t shards; all-reduces between them are not" in text
    assert "estimated" in text.split("name =")[0]
    assert "--memory 1GB --bandwidth 10GB/s" in text
    instance = load(out)
    assert instance.degrees == (1, 2, 4)
    assert (instance.devices, instance.bandwidth_bytes_per_s) == (4, 10e9)
    assert 0.99e9 < instance.memory_bytes < 1e9
    block = instance.layers[2].tmpcs
    assert [tmpc.id for tmpc in block[4]] == ["plain-shard", "full-shard"]
    shard_numbers = 12 * 32 * 32 / 4 + (3 * 32 + 4 * 32) / 4 + 2 * 32 + 4 * 32
    assert block[4][0].weights_bytes == 4 * shard_numbers
    # c is the share at t = 4; what is more at t = 1 is on top of it.
    assert {edge.communication_bytes for edge in instance.edges} == {2 * 16 * 32 * 4 / 4}
    assert set(block[1][0].forward_sync_bytes.values()) == {2 * 16 * 32 * 4 * 3 / 4}
    assert solve(instance).status == "optimal"


def test_other_degrees_are_estimated_and_marked(tmp_path: Path) -> None:
    out = tmp_path / "resnet.toml"
    result = run(
        f"{HERE}:small_resnet", "--microbatch-size", 2, *QUICK, "--tensor-parallel", 2, "--gpu", "L40S", "-o", out
    )
    assert result.exit_code == 0, result.stderr
    assert "# plain-estimated, full-estimated: NOT measured. Time at t = 1 divided by t" in out.read_text()
    for layer in load(out).layers:
        assert all(tmpc.id.endswith("-estimated") for tmpc in layer.tmpcs[2])
        assert not any(tmpc.id.endswith("-estimated") for tmpc in layer.tmpcs[1])


def test_the_workload_says_how_many_threads_it_was_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a rank of ``run`` has where the devices are processes here."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(2, 4)\n"
    )
    try:

        def measured(*options: object) -> tuple[int | None, str]:
            result = run(f"{model}:build", "--microbatch-size", 2, *QUICK, *options, "-o", tmp_path / "m.toml")
            assert result.exit_code == 0, result.stderr
            assert torch.get_num_threads() == 6
            return load(tmp_path / "m.toml", devices=1).measured_threads, result.output

        threads, said = measured("--devices", 4)
        assert threads == 2
        assert " CPU, 2 threads; load " in said
        assert " on 8 cores in the minute before" in said
        assert " CPU, 2 threads; load " in (tmp_path / "m.toml").read_text().splitlines()[0]
        assert measured("--devices", 32)[0] == 1
        assert measured()[0] == 6  # one device: as many as torch has
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        assert measured("--devices", 4)[0] == 6
        monkeypatch.delenv("OMP_NUM_THREADS")
        model.write_text(model.read_text().replace("\n\n", "\n\ntorch.set_num_threads(3)\n", 1))
        assert measured("--devices", 4)[0] == 3
        found = piper_ray.profile(f"{model}:build", microbatch_size=2, devices=4, repeats=2, warm_up=0)
        assert (found.measured_threads, torch.get_num_threads()) == (3, 6)
    finally:
        torch.set_num_threads(before)


def test_inputs_can_be_given(tmp_path: Path) -> None:
    out = tmp_path / "m.toml"
    result = run(
        f"{HERE}:only_a_module", "--arg", "width=5", "--microbatch-size", 6, "--input", "3x5", *QUICK, "-o", out
    )
    assert result.exit_code == 0, result.stderr
    (edge,) = load(out).edges
    assert edge.communication_bytes == 6 * 3 * 5 * 4
    result = run(f"{HERE}:only_a_module", "--microbatch-size", 6, "--input", "5:int64:9", *QUICK, "-o", out)
    assert result.exit_code == 3
    assert "the inputs have the shapes (6, 5)" in result.stderr


def test_a_stopped_profile_goes_on_and_measures_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpt.toml"
    command = (GPT, "--microbatch-size", 2, *SMALL, "--arg", "layers=3", *QUICK, "-o", out)
    whole = passes_of
    seen: list[str] = []

    stops = ["norm"]

    def watched(layer: TracedLayer, *arguments: Any, **options: Any) -> object:
        if layer.path in stops:
            raise KeyboardInterrupt
        seen.append(layer.path)
        return whole(layer, *arguments, **options)

    monkeypatch.setattr(session, "passes_of", watched)
    result = run(*command)
    assert result.exit_code == 130
    assert f"{out}.partial keeps what was measured; the same command with --resume goes on" in result.stderr
    partial = Path(f"{out}.partial")
    kept = partial.read_text().splitlines()
    assert seen == ["word_embedding", "position_embedding", "blocks.0"]
    assert len(kept) == 1 + 3
    assert not out.exists()

    other = run(*command[:2], 3, *command[3:], "--resume")
    assert other.exit_code == 2
    assert "is of another profile: other microbatch; without --resume" in " ".join(other.stderr.split())
    seen.clear()
    stops.clear()
    assert run(*command, "--resume").exit_code == 0
    assert seen == ["norm", "head"]
    times = [layer.tmpcs[1][0].time_per_sample_s for layer in load(out).layers]
    assert times[2] == pytest.approx(json.loads(kept[3])["figures"]["plain"]["total_s"], rel=1e-5)
    assert not partial.exists()
    assert "--resume" not in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nothing",), 2, "nothing: expected module:factory or file.py:factory"),
        (("no.such.module:f",), 2, "no module no here"),
        (("no_such_file.py:f",), 2, "no file no_such_file.py"),
        ((f"{HERE}:f",), 2, "f is not there; tests.profile_models has"),
        ((f"{HERE}:GPT",), 2, "GPT is not callable"),
        ((f"{HERE}:needing",), 2, "needing needs sides; expected --arg sides=VALUE"),
        ((f"{HERE}:raising",), 3, "ValueError: cannot make 3 sides"),
        ((f"{HERE}:raising", "--arg", "side=4"), 2, "--arg side: raising has no such argument; expected one of sides"),
        ((f"{HERE}:raising", "--arg", "sides"), 2, "--arg sides: expected KEY=VALUE"),
        ((f"{HERE}:returning_text",), 3, "returns a str; expected a torch.nn.Module, or (module, example inputs)"),
        ((f"{HERE}:only_a_module",), 3, "returns no example inputs; expected (module, example inputs), or --input"),
        ((f"{HERE}:only_a_module", "--input", "3y5"), 2, "--input 3y5: expected SHAPE[:DTYPE[:LIMIT]]"),
        ((f"{HERE}:of_sides_that_differ",), 3, "are no samples along their first side; expected a factory that takes"),
        ((f"{HERE}:of_wrong_shape",), 3, "the inputs have the shapes (2, 5)"),
        ((f"{HERE}:without_parameters",), 3, "Sequential has no parameters"),
        ((f"{HERE}:branching",), 3, "--layers"),
        ((GPT, "--layers", "block.*"), 2, "--layers block.*: no such module"),
        ((GPT, "--global-batch", "5"), 2, "--global-batch 5 is no multiple of --microbatch-size 2"),
        ((GPT, "--tensor-parallel", "2"), 2, "expected --gpu NAME, one of A100-40"),
        ((GPT, "--tensor-parallel", "two"), 2, "--tensor-parallel two: expected whole numbers, such as 2,4,8"),
        ((GPT, "--tensor-parallel", "3", "--gpu", "H100-SXM"), 3, "ValueError: 8 heads cannot be divided over 3 dev"),
        ((GPT, "--gpu", "K80"), 2, "--gpu K80: unknown"),
        ((GPT, "--memory", "1kB", *SMALL), 2, "recomputing one layer takes"),
        ((GPT, "--device", "tpu"), 2, "--device"),
        ((GPT, "--repeats", "1"), 2, "--repeats"),
        ((GPT, "--hardware", "none.toml"), 3, "none.toml: 1 fault found"),
        ((f"{HERE}:uneven_shards", "--tensor-parallel", "2", "--gpu", "L40S"), 3, "tensor_parallel=2: 2 layers that"),
    ],
)  # fmt: skip
def test_bad_input_is_a_message_and_a_code(tmp_path: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    model, *options = arguments
    small = ("--arg", "layers=1") if model == GPT else ()
    result = run(model, "--microbatch-size", 2, "-o", tmp_path / "x.toml", *QUICK, *small, *options)
    assert result.exit_code == code, result.output + result.stderr
    assert words in " ".join((result.output + result.stderr).split())
    assert "Traceback" not in result.output + result.stderr
    assert not (tmp_path / "x.toml").exists()
    assert (tmp_path / "x.toml.partial").exists() == ("--memory" in options)  # only that is said after measuring


@pytest.mark.parametrize("out", ["x.yaml", "/nowhere/x.toml"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(out: str) -> None:
    result = run(GPT, "--microbatch-size", 2, "-o", out)
    assert result.exit_code == 2
    assert out in result.stderr


def test_broken_code_of_the_user_is_shown_with_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken_model.py"
    broken.write_text("import torch\ndef model(:\n")
    result = run(f"{broken}:model", "--microbatch-size", 2, "-o", tmp_path / "x.toml")
    assert result.exit_code == 3
    assert f"{broken}:2: SyntaxError: invalid syntax" in " ".join(result.stderr.split())
    broken.write_text("import torch\nimport no_such_package\n")
    result = run(f"{broken}:model", "--microbatch-size", 2, "-o", tmp_path / "x.toml")
    assert result.exit_code == 3
    assert f"{broken}:2: ModuleNotFoundError: No module named 'no_such_package'" in " ".join(result.stderr.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_no_gpu(tmp_path: Path) -> None:
    result = run(GPT, "--microbatch-size", 2, "--device", "cuda", "-o", tmp_path / "x.toml")
    assert result.exit_code == 2
    assert "finds no GPU; expected --device cpu" in " ".join(result.stderr.split())


def test_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.model.errors.find_spec", lambda name: importlib.util.find_spec(f"no_{name}"))
    result = run(GPT, "--microbatch-size", 2, "-o", tmp_path / "x.toml")
    assert result.exit_code == 2
    assert "profile needs torch, which is not installed: pip install 'piper-ray[torch]'" in result.stderr


@pytest.mark.long
def test_nothing_else_imports_torch() -> None:
    modules = "piper_ray.cli.app, piper_ray.engine.solve, piper_ray.workloads.formats.load"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "False\n"
