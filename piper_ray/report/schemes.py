"""Found schemes on the screen: a table for each kind of layer, and one scheme step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pygraphviz
from rich.console import Console

from piper_ray.model.figures import plural, size_text, time_text
from piper_ray.report.terminal import Column, print_lines, print_table
from piper_ray.run.schemes import NEAR, SchemeOutcome
from piper_ray.storage.files import written_whole
from piper_ray.workloads.schemes.document import EXACTNESS, SchemesSubject, digest_of
from piper_ray.workloads.schemes.frontier import FoundScheme, KindSchemes
from piper_ray.workloads.schemes.graph import REPLICATED
from piper_ray.workloads.schemes.rules import strategies
from piper_ray.workloads.schemes.scheme import PricedGraph, Scheme

_COLUMNS = (
    Column("id"),
    Column("name", wrap=26),
    Column("edges"),
    Column("time", right=True),
    Column("activations", right=True),
    Column("state", right=True),
    Column("gradients", right=True),
    Column("again", right=True),
)
_LEGEND = (
    "On each of the t devices. edges: what layers pass on is sharded along tokens (sequence parallelism), or whole on "
    "each device; time: of a microbatch, forward and backward; activations: of each microbatch in flight; state: "
    "weights, gradients and optimizer; gradients: what replicas sum; again: operators of all that the backward pass "
    "computes again, which --show ID names. A scheme that is new has no name, and Megatron does not run it."
)


_OUTCOME_COLUMNS = (
    Column("layer"),
    Column("id"),
    Column("name", wrap=34),
    Column("loss, first"),
    Column("last"),
    Column("loss differs by", right=True),
    Column("gradients by", right=True),
)


def print_outcomes(target: Console, outcomes: Sequence[SchemeOutcome]) -> None:
    """Differences from one process, relative, the largest of all steps."""
    rows = [
        [one.layer, one.id, one.name, f"{one.losses[0]:.6f}", f"{one.losses[-1]:.6f}",
         f"{one.loss_difference:.1e}", f"{one.gradient_difference:.1e}"]
        for one in outcomes
    ]  # fmt: skip
    print_table(target, _OUTCOME_COLUMNS, rows)
    if all(one.is_equal for one in outcomes):
        what = f"each trains as one process does, to {NEAR:g} in {plural(len(outcomes[0].losses), 'step')}"
        print_lines(target, ["", f"{plural(len(outcomes), 'scheme')}: {what}; dropout is off"])


def outcomes_document(outcomes: Sequence[SchemeOutcome]) -> dict[str, object]:
    """The outcomes as JSON."""
    return {
        "format": "piper-ray/scheme-run",
        "version": 1,
        "schemes": [{**asdict(one), "is_equal": one.is_equal} for one in outcomes],
    }


def print_schemes(target: Console, of: SchemesSubject, kinds: Sequence[KindSchemes]) -> None:
    """A table for each kind of layer and degree, and what its columns are."""
    print_lines(target, [f"Model     {of.model}; {of.sample}", f"GPU       {of.gpu}"])
    for one in kinds:
        target.print()
        if one.refused:
            print_lines(target, [f"{one.name}, t = {one.degree}: none; {one.refused}"])
            continue
        print_lines(target, [f"{one.name}, t = {one.degree}"])
        print_table(target, _COLUMNS, [_row(found) for found in one.found])
    if any(one.found for one in kinds):
        target.print()
        print_lines(target, [_LEGEND, EXACTNESS])


def _row(found: FoundScheme) -> list[str]:
    figures = found.scheme.figures
    return [
        digest_of(found.scheme),
        found.name,
        "tokens" if found.scheme.border.axis else "whole",
        time_text(figures.time_s, 4),
        size_text(figures.activation_bytes),
        size_text(figures.state_bytes),
        size_text(figures.weights_bytes),
        f"{len(found.scheme.again)} of {len(found.scheme.steps)}",
    ]


def print_scheme(target: Console, found: FoundScheme) -> None:
    """A layer's operators with placements: what each does in both passes, what is kept and what moves."""
    scheme = found.scheme
    print_lines(target, [f"{digest_of(scheme)}  {found.name}, t = {scheme.degree}"])
    columns = (Column("operator"), Column("forward"), Column("backward"), Column("again"))
    rows = [[step.name, step.forward, step.backward, step.again or ""] for step in scheme.steps]
    print_table(target, columns, rows)
    print_lines(target, _flow_lines(scheme))


