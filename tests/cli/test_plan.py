"""``piper-ray plan``: one command from a model's config to launch files, each of which the other commands take."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tests.cli_cases import run
from tests.unit.test_propose import CONFIG


def planned(folder: Path, *options: str) -> Path:
    config, out = folder / "config.json", folder / "out"
    config.write_text(json.dumps(CONFIG))
    finished = run(
        "plan", str(config), "--gpu", "a100-80", "--nodes", "1", "--gpus-per-node", "4", "--global-batch", "16",
        "--tokens", "512", "-o", str(out), *options,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    for word in ("MFU", "tokens/s/GPU", "rank 0", "with 25 % more memory"):
        assert word in finished.stdout
    return out


def test_megatron(tmp_path: Path) -> None:
    out = planned(tmp_path, "--schedule", "1f1b", "--train-tokens", "1e9", "--price", "2")
    arguments = shlex.split((out / "megatron.args").read_text())
    assert "--pipeline-model-parallel-layout" in arguments or "--pipeline-model-parallel-size" in arguments
    assert "<html" in (out / "report.html").read_text()
    for command in ("verify", "simulate"):
        finished = run(command, str(out / "workload.toml"), str(out / "plan.json"))
        assert finished.returncode == 0, finished.stderr


def test_torchtitan(tmp_path: Path) -> None:
    out = planned(tmp_path, "--runtime", "torchtitan", "--microbatch-size", "2", "--schedule", "1f1b")
    assert any("torchtitan" in path.name or path.suffix == ".toml" for path in out.iterdir())


def test_a_price_needs_a_training(tmp_path: Path) -> None:
    finished = run("plan", "llama3-70b", "--gpu", "H100", "--nodes", "8", "-o", str(tmp_path), "--price", "2")
    assert finished.returncode == 2
    assert "--train-tokens" in finished.stderr
