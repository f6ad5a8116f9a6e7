"""The Slurm script, run with stand-ins for Slurm and for the solve: what it starts, and when it requeues itself."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster_support import SBATCH

# Runs the task on the one node there is.
SRUN = """
echo "$@" >>srun.log
while [[ "$1" != -- ]]; do shift; done
shift
"$@" &
wait $!
"""
SOLVE = """
printf '%s\\n' "$@" >arguments
env | grep ^RAY_ >environment
touch started
if [[ "$STAND_IN_CODE" == hang ]]; then sleep 60; fi
exit "$STAND_IN_CODE"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the stand-ins in .venv/bin, which the script puts first on the PATH."""
    programs = {
        "piper-ray": SOLVE,
        "srun": SRUN,
        "scontrol": 'echo "$@" >>scontrol.log',
        "squeue": 'echo "$STAND_IN_STATE"',
        "hostname": "echo 10.0.0.1 172.17.0.1",
    }
    folder = tmp_path / "check out" / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!{shutil.which('bash')}\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return tmp_path / "check out"


def _start(
    checkout: Path, code: str, restarts: int = 0, state: str = "RUNNING", **others: str
) -> subprocess.Popen[str]:
    variables = {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_RESTART_COUNT": str(restarts),
        "STAND_IN_CODE": code,
        "STAND_IN_STATE": state,
        **others,
    }
    return subprocess.Popen(
        ["bash", str(SBATCH), "in put.json", "solve dir", "--gap", "1%"],
        cwd=checkout,
        env={"PATH": os.environ["PATH"], **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _run(checkout: Path, code: str, restarts: int = 0, state: str = "RUNNING", **others: str) -> tuple[int, str]:
    process = _start(checkout, code, restarts, state, **others)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def _signal_when_started(checkout: Path, number: signal.Signals) -> tuple[int, str]:
    process = _start(checkout, "hang")
    try:
        deadline = time.monotonic() + 60
        while not (checkout / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(60)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def _requeued(checkout: Path) -> bool:
    log = checkout / "scontrol.log"
    return log.exists() and log.read_text(encoding="utf-8") == "requeue 12345\n"


def test_bash_can_read_it() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    assert SBATCH.stat().st_mode & stat.S_IXUSR


def test_slurm_is_told_to_requeue_and_to_live_with_lost_nodes() -> None:
    lines = SBATCH.read_text(encoding="utf-8").splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(line in lines[:first_command] for line in directives)  # Slurm reads no further
    options = {
        name: value for name, _, value in (line.removeprefix("#SBATCH --").partition("=") for line in directives)
    }
    assert {"requeue", "no-kill", "exclusive"} <= {name for name, value in options.items() if not value}
    assert options["ntasks-per-node"] == "1"
    assert options["open-mode"] == "append"
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])
    assert "%j" in options["output"]


def test_a_sweep_gets_its_arguments_and_goes_on(checkout: Path) -> None:
    assert _run(checkout, "0", PIPER_RAY_COMMAND="sweep")[0] == 0
    arguments = (checkout / "arguments").read_text(encoding="utf-8").splitlines()
    directory = checkout / "solve dir"
    assert arguments[:4] == ["sweep", "in put.json", "--address", "10.0.0.1:22345"]
    assert arguments[4:] == ["--storage", f"{directory}/dataset", "--resume", "--gap", "1%"]


def test_another_command_is_refused(checkout: Path) -> None:
    code, said = _run(checkout, "0", PIPER_RAY_COMMAND="frontier")
    assert (code, said) == (2, "PIPER_RAY_COMMAND is frontier; expected solve or sweep\n")


def test_a_solve_gets_its_arguments_a_token_and_an_address(checkout: Path) -> None:
    assert _run(checkout, "0")[0] == 0
    directory = checkout / "solve dir"
    arguments = (checkout / "arguments").read_text(encoding="utf-8").splitlines()
    assert arguments[:2] == ["solve", "in put.json"]
    assert arguments[-2:] == ["--gap", "1%"]
    given = dict(pairwise(arguments))
    assert given["--address"] == "10.0.0.1:22345"
    assert given["--workers"] == "3"
    assert given["--cpus-per-worker"] == "16"
    assert given["--checkpoint"] == f"{directory}/state"
    assert given["--out"] == f"{directory}/plan.json"
    environment = (checkout / "environment").read_text(encoding="utf-8").splitlines()
    assert "RAY_AUTH_MODE=token" in environment
    assert f"RAY_AUTH_TOKEN_PATH={directory}/auth_token" in environment
    token = directory / "auth_token"
    assert re.fullmatch(r"[0-9a-f]{64}", token.read_text(encoding="utf-8"))
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    started = (checkout / "srun.log").read_text(encoding="utf-8")
    assert started.startswith("--no-kill --kill-on-bad-exit=0 --wait=0 --cpus-per-task=16 ray symmetric-run ")
    assert " --dashboard-host=127.0.0.1 -- " in started


def test_a_second_run_keeps_the_token(checkout: Path) -> None:
    _run(checkout, "0")
    token = (checkout / "solve dir" / "auth_token").read_text(encoding="utf-8")
    _run(checkout, "0")
    assert (checkout / "solve dir" / "auth_token").read_text(encoding="utf-8") == token


@pytest.mark.parametrize("code", ["0", "2", "3", "4", "5", "6", "130"])
def test_an_answer_is_final(checkout: Path, code: str) -> None:
    assert _run(checkout, code)[0] == int(code)
    assert not _requeued(checkout)


@pytest.mark.parametrize("code", ["1", "7", "134", "137"])
def test_a_fault_requeues_the_job(checkout: Path, code: str) -> None:
    _, said = _run(checkout, code, restarts=2)
    assert _requeued(checkout)
    assert f"the solve ended with {code}; requeued, restart 3 of 20" in said


def test_a_fault_that_stays_is_given_up(checkout: Path) -> None:
    code, said = _run(checkout, "7", restarts=20)
    assert code == 1
    assert not _requeued(checkout)
    assert "given up after 20 restarts" in said


def test_a_cancelled_job_stays_cancelled(checkout: Path) -> None:
    assert _run(checkout, "137", state="COMPLETING")[0] == 143
    assert not _requeued(checkout)


def test_the_end_of_the_time_requeues_the_job(checkout: Path) -> None:
    _, said = _signal_when_started(checkout, signal.SIGUSR1)
    assert _requeued(checkout)
    assert "out of time; requeued, restart 1 of 20" in said


def test_a_request_to_end_is_followed(checkout: Path) -> None:
    code, _ = _signal_when_started(checkout, signal.SIGTERM)
    assert code == 143
    assert not _requeued(checkout)


def test_missing_arguments_are_named(checkout: Path) -> None:
    finished = subprocess.run(["bash", str(SBATCH)], cwd=checkout, capture_output=True, text=True, check=False)
    assert finished.returncode != 0
    assert "usage: sbatch" in finished.stderr
