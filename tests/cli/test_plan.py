"""``piper-ray plan``: one command from a model's config to launch files, each of which the other commands take."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from piper_ray.calibrate.layouts import Untold, laid_out
from piper_ray.calibrate.runs import read_runs
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.layout import priced
from tests.cli_cases import run
from tests.export_support import ROOT
from tests.interrupt_support import HANG_S, started, wait_for
from tests.page_support import Page
from tests.unit.test_plan_documents import assert_described
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
    page = Page((out / "report.html").read_text())
    found = json.loads((out / "search.json").read_text())
    assert page.figure("step_s") == pytest.approx(found["step_s"])
    assert page.figure("gap") == pytest.approx(found["gap"])
    assert {"mfu", "tokens_per_s_per_device", "devices", "peak_memory_bytes", "days", "cost"} <= page.figures.keys()
    assert "the plan" in page.texts["others"]
    assert "comparison" not in page.ids
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
    assert "inf: expected an amount of money" in finished.stderr


def test_what_cannot_be_is_said_before_any_search(tmp_path: Path) -> None:
    """Training that the runtime does not do, and a model whose layers alone are more than the cluster holds."""
    out = tmp_path / "out"
    asked = ("--gpu", "H100-SXM", "--nodes", "2", "-o", str(out))
    finished = run("plan", "llama3-8b", *asked, "--runtime", "torchtitan", "--precision", "fp16")
    assert finished.returncode == 2
    assert "torchtitan trains in bf16 or fp8, and this plan in fp16" in finished.stderr
    assert "--runtime megatron, megatron-bridge, torch, deepspeed or flagscale may do" in finished.stderr
    assert "microbatches of" not in finished.stderr
    finished = run("plan", "deepseek-v3", *asked)
    assert finished.returncode == 4
    assert "more nodes" in finished.stderr
    assert "microbatches of" not in finished.stderr
    assert not out.exists()


def test_a_model_without_launch_files_is_planned(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = run("plan", "bert-large", "--gpu", "H100-SXM", "--nodes", "1", "-o", str(out))
    assert finished.returncode == 0
    assert "no launch files: the export for Megatron-LM is for text decoders, and bert is not one" in finished.stderr
    assert "--runtime torch or deepspeed writes some" in finished.stderr
    assert {file.name for file in out.iterdir()} == {"workload.toml", "plan.json", "search.json", "report.html"}


@pytest.mark.long
def test_what_the_runtime_holds_beside_the_figures_is_set_aside(tmp_path: Path) -> None:
    """DeepSpeed keeps tensors between stages: the best plan by the figures alone does not fit as it is launched."""
    out = tmp_path / "out"
    words = ("--gpu", "H100-SXM", "--nodes", "3", "--runtime", "deepspeed", "--microbatch-size", "1")
    finished = run("plan", "llama3-70b", *words, "--schedule", "1f1b", "--headroom", "0", "-o", str(out))
    assert finished.returncode == 0, finished.stderr
    held = re.search(r"than the (\S+ GiB) that DeepSpeed needs for itself: the search", finished.stderr)
    assert held is not None, finished.stderr
    assert f", {held.group(1)} kept free for DeepSpeed: by these estimates no plan" in " ".join(finished.stdout.split())
    workload, plan = str(out / "workload.toml"), out / "plan.json"
    document = json.loads(plan.read_text())
    assert (document["status"], document["lower_bound_s"], document["gap"]) == ("feasible", None, None)
    again = run("export", workload, str(plan), "--to", "deepspeed", "-o", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "ds_config.json").read_text() == (out / "ds_config.json").read_text()


_SECOND_SEARCH_HANGS = """
import threading
from piper_ray.cli import planning
first = planning.propose

def propose(asked, *more):
    if not asked.set_aside_bytes:
        return first(asked, *more)
    print("the second search", file=sys.stderr, flush=True)
    threading.Event().wait()

planning.propose = propose
"""


@pytest.mark.long
def test_ctrl_c_in_the_search_for_room_leaves_the_plan_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("llama3-70b", "--gpu", "H100-SXM", "--nodes", "3", "--runtime", "deepspeed", "--microbatch-size", "1")
    with started(
        "plan", *words, "--schedule", "1f1b", "--headroom", 0, "-o", out, setup=_SECOND_SEARCH_HANGS
    ) as process:
        wait_for(process, "the second search")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 130, errors
    assert "this is the best plan so far" in errors
    written = next(line for line in output.splitlines() if line.startswith(f"written to {out}: "))
    for name in ("workload.toml", "plan.json", "ds_config.json"):
        assert name in written
    workload, plan = str(out / "workload.toml"), str(out / "plan.json")
    assert json.loads((out / "plan.json").read_text())["status"] != "infeasible"
    assert run("verify", workload, plan).returncode == 0
    assert not (out / "report.html").exists(), "nobody waits for it"


_FIRST_CELL_HANGS = """
import threading
from piper_ray.proposal import cells

