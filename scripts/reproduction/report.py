"""The files of a study (CSV, SVG and PNG) and the page that shows all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from piper_ray.report.plots import style
from scripts.reproduction.study import Findings, Row, Study


def write_study(folder: Path, study: Study, findings: Findings) -> None:
    """``NAME.csv`` and each picture, as SVG for the page and PNG for other uses."""
    pyarrow.csv.write_csv(pa.Table.from_pylist(list(findings.rows)), folder / f"{study.name}.csv")
    for name, figure in findings.pictures.items():
        for ending in ("svg", "png"):
            style.save(figure, folder / f"{name}.{ending}")


def page(heading: str, found: Sequence[tuple[Study, Findings]], about: Sequence[str]) -> str:
    """Markdown: a section for each study."""
    lines = [f"# {heading}", "", *about]
    for study, findings in found:
        lines += ["", f"## {study.title}", "", *findings.words]
        for name in findings.pictures:
            lines += ["", f"![{study.title}]({name}.svg)"]
        if findings.shown:
            lines += ["", *_table(findings.shown)]
        lines += ["", f"All figures: [{study.name}.csv]({study.name}.csv)."]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
