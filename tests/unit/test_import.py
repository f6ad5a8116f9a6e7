"""``import piper_ray``: what it offers, and what it leaves unloaded."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import piper_ray

HEAVY = ("numba", "llvmlite", "ray", "numpy", "pyarrow", "pydantic", "typer", "rich", "matplotlib")


def _loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return set(result.stdout.split())


@pytest.mark.parametrize("code", ["import piper_ray", "from piper_ray import evaluate, Instance, Plan, SolveOptions"])
def test_importing_loads_nothing_heavy_and_says_nothing(code: str) -> None:
    assert _loaded_after(code).isdisjoint(HEAVY)


def test_help_loads_no_solver() -> None:
    assert _loaded_after("import piper_ray.cli.app").isdisjoint({"numba", "llvmlite", "ray", "pyarrow"})


def test_every_public_name_is_there() -> None:
    for name in piper_ray.__all__:
        assert getattr(piper_ray, name) is not None
    assert dir(piper_ray) == sorted(piper_ray.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'slove'"):
        _ = piper_ray.slove


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("evaluate", "piper_ray.evaluate"),
        ("solve", "piper_ray.engine.solve"),
        ("simulate", "piper_ray.simulate.run"),
        ("run", "piper_ray.run.run"),
    ],
)
def test_public_functions_are_not_hidden_by_their_modules(name: str, module: str) -> None:
    import_module(module)
    function = getattr(piper_ray, name)
    assert callable(function)
    assert function.__module__ == module