def hang(self, cell):
    print("the first cell", file=sys.stderr, flush=True)
    threading.Event().wait()

cells.CellSearch._go_through = hang
"""


def test_an_interrupt_before_the_first_plan_says_what_is_known(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("llama3-70b", "--gpu", "H100-SXM", "--nodes", "8", "--schedule", "1f1b", "--microbatch-size", "1")
    with started("plan", *words, "-o", out, setup=_FIRST_CELL_HANGS) as process:
        wait_for(process, "the first cell")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 143, errors
    assert output == ""
    search = json.loads((out / "search.json").read_text())
    assert_described(search, "search.schema.json")
    assert (search["step_s"], search["gap"]) == (None, None)
    looked = sum(cell["closing"] in ("searched", "no plan") for cell in search["cells"])
    told = (
        f"terminated; no plan yet: {looked} of {len(search['cells'])} combinations were looked at, and none takes less"
    )
    assert told in errors
    assert search["lower_bound_s"] > 10.0
    assert sorted(path.name for path in out.iterdir()) == ["search.json"]


_SECOND_ROW_HANGS = """
import threading
from piper_ray.proposal import clusters
first = clusters.propose

def propose(asked, *more, **named):
    if asked.request.batch == 12:
        return first(asked, *more, **named)
    print("the second row", file=sys.stderr, flush=True)
    threading.Event().wait()

