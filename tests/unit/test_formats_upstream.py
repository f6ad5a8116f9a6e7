"""Piper's JSON: what is read, what is written, and a fault for everything that can be wrong with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from piper_ray.model.errors import InputError
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.workloads.formats.load import load, to_upstream

Document = dict[str, Any]


def tmpc(tmpc_id: str, forward: list[int], backward: list[int]) -> Document:
    return {
        "id": tmpc_id,
        "timePerSample": 1.5,
        "parameterSize": 10,
        "memoryUsageA": 20.0,
        "memoryUsageB": 30.0,
        "syncTimeFw": {str(layer): 7.0 for layer in forward},
        "syncTimeBw": {str(layer): 8.0 for layer in backward},
    }


def document() -> Document:
    """4 -> 9 -> 6, and 4 -> 6. Layer 9 has no TMPC at t=1."""
    return {
        "maxMemoryPerDevice": 1000.0,
        "maxDevices": 8,
        "bandwidth": 50.0,
        "mbsInBatch": 16,
        "nodes": [
            {"id": 4, "name": "a", "TMPCs": {"1": [tmpc("vanilla", [], [9, 6])]}},
            {"id": 9, "TMPCs": {"2": [tmpc("vanilla", [4], [6]), tmpc("activation recomp", [4], [6])]}},
            {"id": 6, "name": "c", "TMPCs": {"1": [tmpc("vanilla", [9, 4], [])], "3": []}},
        ],
        "edges": [
            {"sourceId": 4, "destId": 9, "communicationCost": 100.0},
            {"sourceId": 9, "destId": 6, "communicationCost": 200},
            {"sourceId": 4, "destId": 6, "communicationCost": 300.0},
        ],
    }


def test_reads_every_figure_into_its_place() -> None:
    instance = load(document())
    vanilla = Tmpc("vanilla", 1.5, 10.0, 20.0, 30.0, {4: 7.0}, {6: 8.0})
    recompute = Tmpc("activation recomp", 1.5, 10.0, 20.0, 30.0, {4: 7.0}, {6: 8.0}, recompute=True)
    assert instance == Instance(
        layers=(
            Layer(4, "a", {1: (Tmpc("vanilla", 1.5, 10.0, 20.0, 30.0, {}, {9: 8.0, 6: 8.0}),)}),
            Layer(9, "9", {2: (vanilla, recompute)}),
            Layer(6, "c", {1: (Tmpc("vanilla", 1.5, 10.0, 20.0, 30.0, {9: 7.0, 4: 7.0}, {}),)}),
        ),
        edges=(Edge(4, 9, 100.0), Edge(9, 6, 200.0), Edge(4, 6, 300.0)),
        devices=8,
        microbatches=16,
        memory_bytes=1000.0,
        bandwidth_bytes_per_s=50.0,
    )


def test_the_written_document_reads_back_as_the_same_instance() -> None:
    instance = load(document())
    assert load(to_upstream(instance)) == instance
    assert "recompute" not in str(to_upstream(instance))  # upstream's own ids say it


def test_a_role_that_the_id_does_not_say_survives_writing() -> None:
    given = document()
    given["nodes"][0]["TMPCs"]["1"][0]["recompute"] = True
    instance = load(given)
    assert instance.layers[0].tmpcs[1][0].recompute
    assert load(to_upstream(instance)) == instance


def test_edges_may_be_absent() -> None:
    lone = document()
    lone["nodes"] = [{"id": 1, "TMPCs": {"1": [tmpc("x", [], [])]}}, {"id": 2, "TMPCs": {"1": [tmpc("x", [], [])]}}]
    del lone["edges"]
    assert load(lone).edges == ()
    assert [layer.id for layer in load(lone).layers] == [1, 2]


def test_sync_tables_may_be_absent_where_there_are_no_edges() -> None:
    given = document()
    del given["nodes"][0]["TMPCs"]["1"][0]["syncTimeFw"]
    assert load(given) == load(document())


def test_whole_numbers_may_be_written_as_floats() -> None:
    given = document()
    given.update(maxDevices=8.0, mbsInBatch=16.0)
    instance = load(given)
    assert (instance.devices, instance.microbatches) == (8, 16)
    assert type(instance.devices) is int


def test_minus_zero_is_zero() -> None:
    given, plain = document(), document()
    given["nodes"][0]["TMPCs"]["1"][0]["timePerSample"] = -0.0
    plain["nodes"][0]["TMPCs"]["1"][0]["timePerSample"] = 0.0
    assert load(given).digest == load(plain).digest


@pytest.mark.parametrize("key", ["mbsInBatch", "maxBatchSize"])
def test_either_spelling_of_the_microbatches(key: str) -> None:
    given = document()
    del given["mbsInBatch"]
    given[key] = 12
    assert load(given).microbatches == 12


def test_both_spellings_when_they_agree() -> None:
    assert load({**document(), "maxBatchSize": 16.0}).microbatches == 16


def test_overrides_stand_in_for_what_the_file_lacks_or_has_wrong() -> None:
    given = document()
    del given["maxDevices"], given["bandwidth"]
    given.update(mbsInBatch="many", maxBatchSize=3)
    instance = load(given, devices=2, microbatches=5, memory_bytes=7, bandwidth_bytes_per_s=9.5)
    assert (instance.devices, instance.microbatches) == (2, 5)
    assert (instance.memory_bytes, instance.bandwidth_bytes_per_s) == (7.0, 9.5)


def change(*path: str | int, to: object) -> Callable[[Document], None]:
    def mutate(given: Any) -> None:
        for part in path[:-1]:
            given = given[part]
        given[path[-1]] = to

    return mutate


def drop(*path: str | int) -> Callable[[Document], None]:
    def mutate(given: Any) -> None:
        for part in path[:-1]:
            given = given[part]
        del given[path[-1]]

    return mutate


def edge(source: object, target: object, cost: object = 1.0) -> Callable[[Document], None]:
    return lambda given: given["edges"].append({"sourceId": source, "destId": target, "communicationCost": cost})


FIRST = ("nodes", 0, "TMPCs", "1", 0)
TIME = (*FIRST, "timePerSample")
TIME_PATH = 'nodes[0].TMPCs["1"][0].timePerSample'

FAULTS: list[tuple[str, Callable[[Document], None], str, str]] = [
    # name, what is done to the document, path of the fault, words in it
    ("negative", change(*TIME, to=-1.0), TIME_PATH, "negative (-1.0); expected a finite number >= 0"),
    ("nan", change(*TIME, to=math.nan), TIME_PATH, "not finite (nan)"),
    ("infinite", change(*TIME, to=math.inf), TIME_PATH, "not finite (inf)"),
    ("text", change(*TIME, to="1.5"), TIME_PATH, 'not a number ("1.5")'),
    ("boolean", change(*TIME, to=True), TIME_PATH, "not a number (true)"),
    ("null", change(*TIME, to=None), TIME_PATH, "not a number (null)"),
    ("list", change(*TIME, to=[1.0]), TIME_PATH, "not a number (a list)"),
    ("huge float", change(*TIME, to=1e300), TIME_PATH, "too large (1e+300)"),
    ("huge integer", change(*TIME, to=10**5000), TIME_PATH, "too large (a huge number)"),
    ("missing figure", drop(*TIME), TIME_PATH, "missing; expected a finite number >= 0"),
    ("weights", change(*FIRST, "parameterSize", to=-2), 'nodes[0].TMPCs["1"][0].parameterSize', "negative (-2)"),
    ("memory a", change(*FIRST, "memoryUsageA", to=-2), 'nodes[0].TMPCs["1"][0].memoryUsageA', "negative (-2)"),
    ("memory b", drop(*FIRST, "memoryUsageB"), 'nodes[0].TMPCs["1"][0].memoryUsageB', "missing"),
    ("edge cost", change("edges", 1, "communicationCost", to=-1), "edges[1].communicationCost", "negative"),
    ("no edge cost", drop("edges", 1, "communicationCost"), "edges[1].communicationCost", "missing"),
    ("edge end missing", drop("edges", 1, "destId"), "edges[1].destId", "missing; expected the id of a layer"),
    ("edge end text", change("edges", 1, "destId", to="6"), "edges[1].destId", 'not a whole number ("6")'),
    ("edge no object", change("edges", 1, to=3), "edges[1]", "not an object (3)"),
    ("edges no list", change("edges", to={}), "edges", "not a list (an object)"),
    ("edges null", change("edges", to=None), "edges", "not a list (null)"),
    ("shared", change(*FIRST, "memoryUsageShared", to=-2), 'nodes[0].TMPCs["1"][0].memoryUsageShared', "negative"),
    (
        "least d",
        change(*FIRST, "leastDataParallelDegree", to=1.5),
        'nodes[0].TMPCs["1"][0].leastDataParallelDegree',
        "not a whole number (1.5)",
    ),
    ("tensors no list", change("tensors", to=3), "tensors", "not a list (3)"),
    ("tensor end", change("tensors", to=[{"nodes": [4, 77]}]), "tensors[0].nodes", "unknown layer 77"),
    (
        "tensor size",
        change("tensors", to=[{"nodes": [4, 9], "backwardBytes": -1}]),
        "tensors[0].backwardBytes",
        "negative",
    ),
    ("unknown source", edge(77, 6), "edges[3]", "unknown layer 77"),
    ("unknown target", edge(4, 78), "edges[3]", "unknown layer 78"),
    ("self loop", edge(6, 6), "edges[3]", "self loop at layer 6"),
    ("duplicate edge", edge(4, 9), "edges[3]", "duplicate edge 4 -> 9, first at edges[0]"),
    ("cycle", edge(6, 4), "edges", "cycle 4 -> 9 -> 6 -> 4"),
    ("duplicate id", change("nodes", 2, "id", to=9), "nodes[2].id", "duplicate id 9, first at nodes[1].id"),
    ("fractional id", change("nodes", 2, "id", to=6.5), "nodes[2].id", "not a whole number (6.5)"),
    ("text id", change("nodes", 2, "id", to="6"), "nodes[2].id", 'not a whole number ("6")'),
    ("boolean id", change("nodes", 2, "id", to=True), "nodes[2].id", "not a whole number (true)"),
    ("huge id", change("nodes", 2, "id", to=2**60), "nodes[2].id", "too large"),
    ("missing id", drop("nodes", 2, "id"), "nodes[2].id", "missing"),
    ("node no object", change("nodes", 2, to=[]), "nodes[2]", "not an object (a list)"),
    ("name no text", change("nodes", 2, "name", to=5), "nodes[2].name", "not a text (5)"),
    ("no nodes key", drop("nodes"), "nodes", "missing"),
    ("no layers", lambda given: given.update(nodes=[], edges=[]), "nodes", "no layers; expected at least one"),
    ("nodes no list", change("nodes", to={"a": 1}), "nodes", "not a list (an object)"),
    ("TMPCs missing", drop("nodes", 0, "TMPCs"), "nodes[0].TMPCs", "missing"),
    ("TMPCs no object", change("nodes", 0, "TMPCs", to=[]), "nodes[0].TMPCs", "not an object (a list)"),
    ("TMPCs empty", change("nodes", 0, "TMPCs", to={}), "nodes[0].TMPCs", "no TMPC at all"),
    ("TMPC lists empty", change("nodes", 0, "TMPCs", to={"1": []}), "nodes[0].TMPCs", "no TMPC at all"),
    ("t zero", change("nodes", 2, "TMPCs", "0", to=[]), 'nodes[2].TMPCs["0"]', "no tensor-parallel degree"),
    ("t negative", change("nodes", 2, "TMPCs", "-1", to=[]), 'nodes[2].TMPCs["-1"]', "no tensor-parallel degree"),
    ("t fractional", change("nodes", 2, "TMPCs", "1.5", to=[]), 'nodes[2].TMPCs["1.5"]', "no tensor-parallel degree"),
    ("t padded", change("nodes", 2, "TMPCs", "01", to=[]), 'nodes[2].TMPCs["01"]', "no tensor-parallel degree"),
    ("t too large", change("nodes", 2, "TMPCs", "100001", to=[]), 'nodes[2].TMPCs["100001"]', "from 1 to 100000"),
    ("t no list", change("nodes", 2, "TMPCs", "1", to={}), 'nodes[2].TMPCs["1"]', "not a list (an object)"),
    ("TMPC no object", change(*FIRST, to="x"), 'nodes[0].TMPCs["1"][0]', 'not an object ("x")'),
    ("TMPC id", change(*FIRST, "id", to=1), 'nodes[0].TMPCs["1"][0].id', "not a text (1)"),
    (
        "duplicate TMPC id",
        change("nodes", 1, "TMPCs", "2", 1, "id", to="vanilla"),
        'nodes[1].TMPCs["2"]',
        'duplicate TMPC id "vanilla"',
    ),
    (
        "missing fw",
        drop("nodes", 2, "TMPCs", "1", 0, "syncTimeFw", "4"),
        'nodes[2].TMPCs["1"][0].syncTimeFw["4"]',
        "missing; expected a figure for edge 4 -> 6",
    ),
    (
        "missing bw",
        drop(*FIRST, "syncTimeBw", "9"),
        'nodes[0].TMPCs["1"][0].syncTimeBw["9"]',
        "missing; expected a figure for edge 4 -> 9",
    ),
    (
        "no fw table",
        drop("nodes", 1, "TMPCs", "2", 0, "syncTimeFw"),
        'nodes[1].TMPCs["2"][0].syncTimeFw["4"]',
        "missing",
    ),
    (
        "fw for no edge",
        change("nodes", 2, "TMPCs", "1", 0, "syncTimeFw", "5", to=0.0),
        'nodes[2].TMPCs["1"][0].syncTimeFw["5"]',
        'there is no edge "5" -> 6',
    ),
    (
        "bw for no edge",
        change(*FIRST, "syncTimeBw", "x", to=0.0),
        'nodes[0].TMPCs["1"][0].syncTimeBw.x',
        'there is no edge 4 -> "x"',
    ),
    (
        "negative bw",
        change(*FIRST, "syncTimeBw", "9", to=-1),
        'nodes[0].TMPCs["1"][0].syncTimeBw["9"]',
        "negative (-1)",
    ),
    ("bw no table", change(*FIRST, "syncTimeBw", to=[]), 'nodes[0].TMPCs["1"][0].syncTimeBw', "not an object (a list)"),
    ("recompute", change(*FIRST, "recompute", to=1), 'nodes[0].TMPCs["1"][0].recompute', "neither true nor false (1)"),
    ("no devices", drop("maxDevices"), "maxDevices", "missing; expected a whole number from 1 to 100000"),
    ("devices zero", change("maxDevices", to=0), "maxDevices", "zero (0)"),
    ("devices negative", change("maxDevices", to=-3), "maxDevices", "negative (-3)"),
    ("devices fractional", change("maxDevices", to=2.5), "maxDevices", "not a whole number (2.5)"),
    ("devices text", change("maxDevices", to="8"), "maxDevices", 'not a whole number ("8")'),
    ("devices boolean", change("maxDevices", to=True), "maxDevices", "not a whole number (true)"),
    ("devices too many", change("maxDevices", to=100_001), "maxDevices", "too large (100001)"),
    ("devices infinite", change("maxDevices", to=math.inf), "maxDevices", "not"),
    ("no microbatches", drop("mbsInBatch"), "mbsInBatch", "missing"),
    ("microbatches", change("mbsInBatch", to=0), "mbsInBatch", "zero (0)"),
    ("too many microbatches", change("mbsInBatch", to=10**10), "mbsInBatch", "too large"),
    ("two numbers", change("maxBatchSize", to=17), "maxBatchSize", "17, but mbsInBatch is 16"),
    ("memory", change("maxMemoryPerDevice", to=0), "maxMemoryPerDevice", "zero (0); expected a finite size > 0"),
    ("memory text", change("maxMemoryPerDevice", to="8GiB"), "maxMemoryPerDevice", 'not a number ("8GiB")'),
    ("bandwidth", change("bandwidth", to=math.nan), "bandwidth", "not finite (nan)"),
    ("no bandwidth", drop("bandwidth"), "bandwidth", "missing; expected a finite rate > 0"),
    ("title", change("name", to=7), "name", "not a text (7)"),
    ("key no text", change("nodes", 0, "TMPCs", 1, to=[]), "nodes[0].TMPCs", "key 1 is no printable text"),
    ("half a surrogate", change("nodes", 0, "name", to="\ud800"), "nodes[0]", "half a surrogate pair"),
]


@pytest.mark.parametrize(("mutate", "path", "words"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_fault_is_reported_at_its_place(mutate: Callable[[Document], None], path: str, words: str) -> None:
    given = document()
    mutate(given)
    with pytest.raises(InputError) as caught:
        load(given)
    assert [fault for fault in caught.value.faults if fault.path == path and words in fault.message], str(caught.value)
    assert caught.value.exit_code == 3


def test_all_faults_are_reported_at_once() -> None:
    given = document()
    edge(6, 4)(given)
    change(*TIME, to=-1)(given)
    change("nodes", 2, "TMPCs", "1", 0, "memoryUsageA", to="x")(given)
    drop("nodes", 1, "TMPCs", "2", 0, "syncTimeFw", "4")(given)
    change("bandwidth", to=0)(given)
    change("maxBatchSize", to=1)(given)
    with pytest.raises(InputError) as caught:
        load(given)
    assert {fault.path for fault in caught.value.faults} >= {
        "edges",
        TIME_PATH,
        'nodes[2].TMPCs["1"][0].memoryUsageA',
        'nodes[1].TMPCs["2"][0].syncTimeFw["4"]',
        "bandwidth",
        "maxBatchSize",
    }
    assert str(caught.value).count("\n") == len(caught.value.faults)


def test_one_unreadable_id_does_not_make_every_edge_a_fault() -> None:
    given = document()
    given["nodes"][1]["id"] = "nine"
    with pytest.raises(InputError) as caught:
        load(given)
    assert [fault.path for fault in caught.value.faults] == ["nodes[1].id"]


def test_a_long_cycle_is_named_from_its_least_id_and_clipped() -> None:
    ids = list(range(100, 160))
    ring = {
        **document(),
        "nodes": [{"id": v, "TMPCs": {"1": [tmpc("x", [ids[i - 1]], [ids[(i + 1) % 60]])]}} for i, v in enumerate(ids)],
        "edges": [{"sourceId": v, "destId": ids[(i + 1) % 60], "communicationCost": 0} for i, v in enumerate(ids)],
    }
    with pytest.raises(InputError, match=r"cycle 100 -> 101 -> .* -> 119 -> \.\.\. \(60 layers\) -> 100;"):
        load(ring)


def test_the_document_is_left_as_it_was() -> None:
    given = document()
    before = copy.deepcopy(given)
    load(given, devices=3)
    assert given == before


def test_a_document_of_neither_kind_says_so() -> None:
    with pytest.raises(InputError, match=r"expected nodes and edges .* or types and layers"):
        load({"answer": 42})


def test_a_document_that_holds_itself_is_refused() -> None:
    knot: Document = {}
    knot["nodes"] = [knot]
    with pytest.raises(InputError):
        load(knot)
