"""Examples in docstrings of public names give what they show."""

from __future__ import annotations

import doctest
import inspect
from functools import cache
from pathlib import Path

import pytest

import piper_ray

NOT_RUN = {
    "profile": "takes PyTorch and time",
    "run_sweep": "a page of the documentation runs one",
    "read_dataset": "the same",
    "load_solution": "reads what solve --json prints; a page of the documentation does",
    "run": "takes PyTorch and time",
    "run_trace": "of what run returns",
    "write_run_trace": "of what run returns",
    "Run": "what run returns",
    "RankRun": "of what run returns",
    "Job": "of what run returns",
    "RayBackend": "takes Ray",
    "Backend": "takes Ray",
    "Planned": "takes a minute",
    "Figures": "takes a minute",
}
"""Examples that are shown and not run here, and why."""
ALIASES = {"Source", "Numbers", "Event", "SweepListener", "Binding", "PassPrices", "PathSteps"}
"""Names without an example: aliases of types, which have no docstrings, and parts of certificates."""


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


@cache
def by_name() -> dict[str, list[doctest.DocTest]]:
    return {name: found for name in piper_ray.__all__ if (found := examples(name))}


def test_examples_give_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in by_name().items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for test in found:
            told: list[str] = []
            failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(test, out=told.append)
            assert not failed, "".join(told)


def test_every_public_name_has_an_example() -> None:
    assert {name for name in piper_ray.__all__ if name not in by_name()} == {*ALIASES, "__version__"}


def test_examples_are_run_but_for_a_few() -> None:
    lines = {name: [line for test in found for line in test.examples] for name, found in by_name().items()}
    after_import = {name: found[1:] for name, found in lines.items() if found[0].source.startswith("import ")}
    skipped = {name for name, found in after_import.items() if all(doctest.SKIP in line.options for line in found)}
    assert skipped == set(NOT_RUN)
