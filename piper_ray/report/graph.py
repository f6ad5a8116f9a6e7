"""The layer graph drawn by Graphviz (pygraphviz, whose wheels bring it along), runs of equal layers as one box."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pygraphviz

from piper_ray.engine.lattice.layer_graph import LayerGraph, count_cuts, count_downsets
from piper_ray.engine.preview import lattice_input
from piper_ray.model import arguments
from piper_ray.model.errors import LimitError, UsageError
from piper_ray.model.figures import plural, printable, size_text, time_text
from piper_ray.model.instance import Edge, Instance, Layer
from piper_ray.model.options import Contract
from piper_ray.storage.files import written_whole
from piper_ray.workloads.formats.load import Source, instance_of

FORMATS = (".svg", ".png", ".pdf", ".dot")

_MOST_DRAWN = 1_500
"""Boxes. The layout of more takes minutes, and nobody can read it."""

_LONGEST_NAME = 32
_PALETTE = (
    "#dbe9f6", "#fde3cf", "#d9efd9", "#f8dcdc", "#e6def2", "#eadfd9", "#fbe3f1", "#e8e8e8", "#f3f3cf", "#d5f0f3",
)  # fmt: skip
_COUNTS = ("#7f7f7f", "#4a6fa5", "#2f7f5f", "#b8860b", "#c8511b", "#a00000")  # by powers of ten
_UNITS = (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))


def check_path(path: Path) -> None:
    """Raises UsageError for a picture that cannot be written there, before work is done for it."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: unknown kind of picture; expected a path that ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")


def draw(instance: Instance | Source, path: str | os.PathLike[str], *, contract: Contract = Contract.SAFE) -> None:
    """Write the layer graph as .svg, .png, .pdf or .dot, with the number of downsets at each cut.

    contract: as in ``SolveOptions``; OPERATORS draws blocks. Raises LimitError for graphs that nobody could read,
    UsageError for arguments that make no sense and for a file that cannot be written.

    >>> import piper_ray
    >>> piper_ray.draw(piper_ray.estimate("bert-large", "A100-80"), "graph.dot")
    """
    target = Path(arguments.location("path", path))
    check_path(target)
    contract = arguments.choice("contract", contract, Contract)
    planned = lattice_input(instance_of(instance), contract)
    members = planned.outline.contraction.members(planned.instance)
    draw_graph(planned.instance, planned.outline.graph, members, target)


def draw_graph(instance: Instance, graph: LayerGraph, members: Mapping[int, Sequence[int]], path: Path) -> None:
    """Writes the picture: layers front to back, runs of equal ones as one box, and on each edge the number of
    downsets that it crosses: the cuts through it.

    graph, members: the contracted graph and what its layers stand for; edges within a merged group are cut by none and
    are drawn dashed. Raises LimitError for graphs that nobody could read, UsageError if the file cannot be written.
    """
    runs = fold(instance)
    if len(runs) > _MOST_DRAWN:
        raise LimitError(
            f"{len(runs):,} boxes are too many for a picture, which holds {_MOST_DRAWN:,}; "
            "draw blocks of operators instead (--contract operators)"
        )
    kind = path.suffix.lower()
    picture = _picture(instance, graph, members, runs)
    drawn = picture.to_string().encode() if kind == ".dot" else picture.draw(format=kind[1:], prog="dot")
    with written_whole(path) as file:
        file.write_bytes(drawn)


