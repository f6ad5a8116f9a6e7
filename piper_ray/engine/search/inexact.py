"""Where figures differ by so much that sums over layers lose the small ones: nothing that is found can be relied on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from piper_ray.engine.ledger import Ledger
from piper_ray.model.errors import ChoiceTooHard, LimitError
from piper_ray.model.events import Note
from piper_ray.model.stop import StoppedBy, StopSearch


class Inexact(LimitError):
    """found: what shows it, in words."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"sums of the layers' figures are not exact enough: {found}. Leave out configurations that no plan can "
            "use, whose figures are a hundred million times as large as others' and more"
        )


@contextmanager
def keeping_known(ledger: Ledger[Any], forget_bounds: Callable[[], None]) -> Iterator[None]:
    """A TMPC choice that is too hard to make exactly, or figures too far apart for sums, end the search with the plan
    that is known. Without one they are errors, which it raises. forget_bounds: those that came out of sums.
    """
    try:
        yield
    except ChoiceTooHard as error:
        if ledger.best is None:
            raise
        raise StopSearch(StoppedBy.CHOICE_TOO_HARD) from error
    except Inexact as error:
        if ledger.best is None:
            raise
        forget_bounds()
        ledger.listener(Note(str(error)))
        raise StopSearch(StoppedBy.INEXACT) from error
