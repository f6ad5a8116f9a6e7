"""``import piper_ray``: what it offers, and what it leaves unloaded."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import piper_ray

HEAVY = ("numba", "llvmlite", "ray", "numpy", "pyarrow", "pydantic", "typer", "rich", "matplotlib")


def _loaded_after(code: str, *, whole_names: bool = False) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    names = set(result.stdout.split())
    return names if whole_names else {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("code", ["import piper_ray", "from piper_ray import evaluate, Instance, Plan, SolveOptions"])
def test_importing_loads_nothing_heavy_and_says_nothing(code: str) -> None:
    assert _loaded_after(code).isdisjoint(HEAVY)


def test_a_command_is_loaded_when_it_is_wanted() -> None:
    shown = (
        "from piper_ray.cli import main\nimport io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()): main()"
    )
    loaded = _loaded_after(f"sys.argv = ['piper-ray', '--help']\n{shown}")
    assert "typer" in loaded
    assert loaded.isdisjoint({"numba", "llvmlite", "ray", "pyarrow", "pydantic", "numpy"})
    assert _loaded_after(f"sys.argv = ['piper-ray', '--version']\n{shown}").isdisjoint(HEAVY)
    solve = "typer.main.get_command(app).commands['solve'].make_context('solve', [], resilient_parsing=True)"
    loaded = _loaded_after(f"import typer\nfrom piper_ray.cli.app import app\n{solve}")
    assert loaded.isdisjoint({"numba", "llvmlite", "ray", "pyarrow"})


@pytest.mark.parametrize("arguments", [["--help"], ["solve", "--help"], ["solve", "--nope"], ["slove"]])
def test_help_and_complaints_load_no_more_than_they_show(arguments: list[str]) -> None:
    shown = "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()): main()"
    code = f"import io, contextlib\nfrom piper_ray.cli import main\nsys.argv = {['piper-ray', *arguments]}\n{shown}"
    loaded = _loaded_after(code, whole_names=True)
    assert "typer" in loaded
    assert loaded.isdisjoint({"rich", "pydantic", "numpy"})


@pytest.mark.parametrize(("words", "offered"), [("piper-ray so", "solve"), ("piper-ray solve --de", "--devices")])
def test_completion_loads_no_more_than_it_offers(words: str, offered: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_PIPER_RAY_COMPLETE": "complete_bash"}
    shown = "with contextlib.redirect_stdout(io.StringIO()) as said: main()\nassert said.getvalue().split() == "
    code = (
        f"import io, os, contextlib\nfrom piper_ray.cli import main\nos.environ |= {asked}\nsys.argv = ['piper-ray']\n"
    )
    loaded = _loaded_after(f"{code}{shown}{[offered]}", whole_names=True)
    assert loaded.isdisjoint({"rich", "pydantic", "numpy"})
    assert ("piper_ray.cli.solve" in loaded) == (offered == "--devices")


def test_a_command_that_calls_no_kernel_loads_no_numba() -> None:
    code = (
        "import io, contextlib\nfrom piper_ray.cli import main\nwith contextlib.redirect_stdout(io.StringIO()): main()"
    )
    loaded = _loaded_after(f"sys.argv = ['piper-ray', 'info', 'inputs/bert32-a100.toml']\n{code}")
    assert "numpy" in loaded
    assert loaded.isdisjoint({"numba", "llvmlite", "ray"})


@pytest.mark.long
def test_modules_of_a_functions_name_hide_no_function() -> None:
    code = "import piper_ray.run.run, piper_ray.simulate.run, piper_ray.evaluate\n"
    code += "assert all(map(callable, (piper_ray.evaluate, piper_ray.run, piper_ray.simulate)))\n"
    code += "import piper_ray.report\nassert piper_ray.report.__name__ == 'piper_ray.report'"
    _loaded_after(code)


def test_every_public_name_is_there() -> None:
    for name in piper_ray.__all__:
        assert getattr(piper_ray, name) is not None


def test_completion_offers_what_matters_and_not_all_names() -> None:
    offered = dir(piper_ray)
    assert {"estimate", "load", "solve", "plan", "baselines", "Instance", "Restrictions", "Solution"} <= set(offered)
    assert {name for name in piper_ray.__all__ if inspect.isfunction(getattr(piper_ray, name))} <= set(offered)
    assert set(offered) <= set(piper_ray.__all__)
    assert len(offered) < len(piper_ray.__all__) / 2


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
