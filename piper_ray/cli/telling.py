"""What commands print: an answer as a document, notes, a live line, faults of files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from piper_ray.compiled.observers import observed
from piper_ray.model.errors import InvalidPlan, UnsupportedPlan, UsageError
from piper_ray.model.instance import Instance
from piper_ray.report.folding import folded, screen_columns
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray.report.terminal import Working


def show_document(document: Mapping[str, object]) -> None:
    """Prints the answer as one JSON document on stdout."""
    from piper_ray.report.document import to_text

    typer.echo(to_text(document), nl=False)


def write_document(path: Path, document: Mapping[str, object]) -> None:
    """Writes a JSON document, completely or not at all."""
    from piper_ray.report.document import to_text

    write_atomically(path, to_text(document))


def say(text: str) -> None:
    """Writes to stderr, above a live line if there is one, which ``typer.echo`` would overwrite."""
    print("\n".join(folded(f"piper-ray: {text}", screen_columns(sys.stderr))), file=sys.stderr)  # noqa: T201


def note(text: str) -> None:
    """A message that is no fault."""
    say(f"note: {text}")


def once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """A function that passes each text on once, however often it is called with it."""
    told: set[str] = set()

    def tell_new(text: str) -> None:
        if text not in told:
            told.add(text)
            tell(text)

    return tell_new


def kernels_told() -> AbstractContextManager[None]:
    """A context in which compiled kernels, and faults of those on disk, are noted."""
    return observed(note)


@contextmanager
def working(what: str) -> Iterator[Working]:
    """A phase's live line on stderr, and ``kernels_told``. Nothing is to be printed to stdout meanwhile."""
    from piper_ray.report.terminal import Working

    with kernels_told(), Working(what) as line:
        yield line


def refuse_unwritable(option: str, path: Path) -> None:
    """Raises UsageError if no file can be written there: before the work, not after hours of it."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; expected the path of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")


class Unwritten:
    """Files that could not be written, reported after the answer."""

    def __init__(self) -> None:
        self._faults: list[UsageError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which a file that cannot be written is noted, and the command goes on."""
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
    """A context in which an invalid plan that is for another workload is reported so, in one line, and not by each rule
    that it breaks. If it is for another cluster or batch, the report says so in addition to the rules. heading: of the
    report; None: as it is."""
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
