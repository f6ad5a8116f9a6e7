"""Calls in forks: the same results as calls made here, in order; errors, lost forks, and the end on request."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from piper_ray.model.events import Event
from piper_ray.model.stop import Stop
from piper_ray.proposal import forks
from piper_ray.proposal.cells import CellBegun, Watch, unwatched
from piper_ray.proposal.forks import each_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux alone")

BEGUN = CellBegun(1, 2, "microbatches of 4", 8, None)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "usable_cores", lambda: 2)


def square(number: int, watch: Watch) -> tuple[int, int]:
    """The process besides."""
    watch(BEGUN)
    return number * number, os.getpid()


@pytest.mark.usefixtures("two_cores")
def test_results_come_in_order_and_events_arrive() -> None:
    heard: list[object] = []

    def hear(event: CellBegun | Event) -> None:
        heard.append(event)

    results = list(each_of([partial(square, number) for number in range(5)], Stop(), hear))
    assert [result for result, _ in results] == [0, 1, 4, 9, 16]
    assert 1 <= len({process for _, process in results} - {os.getpid()}) <= 2
    assert heard == [BEGUN] * 5


@pytest.mark.parametrize("calls", [1, 3])
def test_one_core_or_one_call_has_no_fork(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "usable_cores", lambda: 1 if calls > 1 else 2)
    results = list(each_of([partial(square, number) for number in range(calls)], Stop(), unwatched))
    assert results == [(number * number, os.getpid()) for number in range(calls)]


@pytest.mark.usefixtures("two_cores")
def test_a_call_whose_fork_is_lost_is_made_here() -> None:
    here = os.getpid()

    def lost(watch: Watch) -> tuple[int, int]:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return square(2, watch)

    calls: list[Callable[[Watch], tuple[int, int]]] = [lost, partial(square, 3)]
    assert [result for result, _ in each_of(calls, Stop(), unwatched)] == [4, 9]


@pytest.mark.usefixtures("two_cores")
def test_what_a_call_raises_is_raised_here() -> None:
    def fails(watch: Watch) -> tuple[int, int]:  # noqa: ARG001
        raise ValueError("no plan")

    calls: list[Callable[[Watch], tuple[int, int]]] = [partial(square, 1), fails]
    results = each_of(calls, Stop(), unwatched)
    assert next(results)[0] == 1
    with pytest.raises(ValueError, match="no plan"):
        next(results)


@pytest.mark.usefixtures("two_cores")
def test_after_a_request_there_is_what_is_known() -> None:
    """The last call ends, and another one then asks to stop while a third one goes on."""
    stop = Stop[object]()

    def asks(watch: Watch) -> tuple[int, int]:
        watch(BEGUN)
        signal.pause()
        return 0, 0

    def hear(event: CellBegun | Event) -> None:
        heard.append(event)
        if len(heard) == 3:
            stop.request()

    heard: list[object] = []
    calls: list[Callable[[Watch], tuple[int, int]]] = [asks, asks, partial(square, 3)]
    assert [result for result, _ in each_of(calls, stop, hear)] == [9]


@pytest.mark.usefixtures("two_cores")
def test_a_request_ends_all_forks() -> None:
    """Calls that would never end are killed; nobody is left of them."""
    stop = Stop[object]()

    def endless(watch: Watch) -> tuple[int, int]:
        watch(BEGUN)
        while True:
            signal.pause()

    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text()
    assert list(each_of([endless, endless], stop, lambda event: stop.request())) == []  # noqa: ARG005
    assert children.read_text() == before
