"""scripts/piper-ray from a checkout: when .venv is made, when it is taken for ready, and what is said meanwhile.

No package is installed: the locks here are empty, and the checkout's piper_ray is a few lines.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli_cases import ROOT

LOCKS = ("requirements.lock", "requirements-dev.lock")
STAMP = ".venv/requirements.lock.stamp"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return new_checkout(tmp_path)


def new_checkout(folder: Path) -> Path:
    """Whose command prints its arguments."""
    root = folder / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for lock in LOCKS:
        (root / lock).write_text("# nothing to install\n")
    package = root / "piper_ray" / "cli"
    package.mkdir(parents=True)
    (root / "piper_ray" / "__init__.py").touch()
    (package / "__init__.py").write_text("import sys\n\n\ndef program():\n    print(sys.argv[1:])\n    sys.exit(3)\n")
    return root


def _start(root: Path, *arguments: str, path: str | None = None) -> subprocess.Popen[str]:
    env = {"PATH": path if path is not None else "/usr/local/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1"}
    return subprocess.Popen(
        ["/bin/bash", str(root / "scripts" / "piper-ray"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=root.parent,
    )


def _run(root: Path, *arguments: str, path: str | None = None) -> tuple[int, str, str]:
    process = _start(root, *arguments, path=path)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str, str]]]:
    """A checkout whose command was run twice at once, and what came of it: an environment takes seconds to make."""
    root = new_checkout(tmp_path_factory.mktemp("made"))
    together = [_start(root, "a b", str(number)) for number in range(2)]
    results = [process.communicate() for process in together]
    return root, [(process.returncode, *said) for process, said in zip(together, results, strict=True)]


@pytest.mark.long
def test_the_first_runs_make_it_once_and_later_ones_are_silent(
    made: tuple[Path, list[tuple[int, str, str]]],
) -> None:
    root, results = made
    assert [(code, out) for code, out, _ in results] == [(3, "['a b', '0']\n"), (3, "['a b', '1']\n")]
    assert "".join(err for _, _, err in results).count("piper-ray: ready") == 1
    assert _run(root, "again") == (3, "['again']\n", "")


@pytest.mark.long
def test_processes_that_the_command_starts_do_not_run_it_again(
    made: tuple[Path, list[tuple[int, str, str]]],
) -> None:
    root, _ = made
    command = root / ".venv" / "bin" / "piper-ray"
    # As multiprocessing imports the main module of the process that it spawns another from.
    imported = f"import runpy; runpy.run_path({str(command)!r}, run_name='__mp_main__')"
    result = subprocess.run(
        [command.with_name("python"), "-c", imported], check=True, capture_output=True, text=True, cwd=root
    )
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.long
def test_a_changed_lock_makes_it_anew_and_a_failed_install_is_not_taken_for_ready(
    made: tuple[Path, list[tuple[int, str, str]]],
) -> None:
    root, _ = made
    (root / "requirements.lock").write_text("no-such-package-here==1 --hash=sha256:" + "0" * 64 + "\n")
    code, out, err = _run(root)
    assert (code, out) == (1, "")
    assert "the installation failed" in err
    assert not (root / STAMP).exists()
    (root / "requirements.lock").write_text("# repaired\n")
    code, out, err = _run(root)
    assert (code, out) == (3, "[]\n")
    assert "making" in err


def test_an_environment_of_somebody_else_is_left_alone(checkout: Path) -> None:
    kept = checkout / ".venv" / "kept"
    kept.parent.mkdir()
    kept.touch()
    code, out, err = _run(checkout)
    assert (code, out) == (1, "")
    assert "was not made by this script" in err
    assert kept.exists()


def test_without_a_python_it_says_what_is_needed(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cat", "cmp", "dirname", "readlink"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    code, out, err = _run(checkout, path=str(tools))
    assert (code, out) == (1, "")
    assert err == "piper-ray needs Python 3.10 or later on the PATH. Found: none\n"

    old = tools / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.8.20 && exit 0\nexit 1\n')
    old.chmod(0o755)
    assert "python3 is Python 3.8.20" in _run(checkout, path=str(tools))[2]


def test_ci_runs_the_tests_in_a_copy_that_lies_alone(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    (checkout / "scripts" / "test").write_text('#!/bin/sh\ncd "$(dirname "$0")/.." && ls -A .. && find .\nexit 7\n')
    for beside in (checkout.parent / "shared", checkout / ".git", checkout / ".venv", checkout / ".mypy_cache"):
        beside.mkdir()
        (beside / "figures.json").touch()
    (checkout / ".gitignore").touch()
    (checkout / "tests" / "data").mkdir(parents=True)
    temporary, tools = tmp_path / "temporary", tmp_path / "tools"
    for folder in (temporary, tools):
        folder.mkdir()
    for name in ("python3", "ip", "chromium"):  # nothing has to be installed
        (tools / name).symlink_to("/bin/true")
    env = {"PATH": f"{tools}:/usr/bin:/bin", "TMPDIR": str(temporary)}
    command = ["/bin/bash", str(checkout / ".ci" / "run")]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=checkout, check=False)
    assert (result.returncode, result.stderr) == (7, "")
    everything = (path.relative_to(checkout) for path in checkout.rglob("*"))
    left_out = {".git", ".venv", ".mypy_cache", "__pycache__"}
    copied = [f"./{path}" for path in everything if left_out.isdisjoint(path.parts)]
    beside_it, *inside = result.stdout.splitlines()
    assert beside_it == "piper-ray"  # it alone
    assert sorted(inside) == sorted([".", *copied])
    assert list(temporary.iterdir()) == []


def test_locks_pin_every_version_with_hashes_and_name_no_index() -> None:
    for name in (*LOCKS, "requirements-torch.lock", "requirements-torch-cpu.lock"):
        lines = (ROOT / name).read_text().splitlines()
        pinned = [line for line in lines if line[:1].isalnum()]
        assert pinned
        assert all("==" in line and line.endswith("\\") for line in pinned)
        assert not any("://" in line or line.startswith("-") for line in lines)
