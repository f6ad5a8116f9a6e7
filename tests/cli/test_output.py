"""What becomes of the answer when stdout, or a file, cannot take it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import piper_ray
from tests.cli_cases import ROOT, run, without_notes, write_small
from tests.lengths import long_after
from tests.report_cases import small_instance
from tests.sweep_support import write_small as write_sweep

FULL = Path("/dev/full")
CLOSED = 128 + signal.SIGPIPE

needs_full = pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path)


def run_unread(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``piper-ray ARGUMENTS`` into a pipe that nobody reads any more: stdout and stderr as the caller sees them."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return run(*arguments, stdout=writer)
    finally:
        os.close(writer)


def run_in_shell(arguments: Sequence[object], redirections: str) -> subprocess.CompletedProcess[str]:
    """``piper-ray ARGUMENTS REDIRECTIONS``."""
    words = shlex.join([sys.executable, "-m", "piper_ray", *(str(argument) for argument in arguments)])
    return subprocess.run(
        ["sh", "-c", f"{words} {redirections}"],
        check=False,
        text=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("planner", ["piper", "gpipe"])
def test_the_answer_comes_before_the_complaint_about_a_file(small: Path, tmp_path: Path, planner: str) -> None:
    link = tmp_path / "plan.json"
    link.symlink_to(tmp_path / "nowhere" / "plan.json")
    result = run("solve", small, "--json", "--out", link, "--planner", planner)
    assert result.returncode == 2
    assert json.loads(result.stdout)["plan"]
    assert f"piper-ray: {link}: cannot be written: No such file or directory" in result.stderr


@needs_full
@pytest.mark.parametrize("command", [("solve",), ("solve", "--planner", "gpipe")])
def test_a_full_disk_costs_the_file_and_not_the_answer(small: Path, command: tuple[str, ...]) -> None:
    result = run(*command, small, "--json", "--out", FULL)
    assert result.returncode == 2
    assert json.loads(result.stdout)["plan"]
    assert result.stderr.endswith(f"piper-ray: {FULL}: cannot be written: No space left on device\n")
    assert FULL.is_char_device(), "it is not replaced"


def test_each_file_of_a_frontier_that_cannot_be_written_is_named(small: Path, tmp_path: Path) -> None:
    names = {"--out": "points.csv", "--plot": "points.png", "--plans": "plans"}
    for name in names.values():
        (tmp_path / name).symlink_to(tmp_path / "nowhere" / name)
    arguments = [word for option, name in names.items() for word in (option, tmp_path / name)]
    result = run("frontier", small, "--json", *arguments)
    assert result.returncode == 2
    assert len(json.loads(result.stdout)["by_devices"]) == 4
    for name in names.values():
        assert f"{tmp_path / name}: cannot be" in result.stderr


@needs_full
def test_a_stdout_without_room_is_told_and_the_plan_is_written(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with FULL.open("w") as full:
        result = run("solve", small, "--out", out, stdout=full.fileno())
    assert result.returncode == 2
    assert result.stderr == "piper-ray: stdout cannot be written: No space left on device\n"
    assert piper_ray.load_plan(out, small_instance()).stages


def test_nobody_reads_and_the_plan_is_written(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run_unread("solve", small, "--json", "--out", out)
    assert (result.returncode, result.stderr.count("piper-ray:")) == (CLOSED, 0)
    assert piper_ray.load_plan(out, small_instance()).stages


def test_nobody_reads_any_command(small: Path, tmp_path: Path) -> None:
    source, storage = write_sweep(tmp_path), tmp_path / "dataset"
    assert run("sweep", source, "--storage", storage).returncode == 0
    plan = tmp_path / "plan.json"
    assert run("solve", small, "--out", plan).returncode == 0
    for command in (
        ("--help",),
        ("--version",),
        ("solve", "--help"),
        ("solve", small),
        ("frontier", small),
        ("verify", small, plan),
        ("info", small),
        ("estimate", "llama3-8b", "--gpu", "H100-SXM", "--nodes", 1),
        ("sweep", source, "--storage", storage, "--resume"),
        ("sweep", source, "--storage", storage, "--dry-run"),
        ("sweep-report", storage),
    ):
        result = run_unread(*command)
        assert result.returncode == CLOSED, command
        assert "piper-ray:" not in without_notes(result.stderr), command
        assert "Traceback" not in result.stderr, command
        assert "Exception" not in result.stderr, command


@pytest.mark.long
def test_a_reader_that_goes_away_ends_a_long_solve(tmp_path: Path) -> None:
    """As head does."""
    from tests.interrupt_support import HANG_S, long_solve, write_long

    out = tmp_path / "plan.json"
    with subprocess.Popen(
        [sys.executable, "-m", "piper_ray", "solve", str(write_long(tmp_path)), "--verbose", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            while "plan (chain)" not in process.stdout.readline():
                pass
            process.stdout.close()
            assert without_notes(process.stderr.read()) == ""
            assert process.wait(HANG_S) == CLOSED
        finally:
            process.kill()
    assert piper_ray.load_plan(out, long_solve()).stages, "the plan so far is written"


@pytest.mark.long
def test_a_closed_stderr_is_nobodys_fault(small: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "piper_ray", "solve", str(small), "--json"],
            stdout=subprocess.PIPE,
            stderr=writer,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    finally:
        os.close(writer)
    assert result.returncode == 0
    assert json.loads(result.stdout)["status"] == "optimal"


@pytest.mark.parametrize(
    ("command", "closed"),
    long_after(1, [("solve", ">&-"), ("sweep", "<&- >&- 2>&-")]),
)
def test_a_stdout_that_was_never_open_is_told(small: Path, tmp_path: Path, command: str, closed: str) -> None:
    """What it was to get is lost and nothing else: no file takes its place, and with it what others print."""
    out = tmp_path / "plan.json"
    arguments = {
        "solve": ["solve", small, "--json", "--out", out],
        "sweep": ["sweep", write_sweep(tmp_path), "--storage", tmp_path / "st"],
    }[command]
    result = run_in_shell(arguments, closed)
    assert result.returncode == 2
    if "2>&-" not in closed:
        assert without_notes(result.stderr).splitlines()[-1] == "piper-ray: stdout cannot be written: it is closed"
    if command == "solve":
        assert json.loads(out.read_text())["stages"]
    else:
        assert piper_ray.read_dataset(tmp_path / "st").num_rows


@pytest.mark.long
def test_other_streams_that_were_never_open_are_nobodys_fault(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert run_in_shell(["solve", small, "--json", "--out", out], "<&- 2>&- >/dev/null").returncode == 0
    assert json.loads(out.read_text())["stages"]


@pytest.mark.long
@needs_full
def test_a_log_on_a_full_disk_costs_neither_the_plan_nor_the_exit_code(small: Path, tmp_path: Path) -> None:
    """As with ``piper-ray solve ... > log 2>&1``: nobody can be told."""
    out = tmp_path / "plan.json"
    assert run_in_shell(["solve", small, "--out", out], f">{FULL} 2>{FULL}").returncode == 2
    assert json.loads(out.read_text())["stages"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_picture_that_cannot_be_written_costs_no_figures(
    small: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    picture = tmp_path / "graph.svg"
    picture.symlink_to(tmp_path / "nowhere" / "graph.svg")
    result = run("info", small, "--draw", picture, *options)
    assert result.returncode == 2
    assert result.stdout == run("info", small, *options).stdout
    assert f"{picture}: cannot be written" in result.stderr