clusters.propose = propose
"""


@pytest.mark.long
def test_an_interrupt_leaves_the_rows_of_a_table_that_are_known(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = (config, "--gpu", "H100-SXM", "--nodes", "1", "--gpus-per-node", "4", "--tokens", "512", "--dry-run")
    with started("plan", *words, "--schedule", "1f1b", "--global-batch", "12,16", setup=_SECOND_ROW_HANGS) as process:
        wait_for(process, "the second row")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 130, errors
    assert "these are the rows so far" in errors
    assert [line.split()[0] for line in output.splitlines()] == ["batch", "12"]


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "piper_ray", *words],
        cwd=ROOT, input=text, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.long
def test_a_config_from_stdin_for_a_gpu_whose_name_leaves_a_choice(tmp_path: Path) -> None:
    cluster = ("--gpus-per-node", "2", "--global-batch", "4", "--tokens", "512", "--microbatch-size", "1")
    config = json.dumps(CONFIG)
    finished = piped(
        config, "plan", "-", "--gpu", "h100", "--nodes", "1", *cluster, "--schedule", "1f1b", "-o", str(tmp_path)
    )
    assert finished.returncode == 0, finished.stderr
    assert "GPU h100: H100-SXM is assumed; H100-PCIe and H100-NVL are also called h100" in finished.stderr
    made = piped(config, "estimate", "-", "--gpu", "H100-SXM", "--nodes", "1")
    assert made.returncode == 0
    assert "called so too" not in made.stderr
    assert 'name = "model"' in made.stdout
    nothing = piped("", "estimate", "-", "--gpu", "H100-SXM", "--nodes", "1")
    assert nothing.returncode == 3
    assert nothing.stderr.startswith("piper-ray: stdin: 1 fault found")


def small(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = ("--gpus-per-node", "4", "--global-batch", "16", "--tokens", "512", "--schedule", "1f1b", *options)
    gpu = () if "--gpu" in options else ("--gpu", "H100-SXM")
    return run("plan", str(config), *gpu, *words)


def test_a_dry_run_s_document_is_the_answer(tmp_path: Path) -> None:
    """In two precisions, of which the fastest is planned; with headroom, which no plan goes into."""
    finished = small(tmp_path, "--nodes", "2", "--dry-run", "--json", "--precision", "bf16,fp8", "--headroom", "95%")
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert_described(document, "planned.schema.json")
    (other,) = document["precisions"].values()
    assert document["best"]["step_s"] <= other["step_s"]
    limit_bytes = document["memory_limit_bytes"]
    assert max(document["ranks_memory_bytes"]) == document["best"]["memory_bytes"] <= 0.05 * limit_bytes * (1 + 1e-9)
    assert document["search"]["left_free_bytes"] == pytest.approx(0.95 * limit_bytes)
    assert document["files"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_candidates_are_jobs_that_calibrate_reads_back(tmp_path: Path) -> None:
    out = tmp_path / "jobs"
    finished = small(tmp_path, "--nodes", "1", "-o", str(out), "--candidates", "2")
    assert finished.returncode == 0, finished.stderr
    for job in ("1", "2"):
        assert (out / job / "megatron.args").exists()
        verified = run("verify", str(out / job / "workload.toml"), str(out / job / "plan.json"))
        assert verified.returncode == 0, verified.stderr
    measured = json.loads((out / "measured.json").read_text())
    first, second = measured["runs"]
    assert first != second | {"id": first["id"]}
    assert "--calibrate measured.json" in (out / "README.md").read_text()
    search = json.loads((out / "search.json").read_text())
    assert_described(search, "search.schema.json")
    untold = Untold(read_model(str(tmp_path / "config.json")), "H100-SXM", gpus_per_node=4)
    for one in read_runs(str(out / "measured.json")):
        laid = laid_out(one, load_hardware(None), untold)
        told = priced(laid.model, laid.stack, load_hardware(None).training, laid.layout)
        planned_stages = json.loads((out / one.id / "plan.json").read_text())["stages"]
        assert [list(stage.layers) for stage in told.plan.stages] == [stage["nodes"] for stage in planned_stages]
    steps_s = sorted({cell["step_s"] for cell in search["cells"] if cell["step_s"] is not None})
    for one, step_s in zip((first, second), steps_s, strict=False):
        one["step_s"] = 1.3 * step_s
    (out / "measured.json").write_text(json.dumps(measured))
    again = small(tmp_path, "--nodes", "1", "--dry-run", "--calibrate", str(out / "measured.json"))
    assert again.returncode == 0, again.stderr
    own = small(tmp_path, "--nodes", "1", "--dry-run", "--json", "--against", str(out / "2"))
    assert own.returncode == 0, own.stderr
    document = json.loads(own.stdout)
    assert_described(document, "planned.schema.json")
    theirs = document["against"]
    assert theirs["plan"]["step_s"] == pytest.approx(steps_s[1], rel=1e-9)
    assert (theirs["name"], theirs["fits"], theirs["notes"]) == (str(out / "2"), True, [])
    assert theirs["why_not"].startswith("the plan has")


@pytest.mark.long
def test_a_launch_with_the_optimizer_in_host_memory_is_held_against_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "host"
    made = small(tmp_path, "--nodes", "1", "--optimizer-on-host", "-o", str(out))
    assert made.returncode == 0, made.stderr
    step_s = json.loads((out / "search.json").read_text())["step_s"]
    words = ("--nodes", "1", "--no-optimizer-on-host", "--dry-run", "--json", "--against", str(out))
    for more, fits, why in (((), True, "the plan has"), (("--host-memory", "1MB"), False, "it does not fit: the opt")):
        finished = small(tmp_path, *words, *more)
        assert finished.returncode == 0, finished.stderr
        theirs = json.loads(finished.stdout)["against"]
        assert theirs["plan"]["step_s"] == pytest.approx(step_s, rel=1e-9)
        assert (theirs["fits"], theirs["notes"]) == (fits, [])
        assert theirs["why_not"].startswith(why)


def test_several_clusters_are_a_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--gpu", "H100-SXM,A100-80", "--price", "2,1", "-o", str(out))
    finished = small(tmp_path, "--nodes", "1..2", *words)
    assert finished.returncode == 0, finished.stderr
    rows = list(csv.DictReader((out / "clusters.csv").read_text().splitlines()))
    assert [(row["gpu"], row["nodes"]) for row in rows] == [
        ("H100-SXM", "1"), ("H100-SXM", "2"), ("A100-80", "1"), ("A100-80", "2"),
    ]  # fmt: skip
    for row in rows:
        assert float(row["lower_bound_s"]) <= float(row["step_s"])
        cost = float(row["gpus"]) * float(row["price_per_gpu_hour"]) / 3600.0 * 1e9 / float(row["tokens_per_s"])
        assert float(row["cost_per_billion_tokens"]) == pytest.approx(cost)
    assert sorted(path.name for path in out.iterdir()) == ["clusters.csv"]
    alone = small(tmp_path, "--nodes", "2", "--dry-run", "--json")
    assert float(rows[1]["step_s"]) == json.loads(alone.stdout)["best"]["step_s"]


def test_several_batches_are_a_curve(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = small(tmp_path, "--nodes", "1", "--global-batch", "12..16", "-o", str(out))
    assert finished.returncode == 0, finished.stderr
    rows = list(csv.DictReader((out / "clusters.csv").read_text().splitlines()))
    assert [row["global_batch"] for row in rows] == ["12", "13", "14", "15", "16"]
    assert [line.split()[0] for line in finished.stdout.splitlines()[1:6]] == ["12", "13", "14", "15", "16"]
    alone = small(tmp_path, "--nodes", "1", "--global-batch", "12", "--dry-run", "--json")
    assert float(rows[0]["step_s"]) == pytest.approx(json.loads(alone.stdout)["best"]["step_s"], rel=2e-4)


def test_fewer_nodes_have_plans_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = small(tmp_path, "--nodes", "2", "-o", str(out), "--spare", "1", "--json")
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert_described(document, "planned.schema.json")
    two, one = document["fewer_nodes"]
    assert (two["nodes"], one["nodes"]) == (2, 1)
    assert one["step_s"] >= two["step_s"]
    assert 0.0 <= one["weights_bytes"] + one["state_bytes"] <= one["all_bytes"]
    folder = out / "nodes-1"
    assert run("verify", str(folder / "workload.toml"), str(folder / "plan.json")).returncode == 0


def test_fewer_nodes_are_planned_with_what_the_runtime_can_do_there(tmp_path: Path) -> None:
    """torchtitan's FSDP is over all GPUs of a cluster, and over as many as are left."""
    words = ("--runtime", "torchtitan", "--microbatch-size", "1", "--dry-run", "--json")
    both, alone = (small(tmp_path, "--nodes", *given, *words) for given in (("2", "--spare", "1"), ("1",)))
    assert (both.returncode, alone.returncode) == (0, 0), both.stderr
    _, fewer = json.loads(both.stdout)["fewer_nodes"]
    assert fewer["step_s"] == json.loads(alone.stdout)["best"]["step_s"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "expected --out DIR for the files, or --dry-run or --json"),
        (("--dry-run", "--fsdp", "4"), "--fsdp: Megatron runs no plan whose replicas share gradients or weights"),
        (("--dry-run", "--offload"), "--offload: Megatron's launch files have no activations in host memory"),
        (("--dry-run", "--zero-2", "4"), "--zero-2: Megatron runs no plan whose replicas share gradients"),
        (
            ("--dry-run", "--zero-2", "4", "--runtime", "deepspeed"),
            "--zero-2: DeepSpeed runs ZeRO-2 and ZeRO-3 under no",
        ),
        (
            ("--dry-run", "--zero-2", "4", "--runtime", "torchtitan"),
            "--zero-2: torchtitan shares weights and gradients",
        ),
        (("--dry-run", "--expert-tensor-parallel", "2", "--runtime", "torchtitan"), "torchtitan divides no experts"),
        (("--dry-run", "--recompute", "op"), "--recompute: Megatron has no"),
        (("--dry-run", "--tensor-parallel", "3"), "--tensor-parallel 3: 1, 2, 4 of these GPUs can share"),
        (("--dry-run", "--stages", "64"), "--stages 64: with TP 1 they take 64 GPUs and a layer each"),
        (("--dry-run", "--zero", "3"), "--zero 3: Megatron shares the optimizer's state among all replicas"),
        (("--dry-run", "--nodes", "1..100000000"), "GPUs; expected at most 100,000"),
        (("--dry-run", "--headroom", "1.5"), "expected a size, such as 4GiB, or a share below 1"),
        (("--dry-run", "--precision", "bf16,fp3"), "fp3"),
        (("--dry-run", "--global-batch", "16..8"), "expected samples, such as 1024 or 960,1024, or 960..1056"),
        (("--dry-run", "--global-batch", "8,16", "--headroom", "0,8%"), "--global-batch and --headroom: give several"),
        (("--dry-run", "--headroom", "0,8%", "--spare", "1"), "--spare is for one GPU, number of nodes, batch and"),
        (("--dry-run", "--candidates", "3"), "--candidates needs --out DIR"),
        (("--dry-run", "--price", "1,2", "--train-tokens", "1e9"), "--price has 2 prices for 1 GPUs"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path, words: tuple[str, ...], complaint: str) -> None:
    finished = small(tmp_path, "--nodes", "1", *words)
    assert finished.returncode == 2
    assert complaint in finished.stderr