def _picture(
    instance: Instance, graph: LayerGraph, members: Mapping[int, Sequence[int]], runs: Sequence[LayerRun]
) -> Any:
    cuts = _cuts(instance, graph, members)
    picture = pygraphviz.AGraph(directed=True, name=instance.name or "layers")
    font = "DejaVu Sans,Helvetica,Arial,sans-serif"
    picture.graph_attr.update(
        rankdir="TB", ranksep="0.35", nodesep="0.25", fontname=font, fontsize="16", labelloc="t", labeljust="l",
        label=_caption(instance, graph, cuts),
    )  # fmt: skip
    picture.node_attr.update(
        shape="box", style="rounded,filled", fontname=font, fontsize="11", margin="0.12,0.06", color="#808080"
    )
    picture.edge_attr.update(fontname=font, fontsize="10", arrowsize="0.6")
    colours: dict[str, str] = {}
    run_of: dict[int, int] = {}
    for number, run in enumerate(runs):
        run_of |= dict.fromkeys(run.layers, number)
        named = kind_name(instance.layer_by_id[run.layers[0]].name)
        colour = colours.setdefault(named, _PALETTE[len(colours) % len(_PALETTE)])
        inner = [cuts.get(ends) for ends in pairwise(run.layers)]
        picture.add_node(number, fillcolor=colour, **_box(instance, run, inner))
    # Between two boxes one edge: the widest cut through the layers that feed one another there.
    between: dict[tuple[int, int], list[Edge]] = {}
    for edge in instance.edges:
        ends = run_of[edge.source], run_of[edge.target]
        if ends[0] != ends[1]:
            between.setdefault(ends, []).append(edge)
    for ends, edges in between.items():
        counts = [cuts.get((edge.source, edge.target)) for edge in edges]
        picture.add_edge(*ends, **_arrow(counts, edges))
    return picture


def _cuts(
    instance: Instance, graph: LayerGraph, members: Mapping[int, Sequence[int]]
) -> dict[tuple[int, int], int | None]:
    """The cuts through each edge by its ends: 0 within a merged group, None where they are too many to count."""
    group_of = {layer: kept for kept, layers in members.items() for layer in layers}
    counts = count_cuts(graph)
    found: dict[tuple[int, int], int | None] = {}
    for edge in instance.edges:
        within = group_of[edge.source] == group_of[edge.target]
        found[edge.source, edge.target] = 0 if within else None
    for (_, _, index), count in zip(graph.edges, counts or [], strict=False):
        edge = instance.edges[index]
        found[edge.source, edge.target] = count
    return found


def _caption(instance: Instance, graph: LayerGraph, cuts: Mapping[tuple[int, int], int | None]) -> str:
    downsets = count_downsets(graph)
    counted = "more downsets than can be counted" if downsets is None else f"{downsets:,} downsets"
    layers, edges = plural(len(instance.layers), "layer"), plural(len(instance.edges), "edge")
    lines = [f"{printable(instance.name) or 'layers'}: {layers}, {edges}, {counted}"]
    if None not in cuts.values():
        lines.append("a downset is one way to cut the graph in two, a front and a back;")
        lines.append("on an edge, and between layers: how many of them cut there")
    lines.append("under a layer: its time for a microbatch, in its fastest way at the least t")
    return "\\l".join(map(_escaped, lines)) + "\\l"


def _box(instance: Instance, run: LayerRun, inner: Sequence[int | None]) -> dict[str, str]:
    layers = [instance.layer_by_id[layer] for layer in run.layers]
    name = printable(layers[0].name)
    short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    times = sorted({time_text(_time_s(layer), 3): _time_s(layer) for layer in layers}.items(), key=lambda item: item[1])
    timed = times[0][0] if len(times) == 1 else f"{times[0][0]} to {times[-1][0]}"
    if len(layers) == 1:
        return {"label": _escaped(f"{layers[0].id}  {short}\n{timed}"), "tooltip": _escaped(name)}
    widest = max((count for count in inner if count is not None), default=None)
    text = f"{layers[0].id}-{layers[-1].id}  {short}  x{len(layers)}\n{timed} each"
    if widest is not None:
        text += f", {count_text(widest)} between" if len(set(inner)) == 1 else f", up to {count_text(widest)} between"
    return {"label": _escaped(text), "tooltip": _escaped(name), "peripheries": "2"}


def _time_s(layer: Layer) -> float:
    """The least time of the layer at its least degree."""
    tmpcs = layer.tmpcs[min(t for t, listed in layer.tmpcs.items() if listed)]
    return min(tmpc.time_per_sample_s for tmpc in tmpcs)


