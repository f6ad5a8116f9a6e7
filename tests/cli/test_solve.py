"""``piper-ray solve``: what goes to which stream, what is written, and the exit codes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray import Solution, Status, StoppedBy
from piper_ray.cli import main
from piper_ray.cli.solve import check_own_plan, exit_code
from piper_ray.cli.values import parse_gap
from piper_ray.model.units import parse_bytes
from tests.cli_cases import ROOT, run, write_small
from tests.report_cases import small_instance, small_plan, solution


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path)


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """``piper-ray`` in this process: for what needs a part of it replaced."""
    monkeypatch.setattr(sys, "argv", ["piper-ray", *(str(argument) for argument in arguments)])
    return main()


def test_a_person_gets_log_tables_and_summary(small: Path) -> None:
    result = run("solve", small)
    assert result.returncode == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == f"piper-ray {piper_ray.__version__}"
    assert any(line.startswith("#  layers") for line in lines)
    assert any(line.startswith("optimal: ") and line.endswith("of 4 devices, gap 0 %") for line in lines)
    assert "\x1b" not in result.stdout


def test_json_is_one_document_on_stdout(small: Path) -> None:
    result = run("solve", small, "--json")
    assert result.returncode == 0
    document = json.loads(result.stdout)
    assert document["status"] == "optimal"
    assert document["gap"] <= 2e-9
    instance = small_instance()
    plan = piper_ray.load_plan(document, instance)
    assert piper_ray.evaluate(instance, plan).time_per_sample_s == document["time_per_sample_s"]
    assert "optimal: " in result.stderr


def test_the_same_input_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    plans: list[bytes] = []
    for name in ("first", "second"):
        path = tmp_path / name
        assert run("solve", small, "--out", path, "--threads", len(plans) + 1).returncode == 0
        plans.append(path.read_bytes())
    assert plans[0] == plans[1]


def test_overrides_and_restrictions_reach_the_solver(small: Path) -> None:
    result = run(
        "solve", small, "--json", "--devices", 3, "--microbatches", 6, "--memory", "10GiB", "--bandwidth", "1GB/s",
        "--no-tensor-parallel", "--no-data-parallel", "--recompute", "all-or-none", "--gap", "1%", "--threads", "1",
        "--time-limit", "60", "--memory-limit", "4GB",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    cluster = {key: document["instance"][key] for key in ("devices", "microbatches", "memory_bytes")}
    assert cluster == {"devices": 3, "microbatches": 6, "memory_bytes": 10 * 2**30}
    assert document["instance"]["bandwidth_bytes_per_s"] == 1e9
    assert document["restrictions"] == {
        "tensor_parallelism": False,
        "data_parallelism": False,
        "recompute": "all-or-none",
    }
    assert document["options"] == {
        "gap": 0.01,
        "time_limit_s": 60.0,
        "passes_limit": None,
        "threads": 1,
        "memory_limit_bytes": 4e9,
        "resume": None,
        "contract": "safe",
        "within_s": None,
    }
    assert all(stage["dataParallelDegree"] == 1 for stage in document["plan"]["stages"])


def test_infeasible_says_why_and_what_would_do(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run("solve", small, "--memory", "1GiB", "--out", out)
    assert result.returncode == 4
    assert "infeasible: " in result.stdout
    text = result.stdout.split("(--memory ")[1].split(")")[0]  # as the option takes it
    least = parse_bytes(text)
    assert len(text) < 12
    assert not out.exists()
    assert run("solve", small, "--memory", text).returncode == 0
    assert run("solve", small, "--memory", f"{math.floor(least * (1 - 1e-3))}B").returncode == 4


def test_infeasible_is_a_document_too(small: Path) -> None:
    result = run("solve", small, "--memory", "1GiB", "--json")
    assert result.returncode == 4
    document = json.loads(result.stdout)
    assert (document["status"], document["plan"], document["lower_bound_s"]) == ("infeasible", None, None)
    assert document["infeasibility"]["reason"]
    assert document["infeasibility"]["least_memory_bytes"] > 2**30


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--devices", "0"], 2, "devices"),
        (["--devices", "many"], 2, "--devices"),
        (["--memory", "8XB"], 2, "--memory"),
        (["--bandwidth", "fast"], 2, "--bandwidth"),
        (["--gap", "little"], 2, "--gap"),
        (["--gap", "1.5"], 2, "gap"),
        (["--threads", "0"], 2, "threads"),
        (["--time-limit", "-1"], 2, "time limit"),
        (["--recompute", "maybe"], 2, "--recompute"),
        (["--in-flight", "stashing"], 2, "PipeDream"),
        (["--no-such-option"], 2, "--no-such-option"),
        (["--out", "/nowhere/at/all/plan.json"], 2, "no folder"),
        (["--memory-limit", "1kB"], 5, "--memory-limit"),
    ],
)
def test_a_mistake_is_named_on_stderr_alone(small: Path, arguments: list[str], code: int, message: str) -> None:
    result = run("solve", small, "--json", *arguments, env={"COLUMNS": "200"})
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_input_is_reported_in_full(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"nodes": [{"id": 1}], "edges": 3}')
    result = run("solve", path)
    assert result.returncode == 3
    assert str(path) in result.stderr
    assert "edges" in result.stderr
    assert "Traceback" not in result.stderr
    assert run("solve", tmp_path / "missing.json").returncode == 3


def test_a_plan_that_costs_something_else_is_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object, **__: object) -> Solution:
        right = solution(plan=small_plan())
        return Solution(right.status, 0.009, 0.009, right.plan, right.stats)

    monkeypatch.setattr(piper_ray, "solve", wrong)
    assert _main(monkeypatch, "solve", small, "--json") == 6
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "a fault of piper-ray" in captured.err


def test_an_invalid_plan_is_never_printed() -> None:
    backwards = piper_ray.Plan(tuple(reversed(small_plan().stages)))
    claimed = Solution(Status.OPTIMAL, 0.01, 0.01, backwards, solution().stats)
    with pytest.raises(piper_ray.InvalidPlan, match="runs backwards"):
        check_own_plan(small_instance(), claimed)


def test_a_fault_of_ours_is_one_line_unless_the_traceback_is_wanted(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> Solution:
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(piper_ray, "solve", broken)
    assert _main(monkeypatch, "solve", small, "--json") == 1
    words = capsys.readouterr().err
    assert "piper-ray: unexpected RuntimeError: the sky fell" in words
    assert "--traceback" in words
    assert "Traceback" not in words
    assert _main(monkeypatch, "--traceback", "solve", small) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("PIPER_RAY_TRACEBACK", "1")
    assert _main(monkeypatch, "solve", small) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (solution(plan=small_plan()), 0),
        (solution(Status.FEASIBLE, plan=small_plan(), stopped_by=StoppedBy.TIME_LIMIT), 0),
        (solution(Status.FEASIBLE, plan=small_plan(), stopped_by=StoppedBy.GAP), 0),
        (solution(Status.FEASIBLE, plan=small_plan(), stopped_by=StoppedBy.INTERRUPT), 130),
        (solution(Status.INFEASIBLE), 4),
        (solution(Status.UNKNOWN, stopped_by=StoppedBy.TIME_LIMIT), 5),
        (solution(Status.UNKNOWN, stopped_by=StoppedBy.INTERRUPT), 130),
    ],
)
def test_exit_codes_of_outcomes(outcome: Solution, code: int) -> None:
    assert exit_code(outcome) == code


def test_an_interrupted_solve_prints_its_incumbent(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    incumbent = solution(Status.FEASIBLE, plan=small_plan(), lower_bound_s=0.009, stopped_by=StoppedBy.INTERRUPT)
    monkeypatch.setattr(piper_ray, "solve", lambda *_, **__: incumbent)
    out = tmp_path / "plan.json"
    assert _main(monkeypatch, "solve", small, "--json", "--out", out) == 130
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["status"], document["stopped_by"]) == ("feasible", "interrupt")
    assert piper_ray.load_plan(out, small_instance()) == small_plan()


def test_an_interrupt_outside_the_search_ends_with_130(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> Solution:
        raise KeyboardInterrupt

    monkeypatch.setattr(piper_ray, "solve", interrupted)
    assert _main(monkeypatch, "solve", small) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


# A command that is waiting when it says so.
_WAITING = """
import os
import sys
import piper_ray
from piper_ray.cli import main
def load(*_, **__):
    os.write(2, b"waiting\\n")  # a signal that comes amid a print may have it written twice
    sys.stdin.read()
piper_ray.load = load
sys.argv = ["piper-ray", "solve", "some.json"]
sys.exit(main())
"""


def test_a_real_interrupt_ends_a_process_with_130() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "piper-ray: interrupted"


@pytest.mark.parametrize(("text", "gap"), [("0.01", 0.01), ("1%", 0.01), (" 0.5 % ", 0.005), ("0", 0.0)])
def test_a_gap_is_a_share_or_a_percentage(text: str, gap: float) -> None:
    assert parse_gap(text) == pytest.approx(gap)


@pytest.mark.parametrize("text", ["", "%", "1%%", "one"])
def test_what_is_no_gap(text: str) -> None:
    with pytest.raises(piper_ray.UsageError, match="is not a gap"):
        parse_gap(text)


@pytest.mark.long
def test_no_color_is_respected_and_ascii_streams_work(small: Path) -> None:
    result = run("solve", small, env={"PYTHONIOENCODING": "ascii", "NO_COLOR": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "# compute, + communication, . gradients" in result.stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_keep_to_the_width(small: Path, columns: int) -> None:
    result = run("solve", small, env={"COLUMNS": str(columns)})
    assert max(len(line) for line in result.stdout.splitlines()) <= columns