def test_help_has_its_options_in_groups() -> None:
    lines = run("plan", "--help-all").stdout.splitlines()
    heads = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    expected = (
        "Arguments, Model and cluster, Answer, Training, Memory, Parallelism, Software, Step, Launch file, Options"
    )
    assert heads == [f"{name}:" for name in expected.split(", ")]
    estimated = run("estimate", "--help-all").stdout.splitlines()
    heads = [line for line in estimated if line.endswith(":") and not line.startswith(" ")]
    assert heads == [
        f"{name}:"
        for name in ["Arguments", "Model and cluster", "Answer", "Training", "Software", "Parallelism", "Options"]
    ]


def test_a_launch_file_that_is_none_is_refused_before_the_search(tmp_path: Path) -> None:
    finished = small(tmp_path, "--nodes", "1", "--dry-run", "--against", str(tmp_path / "none.sh"))
    assert finished.returncode == 2
    assert "there is no such file" in finished.stderr


def test_a_launch_of_another_batch_is_refused_before_the_search(tmp_path: Path) -> None:
    launch = tmp_path / "launch.args"
    launch.write_text("--micro-batch-size 1\n--global-batch-size 32\n--seq-length 512\n")
    finished = small(tmp_path, "--nodes", "1", "--dry-run", "--against", str(launch))
    assert finished.returncode == 2
    assert f"--against {launch}: it has --global-batch 32, and 16 is planned" in finished.stderr


