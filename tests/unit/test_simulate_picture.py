"""The Gantt chart: a lane for each rank, several ranks in one where there are many, both ends of a long step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import ScheduleName
from piper_ray.report.plots.style import COLOURS
from piper_ray.report.plots.timeline import MOST_LANES, plot_timeline, timeline_figure
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import simulate
from tests.lengths import long_after
from tests.simulate_support import GIB, chain, cut


def _simulated(name: str, ranks: int = 4, microbatches: int = 8, **figures: float) -> Simulation:
    instance = chain([0.03] * ranks, microbatches=microbatches, devices=ranks, **figures)  # type: ignore[arg-type]
    return simulate(instance, cut([1] * ranks), name)


def _labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def _boxes(axes: Axes) -> int:
    return sum(len(found.get_paths()) for found in axes.collections if isinstance(found, PolyCollection))


_DRAWN = [(ScheduleName.TWO_BW, "pdf"), (ScheduleName.ZB_V, "svg"), (ScheduleName.INTERLEAVED, "png")]


@pytest.mark.parametrize(("name", "ending"), long_after(1, _DRAWN))
def test_it_is_drawn_the_same_each_time(tmp_path: Path, name: ScheduleName, ending: str) -> None:
    path, again = tmp_path / f"timeline.{ending}", tmp_path / f"again.{ending}"
    simulation = _simulated(name.value)
    plot_timeline(simulation, path)
    plot_timeline(simulation, again)
    assert path.stat().st_size > 1000
    assert path.read_bytes() == again.read_bytes()


def test_lanes_names_and_figures() -> None:
    figure = timeline_figure(_simulated("1f1b"))
    (axes,) = figure.axes
    assert _labels(axes) == ["0: stage 1", "1: stage 2", "2: stage 3", "3: stage 4"]
    assert _boxes(axes) == 4 + 4 * 16  # a lane is grey from end to end, and passes are drawn over it
    (beside,) = axes.child_axes
    assert beside.get_yticklabels()[0].get_text() == "27.3 %  2.00 GiB"
    numbers = [text.get_text() for text in axes.texts]
    assert sorted(numbers, key=int) == [str(k) for k in range(8) for _ in range(8)]
    assert figure.get_suptitle() == "1f1b: 330 ms a batch of 8 microbatches"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["forward", "backward", "idle (bubble)"]


def test_colours_are_those_of_all_plots() -> None:
    (axes,) = timeline_figure(_simulated("zb-h1")).axes
    used = {to_hex(colour) for found in axes.collections for colour in np.asarray(found.get_facecolor())}
    ours = set(COLOURS)
    assert len(used & ours) == 3  # forward, both kinds of backward
    assert len(used - ours) == 1  # what is idle


def test_chunks_replicas_and_too_much_memory_are_told() -> None:
    figure = timeline_figure(_simulated("interleaved", memory_bytes=2.0 * GIB))
    (axes,) = figure.axes
    assert _labels(axes) == ["0: stages 1, 3", "1: stages 2, 4"]
    assert [label.get_text()[-1] for label in axes.child_axes[0].get_yticklabels()] == ["!", "!"]
    assert "paler: later chunks" in [text.get_text() for text in figure.legends[0].get_texts()]
    uneven = simulate(chain([1.0, 2.0], microbatches=4), cut([1, 1], [1, 2]), "2bw")
    assert _labels(timeline_figure(uneven).axes[0]) == ["0: stage 1/0", "1: stage 2/0", "2: stage 2/1"]


def test_many_ranks_share_lanes() -> None:
    assert len(_labels(timeline_figure(_simulated("gpipe", MOST_LANES, 2)).axes[0])) == MOST_LANES
    simulation = _simulated("gpipe", 2 * MOST_LANES + 1, 2)
    (axes,) = timeline_figure(simulation).axes
    labels = _labels(axes)
    assert len(labels) <= MOST_LANES
    assert labels[0] == "0-2"
    assert labels[-1] == "126-128"
    assert _boxes(axes) == 129 + 129 * 4


def test_thousands_of_ranks_are_thinned() -> None:
    instance = chain([0.03, 0.03], microbatches=2048 * 3, devices=4096)
    simulation = simulate(instance, cut([1, 1], [2048, 1536]), "2bw")
    assert len(simulation.ranks) == 7
    wide = simulate(instance, cut([1, 1], [2048, 3]), "2bw")
    assert len(wide.ranks) == 2051
    (axes,) = timeline_figure(wide).axes
    assert len(_labels(axes)) <= MOST_LANES
    assert _labels(axes)[-1].endswith("-2050")


def test_of_a_long_step_both_ends_are_drawn() -> None:
    simulation = _simulated("1f1b", 4, 512)
    start, end = timeline_figure(simulation).axes
    assert start.get_xlim()[0] == 0.0
    assert start.get_xlim()[1] < end.get_xlim()[0]
    assert end.get_xlim()[1] == pytest.approx(simulation.step_s)
    assert _labels(end) == []


def test_steps_of_no_time_are_drawn() -> None:
    for name in ("1f1b", "2bw"):
        simulation = simulate(chain([0.0, 0.0]), cut([1, 1]), name)
        assert simulation.step_s == 0.0
        assert len(timeline_figure(simulation).axes) == 1


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plots are written as \.png, \.svg, \.pdf"):
        plot_timeline(_simulated("1f1b"), tmp_path / "timeline.gif")
