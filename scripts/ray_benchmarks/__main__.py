"""``scripts/bench_ray``: the options, and what is printed."""

from __future__ import annotations

from typing import Annotated

import typer

from piper_ray.model.errors import EXIT_INTERRUPTED
from piper_ray.model.options import SolveOptions
from piper_ray.workloads.formats.load import load
from scripts.benchmarks.runner import describe_machine
from scripts.ray_benchmarks.cases import RAY_CASES, TIGHT_TOWERS
from scripts.ray_benchmarks.model import fit
from scripts.ray_benchmarks.results import LOCAL, ONE, RayResult, s_per_bound
from scripts.ray_benchmarks.runner import WorkersMissingError, measure
from scripts.ray_benchmarks.tables import checked_table, constants_line, simulated, tables_of


def main(
    cases: Annotated[
        str,
        typer.Option(
            "--cases", metavar="NAMES", help=f"Only these, with commas between: {', '.join(c.id for c in RAY_CASES)}."
        ),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out Inception on 48 devices: about two minutes instead of ten.")
    ] = False,
    workers_per_node: Annotated[
        int, typer.Option("--workers-per-node", metavar="C", min=1, help="Of each machine in the model.")
    ] = 8,
    machines: Annotated[
        bool,
        typer.Option(
            "--machines",
            help="Check the event model against real runs on 1, 2 and 3 machines instead: sets of Linux namespaces, "
            "which need root and iproute2. About two minutes.",
        ),
    ] = False,
    calls: Annotated[
        str,
        typer.Option(
            "--calls",
            metavar="INPUT",
            help="What 1 to 64 workers make of the calls of an interleaved search of INPUT instead, by CPU time alone.",
        ),
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables in Markdown.")] = False,
) -> None:
    """Measure the Ray backend against one local thread, and predict the time on 1 to 256 machines.

    Needs two free cores. Tables go to stdout, progress to stderr. Ctrl-C prints what is finished. Exit code 1: answers
    differ or no worker started; a missed goal is no failure.
    """
    if machines:
        from scripts.ray_benchmarks.machines import check

        table = checked_table(check(_tell))
        typer.echo(table.to_markdown() if markdown else table.to_text())
        return
    if calls:
        from scripts.ray_benchmarks.calls import calls_table

        table = calls_table(load(calls), "interleaved", SolveOptions(), (1, 2, 8, 64))
        typer.echo(table.to_markdown() if markdown else table.to_text())
        return
    wanted = [name.strip() for name in cases.split(",") if name.strip()]
    unknown = sorted({*wanted} - {case.id for case in RAY_CASES})
    if unknown:
        raise typer.BadParameter(f"--cases: there is no {', '.join(unknown)}")
    chosen = [case for case in RAY_CASES if (case.id in wanted if wanted else case.quick or not quick)]
    results: list[RayResult] = []
    code = 0
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    try:
        measure(chosen, results, _tell)
    except KeyboardInterrupt:
        _tell("interrupted: what follows is what was finished")
        code = EXIT_INTERRUPTED
    except WorkersMissingError as error:
        _tell(str(error))
        code = 1
    typer.echo(f"Machine: {machine}.\n")
    batches = [batch for result in results for run in result.runs[ONE] for batch in run.batches]
    if batches:
        constants = fit(batches)
        typer.echo(f"{constants_line(constants)}\n")
        for table in tables_of(results, constants, workers_per_node):
            typer.echo(table.to_markdown() if markdown else table.to_text())
        hard = [run for result in results if result.case.id == TIGHT_TOWERS for run in result.runs[LOCAL]]
        if hard:
            table = simulated(constants, s_per_bound(hard[0]))
            typer.echo(table.to_markdown() if markdown else table.to_text())
    for difference in [difference for result in results for difference in result.differences]:
        _tell(difference)
        code = code or 1
    raise typer.Exit(code)


def _tell(message: str) -> None:
    typer.echo(message, err=True)


if __name__ == "__main__":
    typer.run(main)
