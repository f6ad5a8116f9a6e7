"""Compiled kernels on disk: what is damaged, missing or cannot be written is compiled anew, and told of."""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import pytest

import piper_ray
from piper_ray.compiled import cache, dispatch, jit
from piper_ray.compiled.cache import KernelCache
from piper_ray.compiled.compiler import KernelCompiler
from piper_ray.compiled.observers import COMPILING, observed
from tests.cli_cases import ROOT, run, write_small


def triple(value: float) -> float:
    """A kernel that is quickly compiled."""
    return 3 * value


class Told(NamedTuple):
    """What an observer heard."""

    value: float
    compiled: bool
    notes: list[str]


def kept_in(folders: list[Path]) -> Any:
    """``triple`` in what a fresh process would know of it."""
    compiler: Any = numba.njit
    dispatcher = compiler(nogil=True, pipeline_class=KernelCompiler)(triple)
    dispatch.prepare(dispatcher, KernelCache(cast(FunctionType, triple), folders))
    return dispatcher


def call(folders: list[Path], value: float = 14) -> Told:
    dispatcher = kept_in(folders)
    told: list[str] = []
    with observed(told.append):
        found = dispatcher(value)
    assert told.count(COMPILING) <= 1
    return Told(found, COMPILING in told, [text for text in told if text != COMPILING])


def entry_of(folder: Path) -> Path:
    (entry,) = folder.glob("*.nbc")
    return entry


def test_the_first_compiles_and_the_next_finds(tmp_path: Path) -> None:
    assert call([tmp_path]) == (42, True, [])
    assert call([tmp_path]) == (42, False, [])


class Record(NamedTuple):
    """As kernels get them."""

    values: Any
    more: Any


ARRAY = np.arange(6.0)


def test_what_was_found_can_be_compiled_into_another(tmp_path: Path) -> None:
    call([tmp_path], 14.0)
    found: Any = kept_in([tmp_path])
    assert found(14.0) == 42
    compiler: Any = numba.njit
    sextuple: Any = compiler(lambda value: 2 * found(value))
    assert sextuple(7.0) == 42
    assert found.stats.cache_hits


def test_other_types_are_another_entry(tmp_path: Path) -> None:
    assert call([tmp_path], 14) == (42, True, [])
    assert call([tmp_path], 0.5) == (1.5, True, [])
    assert call([tmp_path], 14) == (42, False, [])
    assert call([tmp_path], 0.5) == (1.5, False, [])


