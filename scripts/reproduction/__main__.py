"""``scripts/reproduce``: the options, and what is printed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import piper_ray
from piper_ray.model.errors import EXIT_INTERRUPTED
from scripts.reproduction import (
    correlation,
    greedy,
    pipedream_pipelines,
    pipedream_plans,
    running_time,
    staircases,
    tables,
    throughput,
)
from scripts.reproduction.report import page, write_study
from scripts.reproduction.study import PAGES, Findings, Study

STUDIES = {
    study.name: study
    for study in (
        *(module.STUDY for module in (throughput, staircases, running_time, correlation, greedy, tables)),
        pipedream_plans.STUDY,
        *pipedream_pipelines.STUDIES,
    )
}

ROOT = Path(__file__).resolve().parents[2]


def main(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where tables, pictures and the page go.")] = ROOT
    / "docs"
    / "reproduction",
    only: Annotated[
        str, typer.Option("--only", metavar="NAMES", help=f"Only these, with commas between: {', '.join(STUDIES)}.")
    ] = "",
) -> None:
    """Run the evaluations of the Piper and the PipeDream paper and write their tables and pictures.

    Exit code 1: an optimum is above a published or a baseline's value.
    """
    names = [name.strip() for name in only.split(",") if name.strip()] or list(STUDIES)
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        raise typer.BadParameter(f"--only: {', '.join(unknown)} unknown; expected some of {', '.join(STUDIES)}")
    out.mkdir(parents=True, exist_ok=True)
    found: list[tuple[Study, Findings]] = []
    faults: list[str] = []
    code = 0
    try:
        for name in names:
            study = STUDIES[name]
            began = time.perf_counter()
            typer.echo(study.title, err=True)
            findings = study.run(lambda text: typer.echo(f"  {text}", err=True))
            write_study(out, study, findings)
            found.append((study, findings))
            faults += findings.faults
            typer.echo(f"  {time.perf_counter() - began:.0f} s, {len(findings.rows):,} rows", err=True)
    except KeyboardInterrupt:
        typer.echo("interrupted: what is finished has been written", err=True)
        code = EXIT_INTERRUPTED
    about = [f"Made by `scripts/reproduce` with piper_ray {piper_ray.__version__}."]
    checked = "every optimum is at or below every published and baseline value" if not faults else "FAULTS"
    about.append(f"Checked: {checked}.")
    for name, heading in PAGES.items():
        of_page = [(study, findings) for study, findings in found if study.page == name]
        if of_page:
            (out / f"{name}.md").write_text(page(heading, of_page, [*about, *faults]), encoding="utf-8")
    for text in (*about, *faults):
        typer.echo(text)
    if faults or code:
        raise typer.Exit(code or 1)


if __name__ == "__main__":
    typer.run(main)
