"""How much is run: without ``--all`` no test that is marked long, and fewer examples of Hypothesis and of loops.

Its profiles ``quick`` and ``all`` draw the same examples on every run; ``HYPOTHESIS_PROFILE=nightly`` draws new ones.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.ray_support import RAY_ENVIRONMENT, local_ray

__all__ = ["local_ray"]

os.environ.update(RAY_ENVIRONMENT)  # before any test imports Ray, which reads it then
os.environ.pop("COLUMNS", None)  # which pytest's processes have: what is printed would fold

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is for a shell's background jobs, and for what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A first example may compile a kernel: no deadlines.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", _COMMON, max_examples=3, derandomize=True, database=None)
settings.register_profile("all", _COMMON, max_examples=5, derandomize=True, database=None)
settings.register_profile("nightly", _COMMON, max_examples=5000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the tests marked long too, and more of Hypothesis' examples"
    )


@pytest.fixture
def few(request: pytest.FixtureRequest) -> bool:
    """Whether a test that asserts one thing of many models or instances takes a few of them: it does without ``--all``.

    What it counts must be as many in both.
    """
    return not request.config.getoption("--all")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "all" if config.getoption("--all") else "quick"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: the garbage collector need not look through it time and again, here and in tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [item for item in items if item.get_closest_marker("long")]
    if long and not config.getoption("--all"):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    order = {scope: number for number, scope in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(_scope_of(item.path), len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The Ray that files share ends with the last of them: it takes processor time while nobody asks for anything."""
    result = yield
    ray = sys.modules.get("ray")
    if ray is not None and _scope_of(item.path) == "Ray" and (nextitem is None or _scope_of(nextitem.path) != "Ray"):
        ray.shutdown()
    return result


_ROOT = Path(__file__).parents[1]
_SHARED = {"local_ray": "Ray", "cli_cases": "commands", "runtime_says": "runtimes", "results_of_ranks": "ranks"}
"""What files name, and the scope of those that do: they share a Ray, or the process that commands or ranks are copies
of, or that has imported a runtime."""
_FIRST = (
    "machines",
    "commands",
    "ranks",
    "tests/cli/test_docs.py",
    "Ray",
    "commands elsewhere",
    "runtimes",
    "tests/unit/test_validate_estimates.py",
    "tests/property/test_kinds.py",
    "tests/unit/test_export_forms.py",
    "tests/property/test_plans_of_all_cells.py",
    "tests/unit/test_flush_solve.py",
)
"""Scopes that take longest begin, so that no process works alone at the end; of the first four, which begin together,
only one mostly waits. The Ray that files share begins when ranks have ended, which take the cores."""


@cache
def _scope_of(path: Path) -> str:
    """Tests of one scope run in one process: those of a file, as what they share is made once, or of several files.

    Those with commands would take longer than any other scope, so the ones outside ``tests/cli`` are one of their own.
    """
    if path.parent.name == "faults":
        return "machines"
    text = path.read_text("utf-8")
    scope = next((scope for word, scope in _SHARED.items() if word in text), str(path).removeprefix(f"{_ROOT}/"))
    return "commands elsewhere" if scope == "commands" and path.parent.name != "cli" else scope


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope_of(_ROOT / nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return Scheduling(config, log)
