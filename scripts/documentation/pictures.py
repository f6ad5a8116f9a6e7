"""The pictures of the explanation, drawn from the program's own answers: docs/pictures/NAME.svg."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Patch

import piper_ray
from piper_ray import Edge, EvaluationFinished, Event, IncumbentFound, Instance, Layer, Plan, Simulation, Stage, Tmpc
from piper_ray.report.plots.style import COLOURS, panels, save
from piper_ray.report.plots.timeline import timeline_figure
from piper_ray.simulate.actions import ActionKind

_BLUE, _VERMILION, _GREEN, _, _YELLOW, _, _BLACK, _GREY = COLOURS
_PALE = "#e3e3e3"
_GIB = 2.0**30


def draw_all(folder: Path) -> None:
    """Writes each picture to ``folder``, the same bytes on every run of one version of matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in PICTURES.items():
        save(figure(), folder / f"{name}.svg")


def timeline() -> Figure:
    """README's: the plan of a large model on 512 GPUs, as ``simulate --plot`` draws it."""
    instance = piper_ray.estimate("llama3-70b", "H100-SXM", nodes=64, global_batch=1024)
    plan = piper_ray.solve(instance).plan
    assert plan is not None
    return timeline_figure(piper_ray.simulate(instance, plan))


def configurations() -> Figure:
    """TMPCs of one layer: what each takes, and what it holds for each microbatch in flight."""
    instance = piper_ray.estimate("llama3-70b", "H100-SXM", nodes=64)
    tmpcs = instance.layers[1].tmpcs
    degrees = sorted(tmpcs)
    ids = [tmpc.id for tmpc in tmpcs[degrees[-1]] if tmpc.id in ("plain", "full", "sp", "sp+full")]
    figure, (times, sizes) = panels(
        "One decoder layer of Llama 3 70B: its TMPCs on an H100",
        ["time p of a microbatch, on t devices together", "activations a of a microbatch, on each device"],
        alike=False,
    )
    for axes, label in ((times, "ms"), (sizes, "GiB")):
        axes.set_xlabel("tensor-parallel degree t")
        axes.set_ylabel(label)
        axes.set_xticks(range(len(degrees)), [str(t) for t in degrees])
        axes.grid(visible=False, axis="x")
    width = 0.8 / len(ids)
    for number, name in enumerate(ids):
        for place, t in enumerate(degrees):
            for tmpc in tmpcs[t]:
                if tmpc.id == name:
                    at = place + width * (number - (len(ids) - 1) / 2)
                    label = name if place == len(degrees) - 1 else "_"  # which a legend leaves out
                    times.bar(at, tmpc.time_per_sample_s * 1e3, 0.9 * width, color=COLOURS[number])
                    sizes.bar(at, tmpc.activation_bytes / _GIB, 0.9 * width, color=COLOURS[number], label=label)
    sizes.legend()
    return figure


_GRAPH = {0: (0, 0), 1: (1, 0.7), 2: (2, 0.7), 3: (1, -0.7), 4: (2, -0.7), 5: (3, 0), 6: (4, 0)}
_ARROWS = ((0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5), (5, 6))


def downsets() -> Figure:
    """A layer graph with a downset, a set that is none, and a stage as the difference of two."""
    figure, three = panels(
        "A pipeline is cut along downsets: sets of layers closed under successors",
        ["a downset I: all behind the cut", "no downset: 5 follows 2 and is not in it", "a stage: I \\ J"],
    )
    _graph(three[0], dict.fromkeys((2, 4, 5, 6), _BLUE))
    _graph(three[1], dict.fromkeys((2, 6), _VERMILION))
    _graph(three[2], {**dict.fromkeys((2, 4), _GREEN), **dict.fromkeys((5, 6), _BLUE)})
    three[2].text(2, -1.45, "stage", color=_GREEN, ha="center")
    three[2].text(3.5, -0.75, "J, planned already", color=_BLUE, ha="center")
    figure.set_size_inches(12.0, 2.9)
    return figure


def schedules() -> Figure:
    """The same four ranks and eight microbatches under five schedules."""
    shown = {
        "gpipe": "gpipe: all forward, all backward, flush; every microbatch in flight at once",
        "1f1b": "1f1b: the same bubble, never more in flight than stages behind",
        "interleaved": "interleaved: two chunks on each rank (pale: the second), half the bubble",
        "zb-h1": "zb-h1: gradients of weights (green) fill the bubble",
        "2bw": "2bw, the paper's: never drained; there is no bubble in the long run (its start is shown)",
    }
    figure, _ = panels("", [""])
    figure.clear()
    figure.set_size_inches(11.0, 8.2)
    rows = figure.subplots(len(shown), 1, sharex=True)
    for axes, (name, title) in zip(rows, shown.items(), strict=True):
        _lanes(axes, _toy(name))
        axes.set_title(title, loc="left", fontsize=9.5)
    rows[-1].set_xlabel("time, in forward passes of a stage")
    kinds = {"forward": _BLUE, "backward": _VERMILION, "backward, inputs": _YELLOW, "backward, weights": _GREEN}
    patches = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    figure.legend(handles=[*patches, Patch(color=_PALE, label="idle")], loc="outside lower center", ncols=5)
    return figure


