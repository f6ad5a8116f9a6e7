"""Restated workloads have the figures of those published, to the digit, and our readers and writers keep them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model.forms import InFlight
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.workloads.formats.load import dump, load, load_plan, to_toml, to_upstream
from tests.data import INCEPTION, INPUTS, PROFILES, WORKLOADS, goldens, profile_text
from tests.lengths import long_after

PIPER = {"bert32a100": (37, 67, (1, 2, 4, 8)), "gnmt": (78, 104, (1,)), "resnet": (177, 193, (1,))}
# layers and edges once Input sources and __getitem__ sinks are gone
PIPEDREAM = {
    "alexnet": (22, 22),
    "gnmt": (37, 46),
    "gnmt_large": (77, 102),
    "inception_v3": (325, 361),
    "resnet50": (176, 192),
    "squeezenet1_0": (67, 75),
    "vgg16": (40, 40),
}
# ``digest_of`` the published files: of Piper's JSON itself; of PipeDream's graph.txt as ``profile`` loads it.
PUBLISHED_DIGESTS = {
    "bert32a100": "07abd5c4e757615a5f5fcad46f639fd3fd985bf74b5891f355f30a20d2bae938",
    "gnmt": "76fa7602ec5647dcc02712d4d9a32e8c0e5800736b94cc48a4caf6f1479e9550",
    "resnet": "519b2f2190337f93f771d5f1108d87a8ec9398fbe8206696319ba94e2cb6ff42",
}
PROFILE_DIGESTS = {
    "alexnet": "6d84bcf4978e13d228dd7cbc1f278c522de26adfae4554c90b34efc851618f11",
    "gnmt_large": "5435fcc577b4d5c78fe13de2e3e3c4f602ab1cd03f973b627de02d1d6af1e10c",
    "gnmt": "acacdd8bfdf36b8f39f43045da4b6f287c228b1baaf1dd5619ea84996c7fef5f",
    "inception_v3": "35f5df1682028a66f8c361eecd6d9607e6ed6fecf681e11924665b6b460e4542",
    "resnet50": "549ebec1c6d51b9fa220050586aadc1a8d081ee2459a91910d5ecc66ed448bce",
    "squeezenet1_0": "b820387ef9b722677d23602af04e51e293d4d3e285de6976ae6b99f392ab212d",
    "vgg16": "d0dab4b46641d2389695f3f28069984077a213358fd68d9b382b55f79d5666ea",
}


@pytest.fixture
def profile(tmp_path: Path) -> Callable[..., Instance]:
    """Loads a profile by its name, on a cluster of its own."""

    def load_profile(name: str, in_flight: InFlight = InFlight.TWO_VERSIONS) -> Instance:
        path = tmp_path / f"{name}.graph.txt"
        if name in PROFILES:
            path.write_text(profile_text(name), encoding="utf-8")
        else:
            dump(load(INCEPTION), path)
        cluster: dict[str, Any] = {"devices": 8, "microbatches": 64, "memory_bytes": 2**34}
        return load(path, **cluster, bandwidth_bytes_per_s=25 * 2**30, in_flight=in_flight)

    return load_profile


def document_of(instance: Instance) -> dict[str, Any]:
    """As Piper's JSON has it, which knows no name, and of times only both passes together."""
    document: dict[str, Any] = to_upstream(instance)
    document.pop("name")
    for node in document["nodes"]:
        for tmpc in (tmpc for row in node["TMPCs"].values() for tmpc in row):
            tmpc.pop("forwardTimePerSample", None)
            tmpc.pop("backwardTimePerSample", None)
    return document


