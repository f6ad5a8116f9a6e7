"""An evaluation ahead of need: its outcome when it is wanted, and an end when it is not. Staged on events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from piper_ray.engine.evaluation import evaluations
from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.evaluation.evaluations import Ahead
from piper_ray.engine.evaluation.outcome import Outcome

OUTCOME = Outcome(True, 3, (), 1.0, 1, 1, np.zeros(4, np.int64))
PATIENCE_S = 60.0


def ignore(*_: int) -> None:
    pass


class Staged:
    """An evaluation that reports as it goes on, until it is let end."""

    def __init__(self) -> None:
        self.begun, self.let_end = threading.Event(), threading.Event()
        self.ended_early = False

    def __call__(self, on_progress: OnProgress) -> Outcome:
        deadline = time.monotonic() + PATIENCE_S
        while not self.let_end.wait(0.001) and time.monotonic() < deadline:
            try:
                on_progress(2)
            except BaseException:
                self.ended_early = True
                raise
            self.begun.set()
        return OUTCOME


@pytest.fixture
def staged() -> Iterator[Staged]:
    made = Staged()
    yield made
    made.let_end.set()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("piper-ray-ahead")]


def test_the_outcome_is_there_when_it_is_asked_for(staged: Staged) -> None:
    one = Ahead(1.5, staged)
    assert one.threshold_s == 1.5
    assert staged.begun.wait(PATIENCE_S)
    staged.let_end.set()
    assert one.result(ignore) is OUTCOME
    assert not threads()


def test_who_waits_hears_how_far_it_is(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "_POLL_S", 0.001)
    one = Ahead(1.5, staged)
    assert staged.begun.wait(PATIENCE_S)
    heard: list[int] = []

    def on_progress(done: int) -> None:
        heard.append(done)
        staged.let_end.set()

    assert one.result(on_progress) is OUTCOME
    assert set(heard) == {2}


def test_nobody_wants_it_any_more(staged: Staged) -> None:
    """It ends at its next report, and the one who cancels waits for that."""
    one = Ahead(1.5, staged)
    assert staged.begun.wait(PATIENCE_S)
    one.cancel()
    assert staged.ended_early
    assert not threads()
    one.cancel()


def test_what_the_listener_raises_ends_it(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "_POLL_S", 0.001)
    one = Ahead(1.5, staged)
    assert staged.begun.wait(PATIENCE_S)

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.result(stop)
    assert staged.ended_early
    assert not threads()


def test_an_error_comes_to_who_asks() -> None:
    def fails(_: OnProgress) -> Outcome:
        raise OSError("no room")

    one = Ahead(1.5, fails)
    with pytest.raises(OSError, match="no room"):
        one.result(ignore)
    assert not threads()
