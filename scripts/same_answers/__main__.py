"""``scripts/answers``: the options, and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from piper_ray.workloads.formats.load import dump
from scripts.benchmarks.trees import Tree, this_tree, tree_at
from scripts.same_answers.cases import Case, cases

WORKER = Path(__file__).with_name("worker.py")
_AT_ONCE = 40
"""Cases of one process: few enough to tell how far it is."""


def main(
    against: Annotated[
        str, typer.Option("--against", metavar="REVISION", help="The version of git whose answers are expected.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="A few of each kind: minutes in place of an hour.")] = False,
    only: Annotated[str, typer.Option("--only", metavar="TEXT", help="Cases whose name has this text.")] = "",
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write both versions' answers that differ to FILE.")
    ] = None,
) -> None:
    """Solve many instances with this working tree and with REVISION: plans, values, bounds and thresholds must agree.

    On one thread and on two, under all schedules. Numbers are compared bit by bit. Exit code 1: answers differ, and
    each that does is named.
    """
    chosen = [case for case in cases(quick=quick) if only in case.id]
    differing: list[tuple[dict[str, Any], dict[str, Any]]] = []
    compared = 0
    with tree_at(against) as other, tempfile.TemporaryDirectory(prefix="piper-ray-answers-") as folder:
        for begin in range(0, len(chosen), _AT_ONCE):
            part = chosen[begin : begin + _AT_ONCE]
            typer.echo(f"[{begin + 1}/{len(chosen)}] {part[0].id} ...", err=True)
            order = json.dumps({"cases": _written(part, Path(folder)), "threads": [1, 2]})
            here, there = _answers(this_tree(), order), _answers(other, order)
            for this, before in zip(here, there, strict=True):
                compared += 1
                if this != before:
                    differing.append((this, before))
                    _tell(this, before)
    typer.echo(f"{compared} answers compared with those of {against}: {len(differing)} differ")
    if json_path is not None:
        json_path.write_text(json.dumps(differing, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(1 if differing or not compared else 0)


def _written(part: list[Case], folder: Path) -> list[dict[str, Any]]:
    """The instances as files, and what is asked of each."""
    found = []
    for number, case in enumerate(part):
        file = folder / f"{number}.json"
        dump(case.make(), file)
        found.append({"id": case.id, "file": str(file), "schedules": case.schedules, "devices": case.devices})
    return found


def _answers(tree: Tree, order: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(WORKER), order]
    run = subprocess.run(command, env=tree.environment, cwd=tree.root, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def _tell(this: dict[str, Any], before: dict[str, Any]) -> None:
    for key in sorted({*this, *before}):
        if this.get(key) != before.get(key):
            typer.echo(f"{this['id']}: {key} is {this.get(key)} here, {before.get(key)} before")


if __name__ == "__main__":
    typer.run(main)
