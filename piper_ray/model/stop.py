"""Why a search ended before its proof (``StoppedBy``), and the wish that ends one (``Stop``), with the answer so far.

Who wishes is in another thread than who works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Generic, TypeVar


class StoppedBy(str, Enum):
    """What ended a search before its proof. OPERATOR_BLOCKS: plans of whole blocks are not all plans there are.

    Of schedules with a flush: TOO_MANY_PLANS, TOO_MANY_STATES: more than a search looks at, or keeps. CHOICES_MERGED: a
    stage has more undominated TMPC choices than are told apart, so that the bound is one of better ones. Of schedules
    with chunks: NO_BETTER_BOUND, neither bound nor plan got any further; WORK_LIMIT, as many passes were simulated as
    may be. TOO_SLOW: no plan keeps within the time asked. TOO_MANY_DOWNSETS: not even those that a better plan can use
    can be listed. INEXACT: sums of layers' figures lose the small ones. PROCESS_LOST: the process that searched was
    ended from outside, as by Ray.

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
        """Whether nobody waits for more than what is known.

        >>> StoppedBy.INTERRUPT.in_haste, StoppedBy.GAP.in_haste
        (True, False)
        """
        return self in (StoppedBy.INTERRUPT, StoppedBy.PROCESS_LOST)

    @property
    def ends_all(self) -> bool:
        """Whether it comes from outside: then no further search of the same answer begins.

        >>> StoppedBy.TIME_LIMIT.ends_all, StoppedBy.CHOICE_TOO_HARD.ends_all
        (True, False)
        """
        return self.in_haste or self is StoppedBy.TIME_LIMIT

    @property
    def breaks_off(self) -> bool:
        """Whether the search would have gone on. For all other reasons it had done what it can.

        >>> StoppedBy.CHOICE_TOO_HARD.breaks_off, StoppedBy.GAP.breaks_off
        (True, False)
        """
        return self.ends_all or self in (StoppedBy.CHOICE_TOO_HARD, StoppedBy.INEXACT, StoppedBy.WORK_LIMIT)


_Answer = TypeVar("_Answer")


class StopSearch(Exception):
    """Raised inside a search to end it; ``reason`` is what the user is told.

    >>> StopSearch(StoppedBy.TIME_LIMIT).reason
    <StoppedBy.TIME_LIMIT: 'time limit'>
    """

    def __init__(self, reason: StoppedBy) -> None:
        super().__init__(reason.value)
        self.reason = reason


class _Wish:
    """No lock: it is set by signal handlers too."""

    requested = False


class Stop(Generic[_Answer]):
    """``request`` ends the work that was given this, from any thread or signal handler: it looks here about ten times a
    second.

    Work that is in a long step cannot look. What it offers meanwhile, the answer so far, can be had without it, and
    what it had to do at its end can be done in its place: then it is given up.

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
        """Asks the work to end. Once is enough, and there is no way back."""
        self._wish.requested = True

    @property
    def requested(self) -> bool:
        """Whether ``request`` was called."""
        return self._wish.requested

    def check(self) -> None:
        """Raises StopSearch once the end is wished for."""
        if self.requested:
            raise StopSearch(StoppedBy.INTERRUPT)

    def offer(self, answer: Callable[[], _Answer | None]) -> None:
        """answer: tells at any moment, on any thread, what there is, in place of what was offered before."""
        self._answer = answer

    def conclude(self, answer: _Answer) -> None:
        """answer: all there will be. Where the end is wished for, nobody has to wait for what is left of the work, and
        ``rest`` is called before it."""
        self.offer(lambda: answer)
        if self.requested:
            self.is_concluded = True
            self.rest()

    @property
    def has_answer(self) -> bool:
        """Whether something was offered."""
        return self._answer is not _nothing

    def answer(self) -> _Answer | None:
        """The answer so far; None as long as there is none."""
        return self._answer()

    def part(self) -> Stop[Any]:
        """A stop for a part of the work: it has the same wish, with answers of its own."""
        part: Stop[Any] = Stop()
        part._wish, part._endings = self._wish, self._endings
        return part

    @contextlib.contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """end: what the work would do at its end, should it be given up meanwhile. Safe beside the work itself."""
        self._endings.append(end)
        try:
            yield
        finally:
            self._endings.remove(end)

    def give_up(self) -> None:
        """Ends in place of the work, which gets no further: the process is about to end. What fails is left."""
        for end in reversed(self._endings.copy()):
            with contextlib.suppress(Exception):
                end()


def _nothing() -> None:
    return None
