"""Found schemes on the screen: a table for each kind of layer, and one scheme step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from piper_ray.model.figures import size_text, time_text
from piper_ray.report.terminal import Column, print_lines, print_table
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.schemes.document import EXACTNESS, digest_of
from piper_ray.workloads.schemes.frontier import FoundScheme, KindSchemes
from piper_ray.workloads.schemes.scheme import Scheme

_COLUMNS = (
    Column("id"),
    Column("name", wrap=34),
    Column("border"),
    Column("time", right=True),
    Column("forward", right=True),
    Column("a", right=True),
    Column("b", right=True),
    Column("w", right=True),
    Column("done again", wrap=40),
)


def print_schemes(target: Console, estimate: Estimate, kinds: Sequence[KindSchemes]) -> None:
    """Times of a microbatch; a for each microbatch in flight, b the state, w what replicas reduce, on each device."""
    print_lines(target, [f"Model     {estimate.architecture.name}; {estimate.architecture.sample}"])
    print_lines(target, [f"GPU       {estimate.setting.gpu.name}"])
    for one in kinds:
        target.print()
        if one.refused:
            print_lines(target, [f"{one.kind.name}, t = {one.degree}: none; {one.refused}"])
            continue
        print_lines(target, [f"{one.kind.name}, t = {one.degree}"])
        print_table(target, _COLUMNS, [_row(found) for found in one.found])
    if any(one.found for one in kinds):
        target.print()
        print_lines(target, [EXACTNESS])


def _row(found: FoundScheme) -> list[str]:
    figures = found.scheme.figures
    return [
        digest_of(found.scheme),
        found.name,
        "tokens" if found.scheme.border.axis else "replicated",
        time_text(figures.time_s, 4),
        time_text(figures.forward_s, 4),
        size_text(figures.activation_bytes),
        size_text(figures.state_bytes),
        size_text(figures.weights_bytes),
        ", ".join(found.scheme.again) or "nothing",
    ]


def print_scheme(target: Console, found: FoundScheme) -> None:
    """A layer's operators with placements: what each does in both passes, what is kept and what moves."""
    scheme = found.scheme
    print_lines(target, [f"{digest_of(scheme)}  {found.name}, t = {scheme.degree}"])
    columns = (Column("operator"), Column("forward"), Column("backward"), Column("again"), Column("weights"))
    rows = [
        [
            step.name,
            step.forward,
            step.backward,
            step.again or "",
            scheme.weights[f"weights of {step.name}"].text if f"weights of {step.name}" in scheme.weights else "",
        ]
        for step in scheme.steps
    ]
    print_table(target, columns, rows)
    print_lines(target, _flow_lines(scheme))


def _flow_lines(scheme: Scheme) -> Iterator[str]:
    yield "kept      " + ", ".join(f"{name} ({place.text})" for name, place in scheme.kept)
    for move in scheme.moves:
        what = "gradient of " if move.when in ("gradient", "part", "weight") else ""
        yield f"{move.when:<9} {what}{move.value}: {move.source.text} -> {move.target.text}"
