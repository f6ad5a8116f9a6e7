"""``scripts/bench``: the options, and what is printed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from piper_ray.model.errors import EXIT_INTERRUPTED, UsageError
from scripts.benchmarks.cases import CASES, select
from scripts.benchmarks.measure import MeasurementError
from scripts.benchmarks.results import Results
from scripts.benchmarks.runner import describe_machine, measure
from scripts.benchmarks.table import render


def main(
    rows: Annotated[
        str,
        typer.Option(
            "--rows", metavar="NAMES", help=f"Only these, with commas between: {', '.join(CASES)}. gnmt is all of GNMT."
        ),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what takes minutes, and the compilation of the kernels.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every figure to FILE, as JSON.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables in Markdown.")] = False,
) -> None:
    """Measure piper-ray: answers, times, memory, and the paper's own table in the same run.

    Tables go to stdout, progress to stderr. Ctrl-C prints what is finished. Exit code 1: an answer is wrong or a
    measurement failed; a missed time is no failure.
    """
    try:
        chosen_rows, chosen_twins = select([name.strip() for name in rows.split(",") if name.strip()], quick=quick)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    if json_path is not None and not json_path.parent.is_dir():
        raise typer.BadParameter(f"--json: there is no folder {json_path.parent}")
    results = Results(describe_machine())
    code = 0
    try:
        measure(chosen_rows, chosen_twins, results, _tell, with_compilation=not quick)
    except KeyboardInterrupt:
        _tell("interrupted: what follows is what was finished")
        code = EXIT_INTERRUPTED
    except MeasurementError as error:
        _tell(str(error))
        code = 1
    typer.echo(render(results, markdown=markdown), nl=False)
    if json_path is not None:
        document = dataclasses.asdict(results)
        json_path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    for fault in results.faults():
        _tell(fault)
        code = code or 1
    raise typer.Exit(code)


def _tell(message: str) -> None:
    typer.echo(message, err=True)


if __name__ == "__main__":
    typer.run(main)
