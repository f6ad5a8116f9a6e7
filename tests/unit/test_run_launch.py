"""Which rank is named when one is lost, and what of its error reaches the launcher."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from piper_ray.model.errors import ClusterError, Fault, InputError, LimitError, PiperRayError, UsageError
from piper_ray.model.schedule import ScheduleName
from piper_ray.run import launch
from piper_ray.run.job import Failure
from piper_ray.run.launch import _at_fault, _environment
from piper_ray.run.rank import told
from tests.run_support import job

JOB = job(ScheduleName.GPIPE, (2, 4))
"""Of three ranks."""


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Filled by ``end``; whatever is in it does not outlive the test."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def end(folder: Path, ended: list[subprocess.Popen[bytes]], code: str, failure: Failure | None = None) -> None:
    """A rank that ends so; "wait": it does not."""
    process = subprocess.Popen([sys.executable, "-S", "-c", _CODES[code]], stdin=subprocess.PIPE)
    if code != "wait":
        process.wait()
    rank = len(ended)
    ended.append(process)
    (folder / f"log-{rank}").write_text(f"what {rank} wrote\n")
    if failure is not None:
        (folder / f"error-{rank}.pickle").write_bytes(pickle.dumps(failure))


_CODES = {
    "wait": "input()",
    "1": "raise SystemExit(1)",
    "3": "raise SystemExit(3)",
    "signal": "import os; os.kill(os.getpid(), 11)",
}
LOST = Failure(ClusterError("rank 0 (stage 1): RuntimeError: connection closed by peer"), own=False)
OWN = Failure(InputError("model.py:build", [Fault("rank 1 (stage 2): the forward pass", "ValueError: no")]))


def test_a_rank_with_an_error_of_its_own_goes_before_those_that_lost_it(
    tmp_path: Path, ended: list[subprocess.Popen[bytes]]
) -> None:
    end(tmp_path, ended, "1", LOST)
    end(tmp_path, ended, "1", OWN)
    end(tmp_path, ended, "wait")
    error = _at_fault(JOB, tmp_path, ended)
    assert isinstance(error, InputError)
    assert error.faults == (Fault("rank 1 (stage 2): the forward pass", "ValueError: no"),)
    assert error.source == "model.py:build"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("signal", "rank 2 (stage 3) was ended by SIGSEGV\n  what 2 wrote"),
        ("3", "rank 2 (stage 3) ended with exit code 3\n  what 2 wrote"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named(
    tmp_path: Path, ended: list[subprocess.Popen[bytes]], code: str, words: str
) -> None:
    end(tmp_path, ended, "1", LOST)
    end(tmp_path, ended, "wait")
    end(tmp_path, ended, code)
    error = _at_fault(JOB, tmp_path, ended)
    assert isinstance(error, ClusterError)
    assert str(error) == words


def test_where_its_log_has_gone_it_is_named_all_the_same(tmp_path: Path, ended: list[subprocess.Popen[bytes]]) -> None:
    end(tmp_path, ended, "3")
    for log in tmp_path.glob("log-*"):
        log.unlink()
    assert str(_at_fault(JOB, tmp_path, ended)) == "rank 0 (stage 1) ended with exit code 3"


def test_where_all_have_lost_the_others_the_first_is_told(
    tmp_path: Path, ended: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_CAUSE_WITHIN_S", 0.0)
    end(tmp_path, ended, "1", LOST)
    error = _at_fault(JOB, tmp_path, ended)
    assert isinstance(error, ClusterError)
    assert "connection closed by peer" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no such option"),
        InputError("a file", [Fault("where", "what"), Fault("", "else")]),
        LimitError("too much"),
        ClusterError("lost"),
        PiperRayError("a fault of ours"),
    ],
)
def test_errors_travel_as_they_are(error: PiperRayError) -> None:
    sent: Failure = pickle.loads(pickle.dumps(told(JOB, 1, error)))
    again = sent.error
    assert (type(again), str(again), again.exit_code) == (type(error), str(error), error.exit_code)
    assert sent.own


def test_ranks_get_loopback_and_their_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    found = _environment(replace(JOB, threads=2), 2, tmp_path)
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("2", "2", "3", "2")
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == ("lo0" if sys.platform == "darwin" else "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _environment(JOB, 0, tmp_path)["OMP_NUM_THREADS"] == "5"
