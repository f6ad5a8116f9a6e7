"""Why a search ended before its proof (``StoppedBy``), and a request to end a search with its answer so far (``Stop``).

The request comes from another thread than the one that searches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Generic, TypeVar


class StoppedBy(str, Enum):
    """What ended a search before its proof. OPERATOR_BLOCKS: only plans of whole blocks were searched.

    Under schedules that flush: TOO_MANY_PLANS, TOO_MANY_STATES: more than a search examines, or keeps. CHOICES_MERGED:
    a stage has more undominated TMPC choices than the search distinguishes, so the bound belongs to better choices.
    Under schedules with chunks: NO_BETTER_BOUND, neither bound nor plan improved further; WORK_LIMIT, the allowed
    number of passes was simulated. TOO_SLOW: no plan keeps the requested time. TOO_MANY_DOWNSETS: even the downsets
    that a better plan can use are too many to list. INEXACT: sums of layers' figures lose the small ones. PROCESS_LOST:
    something outside, such as Ray, ended the process that searched.

    >>> StoppedBy("time limit")
    <StoppedBy.TIME_LIMIT: 'time limit'>
    """

    GAP = "gap"
    TIME_LIMIT = "time limit"
    INTERRUPT = "interrupt"
    CHOICE_TOO_HARD = "TMPC choice too hard"
    OPERATOR_BLOCKS = "blocks of operators"
    TOO_MANY_PLANS = "too many plans to look at"
    TOO_MANY_STATES = "too many states to keep"
    CHOICES_MERGED = "TMPC choices merged"
    NO_BETTER_BOUND = "no better bound or plan found"
    WORK_LIMIT = "work limit"
    TOO_SLOW = "no plan is fast enough"
    TOO_MANY_DOWNSETS = "too many downsets to list"
    INEXACT = "figures too far apart"
    PROCESS_LOST = "process lost"

    def __str__(self) -> str:
        return self.value

    @property
    def in_haste(self) -> bool:
        """Whether the search should return at once with what it has.

        >>> StoppedBy.INTERRUPT.in_haste, StoppedBy.GAP.in_haste
        (True, False)
        """
        return self in (StoppedBy.INTERRUPT, StoppedBy.PROCESS_LOST)

    @property
    def ends_all(self) -> bool:
        """Whether the reason comes from outside; then no further search for the same answer begins.

        >>> StoppedBy.TIME_LIMIT.ends_all, StoppedBy.CHOICE_TOO_HARD.ends_all
        (True, False)
        """
        return self.in_haste or self is StoppedBy.TIME_LIMIT

    @property
    def breaks_off(self) -> bool:
        """Whether the search would have gone on. For all other reasons it had already done all that it can.

        >>> StoppedBy.CHOICE_TOO_HARD.breaks_off, StoppedBy.GAP.breaks_off
        (True, False)
        """
        return self.ends_all or self in (StoppedBy.CHOICE_TOO_HARD, StoppedBy.INEXACT, StoppedBy.WORK_LIMIT)


_Answer = TypeVar("_Answer")


class StopSearch(Exception):
    """Raised inside a search to end it; ``reason`` is shown to the user.

    >>> StopSearch(StoppedBy.TIME_LIMIT).reason
    <StoppedBy.TIME_LIMIT: 'time limit'>
    """

    def __init__(self, reason: StoppedBy) -> None:
        super().__init__(reason.value)
        self.reason = reason


class _Wish:
    """A flag without a lock, because signal handlers set it too."""

    requested = False


class Stop(Generic[_Answer]):
    """``request`` ends the work that received this object, from any thread or signal handler. The work checks it about
    ten times a second.

    Work in a long step cannot check. Then another thread can read the latest answer that the work offered, carry out
    what the work would do at its end, and abandon the work.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> stop = piper_ray.Stop()
    >>> stop.request()
    >>> piper_ray.solve(bert, stop=stop, threads=1).stopped_by
    <StoppedBy.INTERRUPT: 'interrupt'>
    """

    def __init__(self) -> None:
        self._wish = _Wish()
        self.is_concluded = False
        self.rest: Callable[[], object] = _nothing
        self._answer: Callable[[], _Answer | None] = _nothing
        self._endings: list[Callable[[], object]] = []

    def request(self) -> None:
        """Asks the work to end. A request cannot be withdrawn."""
        self._wish.requested = True

    @property
    def requested(self) -> bool:
        """Whether ``request`` was called."""
        return self._wish.requested

    def check(self) -> None:
        """Raises StopSearch if the end was requested."""
        if self.requested:
            raise StopSearch(StoppedBy.INTERRUPT)

    def offer(self, answer: Callable[[], _Answer | None]) -> None:
        """answer: returns the current answer at any moment and on any thread. It replaces the one offered before."""
        self._answer = answer

    def conclude(self, answer: _Answer) -> None:
        """answer: the final answer. If the end was requested, ``rest`` is called before the remaining work begins, and
        may hold it off, so that nobody has to wait for that work."""
        self.offer(lambda: answer)
        if self.requested:
            self.is_concluded = True
            self.rest()

    @property
    def has_answer(self) -> bool:
        """Whether an answer was offered."""
        return self._answer is not _nothing

    def answer(self) -> _Answer | None:
        """The answer so far; None if there is none yet."""
        return self._answer()

    def part(self) -> Stop[Any]:
        """A stop for a part of the work. It shares the request and has answers of its own."""
        part: Stop[Any] = Stop()
        part._wish, part._endings = self._wish, self._endings
        return part

    @contextlib.contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """end: what the work does at its end, called by ``give_up`` if the work is abandoned inside this context. It
        must be safe to call while the work runs."""
        self._endings.append(end)
        try:
            yield
        finally:
            self._endings.remove(end)

    def give_up(self) -> None:
        """Does what the work would do at its end, in place of work that cannot continue, because the process is about
        to end. Errors are ignored."""
        for end in reversed(self._endings.copy()):
            with contextlib.suppress(Exception):
                end()


def _nothing() -> None:
    return None
