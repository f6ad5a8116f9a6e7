"""PipeDream's profiles: what is read, what is dropped, and a fault for everything that can be wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.forms import InFlight
from piper_ray.model.instance import Edge, Layer, Tmpc
from piper_ray.workloads.formats.load import load


def node(number: int, description: str, activation: str = "8.0", forward: str = "1.5", parameters: str = "3") -> str:
    return (
        f"node{number} -- {description} -- forward_compute_time={forward}, backward_compute_time=0.5, "
        f"activation_size={activation}, parameter_size={parameters}\n"
    )


# Input0 -> Conv -- x -> Split -> item 0 -> Add, Conv -> Add, Split -> item 1 (a sink, dropped)
PROFILE = (
    node(1, "Input0", parameters="100")
    + node(7, "Conv -- x(1, 2)")
    + node(5, "Split", activation="[4.0; 2.0]")
    + node(2, "__getitem__(0)", activation="4.0", parameters="0.000")
    + node(3, "__getitem__(1)", activation="2.0")
    + node(4, "Add")
    + "\tnode1 -- node7\n\tnode7 -- node5\n\tnode5 -- node2\n\tnode5 -- node3\n\tnode7 -- node4\n\tnode2 -- node4"
)


def write(tmp_path: Path, text: str, name: str = "small.graph.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def read(path: Path, in_flight: InFlight | str | None = None) -> tuple[tuple[Layer, ...], tuple[Edge, ...]]:
    instance = load(path, devices=2, microbatches=4, memory_bytes=8, bandwidth_bytes_per_s=16, in_flight=in_flight)
    assert instance.name == "small"
    return instance.layers, instance.edges


def layer(
    number: int, name: str, activation: float, fixed: float, before: list[int], after: list[int], weights: float = 3.0
) -> Layer:
    sync = dict.fromkeys(before, 0.0), dict.fromkeys(after, 0.0)
    tmpc = Tmpc("vanilla", 0.002, weights, activation, fixed, *sync, forward_s=0.0015, backward_s=0.0005)
    return Layer(number, name, {1: (tmpc,)})


EDGES = (Edge(7, 5, 8.0), Edge(5, 2, 6.0), Edge(7, 4, 8.0), Edge(2, 4, 4.0))


@pytest.mark.parametrize("in_flight", [None, "two-versions", InFlight.TWO_VERSIONS])
def test_by_hand_with_two_versions_of_the_weights(tmp_path: Path, in_flight: InFlight | str | None) -> None:
    layers, edges = read(write(tmp_path, PROFILE), in_flight)
    assert layers == (
        layer(7, "Conv -- x(1, 2)", 8.0, 6.0, [], [5, 4]),
        layer(5, "Split", 6.0, 6.0, [7], [2]),
        layer(2, "__getitem__(0)", 4.0, 0.0, [5], [4], weights=0.0),
        layer(4, "Add", 8.0, 6.0, [7, 2], []),
    )
    assert edges == EDGES


def test_by_hand_with_stashing(tmp_path: Path) -> None:
    layers, edges = read(write(tmp_path, PROFILE), "stashing")
    assert [(found.tmpcs[1][0].activation_bytes, found.tmpcs[1][0].fixed_bytes) for found in layers] == [
        (11.0, 0.0),
        (9.0, 0.0),
        (4.0, 0.0),
        (11.0, 0.0),
    ]
    assert edges == EDGES


def test_windows_lines_blank_lines_and_planned_stages_are_read_all_the_same(tmp_path: Path) -> None:
    planned = PROFILE.replace("parameter_size=3\n", "parameter_size=3 -- stage_id=1\n\n").replace("\n", "\r\n")
    assert read(write(tmp_path, planned)) == read(write(tmp_path, PROFILE))


def test_a_profile_is_known_by_its_content(tmp_path: Path) -> None:
    assert read(write(tmp_path, PROFILE, "small")) == read(write(tmp_path, PROFILE))


def test_a_profile_names_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(write(tmp_path, PROFILE), devices=3)
    assert [fault.path for fault in caught.value.faults] == ["microbatches", "memory_bytes", "bandwidth_bytes_per_s"]


def test_an_unknown_rule_for_what_is_in_flight() -> None:
    with pytest.raises(UsageError, match="expected one of two-versions, stashing"):
        load("anything.txt", in_flight="three-versions")


def test_the_rule_is_for_profiles_only() -> None:
    with pytest.raises(UsageError, match="PipeDream profiles only"):
        load({"nodes": []}, in_flight="stashing")


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        ("node7 -- Conv", "nodule7 -- Conv", "line 2", "is no node; expected node<id> --"),
        ("node4 -- Add -- ", "node4 -- ", "line 6", "is no node"),
        ("\tnode7 -- node4", "\tnode7 -> node4", "line 11", "is no edge; expected node<id> -- node<id>"),
        ("\tnode7 -- node4", "\tnode7 -- node40", "line 11", "unknown layer 40"),
        ("\tnode7 -- node4", "\tnode7 -- node5", "line 11", "duplicate edge 7 -> 5, first at line 8"),
        ("\tnode7 -- node4", "\tnode4 -- node4", "line 11", "self loop at layer 4"),
        ("\tnode7 -- node4", "\tnode4 -- node7", "", "cycle 2 -> 4 -> 7 -> 5 -> 2"),
        ("node4 -- Add", "node7 -- Add", "line 6", "duplicate id 7, first at line 2"),
        ("forward_compute_time=1.5", "forward_compute_time=-1.5", "line 1, forward_compute_time", "negative (-1.5)"),
        ("forward_compute_time=1.5", "forward_compute_time=nan", "line 1, forward_compute_time", "not finite"),
        ("forward_compute_time=1.5", "forward_compute_time=1_5", "line 1, forward_compute_time", 'number ("1_5")'),
        ("forward_compute_time=1.5, ", "", "line 1, forward_compute_time", "missing"),
        ("parameter_size=100", "parameter_size=1e30", "line 1, parameter_size", "too large"),
        ("parameter_size=100", "parameter_size=", "line 1, parameter_size", "not a number"),
        ("[4.0; 2.0]", "[4.0; two]", "line 3, activation_size", 'not a number ("two")'),
    ],
)
def test_a_fault_is_reported_at_its_line(tmp_path: Path, old: str, new: str, path: str, words: str) -> None:
    assert old in PROFILE
    with pytest.raises(InputError) as caught:
        read(write(tmp_path, PROFILE.replace(old, new, 1)))
    assert [fault for fault in caught.value.faults if fault.path == path and words in fault.message], str(caught.value)


def test_without_any_backward_time_how_times_part_is_not_known(tmp_path: Path) -> None:
    some = PROFILE.replace("backward_compute_time=0.5", "backward_compute_time=0", 5)
    layers, _ = read(write(tmp_path, some))
    assert [(x.tmpcs[1][0].forward_s, x.tmpcs[1][0].backward_s) for x in layers] == [(1.5e-3, 0.0)] * 3 + [
        (1.5e-3, 0.5e-3)
    ]
    layers, _ = read(write(tmp_path, PROFILE.replace("backward_compute_time=0.5", "backward_compute_time=0")))
    assert {(x.tmpcs[1][0].time_per_sample_s, x.tmpcs[1][0].forward_s) for x in layers} == {(1.5e-3, None)}


def test_nothing_left_but_ends(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no layers other than"):
        read(write(tmp_path, node(1, "Input0")))


def test_some_other_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a PipeDream profile; expected lines such as node<id>"):
        read(write(tmp_path, "Permission is hereby granted,\n\tfree of charge\n"))
