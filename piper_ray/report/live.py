"""A line at the foot of a terminal that is always taken down; nothing where there is no terminal."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from piper_ray.model.figures import duration_text
from piper_ray.report.layout import console

WORTH_A_GUESS_S = 2.0
"""Of work that has taken less nobody asks what is left."""

_REFRESH_PER_S = 8
_Log = TypeVar("_Log", bound="LiveLog")  # typing has Self from Python 3.11 on


def left_texts(elapsed_s: float, done: float, what: str = "left") -> list[str]:
    """``about 12 s left``, where that is worth a guess. done: share of the work."""
    if elapsed_s <= WORTH_A_GUESS_S or not done > 0.0:
        return []
    return [f"about {duration_text(elapsed_s * (1.0 / done - 1.0))} {what}"]


class LiveLog(ABC):
    """A log on ``console`` with such a line, shown while the context lasts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._ended = False
        """What work that was given up has to tell comes too late."""

    @abstractmethod
    def live_line(self) -> Text:
        """What the line says; asked for often, so that a clock in it runs while nothing happens."""

    def _one_line(self) -> Text:
        """Cut off where the terminal ends: what a line says first matters most."""
        line = self.live_line()
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def __enter__(self: _Log) -> _Log:  # noqa: PYI019 - the same reason
        self._ended = False
        if self._console.is_interactive:
            self._live = Live(
                console=self._console,
                transient=True,
                refresh_per_second=_REFRESH_PER_S,
                redirect_stdout=sys.stdout.isatty(),  # what goes elsewhere is not to come up here
                get_renderable=self._one_line,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        if self._live is not None:
            self._live.stop()
            self._live = None


class Working(LiveLog):
    """A phase of a command that prints nothing meanwhile: what is done, how far it is and for how long it goes on.

    Called with the steps that are done, all steps, and the name of the next one, where these are known.
    target: stderr if not given, so that what a command answers is left alone.
    """

    def __init__(self, what: str, target: Console | None = None) -> None:
        super().__init__(target or console(stderr=True))
        self._what = what
        self._done, self._total, self._name = 0, 0, ""
        self._began_s = time.perf_counter()

    def __call__(self, done: int, total: int, name: str = "") -> None:
        self._done, self._total, self._name = done, total, name

    def live_line(self) -> Text:
        elapsed_s = time.perf_counter() - self._began_s
        counted = f", {self._done:,} of {self._total:,}" if self._total else ""
        parts = [f"{self._what}{counted}", f"{elapsed_s:.1f} s"]
        if self._done < self._total:
            parts += left_texts(elapsed_s, self._done / self._total)
        return Text(", ".join([*parts, self._name] if self._name else parts), style="dim")
