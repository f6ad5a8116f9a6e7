"""``scripts/bench``: the options, and what is printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from piper_ray.model.errors import EXIT_INTERRUPTED, UsageError
from scripts.benchmarks.cases import CASES, Row, Twin, select
from scripts.benchmarks.compared_table import render_compared
from scripts.benchmarks.kept import keep_compared, keep_yardsticks, write_pages
from scripts.benchmarks.measure import MeasurementError
from scripts.benchmarks.paired import Compared, compare
from scripts.benchmarks.results import Results
from scripts.benchmarks.runner import describe_machine, measure
from scripts.benchmarks.subjects import FAMILIES, Subject, of_rows, select_families
from scripts.benchmarks.table import render
from scripts.benchmarks.trees import this_tree, tree_at

_BEGINNINGS = dict.fromkeys(subject.id.partition("-")[0] for subject in FAMILIES)


def main(
    rows: Annotated[
        str,
        typer.Option(
            "--rows",
            metavar="NAMES",
            help=f"Only these, with commas between: {', '.join(CASES)}; or, with --families, {', '.join(_BEGINNINGS)}. "
            "gnmt is all of GNMT, towers-3x24 one of the towers.",
        ),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what takes minutes, and the compilation of the kernels.")
    ] = False,
    families: Annotated[
        bool,
        typer.Option(
            "--families",
            help="Measure graphs that are hard to plan instead, of each family several sizes: towers, mixtures, cells, "
            "chains, operators, Inception-v3, ImageBind. Half an hour to an hour; with --quick a few minutes.",
        ),
    ] = False,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="REVISION",
            help="Measure this revision of git, too, in turns with the working tree: times, memory, and answers that "
            "must agree. Without --families on the rows of the yardsticks.",
        ),
    ] = "",
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep what is measured in docs/performance/, and make the tables and the picture of README and "
            "docs/performance.md anew from what is there.",
        ),
    ] = False,
    pages: Annotated[
        bool, typer.Option("--pages", help="Measure nothing: make these anew from what was kept before.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every figure to FILE, as JSON.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables in Markdown.")] = False,
) -> None:
    """Measure piper-ray: answers, times, memory, and the paper's own table in the same run.

    Tables go to stdout, progress to stderr. Ctrl-C prints what is finished. Exit code 1: an answer is wrong, versions
    do not agree, or a measurement failed; a missed time is no failure.
    """
    if json_path is not None and not json_path.parent.is_dir():
        raise typer.BadParameter(f"--json: there is no folder {json_path.parent}")
    if pages:
        write_pages()
        return
    names = [name.strip() for name in rows.split(",") if name.strip()]
    try:
        if families or against:
            subjects = select_families(names, quick=quick) if families else of_rows(select(names, quick=quick)[0])
            code, compared = _compare(subjects, against)
            text, document = render_compared(compared, markdown=markdown), dataclasses.asdict(compared)
        else:
            code, measured = _measure(*select(names, quick=quick), with_compilation=not quick)
            text, document = render(measured, markdown=markdown), dataclasses.asdict(measured)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(text, nl=False)
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    if keep:
        if families or against:
            keep_compared(compared)
        else:
            keep_yardsticks(measured)
        write_pages()
    raise typer.Exit(code)


def _measure(rows: Sequence[Row], twins: Sequence[Twin], *, with_compilation: bool) -> tuple[int, Results]:
    """The exit code, and what was measured until the end or an interrupt."""
    results = Results(describe_machine())
    code = _told(lambda: measure(rows, twins, results, _tell, with_compilation=with_compilation))
    return _judged(code, results.faults()), results


def _compare(subjects: Sequence[Subject], revision: str) -> tuple[int, Compared]:
    """Likewise, in turns with the revision if it is not empty."""
    results = Compared(describe_machine())
    with ExitStack() as stack:
        trees = [this_tree(), *([stack.enter_context(tree_at(revision))] if revision else [])]
        code = _told(lambda: compare(subjects, trees, results, _tell))
    return _judged(code, results.faults()), results


def _told(work: Callable[[], None]) -> int:
    try:
        work()
    except KeyboardInterrupt:
        _tell("interrupted: what follows is what was finished")
        return EXIT_INTERRUPTED
    except MeasurementError as error:
        _tell(str(error))
        return 1
    return 0


def _judged(code: int, faults: Iterable[str]) -> int:
    for fault in faults:
        _tell(fault)
        code = code or 1
    return code


def _tell(message: str) -> None:
    typer.echo(message, err=True)


if __name__ == "__main__":
    typer.run(main)