def digest_of(document: dict[str, Any]) -> str:
    """SHA-256 of every key and figure, whatever the order of keys and the spelling of numbers."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: plain(value) for key, value in part.items()}
        if isinstance(part, list):
            return [plain(value) for value in part]
        return float(part) if isinstance(part, int) else part

    return hashlib.sha256(json.dumps(plain(document), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@pytest.mark.parametrize("name", PIPER)
def test_pipers_workloads_are_the_published_ones_figure_for_figure(name: str) -> None:
    instance = load(WORKLOADS[name])
    layers, edges, degrees = PIPER[name]
    assert (len(instance.layers), len(instance.edges), instance.degrees) == (layers, edges, degrees)
    assert digest_of(document_of(instance)) == PUBLISHED_DIGESTS[name]
    recompute = {(x.id, x.recompute) for layer in instance.layers for xs in layer.tmpcs.values() for x in xs}
    assert recompute == {("vanilla", False), ("activation recomp", True)}


@pytest.mark.parametrize("name", PIPER)
def test_pipers_own_form_is_read_figure_for_figure(name: str, tmp_path: Path) -> None:
    document = document_of(load(WORKLOADS[name]))
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    instance = load(path)
    assert instance.name == name
    assert document_of(instance) == document


@pytest.mark.parametrize("name", PIPEDREAM)
def test_pipedreams_profiles_are_the_published_ones(profile: Callable[..., Instance], name: str) -> None:
    instance = profile(name)
    assert (len(instance.layers), len(instance.edges)) == PIPEDREAM[name]
    assert digest_of(document_of(instance)) == PROFILE_DIGESTS[name]
    for layer in instance.layers:
        (one,) = layer.tmpcs[1]
        if name == "inception_v3":  # profiled without its backward pass
            assert one.forward_s is None
        else:
            assert one.forward_s is not None
            assert one.backward_s is not None
            assert one.forward_s + one.backward_s == pytest.approx(one.time_per_sample_s, rel=1e-12)
    stashing = profile(name, InFlight.STASHING)
    for layer, stashed in zip(instance.layers, stashing.layers, strict=True):
        (plain,), (kept,) = layer.tmpcs[1], stashed.tmpcs[1]
        assert plain.fixed_bytes == 2 * plain.weights_bytes
        assert kept.fixed_bytes == 0.0
        assert kept.activation_bytes == plain.activation_bytes + plain.weights_bytes
    activation = {layer.id: layer.tmpcs[1][0].activation_bytes for layer in instance.layers}
    assert all(edge.communication_bytes == activation[edge.source] for edge in instance.edges)


def test_the_profile_of_vgg16_sums_to_what_its_lines_say(profile: Callable[..., Instance]) -> None:
    lines = profile_text("vgg16").splitlines()
    nodes = [line.split(" -- ")[-1] for line in lines if line.startswith("node") and "Input" not in line]
    figures = [dict(part.split("=") for part in node.split(", ")) for node in nodes]
    tmpcs = [layer.tmpcs[1][0] for layer in profile("vgg16").layers]
    assert sum(tmpc.time_per_sample_s for tmpc in tmpcs) == pytest.approx(
        sum(float(node["forward_compute_time"]) + float(node["backward_compute_time"]) for node in figures) / 1000
    )
    assert [tmpc.weights_bytes for tmpc in tmpcs] == [float(node["parameter_size"]) for node in figures]


@pytest.mark.parametrize("extension", long_after(1, ["json", "toml"]))
def test_published_inputs_survive_being_written(
    tmp_path: Path, extension: str, profile: Callable[..., Instance]
) -> None:
    for instance in [*map(load, WORKLOADS.values()), *map(profile, PIPEDREAM)]:
        path = tmp_path / f"written.{extension}"
        dump(instance, path)
        again = load(path)
        assert again == instance
        assert again.digest == instance.digest


def test_the_compact_form_is_compact() -> None:
    bert32 = load(WORKLOADS["bert32a100"])
    text = to_toml(bert32)
    assert len(text) * 10 < len(json.dumps(to_upstream(bert32), indent=2))
    assert text.count("[types.") == 5
    assert text.count("continues = ") == 1


def without_sync(tmpc: Tmpc) -> Tmpc:
    return dataclasses.replace(tmpc, forward_sync_bytes={}, backward_sync_bytes={})


@pytest.mark.parametrize("depth", [48, 64, 96])
def test_deeper_berts_are_bert32_with_more_transformer_layers(depth: int) -> None:
    bert32, bert = load(INPUTS / "bert32-a100.toml"), load(INPUTS / f"bert{depth}-a100.toml")
    assert bert.name == f"bert{depth}-a100"
    assert (bert.devices, bert.microbatches) == (10, 1920)
    assert (bert.memory_bytes, bert.bandwidth_bytes_per_s) == (80e9, 25e9)
    transformers = [layer for layer in bert.layers if layer.name == "ParallelTransformerLayer"]
    assert len(transformers) == depth
    assert len(bert.layers) == depth + 5
    assert len(bert.edges) == 67 + 2 * (depth - 32)

    # The mask feeds every transformer layer, each of which feeds the next; the sizes are those of the 32-layer one.
    mask = 4
    cost = {(edge.source, edge.target): edge.communication_bytes for edge in bert.edges}
    published_cost = {(edge.source, edge.target): edge.communication_bytes for edge in bert32.edges}
    assert {target for source, target in cost if source == mask} == {layer.id for layer in transformers}
    for before, after in itertools.pairwise(transformers):
        assert cost[mask, after.id] == published_cost[mask, 5]
        assert cost[before.id, after.id] == published_cost[5, 6]
    assert cost[transformers[-1].id, bert.layers[-1].id] == published_cost[35, 36]

    # Every figure of layer i is that of layer i mod 32 of the published one, towards its own neighbours.
    originals = [layer for layer in bert32.layers if layer.name == "ParallelTransformerLayer"]
    for index, layer in enumerate(transformers):
        original = originals[index % 32]
        assert layer.tmpcs.keys() == original.tmpcs.keys()
        for t, tmpcs in layer.tmpcs.items():
            for tmpc, published_tmpc in zip(tmpcs, original.tmpcs[t], strict=True):
                assert without_sync(tmpc) == without_sync(published_tmpc)
                assert sorted(tmpc.forward_sync_bytes.values()) == sorted(published_tmpc.forward_sync_bytes.values())
                assert list(tmpc.backward_sync_bytes.values()) == list(published_tmpc.backward_sync_bytes.values())
    assert [layer.tmpcs for layer in bert.layers[:3]] == [layer.tmpcs for layer in bert32.layers[:3]]


@pytest.mark.parametrize("depth", [48, 64, 96])
def test_a_deeper_bert_changes_one_number(depth: int) -> None:
    lines = (INPUTS / f"bert{depth}-a100.toml").read_text(encoding="utf-8").splitlines()
    said = [line for line in lines if line and not line.startswith("#")]
    assert said == ['base = "bert32-a100.toml"', f'name = "bert{depth}-a100"', f"layers.stack.length = {depth}"]


@pytest.mark.parametrize("path", long_after(3, sorted(INPUTS.glob("*.toml"))), ids=lambda path: path.stem)
def test_every_shipped_input_says_where_its_figures_come_from_and_converts(path: Path, tmp_path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")
    instance = load(path)
    dump(instance, tmp_path / "converted.json")
    assert load(tmp_path / "converted.json") == instance


@pytest.mark.long
def test_random_goldens_load_and_survive_being_written(tmp_path: Path) -> None:
    documents: list[dict[str, Any]] = [record["instance"] for record in goldens("random")]
    assert len(documents) == 400
    for document in documents[::20]:
        instance = load(document)
        written = to_upstream(instance)
        assert {key: written[key] for key in ("nodes", "edges")} == {key: document[key] for key in ("nodes", "edges")}
        assert load(written) == instance
        (tmp_path / "written.toml").write_text(to_toml(instance), encoding="utf-8")
        assert load(tmp_path / "written.toml") == dataclasses.replace(instance, name="")


def test_a_plan_of_a_published_workload_reads_back() -> None:
    instance = load(WORKLOADS["gnmt"])
    plan = {
        "stages": [
            {
                "nodes": [layer.id for layer in instance.layers],
                "dataParallelDegree": 2,
                "tensorParallelDegree": 1,
                "TMPCids": {str(layer.id): "vanilla" for layer in instance.layers},
            }
        ]
    }
    assert load_plan(plan, instance).to_dict() == plan
