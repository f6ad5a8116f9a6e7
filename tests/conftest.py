"""How much is run: without ``--all`` no test that is marked long, and fewer of Hypothesis' examples.

Its profiles ``quick`` and ``all`` draw the same examples on every run; ``HYPOTHESIS_PROFILE=nightly`` draws new ones.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.ray_support import RAY_ENVIRONMENT, local_ray, shares_ray

__all__ = ["local_ray"]

os.environ.update(RAY_ENVIRONMENT)  # before any test imports Ray, which reads it then
os.environ.pop("COLUMNS", None)  # which pytest's processes have: what is printed would fold

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is for a shell's background jobs, and for what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A first example may compile a kernel: no deadlines.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", _COMMON, max_examples=3, derandomize=True, database=None)
settings.register_profile("all", _COMMON, max_examples=7, derandomize=True, database=None)
settings.register_profile("nightly", _COMMON, max_examples=5000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the tests marked long too, and more of Hypothesis' examples"
    )


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The Ray that files share ends with the last of them: it takes processor time while nobody asks for anything."""
    result = yield
    ray = sys.modules.get("ray")
    if ray is not None and shares_ray(item.path) and not (nextitem is not None and shares_ray(nextitem.path)):
        ray.shutdown()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes one has the Ray that files share, one the machines of the fault tests; these begin.
    What a file's tests share is made once, so they stay together.
    """
    from xdist.scheduler import LoadScopeScheduling

    tests = Path(__file__).parent
    texts = {path.relative_to(tests.parent).as_posix(): path.read_text("utf-8") for path in tests.rglob("test_*.py")}

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if path.startswith("tests/faults/"):
                return "machines"
            if shares_ray(Path(tests.parent, path)):
                return "Ray"
            return path if any(shared in texts.get(path, "") for shared in ('scope="module"', "@cache")) else nodeid

    return Scheduling(config, log)
