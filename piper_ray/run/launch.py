"""Starts the ranks of a job as processes on this machine, and ends them all if one is lost or a stop is requested."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from piper_ray.model.errors import ClusterError, PiperRayError
from piper_ray.model.stop import Stop
from piper_ray.run.job import Failure

_POLL_S = 0.05
_CAUSE_WITHIN_S = 1.0
"""The time in which the rank that failed first reports its failure, after another rank lost it."""

_LOG_LINES = 12
_THREADS, _GLOO, _NCCL = "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

Advanced = Callable[[int, int], None]
"""Called with the number of finished steps (or schemes), and their total, including those before the measured ones. The
number is 0 until the ranks have found each other."""


class RankJob(Protocol):
    """The work of ranks. efforts: the total for ``Advanced``."""

    @property
    def ranks(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def efforts(self) -> int: ...

    def name_of(self, rank: int) -> str: ...


def launch(job: RankJob, advanced: Advanced, stop: Stop[Any]) -> Any:
    """Runs the job on this machine's loopback interface, and returns its first rank's result.

    Raises the error of the rank that failed first, or StopSearch.
    """
    with tempfile.TemporaryDirectory(prefix="piper-ray-run-") as text:
        folder = Path(text)
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        with _processes(job, folder, stop) as processes:
            _watch(job, folder, processes, advanced, stop)
        try:
            return pickle.loads((folder / "run.pickle").read_bytes())
        except FileNotFoundError:
            raise ClusterError(f"{job.name_of(0)} ended without a result") from None


@contextlib.contextmanager
def _processes(job: RankJob, folder: Path, stop: Stop[Any]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process for each rank. All of them end with the context."""
    processes: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        for process in processes:
            _kill(process)

    with stop.ending(end):
        try:
            for rank in range(job.ranks):
                with (folder / f"log-{rank}").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "piper_ray.run.rank", str(folder)],
                            stdin=subprocess.PIPE,  # it closes with this process, which ends the rank
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            env=_environment(job, rank, folder),
                            start_new_session=True,
                        )
                    )
            yield processes
        finally:
            end()
            for process in processes:
                process.wait()
                assert process.stdin is not None
                process.stdin.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(job: RankJob, rank: int, folder: Path) -> Mapping[str, str]:
    """The environment of a rank as torchrun sets it, with the number of threads unless the user has set that."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        _THREADS: str(job.threads),
        _GLOO: loopback,
        _NCCL: loopback,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "PIPER_RAY_RENDEZVOUS": str(folder / "rendezvous"),
    }


def _watch(
    job: RankJob, folder: Path, processes: list[subprocess.Popen[bytes]], advanced: Advanced, stop: Stop[Any]
) -> None:
    """Waits until all processes have ended. Raises the error of one that failed."""
    told = -1
    while True:
        stop.check()
        codes = [process.poll() for process in processes]
        if any(code not in (None, 0) for code in codes):
            raise _at_fault(job, folder, processes)
        if all(code == 0 for code in codes):
            return
        done = _progress(folder)
        if done > told:
            advanced(done, job.efforts)
            told = done
        time.sleep(_POLL_S)


def _progress(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError):  # not written yet, or not completely
        return int((folder / "progress").read_text())
    return 0


def _at_fault(job: RankJob, folder: Path, processes: list[subprocess.Popen[bytes]]) -> PiperRayError:
    """The error of the rank that failed first, as it reported it or by its exit code; not of one that only lost it."""
    due_s = time.monotonic() + _CAUSE_WITHIN_S
    while True:
        ended = {rank: code for rank, process in enumerate(processes) if (code := process.poll())}
        failures = {rank: failure for rank in ended if (failure := _failure(folder, rank)) is not None}
        for rank, code in ended.items():
            if code < 0:
                return ClusterError(f"{job.name_of(rank)} was ended by {_signal_text(code)}{_log_text(folder, rank)}")
        for rank, code in ended.items():
            if rank not in failures:
                what = f"{job.name_of(rank)} ended with exit code {code}"
                return ClusterError(f"{what}{_log_text(folder, rank)}")
        for failure in failures.values():
            if failure.own:
                return failure.error
        if time.monotonic() > due_s:
            return next(iter(failures.values())).error
        time.sleep(_POLL_S)


def _failure(folder: Path, rank: int) -> Failure | None:
    with contextlib.suppress(FileNotFoundError):
        failure: Failure = pickle.loads((folder / f"error-{rank}.pickle").read_bytes())
        return failure
    return None


def _signal_text(code: int) -> str:
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"{name} (is there too little memory?)" if name == "SIGKILL" else name


def _log_text(folder: Path, rank: int) -> str:
    """The end of the rank's output; empty if the file was removed."""
    try:
        lines = (folder / f"log-{rank}").read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines)