def _flow_lines(scheme: Scheme) -> Iterator[str]:
    figures = scheme.figures
    passes = (figures.forward_s, figures.backward_s, figures.once_s)
    there, back, once = (time_text(seconds, 4) for seconds in passes)
    yield f"time      {there} forward, {back} backward, {once} for sums once a batch"
    sizes = (figures.activation_bytes, figures.state_bytes, figures.weights_bytes)
    kept, state, summed = map(size_text, sizes)
    yield f"memory    {kept} for each microbatch in flight, {state} of state; replicas sum {summed}"
    yield "weights   " + ", ".join(f"{name} ({place.text})" for name, place in scheme.weights.items())
    yield "kept      " + ", ".join(f"{name} ({place.text})" for name, place in scheme.kept)
    for move in scheme.moves:
        what = "gradient of " if move.when in ("gradient", "part", "weight") else ""
        yield f"{move.when:<9} {what}{move.value}: {move.source.text} -> {move.target.text}"


_COLOURS = ("#dbe9f6", "#fde3cf", "#d9efd9", "#f8dcdc", "#e6def2", "#f3f3cf")


def draw_scheme(found: FoundScheme, of: PricedGraph, path: Path) -> None:
    """A layer's operators, coloured by the axis of which each device takes its part. Arrows say where values lie when
    they are read, in bold where they are moved; double ones are kept. Raises UsageError for a file that cannot be
    written."""
    graph, scheme = of.graph, found.scheme
    drawn = pygraphviz.AGraph(directed=True, strict=False)
    drawn.graph_attr.update(
        rankdir="TB", fontname="Helvetica", label=f"{graph.name}, t = {scheme.degree}: {found.name}"
    )
    drawn.node_attr.update(shape="box", style="filled,rounded", fontname="Helvetica", fillcolor="#ffffff")
    drawn.edge_attr.update(fontname="Helvetica", fontsize="9")
    made = {name: (name, graph.at_border(name, scheme.border)) for name in graph.arriving}
    made |= {name: (name, REPLICATED) for name in graph.given}
    colours: dict[str, str] = {"whole": "#eeeeee"}
    kept = {name for name, _ in scheme.kept}
    for step, how in zip(graph.steps, scheme.steps, strict=True):
        colour = colours.setdefault(how.forward, _COLOURS[(len(colours) - 1) % len(_COLOURS)])
        again = f"\nagain by {how.again}" if how.again else ""
        back = "" if how.backward == how.forward else f"\nbackwards by {how.backward}"
        drawn.add_node(step.name, label=f"{step.name}\nby {how.forward}{back}{again}", fillcolor=colour)
        strategy = next(x for x in strategies(step, graph, scheme.degree) if x.text == how.forward)
        for name in step.inputs:
            place = strategy.placements[name]
            if name in scheme.weights:
                source, lies = f"{name}: {scheme.weights[name].text}", scheme.weights[name]
                drawn.add_node(source, shape="plaintext", style="", fontsize="9")
            else:
                source, lies = made[name]
            moved = lies != place
            label = f"{lies.text} to {place.text}" if moved else place.text
            double = name in kept
            drawn.add_edge(
                source, step.name, key=name, label=label, penwidth="3" if moved else "1",
                color="#333333:#333333" if double else "#333333",
            )  # fmt: skip
        made |= {name: (step.name, strategy.placements[name]) for name in step.outputs}
    with written_whole(path) as unfinished:
        drawn.draw(str(unfinished), format=path.suffix[1:], prog="dot")
