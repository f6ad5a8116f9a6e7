"""``piper-ray simulate``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import piper_ray
from piper_ray.cli.app import app
from tests.cli_cases import run, without_notes
from tests.simulate_support import GIB, chain, cut

RUNNER = CliRunner()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Four layers on four devices, and a plan of a stage for each."""
    workload, plan = tmp_path / "chain.json", tmp_path / "plan.json"
    piper_ray.dump(chain([3.0] * 4, microbatches=8, devices=4, edge_bytes=GIB / 8), workload)
    plan.write_text(json.dumps(cut([1] * 4).to_dict()))
    return workload, plan


def _run(*arguments: object) -> tuple[int, str, str]:
    result = RUNNER.invoke(app, ["simulate", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_as_a_process(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "timeline.svg"
    result = run("simulate", *files, "--schedule", "1f1b", "--trace", trace, "--plot", plot)
    assert (result.returncode, without_notes(result.stderr)) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "Workload  chain: 4 layers, 3 edges, tensor-parallel degrees 1"
    assert "1f1b: one forward, one backward pass in turn, then a flush" in lines
    assert "step 37.8 s: 4.72 s/microbatch, 0.212 microbatches/s" in lines
    assert json.loads(trace.read_text())["otherData"]["step_s"] == 37.75
    assert plot.read_text().startswith("<?xml")


def test_as_a_document(files: tuple[Path, Path]) -> None:
    code, out, _ = _run(*files, "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["schema"], document["schedule"]) == ("piper-ray/simulation", "2bw")
    instance, plan = chain([3.0] * 4, microbatches=8, devices=4, edge_bytes=GIB / 8), cut([1] * 4)
    assert document["time_per_sample_s"] == pytest.approx(piper_ray.evaluate(instance, plan).time_per_sample_s)


def _step_s(files: tuple[Path, Path], *options: object) -> float:
    code, out, err = _run(*files, "--json", *options)
    assert code == 0, err
    step_s = json.loads(out)["step_s"]
    assert isinstance(step_s, float)
    return step_s


def test_options_reach_the_simulation(files: tuple[Path, Path]) -> None:
    plain_s = _step_s(files, "--schedule", "1f1b")
    assert _step_s(files, "--schedule", "1f1b", "--optimizer", "250ms") == pytest.approx(plain_s + 0.25)
    gpipe_s = _step_s(files, "--schedule", "gpipe")
    assert _step_s(files, "--schedule", "gpipe", "--latency", "1 s") == pytest.approx(gpipe_s + 6.0)
    assert _step_s(files, "--schedule", "1f1b", "--transfers", "overlapped") < plain_s
    assert _step_s(files, "--schedule", "1f1b", "--keep", "8,8,8,8") == pytest.approx(
        _step_s(files, "--schedule", "gpipe")
    )
    assert _step_s(files, "--schedule", "interleaved", "--chunks", 4) > plain_s
    assert _step_s(files, "--schedule", "interleaved", "--group", 8) > 0
    assert _step_s(files, "--schedule", "1f1b", "--microbatches", 16) > 1.5 * plain_s
    code, out, _ = _run(*files, "--json", "--microbatch-size", 2, "--tokens", 10)
    assert out == _run(*files, "--json", "--samples-per-microbatch", 2, "--tokens-per-sample", 10)[1], "as of before"
    assert code == 0
    assert json.loads(out)["tokens_per_s"] == pytest.approx(20 * 8 / json.loads(out)["step_s"])


def test_replicas_and_how_their_gradients_are_summed(tmp_path: Path) -> None:
    workload, plan = tmp_path / "chain.json", tmp_path / "plan.json"
    piper_ray.dump(chain([3.0, 6.0, 3.0], microbatches=8, weights_bytes=GIB), workload)
    plan.write_text(json.dumps(cut([1] * 3, [1, 2, 1]).to_dict()))
    files = workload, plan
    sums_s = [_step_s(files, "--schedule", "gpipe", "--all-reduce", how) for how in ("parameter-server", "ring")]
    assert sums_s[0] >= sums_s[1]
    hidden_s = _step_s(files, "--schedule", "gpipe", "--all-reduce-overlap", "1.0")
    assert hidden_s <= sums_s[0]
    document = json.loads(_run(*files, "--json")[1])
    assert document["sustaining_in_flight"] == [5, 2, 1]
    sustained = json.loads(_run(*files, "--json", "--keep", "sustaining")[1])
    assert sustained["in_flight"] == [5, 2, 1]
    assert sustained["step_s"] == pytest.approx(sustained["promised_s"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--schedule", "1f2b"], 2, "1f2b"),
        (["--latency", "5"], 2, "'5' is no time; expected one such as 5us, 1.5ms or 2s"),
        (["--latency", "-5us"], 2, "'-5us' is no time"),
        (["--keep", "most"], 2, "--keep 'most' is unknown; expected rule, sustaining, or a number for each stage"),
        (["--keep", "1,2"], 2, "in_flight has 2 figures; the plan has 4 stages"),
        (["--schedule", "1f1b", "--chunks", "2"], 2, "schedule 1f1b has one stage on each rank"),
        (["--all-reduce-overlap", "2"], 2, "--all-reduce-overlap must be from 0 to 1"),
        (["--plot", "timeline.gif"], 2, "plots are written as .png, .svg, .pdf"),
        (["--devices", "2"], 6, "the plan uses 4 devices, 2 are there"),
        (["--schedule", "interleaved", "--chunks", "3"], 6, "puts 3 stages on each rank; the plan has 4"),
    ],
)
def test_refusals(files: tuple[Path, Path], options: list[str], code: int, message: str) -> None:
    found, out, err = _run(*files, *options)
    assert found == code
    assert message in " ".join(err.split())
    assert out == ""


def test_files_that_cannot_be_written_cost_no_answer(files: tuple[Path, Path], tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    code, out, err = _run(*files, "--trace", missing / "trace.json", "--plot", missing / "timeline.svg")
    assert code == 2
    assert "the promised 28.0 s a batch are kept" in out
    assert err.count("cannot be written") == 2
