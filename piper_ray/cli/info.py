"""``piper-ray info``: what is in an input, and what a solve of it will take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ray import Contract, Forecast, Instance
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import flag, option
from piper_ray.cli.shared import ContractOption, JsonOption, WorkloadOptions
from piper_ray.cli.telling import Unwritten, show_document, working

if TYPE_CHECKING:
    from piper_ray.engine.preview import LatticeInput


_MOST_IDS = 6


@dataclass(frozen=True)
class InfoOptions:
    """What is shown besides the usual."""

    verbose: bool = flag("Show the ids of all TMPCs.")
    picture: Path | None = option(
        "FILE", "Draw the layer graph with the number of downsets at each cut: .svg, .png, .pdf or .dot.", "--draw"
    )


def info(workload: WorkloadOptions, contracted: ContractOption, shown: InfoOptions, told_as: JsonOption) -> None:
    """Show what INPUT holds, and what solving it will take in memory and time."""
    picture = shown.picture
    if picture is not None:
        from piper_ray.report.graph import check_path, draw_graph

        check_path(picture)
    instance = workload.load()

    from piper_ray.report.document import degree_rows, info_document, machine_table
    from piper_ray.report.summary import blocks_text, instance_lines
    from piper_ray.report.terminal import Column, console, print_lines, print_table

    with working("looking into the lattice"):
        planned, forecast = current().run(lambda _: _looked_into(instance, contracted.contract))
    blocks = planned.blocks
    unwritten = Unwritten()
    if picture is not None:
        with unwritten.noted():
            members = planned.outline.contraction.members(planned.instance)
            draw_graph(planned.instance, planned.outline.graph, members, picture)
    if told_as.json:
        show_document(info_document(instance, forecast, blocks))
        unwritten.report()
        return
    screen = console()
    print_lines(screen, [*instance_lines(instance), f"Digest    {instance.digest}", ""])
    columns = [Column("t", right=True), Column("layers", right=True), Column("TMPCs", right=True)]
    rows = [
        [
            str(row["tensor_parallel_degree"]),
            str(row["layers"]),
            str(row["tmpcs"]),
            _ids_text(instance, degree, shown.verbose),
        ]
        for degree, row in zip(instance.degrees, degree_rows(instance), strict=True)
    ]
    print_table(screen, [*columns, Column("by id", wrap=max(40, screen.width - 24))], rows)
    screen.print()
    print_table(screen, *machine_table(instance))
    screen.print()
    if blocks is not None:
        print_lines(screen, [f"Blocks    {blocks_text(blocks)}"])
    print_lines(screen, forecast_lines(forecast, planned.is_wide))
    if instance.cluster.kinds:
        print_lines(
            screen,
            [f"          the search on several {instance.kind_word}s is not in this: seconds on two, minutes on three"],
        )
    unwritten.report()


def _looked_into(instance: Instance, contract: Contract) -> tuple[LatticeInput, Forecast]:
    from piper_ray.engine.preview import lattice_input

    planned = lattice_input(instance, contract)
    return planned, planned.forecast


def forecast_lines(forecast: Forecast, is_wide: bool = False) -> list[str]:
    """What a solve will take, in words. is_wide: see ``LatticeInput``."""
    from piper_ray.model.figures import size_text

    fewer = "solve lists only those that a best plan can use"
    if is_wide and forecast.seconds is not None:
        fewer += f", in about {_seconds_text(forecast.seconds)} if they are few enough"
    if forecast.downsets is None:
        return [
            f"Solve     more downsets than can be counted quickly; {fewer}; --contract operators plans blocks of layers"
        ]
    pairs = "more pairs than can be counted quickly" if forecast.pairs is None else f"{forecast.pairs:,} pairs"
    lines = [f"Solve     {forecast.downsets:,} downsets, {pairs}"]
    if is_wide:
        if forecast.memory_bytes is not None:
            lines.append(f"Forecast  about {size_text(forecast.memory_bytes, 2)} of memory for all of them")
        lines.append(f"          {fewer}")
    elif forecast.memory_bytes is not None and forecast.seconds is not None:
        time_text = _seconds_text(forecast.seconds)
        lines.append(f"Forecast  about {size_text(forecast.memory_bytes, 2)} of memory and {time_text}")
    return lines


def _seconds_text(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1g} s"


def _ids_text(instance: Instance, degree: int, whole: bool) -> str:
    from piper_ray.model.figures import printable

    counts = Counter(
        f"{printable(tmpc.id)}{' (recomputes)' if tmpc.recompute else ''}"
        for layer in instance.layers
        for tmpc in layer.tmpcs.get(degree, ())
    )
    texts = [f"{name} x{count}" for name, count in counts.items()]
    if whole or len(texts) <= _MOST_IDS:
        return ", ".join(texts)
    return f"{', '.join(texts[:_MOST_IDS])}, and {len(texts) - _MOST_IDS} more ids (--verbose)"