def _arrow(counts: Sequence[int | None], edges: Sequence[Edge]) -> dict[str, str]:
    size_bytes = max(edge.communication_bytes for edge in edges)
    sized = f"{size_text(size_bytes, 3)} a sample"
    known = [count for count in counts if count is not None]
    if not known:
        return {"color": "#7f7f7f", "tooltip": sized}
    widest = max(known)
    if widest == 0:
        return {"style": "dashed", "color": "#b0b0b0", "tooltip": f"{sized}; never cut"}
    colour = _COUNTS[min(len(_COUNTS) - 1, int(math.log10(widest)))]
    return {
        "label": f" {count_text(widest)}",
        "color": colour,
        "fontcolor": colour,
        "penwidth": f"{1 + 0.4 * min(8.0, math.log10(widest)):.2f}",
        "tooltip": f"{widest:,} cuts; {sized}",
    }


def count_text(count: int) -> str:
    """``999``, ``12.3k``, ``4.10M``, ``1.2e+30``: at most seven characters."""
    if count < 1000:
        return str(count)
    for (unit, size), (_, above) in zip(_UNITS, [*_UNITS[1:], ("", 1e15)], strict=True):
        if count < 0.9995 * above:
            return f"{count / size:.3g}{unit}"
    exponent = len(str(count)) - 1
    return f"{count / 10**exponent:.1f}e{exponent}"


def _escaped(text: str) -> str:
    """Graphviz reads a backslash as the start of an escape."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


_SHORTEST_RUN = 3
_TIME_TOLERANCE = 0.1


@dataclass(frozen=True)
class LayerRun:
    """Layer ids, front to back; more than one if they are equal and each feeds the next."""

    layers: tuple[int, ...]


def fold(instance: Instance) -> list[LayerRun]:
    """Every layer in one run. Layers of a run have equal names but for digits, equal sizes, times about as equal as
    measured ones are, and the same other inputs, and all but the last feed the next one only."""
    layers = instance.layers
    kind = {layer.id: (kind_name(layer.name), _sizes(layer)) for layer in layers}
    times = {layer.id: [x.time_per_sample_s for t in sorted(layer.tmpcs) for x in layer.tmpcs[t]] for layer in layers}

    def follows(before: int, after: int) -> bool:
        alike = kind[before] == kind[after] and all(
            abs(one - other) <= _TIME_TOLERANCE * max(one, other)
            for one, other in zip(times[before], times[after], strict=True)
        )
        return alike and instance.neighbours[before][1] == (after,)

    follower: dict[int, int] = {}
    for layer in instance.layers:
        for before in instance.neighbours[layer.id][0]:
            if follows(before, layer.id) and before not in follower:
                follower[before] = layer.id
    followed = {after: before for before, after in follower.items()}
    runs = []
    for layer in instance.layers:
        if layer.id in followed:
            continue
        chain = [layer.id]
        while chain[-1] in follower:
            chain.append(follower[chain[-1]])
        runs += [LayerRun(tuple(piece)) for piece in _pieces(chain, instance)]
    return runs


def _pieces(chain: Sequence[int], instance: Instance) -> list[list[int]]:
    """The chain cut where the other inputs change; short pieces as single layers."""
    pieces: list[list[int]] = [[chain[0]]]
    others = None  # of the first layer they include what comes before the chain
    for before, layer in pairwise(chain):
        of_layer = sorted(set(instance.neighbours[layer][0]) - {before})
        alike = set(of_layer) <= set(instance.neighbours[before][0]) if others is None else of_layer == others
        others = of_layer
        if alike:
            pieces[-1].append(layer)
        else:
            pieces.append([layer])
    return [part for piece in pieces for part in ([piece] if len(piece) >= _SHORTEST_RUN else [[v] for v in piece])]


def kind_name(name: str) -> str:
    """The name without what numbers it: layers of one kind share it."""
    return "".join(character for character in name if not character.isdigit()).strip(" .-_()[]")


def _sizes(layer: Layer) -> object:
    return tuple(
        (t, tmpc.id, tmpc.weights_bytes, tmpc.activation_bytes, tmpc.fixed_bytes)
        for t in sorted(layer.tmpcs)
        for tmpc in layer.tmpcs[t]
    )
