"""Pictures of the layer graph: runs of equal layers folded, cuts counted on each edge."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pygraphviz
import pytest
from typer.testing import CliRunner

import piper_ray
from piper_ray import LimitError, UsageError
from piper_ray.cli.app import app
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import build_graph, count_cuts
from piper_ray.engine.preview import lattice_input
from piper_ray.model.instance import Instance
from piper_ray.report.graph import check_path, count_text, draw_graph, fold
from tests.instances import build, equal_chain, tmpc, two_towers
from tests.lengths import long_after
from tests.operator_graphs import transformer_operators
from tests.solver_support import downsets_by_definition, random_graph

INPUTS = Path(__file__).resolve().parents[2] / "inputs"


def drawn(instance: Instance, path: Path) -> None:
    planned = lattice_input(instance)
    draw_graph(instance, planned.outline.graph, planned.outline.contraction.members(instance), path)


def as_graph(instance: Instance, folder: Path) -> pygraphviz.AGraph:
    drawn(instance, folder / "out.dot")
    return pygraphviz.AGraph(filename=str(folder / "out.dot"))


@pytest.mark.parametrize("seed", long_after(3, range(12)))
def test_cuts_through_each_edge_against_enumeration(seed: int) -> None:
    instance = random_graph(Random(seed), 7, 0.35)
    graph = build_graph(instance, without_contraction())
    downsets = downsets_by_definition(instance)
    counts = count_cuts(graph)
    assert counts is not None
    for (_, _, index), count in zip(graph.edges, counts, strict=True):
        edge = instance.edges[index]
        assert count == sum(edge.target in downset and edge.source not in downset for downset in downsets)


def test_two_towers_show_where_the_lattice_is_wide(tmp_path: Path) -> None:
    picture = as_graph(two_towers(4), tmp_path)
    labels = [node.attr["label"] for node in picture.nodes()]
    assert sum("x4" in label and "5 between" in label for label in labels) == 2
    assert sorted(edge.attr["label"].strip() for edge in picture.edges()) == ["5"] * 4
    assert "27 downsets" in picture.graph_attr["label"]


def test_equal_layers_fold_and_others_do_not() -> None:
    assert [run.layers for run in fold(equal_chain(5))] == [(0, 1, 2, 3, 4)]
    row = {1: [tmpc(1, 2)]}
    mixed = build({0: row, 1: row, 2: row, 3: {1: [tmpc(1, 3)]}, 4: row}, {(v, v + 1): 1 for v in range(4)})
    assert [run.layers for run in fold(mixed)] == [(0, 1, 2), (3,), (4,)]
    side_exit = build(dict.fromkeys(range(4), row), {(0, 1): 1, (1, 2): 1, (2, 3): 1, (0, 3): 1})
    assert all(len(run.layers) == 1 for run in fold(side_exit))


def test_a_mask_that_all_layers_read_does_not_unfold_them() -> None:
    instance = piper_ray.load(INPUTS / "bert32-a100.toml")
    assert max(len(run.layers) for run in fold(instance)) == 32
    assert sorted(layer for run in fold(instance) for layer in run.layers) == sorted(x.id for x in instance.layers)


def test_edges_within_a_merged_group_are_dashed(tmp_path: Path) -> None:
    picture = as_graph(
        build({0: {1: [tmpc(0)]}, 1: {1: [tmpc(1)]}, 2: {1: [tmpc(2)]}}, {(0, 1): 1, (1, 2): 1}), tmp_path
    )
    assert [(edge.attr["style"], edge.attr["label"].strip()) for edge in sorted(picture.edges())] == [
        ("dashed", ""),
        ("", "1"),
    ]


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_every_kind_of_picture(suffix: str, start: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"towers{suffix}"
    drawn(two_towers(3), path)
    assert path.read_bytes().startswith(start)


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    instance = piper_ray.load(INPUTS / "bert32-a100.toml")
    layers = (*instance.layers[:-1], piper_ray.Layer(instance.layers[-1].id, 'a\\n"<b>&', instance.layers[-1].tmpcs))
    odd = Instance(layers, instance.edges, 4, 4, 1e12, 1e9, "odd")
    drawn(odd, tmp_path / "out.svg")
    assert "a\\n&quot;&lt;b&gt;&amp;" in (tmp_path / "out.svg").read_text()


def test_too_many_boxes_are_refused_and_blocks_are_drawn(tmp_path: Path) -> None:
    with pytest.raises(LimitError, match=r"4,468 boxes are too many .*--contract operators"):
        drawn(transformer_operators(), tmp_path / "out.svg")
    command = [
        "info",
        str(INPUTS / "imagebind-huge.toml"),
        "--contract",
        "operators",
        "--draw",
        str(tmp_path / "b.dot"),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "111 layers in 32 blocks: 13,441 downsets instead of 28,704,376" in result.output
    assert "13,441 downsets" in (tmp_path / "b.dot").read_text()


def test_where_no_picture_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a path that ends in \.svg, \.png, \.pdf, \.dot"):
        check_path(tmp_path / "out.jpeg")
    with pytest.raises(UsageError, match="there is no folder"):
        check_path(tmp_path / "nowhere" / "out.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        drawn(two_towers(2), tmp_path / "folder.svg")


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (999_949, "1M"), (4_100_625, "4.1M"), (10**15, "1.0e15"),
     (123 * 10**40, "1.2e42")],
)  # fmt: skip
def test_counts_are_short(count: int, text: str) -> None:
    assert count_text(count) == text
