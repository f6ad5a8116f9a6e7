"""A first run: a second process compiles what the first asks for, and what is compiled is not compiled again."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from piper_ray.compiled import beside, claims
from piper_ray.compiled.jit import cache_folders
from piper_ray.compiled.observers import COMPILING, tell
from piper_ray.engine import first_run
from piper_ray.engine.first_run import compiling_told, of_chunks, of_flush, of_papers_frontier, of_papers_schedule
from piper_ray.model.events import Event
from tests.cli_cases import ROOT

_THE_SECOND_PROCESS = beside._THE_SECOND_PROCESS

_COMPILED_BEFORE = """
import piper_ray
from piper_ray.compiled.compiler import dispatchers
from piper_ray.compiled.observers import observed
from piper_ray.engine import first_run
from piper_ray.engine.backends.ray.warm import compile_kernels

def solved(schedule, **options):
    solution = piper_ray.solve("inputs/bert32-a100.toml", devices=4, schedule=schedule, **options)
    piper_ray.simulate("inputs/bert32-a100.toml", solution.plan, schedule)

def then_compile_nothing(*uses):
    compiled = []
    with observed(compiling=lambda: compiled.append(True), note=print):
        for use in uses:
            use()
    assert not compiled, uses

solved("2bw", threads=1)
# Of more downsets: enough of them have states for limits from both sides.
piper_ray.solve("inputs/bert32-a100.toml", devices=64, microbatches=512, memory_bytes="8GiB", threads=1)
then_compile_nothing(first_run.of_papers_schedule)
compile_kernels()  # workers take in states besides
then_compile_nothing(lambda: solved("2bw", threads=2))
solved("1f1b", threads=1)
then_compile_nothing(first_run.of_flush)
piper_ray.frontier("inputs/bert32-a100.toml", devices=[2, 4])
then_compile_nothing(first_run.of_papers_frontier, lambda: solved("2bw", threads=2), compile_kernels)
several = {name for name, kernel in dispatchers.items() if name[2] != "inner" and len(kernel.overloads) > 1}
print(sorted(".".join(name[:2]) for name in several))
piper_ray.solve("inputs/bert32-a100.toml", devices=4, threads=1, schedule="interleaved", time_limit=0.5)
then_compile_nothing(first_run.of_chunks)
"""


def test_nothing_is_compiled_again_for_another_command_a_worker_or_more_threads() -> None:
    """Nor for other types of the same arguments, literals among them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", _COMPILED_BEFORE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[]\n"


@pytest.mark.parametrize("threads", [1, 2, None])
@pytest.mark.parametrize("cores", [1, 2])
def test_a_second_process_begins_where_there_is_a_core_for_it(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, cores: int
) -> None:
    begun: list[tuple[str, str]] = []
    monkeypatch.setattr(first_run, "compile_beside", lambda *which: begun.append(which))
    monkeypatch.setattr(first_run, "usable_cores", lambda: cores)
    told: list[Event] = []

    def hear(event: Event) -> None:
        told.append(event)

    with compiling_told(hear, threads, of_flush):
        assert not begun, "nothing has to be compiled yet"
        tell(COMPILING)
        tell(COMPILING)
    assert begun == [("piper_ray.engine.first_run", "of_flush")] * (cores > 1 and threads != 1)
    assert len(told) == 1


@pytest.mark.parametrize("kernels", [of_papers_schedule, of_papers_frontier, of_flush, of_chunks])
def test_the_second_process_finds_its_function(kernels: Callable[[], None]) -> None:
    assert getattr(first_run, kernels.__name__) is kernels


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(beside, "cache_folders", cache_folders.__wrapped__)
    return tmp_path


_FIRST = """
import sys
from piper_ray.compiled.beside import compile_beside
print(compile_beside("signal", "pause"), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process that is not its child")
def test_the_second_process_ends_with_the_first(own_folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(own_folder)}
    command = [sys.executable, "-c", _FIRST]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        second = os.pidfd_open(int(first.stdout.readline()))
        assert not select.select([second], [], [], 0)[0]
        first.kill()
    assert select.select([second], [], [], 60)[0]
    os.close(second)


def test_one_second_process_at_a_time(own_folder: Path) -> None:
    """Another one ends at once: a lock of this process stands for the first."""
    folders = cache_folders.__wrapped__()
    assert claims.is_free(folders, _THE_SECOND_PROCESS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(own_folder)}
    program = "from piper_ray.compiled.beside import main; main('signal', 'pause')"
    second = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, timeout=60, check=False
    )
    claims.release(folders, _THE_SECOND_PROCESS)
    assert second.returncode == 0


def test_a_second_process_that_has_ended_leaves_nothing_open(own_folder: Path) -> None:
    """Python would warn of it, which fails a test."""
    del own_folder
    assert beside.compile_beside("gc", "collect") is not None
    for thread in threading.enumerate():
        if thread.name == "piper-ray-compiling":
            thread.join()


def test_no_second_process_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(beside, "cache_folders", lambda: (tmp_path / "file" / "kernels",))
    assert beside.compile_beside("signal", "pause") is None


def test_claims_wait_for_nobody_where_there_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = (tmp_path / "file" / "kernels",)
    assert not claims.claim(nowhere, 1)
    claims.release(nowhere, 1)
    assert not claims.is_free(nowhere, 1)
    assert not claims.claim((tmp_path,), 1), "nobody had it"
    claims.release((tmp_path,), 1)
