"""A line at the foot of a terminal that is always taken down; nothing where there is no terminal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

_REFRESH_PER_S = 8
_Log = TypeVar("_Log", bound="LiveLog")  # typing has Self from Python 3.11 on


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
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                transient=True,
                refresh_per_second=_REFRESH_PER_S,
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
