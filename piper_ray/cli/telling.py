"""What every command tells beside its answer: notes, a live line, what is wrong with files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ray.compiled.observers import observed
from piper_ray.model.errors import InvalidPlan, UnsupportedPlan, UsageError
from piper_ray.model.instance import Instance
from piper_ray.report.folding import folded, screen_columns

if TYPE_CHECKING:
    from piper_ray.report.terminal import Working


def say(text: str) -> None:
    """Writes to stderr, above a live line if there is one: ``typer.echo`` goes past the stream that looks after the
    line."""
    print("\n".join(folded(f"piper-ray: {text}", screen_columns(sys.stderr))), file=sys.stderr)  # noqa: T201


def note(text: str) -> None:
    """What is no fault and still worth telling."""
    say(f"note: {text}")


def once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Tells each text when it comes first, where one work is done again and again."""
    told: set[str] = set()

    def tell_new(text: str) -> None:
        if text not in told:
            told.add(text)
            tell(text)

    return tell_new


def kernels_told() -> AbstractContextManager[None]:
    """Kernels that are compiled meanwhile are told of, and what is amiss with those on disk."""
    return observed(note)


@contextmanager
def working(what: str) -> Iterator[Working]:
    """A phase's live line on stderr, and ``kernels_told``. Nothing is to be printed to stdout meanwhile."""
    from piper_ray.report.terminal import Working

    with kernels_told(), Working(what) as line:
        yield line


def refuse_unwritable(option: str, path: Path) -> None:
    """Raises UsageError for a place where no file can be: said before the work, not after hours of it."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; expected the path of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")


class Unwritten:
    """Files that could not be written: told of once the answer is out."""

    def __init__(self) -> None:
        self._faults: list[UsageError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What cannot be written meanwhile is left, and what comes after goes on."""
        try:
            yield
        except UsageError as fault:
            self._faults.append(fault)

    def report(self) -> None:
        """Raises UsageError if there are any, with all of them."""
        if self._faults:
            raise UsageError("\n".join(map(str, self._faults))) from self._faults[0]


@contextmanager
def judged(plan_file: Path, instance: Instance, heading: str | None = None) -> Iterator[None]:
    """A context in which one line tells that a plan is for another workload, in place of each rule that it breaks; that
    it is for another cluster or batch is told beside these. heading: the complaint's; None: as it is."""
    try:
        yield
    except InvalidPlan as error:
        from piper_ray.workloads.formats.load import plan_made_for

        made_for = plan_made_for(plan_file, instance)
        unsupported = isinstance(error, UnsupportedPlan)
        if made_for is not None and made_for.other_workload:
            raise InvalidPlan([str(made_for)], heading or InvalidPlan.HEADING) from None
        if heading is None and (made_for is None or unsupported):
            raise
        claims = [] if made_for is None or unsupported else [str(made_for)]
        raise InvalidPlan([*error.violations, *claims], heading or error.heading) from None
