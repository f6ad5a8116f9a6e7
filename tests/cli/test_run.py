"""``piper-ray run``: from a plan to measured steps; what a user does wrong; ranks that fail; signals; torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import piper_ray
from tests.cli_cases import ROOT, run
from tests.interrupt_support import HANG_S, started
from tests.lengths import long_after
from tests.run_models import DROPPING_PATHS, HEAVY_PATHS, HERE, TROUBLED_PATHS
from tests.run_support import GPT_PATHS

GPT = f"{HERE}:gpt"
QUICK = ("--steps", 2, "--warm-up", 0)


def chain(paths: tuple[str, ...], microbatches: int = 4) -> piper_ray.Instance:
    """Layers as profile would find them, all of 10 ms, which recompute or do not."""
    ways = [
        piper_ray.Tmpc(name, forward_s=0.003, backward_s=0.007, fixed_bytes=1e3, activation_bytes=1e3, recompute=full)
        for name, full in (("plain", False), ("full", True))
    ]
    return piper_ray.Instance(
        [piper_ray.Layer(number, "Layer", {1: tuple(ways)}, path) for number, path in enumerate(paths)],
        [piper_ray.Edge(number, number + 1, 1024.0) for number in range(len(paths) - 1)],
        cluster=piper_ray.Cluster(4, 1e9, (piper_ray.Link(1e9),)),
        batch=piper_ray.Batch(microbatches, 2),
        name="chain",
        schedule="1f1b",
    )


def write_plan(
    folder: Path,
    paths: tuple[str, ...],
    border: int | None,
    *,
    recompute: tuple[int, ...] = (),
    replicas: int = 1,
    microbatches: int = 4,
) -> tuple[Path, Path]:
    """Two stages, or without a border one; returns the plan and its workload."""
    instance = chain(paths, microbatches)
    ends = (0, len(paths)) if border is None else (0, border, len(paths))
    stages = tuple(
        piper_ray.Stage(of, replicas, 1, {layer: "full" if layer in recompute else "plain" for layer in of})
        for of in (tuple(range(first, end)) for first, end in pairwise(ends))
    )
    plan, workload = folder / "plan.json", folder / "workload.toml"
    piper_ray.dump_plan(piper_ray.Plan(stages), plan, instance)
    piper_ray.dump(instance, workload)
    return plan, workload


def test_a_plan_is_trained_and_measured_against_its_promise(tmp_path: Path) -> None:
    plan, workload = write_plan(tmp_path, GPT_PATHS, 3, recompute=(2,))
    trace = tmp_path / "trace.json"
    result = run("run", GPT, plan, "--workload", workload, "--trace", trace, *QUICK)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "Model     tests.run_models:gpt",
        f"Ranks     2 on CPU, {_threads()} each: 2 stages, 1f1b",
        "Batch     4 microbatches of 2 samples",
    ]
    table = [line.split()[:3] for line in lines if " measured " in line]
    assert table[:2] == [["0", "1", "measured"], ["1", "2", "measured"]]
    assert sum(line.strip().startswith("promised") for line in lines) == 3
    assert "promised 230.0 ms: measured" in result.stdout  # 4 times 50 ms, and stage 1 there and back
    assert "(median of 2 steps, " in result.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        0: "measured rank 0 (stage 1)",
        1: "promised rank 0: stage 1",
        2: "measured rank 1 (stage 2)",
        3: "promised rank 1: stage 2",
    }
    for track in names:
        passes = [event["name"] for event in events if event["pid"] == track and "microbatch" in event.get("args", {})]
        assert sorted(passes) == sorted(f"{kind}{k}" for kind in "FB" for k in range(4))


@pytest.mark.long
def test_masks_of_dropout_differ_between_replicas_and_are_the_same_in_each_run(tmp_path: Path) -> None:
    seen = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        plan, _ = write_plan(folder, DROPPING_PATHS, None, recompute=(0,), replicas=2)
        result = run("run", f"{HERE}:dropping", plan, "--arg", f"folder={folder}", "--json", *QUICK)
        assert result.returncode == 0, result.stderr
        masks = [(folder / f"kept-{rank}").read_text().splitlines() for rank in range(2)]
        seen.append((json.loads(result.stdout)["losses"], masks))
    (losses, (one, other)), again = seen
    assert again == seen[0]
    for own in (one, other):  # each twice, since the first layer is recomputed
        assert sorted(own) == sorted(2 * list(set(own)))
        assert len(set(own)) == 2 * len(losses)  # a replica has two microbatches
    assert not set(one) & set(other)


@pytest.mark.long
def test_the_peak_of_memory_is_that_of_a_step_with_the_optimizer_s_state(tmp_path: Path) -> None:
    plan, _ = write_plan(tmp_path, HEAVY_PATHS, None, microbatches=1)
    result = run("run", f"{HERE}:heavy", plan, "--microbatch-size", 2048, "--json", *QUICK)
    assert result.returncode == 0, result.stderr
    (rank,) = json.loads(result.stdout)["ranks"]
    # MiB, as the backward pass is through with its last layer: weights, AdamW's state, what the layers keep; then
    # gradients of the output, of what is before its tanh, and of the layer's weights.
    expected = 3 + 6 + 3 * 4 + 4 + 4 + 1
    assert rank["measured"]["peak_memory_bytes"] / 2**20 == pytest.approx(expected, rel=1e-3)


def _threads() -> str:
    count = int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // 2)))
    return f"{count} thread{'' if count == 1 else 's'}"


@pytest.mark.parametrize(
    ("words", "ranks", "code", "told"),
    long_after(
        2,
        [
            ("raise", 1, 3, "  rank 0 (stage 1): the forward pass of stage 1: ValueError: no such number ("),
            ("die", 2, 7, "piper-ray: rank 1 (stage 2) was ended by SIGKILL (is there too little memory?)"),
            ("raise", 2, 3, "  rank 1 (stage 2): the forward pass of stage 2: ValueError: no such number ("),
        ],
    ),
)
def test_a_rank_that_fails_ends_the_run_with_its_own_error(
    tmp_path: Path, words: str, ranks: int, code: int, told: str
) -> None:
    plan, _ = write_plan(tmp_path, TROUBLED_PATHS, 1 if ranks == 2 else None)
    result = run("run", f"{HERE}:troubled", plan, "--arg", f"folder={tmp_path}", "--arg", f"words={words}", *QUICK)
    assert result.returncode == code, result.stderr
    assert told in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("rank ") == 1
    assert _left(tmp_path) == []


@pytest.mark.parametrize(("number", "ranks"), long_after(1, [(signal.SIGINT, 1), (signal.SIGKILL, 2)]))
def test_a_signal_ends_all_ranks_within_three_seconds(tmp_path: Path, number: signal.Signals, ranks: int) -> None:
    plan, _ = write_plan(tmp_path, TROUBLED_PATHS, 1 if ranks == 2 else None)
    arguments = ("--arg", f"folder={tmp_path}", "--arg", "words=hang")
    with started("run", f"{HERE}:troubled", plan, *arguments) as process:
        _wait_until((tmp_path / f"rank-{ranks - 1}.pid").exists)
        assert len(_left(tmp_path)) == ranks
        begun_s = time.monotonic()
        process.send_signal(number)
        code = process.wait(HANG_S)
        _wait_until(lambda: not _left(tmp_path))
        assert time.monotonic() - begun_s < 3.0 or _is_loaded()
        assert process.stderr is not None
        said = process.stderr.read()
    assert code == (-number if number is signal.SIGKILL else 128 + number)
    assert "Traceback" not in said
    assert ("piper-ray: " in said) == (number is not signal.SIGKILL)


def _is_loaded() -> bool:
    """Other work than this keeps the cores."""
    return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)


def _left(folder: Path) -> list[int]:
    """Processes that have a folder in their command line or in that of who started them: ranks of its runs."""
    if not Path("/proc").exists():
        pytest.skip("there is no /proc")
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not process.name.isdigit() or b"piper_ray.run.rank" not in (process / "cmdline").read_bytes():
                continue
            job = Path(os.fsdecode((process / "cmdline").read_bytes().split(b"\0")[-2])) / "job.pickle"
            if os.fsencode(folder) in job.read_bytes():
                found.append(int(process.name))
    return found


def _wait_until(true: Callable[[], bool]) -> None:
    due_s = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < due_s
        time.sleep(0.05)


@pytest.mark.long
def test_ranks_may_be_torchrun_s(tmp_path: Path) -> None:
    plan, _ = write_plan(tmp_path, GPT_PATHS, 3)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "-m", "piper_ray", "run", GPT, str(plan), "--json", "--steps", "1", "--warm-up", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"},
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["schema"], document["stages"], document["replicas"]) == ("piper-ray/run", 2, 1)
    assert len(document["losses"]) == 3
    assert document["step_s"] == document["steps_s"][0] > 0
    assert document["promised_s"] is None  # dump_plan says nothing of what a plan costs
    assert [rank["stages"] for rank in document["ranks"]] == [[1], [2]]
    for rank in document["ranks"]:
        measured = rank["measured"]
        shares_s = [measured[f"{name}_s"] for name in ("compute", "waiting", "gradients", "optimizer")]
        assert sum(shares_s) == pytest.approx(document["step_s"])
        assert measured["compute_s"] > 0
        assert measured["peak_memory_bytes"] > 0
        assert rank["promised"] is None
        assert set(rank["passes_median_s"]) == {f"{kind} stage {rank['stages'][0]}" for kind in "FB"}
