"""Inputs of dnn-partitioning: what becomes of them, what is refused, and the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray import InputError, Restrictions, UsageError, dump, load
from piper_ray.model.forms import Form
from piper_ray.model.instance import Tensor
from piper_ray.model.plan import Plan, Stage
from piper_ray.workloads.formats.dnn_partitioning import strong_components
from piper_ray.workloads.formats.pipedream_profile import in_flight_rule
from tests.data import INCEPTION, PROFILES, profile_text
from tests.instances import build, random_instance, tmpc


def node(
    number: int, ms: float, size: float = 0.0, colour: int | None = None, backward: bool = False
) -> dict[str, Any]:
    found = {"id": number, "supportedOnFpga": 1, "cpuLatency": 10 * ms, "fpgaLatency": ms, "size": size,
             "isBackwardNode": int(backward)}  # fmt: skip
    return found if colour is None else found | {"colorClass": colour}


def edge(source: int, target: int, cost: float) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "cost": cost, "size": 77.0}


def document(nodes: list[dict[str, Any]], edges: list[dict[str, Any]], **other: Any) -> dict[str, Any]:
    return {"maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges} | other


TRAINING = document(
    [
        node(1, 2, 10, 1), node(2, 3, 20, 2), node(3, 4, 30, 3),
        node(11, 20, 1, 1, True), node(12, 30, 2, 2, True), node(13, 40, 3, 3, True),
    ],
    [edge(1, 2, 0.5), edge(2, 3, 0.25), edge(3, 13, 9), edge(13, 12, 1.0), edge(12, 11, 2.0), edge(1, 11, 0.5)],
)  # fmt: skip


def test_forward_and_backward_nodes_of_a_class_are_one_layer() -> None:
    instance = load(TRAINING)
    assert (instance.devices, instance.microbatches, instance.memory_bytes) == (2, 2, 100.0)
    assert [(x.id, x.tmpcs[1][0].fixed_bytes) for x in instance.layers] == [(1, 11.0), (2, 22.0), (3, 33.0)]
    assert [x.tmpcs[1][0].time_per_sample_s for x in instance.layers] == pytest.approx([22e-3, 33e-3, 44e-3])
    # Half the cost forwards and backwards together, at 1 GB/s. Nodes 3 and 13, 1 and 11 are on one device anyway.
    assert {(x.source, x.target): x.communication_bytes for x in instance.edges} == {
        (1, 2): pytest.approx((0.5 + 2.0) / 2 * 1e6),
        (2, 3): pytest.approx((0.25 + 1.0) / 2 * 1e6),
    }
    assert not instance.tensors
    assert not instance.notes


def test_a_split_costs_what_it_costs_there() -> None:
    """Layers 1, 2 | 3 on two devices: 55 ms and the tensors 2 -> 3 and 13 -> 12; or 44 ms and the same."""
    for bandwidth in (None, 5.0):
        instance = load(TRAINING, bandwidth_bytes_per_s=bandwidth)
        solution = piper_ray.solve(instance, restrictions=Restrictions(data_parallelism=False))
        assert solution.time_per_sample_s == pytest.approx(55e-3 + 0.25e-3 + 1.0e-3)


def test_a_sender_is_paid_once_for_a_layer_however_many_nodes_of_it_it_feeds() -> None:
    instance = load(document([node(1, 1), node(2, 1, 0, 7), node(3, 1, 0, 7)], [edge(1, 2, 4), edge(1, 3, 4)]))
    assert [x.communication_bytes for x in instance.edges] == [2e6]


def test_a_sender_is_paid_once_on_its_own_device_and_once_on_each_other() -> None:
    """Node 1 sends to three layers; on a device with two of them it is paid once."""
    nodes = [node(1, 1), node(2, 10), node(3, 10), node(4, 20, 0, 4), node(14, 0, 0, 4, True)]
    edges = [edge(1, 2, 4), edge(1, 3, 4), edge(1, 4, 4), edge(1, 14, 4)]
    instance = load(document(nodes, edges, maxFPGAs=3))
    assert instance.tensors == (Tensor((1, 2, 3, 4), 4e6, 0.0),)
    assert [x.communication_bytes for x in instance.edges] == [0.0] * 3
    solution = piper_ray.solve(instance, restrictions=Restrictions(data_parallelism=False))
    assert solution.time_per_sample_s == pytest.approx(24e-3)
    together = Plan((Stage((1, 2, 3), 1, 1, dict.fromkeys((1, 2, 3), "vanilla")), Stage((4,), 1, 1, {4: "vanilla"})))
    assert [stage.time_s for stage in piper_ray.evaluate(instance, together).stages] == pytest.approx([25e-3, 24e-3])


def test_what_backward_nodes_send_belongs_to_the_backward_pass() -> None:
    nodes = [*TRAINING["nodes"], node(4, 1, 0, 4), node(14, 1, 0, 4, True)]
    edges = [edge(2, 4, 0.25), edge(14, 12, 3.0), edge(14, 13, 3.0)]
    instance = load(TRAINING | {"nodes": nodes, "edges": TRAINING["edges"] + edges})
    assert instance.tensors == (Tensor((2, 3, 4), 0.25e6, 3e6),)


def test_classes_that_wait_for_one_another_are_one_and_a_note_says_so() -> None:
    nodes = [node(1, 1, 0, 5), node(2, 1), node(3, 1, 0, 5), node(4, 1)]
    instance = load(document(nodes, [edge(1, 2, 1), edge(2, 3, 1), edge(3, 4, 1)]))
    assert [x.id for x in instance.layers] == [1, 4]
    assert instance.layers[0].tmpcs[1][0].time_per_sample_s == pytest.approx(3e-3)
    assert instance.notes == (
        "2 colour classes wait for one another in a circle and become one layer: those of nodes 1, 2",
    )


def test_backward_edges_may_be_drawn_as_the_forward_pass_runs() -> None:
    """As in the files at the level of layers: the same instance, and a note."""
    turned = [
        edge(x["destId"], x["sourceId"], x["cost"]) if min(x["sourceId"], x["destId"]) > 10 else x
        for x in [edge(1, 2, 0.5), edge(2, 3, 0.25), edge(13, 12, 1.0), edge(12, 11, 1.0), edge(1, 11, 0.5)]
    ]
    instance = load(TRAINING | {"edges": turned})
    assert [(x.source, x.target) for x in instance.edges] == [(1, 2), (2, 3)]
    assert [x.id for x in instance.layers] == [1, 2, 3]
    assert "taken the other way round" in instance.notes[0]


def test_backward_edges_that_run_both_ways_are_refused() -> None:
    edges = [edge(1, 2, 0), edge(2, 3, 0), edge(13, 12, 0), edge(11, 12, 0)]
    with pytest.raises(InputError, match="others against them"):
        load(TRAINING | {"edges": edges})


def test_backward_nodes_without_a_forward_one_are_layers_against_the_arrows() -> None:
    nodes = [
        node(1, 1, 0, 1),
        node(2, 1, 0, 2),
        node(11, 1, 0, 1, True),
        node(12, 1, 0, 2, True),
        node(13, 5, 0, 3, True),
    ]
    instance = load(document(nodes, [edge(1, 2, 1), edge(12, 13, 1), edge(13, 11, 1)]))
    assert {(x.source, x.target) for x in instance.edges} == {(1, 2), (13, 2), (1, 13)}


@pytest.mark.parametrize(
    ("nodes", "edges", "path", "words"),
    [
        ([node(1, 1) | {"supportedOnFpga": False}], [], "nodes[0].supportedOnFpga", "runs on CPUs only"),
        ([node(1, 1), node(2, 1, 0, 2, True)], [edge(2, 1, 0)], "edges[0]", "from backward node 2 to forward node 1"),
        ([node(1, 1), node(2, 1), node(3, 1)], [edge(1, 2, 1), edge(1, 3, 2)], "edges[1].cost", "expected one cost"),
        ([node(1, 1), node(2, 1)], [edge(1, 2, 1), edge(2, 1, 1)], "edges", "cycle 1 -> 2 -> 1"),
        ([node(1, -1)], [], "nodes[0].fpgaLatency", "negative (-1)"),
        ([node(1, 1)], [edge(1, 9, 1)], "edges[0]", "unknown layer 9"),
        ([], [], "nodes", "no layers"),
    ],
)
def test_what_is_refused(nodes: list[dict[str, Any]], edges: list[dict[str, Any]], path: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        load(document(nodes, edges))
    assert any(fault.path == path and words in fault.message for fault in error.value.faults), error.value


@pytest.mark.parametrize("key", ["nodes", "edges"])
def test_lists_that_are_none(key: str) -> None:
    with pytest.raises(InputError, match=f"{key}: not a list"):
        load(document([node(1, 1)], []) | {key: 3})


def test_round_trip_through_the_form(tmp_path: Path) -> None:
    edges = {(0, 1): 0.0, (0, 2): 0.0, (1, 2): 5.0}
    instance = build({v: {1: [tmpc(1 + v, fixed=7 * v)]} for v in range(3)}, edges, name="three")
    instance = replace(instance, tensors=(Tensor((0, 1, 2), 6.0, 0.0),))
    path = tmp_path / "out.json"
    dump(instance, path, Form.DNN_PARTITIONING)
    assert json.loads(path.read_text())["maxFPGAs"] == instance.devices
    back = load(path)
    assert (back.name, back.devices, back.microbatches, back.memory_bytes, back.bandwidth_bytes_per_s) == (
        "three", instance.devices, instance.microbatches, instance.memory_bytes, instance.bandwidth_bytes_per_s,
    )  # fmt: skip
    assert [x.name for x in back.layers] == [x.name for x in instance.layers]
    for one, other in zip(back.layers, instance.layers, strict=True):
        assert one.tmpcs[1][0].time_per_sample_s == pytest.approx(other.tmpcs[1][0].time_per_sample_s, rel=1e-12)
        assert one.tmpcs[1][0].fixed_bytes == other.tmpcs[1][0].fixed_bytes
    assert {(x.source, x.target): pytest.approx(x.communication_bytes) for x in back.edges} == edges
    (tensor,) = back.tensors
    assert (tensor.layers, tensor.backward_bytes) == ((0, 1, 2), 0.0)
    assert tensor.forward_bytes == pytest.approx(6.0)


@pytest.mark.parametrize(
    "tensors",
    [(Tensor((0, 1), 1.0, 0.0),), (Tensor((0, 1, 2), 1.0, 2.0),), (Tensor((0, 1, 2), 1.0, 0.0),) * 2],
    ids=["not all that come after", "of the backward pass", "two"],
)
def test_tensors_that_the_form_cannot_hold(tensors: tuple[Tensor, ...], tmp_path: Path) -> None:
    instance = build({v: {1: [tmpc(1)]} for v in range(3)}, {(0, 1): 0.0, (0, 2): 0.0})
    with pytest.raises(UsageError, match="tensors other than one"):
        dump(replace(instance, tensors=tensors), tmp_path / "out.json", Form.DNN_PARTITIONING)


def test_edges_that_are_charged_one_by_one_would_be_lost(tmp_path: Path) -> None:
    instance = build({v: {1: [tmpc(1)]} for v in range(3)}, {(0, 1): 1.0, (0, 2): 1.0})
    with pytest.raises(UsageError, match="tensors other than one"):
        dump(instance, tmp_path / "out.json", Form.DNN_PARTITIONING)


@pytest.mark.parametrize("form", [Form.DNN_PARTITIONING, Form.PIPEDREAM])
def test_what_would_be_lost_is_named(form: Form, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with pytest.raises(UsageError) as error:
        dump(random_instance(3, most_layers=5, density=1.0), path, form)
    assert "would lose" in str(error.value)
    assert "the choice between several TMPCs of a layer" in str(error.value)
    assert not path.exists()


@pytest.mark.parametrize("in_flight", ["two-versions", "stashing"])
@pytest.mark.parametrize("name", PROFILES)
def test_profiles_come_back_as_they_were(name: str, in_flight: str, tmp_path: Path) -> None:
    def read(path: Path) -> piper_ray.Instance:
        return load(path, devices=4, microbatches=8, memory_bytes=1e10, bandwidth_bytes_per_s=1e9, in_flight=in_flight)

    path = tmp_path / f"{name}.graph.txt"
    path.write_text(profile_text(name), encoding="utf-8")
    instance = read(path)
    dump(instance, path)
    rule = in_flight_rule(instance)
    assert rule is not None
    assert rule.value == in_flight
    assert read(path) == instance


def test_a_workload_made_of_a_profile_becomes_one_again(tmp_path: Path) -> None:
    instance = load(INCEPTION)
    path = tmp_path / "inception_v3.graph.txt"
    dump(instance, path)
    again = load(
        path,
        devices=instance.devices,
        microbatches=instance.microbatches,
        memory_bytes=instance.memory_bytes,
        bandwidth_bytes_per_s=instance.bandwidth_bytes_per_s,
    )
    assert again == instance


def test_a_profile_as_dnn_partitioning_would_lose_its_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="weights to synchronise"):
        dump(load(INCEPTION), tmp_path / "out.json", "dnn-partitioning")


def test_strong_components_of_two_circles_and_a_bridge() -> None:
    found = strong_components({0: [1], 1: [2], 2: [0, 3], 3: [4], 4: [3], 5: []})
    groups: dict[int, set[int]] = {}
    for v, component in found.items():
        groups.setdefault(component, set()).add(v)
    assert sorted(map(sorted, groups.values())) == [[0, 1, 2], [3, 4], [5]]
