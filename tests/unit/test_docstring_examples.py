"""Examples in docstrings of public names give what they show."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import piper_ray

FUNCTIONS = [name for name in piper_ray.__all__ if inspect.isfunction(getattr(piper_ray, name))]
WITHOUT = {
    "profile": "takes PyTorch and time",
    "run_sweep": "a page of the documentation runs one",
    "read_dataset": "the same",
    "write_trace": "as simulate, which has one",
    "chrome_trace": "as simulate, which has one",
    "load_solution": "as load_plan, which has one",
    "passes_of": "of use with a Tmpc alone",
    "with_passes": "of use with a Tmpc alone",
    "run": "takes PyTorch and time",
    "run_trace": "of what run returns",
    "write_run_trace": "of what run returns",
}
"""Functions that have no example, and why."""


def examples(name: str) -> list[doctest.DocTest]:
    value = getattr(piper_ray, name)
    if inspect.ismodule(value):
        return [test for public in value.__all__ for test in _of(getattr(value, public), public)]
    return _of(value, name)


def _of(value: object, name: str) -> list[doctest.DocTest]:
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return []
    module = inspect.getmodule(value)
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
    return [test for test in finder.find(value, name, module=module) if test.examples]


NAMES = [name for name in piper_ray.__all__ if examples(name)]


@pytest.mark.parametrize("name", NAMES)
def test_examples_give_what_they_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for test in examples(name):
        told: list[str] = []
        failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(test, out=told.append)
        assert not failed, "".join(told)


def test_functions_have_examples() -> None:
    assert {name for name in FUNCTIONS if name not in NAMES} == set(WITHOUT)
    assert "baselines" in NAMES


def test_what_users_make_has_examples() -> None:
    made = {"Instance", "Layer", "Tmpc", "Cluster", "Link", "Batch", "Plan", "Stage", "Restrictions", "SolveOptions"}
    assert made <= set(NAMES)