def test_the_plan_is_shown_where_a_launch_cannot_be_compared(tmp_path: Path) -> None:
    launch = tmp_path / "launch.args"
    launch.write_text("--pipeline-model-parallel-size 4\n--micro-batch-size 1\n--global-batch-size 16\n")
    finished = small(tmp_path, "--nodes", "1", "--dry-run", "--against", str(launch))
    assert finished.returncode == 2
    assert "\nlayout    " in finished.stdout
    assert f"note: the plan is on stdout, but is not compared with {launch}:\n" in finished.stderr
    assert "do not divide evenly over 4 pipeline ranks, which Megatron requires without a layout" in finished.stderr


def test_calibration_holds_for_all_numbers_of_nodes_of_one_gpu(tmp_path: Path) -> None:
    runs = {
        "tp": 1, "pp": 1, "dp": 4, "gpus": 4, "microbatch": 4, "global_batch": 16, "seq": 512,
        "sequence_parallel": False, "recompute": "none", "step_s": 0.012,
    }  # fmt: skip
    measured = tmp_path / "run.json"
    measured.write_text(json.dumps(runs))
    several = small(tmp_path, "--nodes", "1", "--gpu", "H100-SXM,A100-80", "--calibrate", str(measured))
    assert several.returncode == 2
    assert "--calibrate: measurements are of one GPU" in several.stderr
    out = tmp_path / "out"
    words = ("--calibrate", str(measured), "--microbatch-size", "4")
    table = small(tmp_path, "--nodes", "1..2", "-o", str(out), *words)
    assert table.returncode == 0, table.stderr
    alone = small(tmp_path, "--nodes", "2", "--dry-run", "--json", *words)
    (row,) = (row for row in csv.DictReader((out / "clusters.csv").read_text().splitlines()) if row["nodes"] == "2")
    assert float(row["step_s"]) == json.loads(alone.stdout)["best"]["step_s"]


def test_what_no_plan_can_leave_free_is_told_as_such(tmp_path: Path) -> None:
    finished = small(tmp_path, "--nodes", "1", "--dry-run", "--headroom", "99.9%")
    assert finished.returncode == 4
    assert "no plan fits: it takes a smaller --headroom, more nodes" in finished.stderr


def test_a_folder_below_a_file_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finished = small(tmp_path, "--nodes", "1", "-o", str(tmp_path / "file" / "out"))
    assert finished.returncode == 2
    assert f"{tmp_path / 'file'} is a file; expected a folder" in finished.stderr


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="only Linux has /proc, where nobody makes files")
def test_a_folder_that_takes_no_files_is_refused_before_the_search(tmp_path: Path) -> None:
    finished = small(tmp_path, "--nodes", "1", "-o", "/proc/self/out")
    assert finished.returncode == 2
    assert "--out /proc/self/out: no file can be made in /proc/self" in finished.stderr


def test_a_launch_of_experts_that_says_nothing_of_their_tensor_parallelism_has_that_of_all_layers(
    tmp_path: Path,
) -> None:
    config, launch = tmp_path / "config.json", tmp_path / "launch.sh"
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    config.write_text(json.dumps({**CONFIG, **experts}))
    launch.write_text(
        "torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel "
        "--micro-batch-size 1 --global-batch-size 16 --bf16 --num-experts 4"
    )
    finished = run(
        "plan", str(config), "--gpu", "a100-80", "--nodes", "1", "--gpus-per-node", "4", "--global-batch", "16",
        "--tokens", "512", "--schedule", "1f1b", "--dry-run", "--against", str(launch),
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "TP 2, CP 1, PP 1, DP 2, EP 2, ETP 2" in " ".join(finished.stdout.split())