def _damaged(entry: bytes) -> Iterator[bytes]:
    """One flipped bit in each of a thousand bytes, all of the first hundred among them, and cut off anywhere."""
    rng = random.Random(1)
    for place in [*range(100), *sorted(rng.sample(range(100, len(entry)), 900))]:
        flipped = bytearray(entry)
        flipped[place] ^= 1 << rng.randrange(8)
        yield bytes(flipped)
    yield from (entry[:length] for length in range(0, len(entry), 1 + len(entry) // 500))
    yield entry + b"\0"


def test_no_damaged_byte_is_ever_used(tmp_path: Path) -> None:
    call([tmp_path])
    entry = entry_of(tmp_path)
    whole = entry.read_bytes()
    compiler: Any = numba.njit
    dispatcher = compiler(nogil=True)(triple)
    kept = KernelCache(cast(FunctionType, triple), [tmp_path])
    sig = (numba.int64,)
    assert kept.load_overload(sig, dispatcher.targetctx) is not None
    for content in _damaged(whole):
        entry.write_bytes(content)
        assert kept.load_overload(sig, dispatcher.targetctx) is None
    entry.write_bytes(whole)
    assert kept.load_overload(sig, dispatcher.targetctx) is not None


def test_a_damaged_entry_is_compiled_anew_and_replaced(tmp_path: Path) -> None:
    call([tmp_path])
    entry = entry_of(tmp_path)
    entry.write_bytes(entry.read_bytes()[:-1])
    assert call([tmp_path]) == (42, True, [f"a compiled kernel in {tmp_path} is damaged: it is compiled anew"])
    assert call([tmp_path]) == (42, False, [])


def test_the_entry_of_another_kernel_under_this_name_is_not_used(tmp_path: Path) -> None:
    call([tmp_path / "integers"], 14)
    call([tmp_path / "floats"], 0.5)
    shutil.copy(entry_of(tmp_path / "floats"), entry_of(tmp_path / "integers"))
    assert call([tmp_path / "integers"], 14) == (42, True, [])


def test_what_cannot_be_read_is_compiled_anew(tmp_path: Path) -> None:
    call([tmp_path])
    entry = entry_of(tmp_path)
    entry.unlink()
    entry.mkdir()
    value, compiled, notes = call([tmp_path])
    assert (value, compiled) == (42, True)
    assert notes[0] == f"a compiled kernel in {tmp_path} cannot be read (Is a directory): it is compiled anew"
    assert "cannot be kept, so every run compiles them anew" in notes[1]


def test_a_folder_that_cannot_be_made_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "kernels"
    told = [f"compiled kernels cannot be kept, so every run compiles them anew ({folder}: Not a directory)"]
    for _ in range(2):
        assert call([folder]) == (42, True, told)


def test_the_first_folder_that_can_be_written_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folders = [tmp_path / "file", tmp_path / "home"]
    assert call(folders).compiled
    assert not call(folders).compiled
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["home"]


def test_a_disk_without_room_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        value, compiled, notes = call([tmp_path])
    assert (value, compiled) == (42, True)
    assert "No space left on device" in notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["compiling"], "what was begun is removed"


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    call([folder], 14)
    shutil.rmtree(folder)
    assert call([folder], 0.5) == (1.5, True, [])
    assert call([folder], 0.5) == (1.5, False, [])


def test_a_folder_where_this_user_may_not_look_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that another user's first run left behind."""
    ours = tmp_path / "__pycache__"
    ours.mkdir()
    jit.sources_digest()  # of the true sources
    stat = os.stat

    def denied(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and ours in Path(path).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != ours)  # noqa: ARG005
    (folder,) = jit.cache_folders.__wrapped__()
    assert folder.parent == tmp_path / "home" / "piper_ray"


def below_a_file(folder: Path) -> Path:
    """Where no folder can be made."""
    (folder / "file").touch()
    return folder / "file" / "nowhere"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_what_others_may_write_to_is_neither_read_nor_written(tmp_path: Path, mode: int) -> None:
    """An entry is a pickle: whoever writes one there would have it run."""
    folder = tmp_path / "kernels"
    assert call([folder]).compiled
    (entry,) = folder.glob("*.nbc")
    before = entry.read_bytes()
    folder.chmod(mode)
    told = call([folder])
    assert (told.value, told.compiled) == (42, True)
    assert f"compiled kernels in {folder} are left alone: others may write to it; delete it" in told.notes[0]
    assert entry.read_bytes() == before
    folder.chmod(0o755)
    assert not call([folder]).compiled


def test_what_another_user_owns_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tmp_path / "kernels", tmp_path / "other"
    assert call([folder]).compiled
    monkeypatch.setattr(cache, "_trusted", lambda: frozenset({os.getuid() + 1}))
    told = call([folder, other])
    assert told.compiled
    assert f"compiled kernels in {folder} are left alone: it belongs to another user" in told.notes[0]


def test_folders_are_made_for_nobody_else_to_write_to(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert call([tmp_path / "kernels"]).compiled
    finally:
        os.umask(before)
    assert (tmp_path / "kernels").stat().st_mode & 0o022 == 0
    assert not call([tmp_path / "kernels"]).compiled


def test_each_observer_is_told_once(tmp_path: Path) -> None:
    """And nobody else is."""
    told: list[str] = []
    folder = below_a_file(tmp_path)
    with observed(told.append):
        call([folder], 14)
        call([folder], 0.5)
    call([folder], 14)
    assert told.count(COMPILING) == 1
    assert len(told) == len(set(told)) == 2, "the other is that nothing can be kept"


_PROCESS = """
import sys
from pathlib import Path
from tests.unit.test_kernels_cache import call
for value in (14, 0.5, 14, 0.5):
    told = call([Path(sys.argv[1])], value)
    assert told.value == 3 * value
    print(int(told.compiled))
"""


@pytest.mark.long
def test_many_processes_at_once(tmp_path: Path) -> None:
    """Each kernel is compiled by one of them; the others wait for it."""
    command = [sys.executable, "-c", _PROCESS, str(tmp_path / "kernels")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) for _ in range(4)]
    assert sum(int(line) for process in processes for line in process.communicate()[0].split()) == 2
    assert [process.returncode for process in processes] == [0] * 4
    assert len(list((tmp_path / "kernels").glob("*.nbc"))) == 2
    assert not call([tmp_path / "kernels"], 14).compiled


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the kernels that solve and frontier need."""
    small = write_small(tmp_path_factory.mktemp("small"))
    for command in ("solve", "frontier"):
        assert run(command, small).returncode == 0
    return next(folder for folder in jit.cache_folders() if folder.is_dir())


@pytest.fixture
def kept(compiled: Path, tmp_path: Path) -> Path:
    """A copy of it, as NUMBA_CACHE_DIR."""
    shutil.copytree(compiled, tmp_path / "cache" / compiled.name)
    return tmp_path / "cache"


@pytest.mark.long
def test_the_program_says_when_it_compiles_and_only_then(kept: Path, tmp_path: Path) -> None:
    """Also a kernel that others call where it lies."""
    small, environment = write_small(tmp_path), {"NUMBA_CACHE_DIR": str(kept)}
    for entry in kept.glob("*/selection.exact_fit.*"):
        entry.unlink()
    first, second = (run("solve", small, env=environment) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert "\ncompiling  " in first.stdout
    assert "\ncompiling  " not in second.stdout


@pytest.mark.long
def test_the_program_goes_on_without_a_damaged_kernel_and_without_room(kept: Path, tmp_path: Path) -> None:
    small, environment = write_small(tmp_path), {"NUMBA_CACHE_DIR": str(kept)}
    (entry,) = kept.glob("*/downsets.enumerate_downsets.*")
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    result = run("solve", small, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"note           a compiled kernel in {entry.parent} is damaged: it is compiled anew" in result.stdout
    entry.unlink()
    entry.mkdir()  # which no file can replace
    result = run("solve", small, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "note           compiled kernels cannot be kept" in result.stdout


def test_every_kernel_is_kept_in_these_files_and_lets_other_threads_run() -> None:
    """Numba's own files are not checked, and what keeps the interpreter's lock keeps signals waiting."""
    found = [
        (f"{module.name}.{name}", kernel)
        for module in pkgutil.walk_packages(piper_ray.__path__, "piper_ray.")
        if re.search(r"\b(kernels?|compiled|cost)\b", module.name)
        for name, kernel in vars(importlib.import_module(module.name)).items()
        if isinstance(kernel, jit.Kernel)
    ]
    assert {name.rpartition(".")[0].split(".")[1] for name, _ in found} >= {"cost", "engine", "planners"}
    for name, kernel in found:
        dispatcher = kernel.dispatcher()
        assert isinstance(vars(dispatcher)["_cache"], KernelCache), name
        assert dispatcher.targetoptions["nogil"], name


def test_kernels_are_compiled_in_listed_folders_only() -> None:
    """The others' sources would not count in the name of the folder where they are kept."""
    package = Path(piper_ray.__file__).parent
    decorated = re.compile(r"^@(?:\w+\.)?(?:\w*kernel|njit|jit)\b", re.MULTILINE)
    sources = {
        str(path.parent.relative_to(package)) for path in package.rglob("*.py") if decorated.search(path.read_text())
    }
    assert "planners/published" in sources
    assert sources <= set(jit._FOLDERS)


@pytest.mark.long
def test_a_planner_goes_on_without_a_damaged_kernel(kept: Path, tmp_path: Path) -> None:
    small, environment = write_small(tmp_path), {"NUMBA_CACHE_DIR": str(kept)}
    command = ("solve", small, "--planner", "pipedream")
    assert run(*command, env=environment).returncode == 0
    (entry,) = kept.glob("*/kernel.best_first_stage.*")
    entry.write_bytes(entry.read_bytes()[:5000])
    first, second = (run(*command, env=environment) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert f"note: a compiled kernel in {entry.parent} is damaged: it is compiled anew" in first.stderr
    assert second.stderr == ""


_COMPILED_BEFORE = """
import piper_ray
from piper_ray.compiled.compiler import dispatchers
from piper_ray.compiled.observers import observed
from piper_ray.engine.backends.ray.worker import compile_kernels

def solved(schedule, **options):
    solution = piper_ray.solve("inputs/bert32-a100.toml", devices=4, schedule=schedule, **options)
    piper_ray.simulate("inputs/bert32-a100.toml", solution.plan, schedule)

def then_compile_nothing(*uses):
    told = []
    with observed(told.append):
        for use in uses:
            use()
    assert not told, uses

solved("2bw", threads=1)
compile_kernels()  # workers take in states besides
then_compile_nothing(lambda: solved("2bw", threads=2))
piper_ray.frontier("inputs/bert32-a100.toml", devices=[2, 4])
then_compile_nothing(lambda: solved("2bw", threads=2), compile_kernels)
several = {name for name, kernel in dispatchers.items() if name[2] != "inner" and len(kernel.overloads) > 1}
print(sorted(".".join(name[:2]) for name in several))
"""


@pytest.mark.long
def test_nothing_is_compiled_again_for_another_command_a_worker_or_more_threads() -> None:
    """Nor for other types of the same arguments, literals among them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", _COMPILED_BEFORE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[]\n"


def test_claims_wait_for_nobody_where_there_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = (tmp_path / "file" / "kernels",)
    assert not cache.claim(nowhere, 1)
    cache.release(nowhere, 1)
    assert not cache.claim((tmp_path,), 1), "nobody had it"
    cache.release((tmp_path,), 1)
