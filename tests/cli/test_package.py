"""What is released: wheel and source distribution, in an environment with what ``solve`` needs and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import piper_ray
from piper_ray.model.errors import EXTRAS

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = ", ".join(repr(module) for module in EXTRAS)

HIDDEN = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in ({WITHOUT}) else find(name, path, target)

PathFinder.find_spec = find_others
"""
"""A ``sitecustomize`` without the packages of any extra."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's folder of programs: the wheel alone is installed there."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "sitecustomize.py").write_text(HIDDEN)
    return folder / "bin"


def ran(bare: Path, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # kernels would be compiled for this environment alone
    environment.pop("PYTHONPATH", None)
    command = [str(bare / "piper-ray"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


def test_both_have_what_is_needed_and_nothing_else(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert f"-{piper_ray.__version__}" in wheel.name
    assert f"-{piper_ray.__version__}." in source.name
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    packaged = {path.relative_to(ROOT).as_posix() for path in (ROOT / "piper_ray").rglob("*") if _kept(path)}
    assert {name for name in in_wheel if not name.startswith("piper_ray-")} == packaged
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    assert packaged | {"pyproject.toml", "README.md", "LICENSE"} <= in_source


def _kept(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def test_solve_needs_no_extra(bare: Path, tmp_path: Path) -> None:
    version = ran(bare, "--version", cwd=tmp_path)
    assert version.stdout.strip() == f"piper-ray {piper_ray.__version__}"
    workload = tmp_path / "small.toml"
    estimated = ran(bare, "estimate", "bert-large", "--gpu", "A100-80", "--nodes", "1", "-o", workload, cwd=tmp_path)
    assert estimated.returncode == 0, estimated.stderr
    solved = ran(bare, "solve", workload, "--devices", "2", "--gap", "0.5", "-o", "plan.json", cwd=tmp_path)
    assert solved.returncode == 0, solved.stderr
    verified = ran(bare, "verify", workload, "plan.json", cwd=tmp_path)
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (("info", ROOT / "inputs" / "resnet50.toml", "--draw", "graph.svg"), "pygraphviz"),
        (("solve", ROOT / "inputs" / "resnet50.toml", "--address", "local"), "ray"),
        (("frontier", ROOT / "inputs" / "bert32-a100.toml", "--devices", "2,4", "--plot", "f.svg"), "matplotlib"),
        (("run", "model.py:build", ROOT / "README.md"), "torch"),
    ],
    ids=["draw", "cluster", "plot", "run"],
)
def test_what_brings_a_missing_package_is_said(
    bare: Path, tmp_path: Path, arguments: tuple[str | Path, ...], module: str
) -> None:
    finished = ran(bare, *arguments, cwd=tmp_path)
    assert finished.returncode == 2, finished.stderr
    assert f"{module}, which is not installed: pip install 'piper-ray[{EXTRAS[module]}]'" in finished.stderr
    assert "Traceback" not in finished.stderr
