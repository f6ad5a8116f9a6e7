"""``piper-ray plan``: one command from a model's config to launch files, each of which the other commands take."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.cli_cases import run
from tests.export_support import ROOT
from tests.interrupt_support import HANG_S, started, wait_for
from tests.unit.test_propose import CONFIG


def planned(folder: Path, *options: str) -> Path:
    config, out = folder / "config.json", folder / "out"
    config.write_text(json.dumps(CONFIG))
    finished = run(
        "plan", str(config), "--gpu", "a100-80", "--nodes", "1", "--gpus-per-node", "4", "--global-batch", "16",
        "--tokens", "512", "-o", str(out), *options,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    for word in ("MFU", "tokens/s/GPU", "layout    mbs", "with 25 % more memory"):
        assert word in finished.stdout
    return out


def test_megatron(tmp_path: Path) -> None:
    out = planned(tmp_path, "--schedule", "1f1b", "--train-tokens", "1e9", "--price", "2")
    arguments = shlex.split((out / "megatron.args").read_text())
    assert "--pipeline-model-parallel-layout" in arguments or "--pipeline-model-parallel-size" in arguments
    assert "<html" in (out / "report.html").read_text()
    assert "--zero" not in (out / "workload.toml").read_text().splitlines()[1]  # which is as it is by itself
    for command in ("verify", "simulate"):
        finished = run(command, str(out / "workload.toml"), str(out / "plan.json"))
        assert finished.returncode == 0, finished.stderr


def test_torchtitan(tmp_path: Path) -> None:
    out = planned(tmp_path, "--runtime", "torchtitan", "--microbatch-size", "2", "--schedule", "1f1b")
    decided = json.loads((out / "torchtitan.json").read_text())
    degrees = decided["parallelism"]
    ranks = (
        "pipeline_parallel",
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "context_parallel",
    )
    used = len((out / "ranks.csv").read_text().splitlines()) - 1
    assert math.prod(degrees[f"{name}_degree"] for name in ranks) == used
    assert (decided["layers"], decided["training"]["global_batch_size"]) == (CONFIG["num_hidden_layers"], 16)


def test_a_price_needs_a_training(tmp_path: Path) -> None:
    finished = run("plan", "llama3-70b", "--gpu", "H100", "--nodes", "8", "-o", str(tmp_path), "--price", "2")
    assert finished.returncode == 2
    assert "--train-tokens" in finished.stderr
    words = ("--train-tokens", "1e9", "--price", "inf")
    finished = run("plan", "llama3-70b", "--gpu", "H100", "--nodes", "8", "-o", str(tmp_path), *words)
    assert finished.returncode == 2
    assert "--price inf: expected an amount of money" in finished.stderr


def test_what_cannot_be_is_said_before_any_search(tmp_path: Path) -> None:
    """A model that the runtime's files cannot say, and one whose layers alone are more than the cluster holds."""
    out = tmp_path / "out"
    finished = run("plan", "vit-22b", "--gpu", "H100-SXM", "--nodes", "16", "-o", str(out))
    assert finished.returncode == 2
    assert "is of decoders of text; vit is none" in finished.stderr
    assert "--runtime deepspeed may do" in finished.stderr
    assert "microbatches of" not in finished.stderr
    finished = run("plan", "deepseek-v3", "--gpu", "H100-SXM", "--nodes", "2", "-o", str(out))
    assert finished.returncode == 4
    assert "layers need at least 11.3 TiB, 157 GPUs or more: they do not fit on 16" in finished.stderr
    assert "microbatches of 2" not in finished.stderr
    assert not out.exists()


def test_what_the_runtime_holds_beside_the_figures_is_set_aside(tmp_path: Path) -> None:
    """DeepSpeed keeps tensors between stages: the best plan by the figures alone does not fit as it is launched."""
    out = tmp_path / "out"
    words = ("--gpu", "H100-SXM", "--nodes", "4", "--runtime", "deepspeed", "--microbatch-size", "1")
    finished = run("plan", "llama3-70b", *words, "--schedule", "1f1b", "-o", str(out))
    assert finished.returncode == 0, finished.stderr
    held = re.search(r"than the (\S+ GiB) that DeepSpeed holds beside its figures: it is sought", finished.stderr)
    assert held is not None, finished.stderr
    assert f"no plan that leaves {held.group(1)} for DeepSpeed with any of these" in finished.stdout
    workload, plan = str(out / "workload.toml"), out / "plan.json"
    document = json.loads(plan.read_text())
    assert (document["status"], document["lower_bound_s"]) == ("feasible", 0.0)
    again = run("export", workload, str(plan), "--to", "deepspeed", "-o", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "ds_config.json").read_text() == (out / "ds_config.json").read_text()


_SECOND_SEARCH_HANGS = """
import threading
from piper_ray.proposal import propose as searching
first = searching.propose

def propose(asked, *more):
    if not asked.set_aside_bytes:
        return first(asked, *more)
    print("the second search", file=sys.stderr, flush=True)
    threading.Event().wait()

searching.propose = propose
"""


def test_ctrl_c_in_the_search_for_room_leaves_the_plan_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("llama3-70b", "--gpu", "H100-SXM", "--nodes", "4", "--runtime", "deepspeed", "--microbatch-size", "1")
    with started("plan", *words, "--schedule", "1f1b", "-o", out, setup=_SECOND_SEARCH_HANGS) as process:
        wait_for(process, "the second search")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 130, errors
    assert "this is the best plan so far" in errors
    for name in ("workload.toml", "plan.json", "ds_config.json"):
        assert str(out / name) in output.splitlines()
    workload, plan = str(out / "workload.toml"), str(out / "plan.json")
    assert json.loads((out / "plan.json").read_text())["status"] != "infeasible"
    assert run("verify", workload, plan).returncode == 0
    assert not (out / "report.html").exists(), "nobody waits for it"


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "piper_ray", *words],
        cwd=ROOT, input=text, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_config_from_stdin_for_a_gpu_whose_name_leaves_a_choice(tmp_path: Path) -> None:
    cluster = ("--gpus-per-node", "2", "--global-batch", "4", "--tokens", "512", "--microbatch-size", "1")
    config = json.dumps(CONFIG)
    finished = piped(
        config, "plan", "-", "--gpu", "h100", "--nodes", "1", *cluster, "--schedule", "1f1b", "-o", str(tmp_path)
    )
    assert finished.returncode == 0, finished.stderr
    assert "GPU h100: H100-SXM is taken; H100-PCIe and H100-NVL are called so too" in finished.stderr
    made = piped(config, "estimate", "-", "--gpu", "H100-SXM", "--nodes", "1")
    assert made.returncode == 0
    assert "called so too" not in made.stderr
    assert 'name = "model"' in made.stdout
    nothing = piped("", "estimate", "-", "--gpu", "H100-SXM", "--nodes", "1")
    assert nothing.returncode == 3
    assert nothing.stderr.startswith("piper-ray: stdin: 1 fault found")