def optimal() -> Figure:
    """How a solve ends: the bound from below meets the best plan."""
    found: list[tuple[int, float, bool]] = []
    lower: list[tuple[int, float]] = []
    upper: list[tuple[int, float]] = []

    def listen(event: Event) -> None:
        if isinstance(event, EvaluationFinished):
            found.append((event.index, event.threshold_s * 1e3, event.feasible))
        if isinstance(event, EvaluationFinished | IncumbentFound):
            lower.append((len(found), event.bounds.lower_s * 1e3))
            if event.bounds.upper_s is not None:
                upper.append((len(found), event.bounds.upper_s * 1e3))

    inputs = Path(__file__).resolve().parents[2] / "inputs"
    instance = piper_ray.load(inputs / "bert64-a100.toml", devices=2048, microbatches=2048, memory_bytes=8 * _GIB)
    piper_ray.solve(instance, listener=listen)
    figure, (axes,) = panels("BERT-64 on 2,048 devices: a proof in 16 questions", [""])
    axes.step(*zip(*upper, strict=True), where="post", color=_VERMILION, label="best plan so far")
    axes.step(*zip(*lower, strict=True), where="post", color=_BLUE, label="proved: no plan is faster")
    for feasible, marker, text in ((True, "o", "asked: there is a plan"), (False, "x", "asked: there is none")):
        asked = [(number, at) for number, at, answer in found if answer is feasible]
        axes.plot(*zip(*asked, strict=True), marker, color=_BLACK, label=text)
    axes.set_xlabel("evaluation: is there a plan with every stage at most this long?")
    axes.set_ylabel("ms a microbatch")
    axes.legend()
    return figure


PICTURES: Mapping[str, Callable[[], Figure]] = MappingProxyType(
    {
        "timeline": timeline,
        "tmpc": configurations,
        "downset": downsets,
        "schedules": schedules,
        "optimal": optimal,
    }
)


def _graph(axes: Axes, filled: Mapping[int, str]) -> None:
    for source, target in _ARROWS:
        arrow = FancyArrowPatch(
            _GRAPH[source], _GRAPH[target], arrowstyle="-|>", mutation_scale=9, shrinkA=15, shrinkB=15, color=_GREY
        )
        axes.add_patch(arrow)
    for layer, place in _GRAPH.items():
        colour = filled.get(layer)
        axes.add_patch(Circle(place, 0.27, facecolor=colour or "white", edgecolor=colour or _GREY))
        axes.text(*place, str(layer), ha="center", va="center_baseline", color="white" if colour else _BLACK)
    axes.set_xlim(-0.5, 4.5)
    axes.set_ylim(-1.6, 1.2)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _toy(name: str) -> Simulation:
    """Eight equal layers on four ranks, eight microbatches; a backward pass takes as long as two forward passes."""
    tmpc = Tmpc("plain", forward_s=0.5, backward_s=1.0, weight_s=0.5, activation_bytes=1.0)
    layers = [Layer(number, f"layer {number}", {1: (tmpc,)}) for number in range(8)]
    edges = [Edge(number, number + 1, 0.0) for number in range(7)]
    instance = Instance(layers, edges, 8, 8, 1e9, 1e9)
    size = 1 if name == "interleaved" else 2
    stages = [range(first, first + size) for first in range(0, 8, size)]
    plan = Plan(tuple(Stage(tuple(stage), 1, 1, dict.fromkeys(stage, "plain")) for stage in stages))
    schedule = piper_ray.Schedule.of(name) if size == 2 else piper_ray.Schedule(piper_ray.ScheduleName(name), 2)
    return piper_ray.simulate(instance, plan, schedule)


def _lanes(axes: Axes, simulation: Simulation) -> None:
    colours = {ActionKind.F: _BLUE, ActionKind.B: _VERMILION, ActionKind.I: _YELLOW, ActionKind.W: _GREEN}
    line = simulation.timeline
    until_s = 34.5
    for rank in range(4):
        axes.barh(-rank, until_s, 0.86, color=_PALE)
        mine = line.of_rank(rank)
        for kind, stage, microbatch, start_s, end_s in zip(
            line.kind[mine], line.stage[mine], line.microbatch[mine], line.start_s[mine], line.end_s[mine], strict=True
        ):
            if end_s > until_s:
                continue
            axes.barh(
                -rank,
                end_s - start_s,
                0.86,
                left=start_s,
                color=colours[ActionKind(kind)],
                alpha=0.6 if stage >= 4 else 1.0,
                edgecolor="white",
                linewidth=0.5,
            )
            middle = (start_s + end_s) / 2
            axes.text(middle, -rank, str(microbatch + 1), ha="center", va="center_baseline", color="white", fontsize=7)
    axes.set_xlim(0, until_s)
    axes.set_yticks([0, -1, -2, -3], [f"rank {rank}" for rank in range(4)])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
