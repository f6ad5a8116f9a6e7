"""The compact TOML workload: expansion, chains, bases, and a fault for everything that can be wrong with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import InputError
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.workloads.formats.load import load, load_text, to_toml, to_upstream

WORKLOAD = """\
name = "small"

[cluster]
devices = 4
microbatches = 8
memory = "1KiB"
bandwidth = "2kB/s"

[types.in]
tmpcs = [{ t = 1, id = "vanilla", time_s = 0, backward_sync = 3 }]

[types.block]
name = "Block"
inputs = ["1KiB", 100]
tmpcs = [
  { t = 1, id = "vanilla", time_s = [0.5, 0.25, 0.125], weights = "1kB", activation = 20, fixed = 30 },
  { t = [2, 6], id = "half", time_s = 1, forward_sync = [5, "6B"], recompute = true },
]

[layers]
mask = { type = "in", id = 10 }
start = { type = "in" }
first = { type = "block", inputs = ["start", "mask"] }
stack = { continues = "first", length = 4, inputs = ["previous", "mask"] }
"""


def write(tmp_path: Path, text: str, name: str = "small.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def block(layer: int, time_s: float, before: int, after: int | None) -> Layer:
    backward = {} if after is None else {after: 0.0}
    vanilla = Tmpc("vanilla", time_s, 1000.0, 20.0, 30.0, {before: 0.0, 10: 0.0}, backward)
    half = Tmpc("half", 1.0, 0.0, 0.0, 0.0, {before: 5.0, 10: 6.0}, backward, recompute=True)
    return Layer(layer, "Block", {1: (vanilla,), 2: (half,), 6: (half,)})


def test_expansion_by_hand(tmp_path: Path) -> None:
    # Four blocks, 12 to 15; three measured times, so the fourth takes the first again.
    blocks = (block(12, 0.5, 11, 13), block(13, 0.25, 12, 14), block(14, 0.125, 13, 15), block(15, 0.5, 14, None))
    source = Tmpc("vanilla", 0.0, 0.0, 0.0, 0.0)
    feeds_all = Tmpc("vanilla", 0.0, 0.0, 0.0, 0.0, {}, dict.fromkeys((12, 13, 14, 15), 3.0))
    feeds_first = Tmpc("vanilla", 0.0, 0.0, 0.0, 0.0, {}, {12: 3.0})
    assert source != feeds_first
    assert load(write(tmp_path, WORKLOAD)) == Instance(
        layers=(Layer(10, "in", {1: (feeds_all,)}), Layer(11, "in", {1: (feeds_first,)}), *blocks),
        edges=tuple(
            Edge(source, target, cost)
            for target in (12, 13, 14, 15)
            for source, cost in ((target - 1, 1024.0), (10, 100.0))
        ),
        devices=4,
        microbatches=8,
        memory_bytes=1024.0,
        bandwidth_bytes_per_s=2000.0,
        name="small",
    )


def test_a_chain_of_no_more_than_its_head_is_its_head(tmp_path: Path) -> None:
    text = WORKLOAD.replace("length = 4", "length = 1") + 'last = { type = "in", inputs = ["stack"] }\n'
    instance = load(write(tmp_path, text))
    assert [layer.id for layer in instance.layers] == [10, 11, 12, 13]
    assert [(edge.source, edge.target) for edge in instance.edges] == [(11, 12), (10, 12), (12, 13)]


def test_a_chain_continues_a_chain(tmp_path: Path) -> None:
    text = WORKLOAD + 'more = { continues = "stack", length = 6, inputs = ["previous", "start"] }\n'
    edges = [(edge.source, edge.target) for edge in load(write(tmp_path, text)).edges]
    assert edges[-4:] == [(15, 16), (11, 16), (16, 17), (11, 17)]


def test_edges_of_the_graph_table_come_last_and_carry_their_cost(tmp_path: Path) -> None:
    text = WORKLOAD + 'end = { type = "in" }\n[graph]\nedges = [{ from = "stack", to = "end", bytes = "2KiB" }]\n'
    assert load(write(tmp_path, text)).edges[-1] == Edge(15, 16, 2048.0)


def test_what_replicas_share_and_the_tensors_of_a_stage(tmp_path: Path) -> None:
    row = "time_s = 1,"
    text = WORKLOAD.replace(row, 'time_s = 1, shared = "2kB", least_data_parallel_degree = 4,', 1)
    text += '[graph]\ntensors = [{ layers = ["mask", "first", "stack"], forward = "1KiB" }]\n'
    instance = load(write(tmp_path, text))
    assert instance.tensors == (Tensor((10, 12, 15), 1024.0, 0.0),)
    assert {(x.shared_bytes, x.least_data_parallel_degree) for x in instance.layers[3].tmpcs[2]} == {(2000.0, 4)}
    assert {(x.shared_bytes, x.least_data_parallel_degree) for x in instance.layers[3].tmpcs[1]} == {(0.0, 1)}
    assert load(write(tmp_path, to_toml(instance), "again.toml")) == instance
    assert load(to_upstream(instance)) == instance


def test_a_base_with_one_number_changed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, WORKLOAD)
    longer = write(
        tmp_path / "sub", 'base = "../small.toml"\nlayers.stack.length = 7\ncluster.memory = "2KiB"\n', "b.toml"
    )
    assert len(load(longer).layers) == 9
    assert load(longer).memory_bytes == 2048.0
    assert load(longer).name == "small"


def test_the_file_names_the_instance_that_has_no_name(tmp_path: Path) -> None:
    text = WORKLOAD.replace('name = "small"', "", 1)
    assert load(write(tmp_path, text, "bert.toml")).name == "bert"


def test_a_parsed_document_of_this_shape() -> None:
    row = {"t": 1, "id": "x", "time_s": 1.0}
    instance = load({"types": {"a": {"tmpcs": [row]}}, "layers": {"l": {"type": "a"}}}, devices=1, microbatches=1,
                    memory_bytes=1, bandwidth_bytes_per_s=1)  # fmt: skip
    assert instance.layers == (Layer(0, "a", {1: (Tmpc("x", 1.0, 0.0, 0.0, 0.0),)}),)


def test_the_cluster_may_be_left_to_the_caller(tmp_path: Path) -> None:
    head, _, rest = WORKLOAD.partition("[cluster]")
    path = write(tmp_path, head + rest[rest.index("[types.in]") :])
    assert load(path, devices=1, microbatches=2, memory_bytes=3, bandwidth_bytes_per_s=4).memory_bytes == 3.0
    with pytest.raises(InputError) as caught:
        load(path)
    assert [fault.path for fault in caught.value.faults] == [
        "cluster.devices",
        "cluster.microbatches",
        "cluster.memory",
        "cluster.bandwidth",
    ]
    assert "(or give --memory)" in str(caught.value)


def test_writing_finds_the_types_and_the_chain(tmp_path: Path) -> None:
    instance = load(write(tmp_path, WORKLOAD))
    text = to_toml(instance)
    assert load(write(tmp_path, text, "again.toml")) == instance
    assert text.count("[types.") == 2
    assert '13-15 = { continues = "12", length = 4, inputs = ["previous", "10"] }' in text
    assert "time_s = [0.5, 0.25, 0.125]" in text


FAULTS: list[tuple[str, str, str, str, str]] = [
    # name, what of the text, what it becomes, path of the fault, words in it
    ("negative", "weights = \"1kB\"", "weights = -1", "types.block.tmpcs[0].weights", "negative (-1)"),
    ("bad unit", "\"1kB\"", "\"1 furlong\"", "types.block.tmpcs[0].weights", "unknown unit"),
    ("ambiguous unit", "\"1kB\"", "\"1Gb\"", "types.block.tmpcs[0].weights", "ambiguous"),
    ("nan", "activation = 20", "activation = nan", "types.block.tmpcs[0].activation", "not finite (nan)"),
    ("time text", "time_s = 1,", 'time_s = "1",', "types.block.tmpcs[1].time_s", 'not a number ("1")'),
    ("no times", "[0.5, 0.25, 0.125]", "[]", "types.block.tmpcs[0].time_s", "empty"),
    ("one bad time", "0.25", "inf", "types.block.tmpcs[0].time_s[1]", "not finite (inf)"),
    ("missing time", "time_s = 1,", "", "types.block.tmpcs[1].time_s", "missing"),
    ("t zero", "[2, 6]", "[0, 6]", "types.block.tmpcs[1].t[0]", "zero (0)"),
    ("t fraction", "[2, 6]", "2.5", "types.block.tmpcs[1].t", "not a whole number (2.5)"),
    ("no t", "[2, 6]", "[]", "types.block.tmpcs[1].t", "empty"),
    ("misspelt figure", "weights =", "weight =", "types.block.tmpcs[0].weight", "unknown key; expected one of t, id"),
    ("duplicate TMPC", 't = [2, 6], id = "half"', 't = [1, 6], id = "vanilla"', "types.block.tmpcs",
     'id "vanilla" at t = 1'),
    ("same t twice", "[2, 6]", "[2, 2]", "types.block.tmpcs", 'duplicate TMPC id "half" at t = 2'),
    ("sync count", "[5, \"6B\"]", "[5, 6, 7]", "layers.first", "2 edges arrive at layer 12"),
    ("bw count", "backward_sync = 3", "backward_sync = [3, 4]", "layers.mask", "4 edges leave layer 10"),
    ("input count", "[\"1KiB\", 100]", "[1, 2, 3]", "layers.first.inputs", "2 inputs, but types.block.inputs lists 3"),
    ("no rows", "tmpcs = [{ t = 1, id = \"vanilla\", time_s = 0, backward_sync = 3 }]", "tmpcs = []",
     "types.in.tmpcs", "empty"),
    ("unknown type", 'type = "in" }\nfirst', 'type = "out" }\nfirst', "layers.start.type", 'unknown type "out"'),
    ("unknown input", '["start", "mask"]', '["strat", "mask"]', "layers.first.inputs[0]", 'unknown layer "strat"'),
    ("input twice", '["start", "mask"]', '["mask", "mask"]', "layers.first.inputs[1]", 'duplicate edge from "mask"'),
    ("previous outside", '["start", "mask"]', '["previous", "mask"]', "layers.first.inputs[0]", "outside a chain"),
    ("self loop", '["start", "mask"]', '["first", "mask"]', "layers.first.inputs[0]", "self loop at layer 12"),
    ("cycle", '["start", "mask"]', '["stack", "mask"]', "layers", "cycle 12 -> 13 -> 14 -> 15 -> 12"),
    ("length low", "length = 4", "length = 0", "layers.stack.length", "zero (0)"),
    ("length huge", "length = 4", "length = 1000000000", "layers.stack.length", "too large"),
    ("no length", "length = 4, ", "", "layers.stack.length", "missing"),
    ("length alone", 'type = "in", id', 'type = "in", length = 2, id', "layers.mask.length", "without continues"),
    ("no type", 'type = "in", id', "id", "layers.mask.type", "missing"),
    ("type and continues", "length = 4", 'length = 4, type = "in"', "layers.stack.type", "a type and continues"),
    ("unknown head", 'continues = "first"', 'continues = "frist"', "layers.stack.continues", 'unknown layer "frist"'),
    ("own head", 'continues = "first"', 'continues = "stack"', "layers.stack.continues", 'unknown layer "stack"'),
    ("duplicate id", 'first = { type = "block"', 'first = { id = 10, type = "block"', "layers.first",
     "duplicate id 10"),
    ("reserved label", "mask = {", "previous = {", "layers.previous", "reserved label"),
    ("unknown key", "[layers]", "[layres]", "layres", "unknown key"),
    ("no layers", "[layers]", "[layers]\n[types.x]", "layers", "no layers"),
    ("cluster key", "devices = 4", "gpus = 4", "cluster.gpus", "unknown key; expected one of devices"),
    ("devices", "devices = 4", "devices = 0", "cluster.devices", "zero (0)"),
    ("memory", "\"1KiB\"\nband", "\"0GiB\"\nband", "cluster.memory", "zero"),
    ("bandwidth", "\"2kB/s\"", "\"fast\"", "cluster.bandwidth", "not understood"),
    ("cluster no table", "[cluster]", "cluster = 1\n[other]", "cluster", "not a table (1)"),
    ("edges", "[layers]", "[graph]\nedges = [{ from = \"mask\", to = \"nowhere\", bytes = 1 }]\n[layers]",
     "graph.edges[0].to", 'unknown layer "nowhere"'),
    ("edge cost", "[layers]", "[graph]\nedges = [{ from = \"mask\", to = \"first\" }]\n[layers]",
     "graph.edges[0].bytes", "missing"),
    ("edge twice", "[layers]", "[graph]\nedges = [{ from = \"mask\", to = \"first\", bytes = 1 }]\n[layers]",
     "graph.edges[0]", "duplicate edge 10 -> 12"),
    ("shared", "activation = 20", "shared = -1", "types.block.tmpcs[0].shared", "negative"),
    ("least d", "activation = 20", "least_data_parallel_degree = 0",
     "types.block.tmpcs[0].least_data_parallel_degree", "zero (0)"),
    ("tensor end", "[layers]", "[graph]\ntensors = [{ layers = [\"mask\", \"x\"] }]\n[layers]",
     "graph.tensors[0].layers[1]", 'unknown layer "x"'),
    ("tensor of one", "[layers]", "[graph]\ntensors = [{ layers = [\"mask\"] }]\n[layers]",
     "graph.tensors[0].layers", "1 layers; expected at least two"),
    ("tensor end twice", "[layers]", "[graph]\ntensors = [{ layers = [\"mask\", \"mask\"] }]\n[layers]",
     "graph.tensors[0].layers", "layer 10 comes more than once"),
    ("base missing", 'name = "small"', 'base = "nowhere.toml"', "base", "No such file"),
    ("base no text", 'name = "small"', "base = 3", "base", "not a text"),
    ("base of itself", 'name = "small"', 'base = "small.toml"', "base", "deep; expected one that does not lead"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "path", "words"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_fault_is_reported_at_its_place(tmp_path: Path, old: str, new: str, path: str, words: str) -> None:
    assert old in WORKLOAD
    with pytest.raises(InputError) as caught:
        load(write(tmp_path, WORKLOAD.replace(old, new, 1)))
    assert [fault for fault in caught.value.faults if fault.path == path and words in fault.message], str(caught.value)


def test_faults_of_types_layers_and_cluster_are_reported_at_once(tmp_path: Path) -> None:
    text = WORKLOAD.replace("devices = 4", "devices = 0").replace("activation = 20", "activation = -20")
    text = text.replace('["start", "mask"]', '["stack", "mask"]')
    with pytest.raises(InputError) as caught:
        load(write(tmp_path, text))
    assert {fault.path for fault in caught.value.faults} == {
        "cluster.devices",
        "types.block.tmpcs[0].activation",
        "layers",
    }


def test_an_input_that_would_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    many = "".join(f'm{i} = {{ type = "in" }}\n' for i in range(30))
    labels = ", ".join(f'"m{i}"' for i in range(30))
    wide = f'[types.wide]\ntmpcs = [{{ t = 1, id = "x", time_s = 1 }}]\n[layers]\n{many}w = {{ type = "wide" }}\n'
    wide += f'x = {{ continues = "w", length = 40000, inputs = [{labels}] }}\n'
    with pytest.raises(InputError, match="1199970 edges; expected at most 500000"):
        load(write(tmp_path, WORKLOAD[: WORKLOAD.index("[layers]")] + wide))


def test_weights_in_common_experts_and_key_heads_go_there_and_back(tmp_path: Path) -> None:
    text = (
        WORKLOAD.replace('name = "Block"', 'name = "Block"\nexperts = 8\nkey_heads = 4').replace(
            'start = { type = "in" }', 'start = { type = "in", tied = "table" }'
        )
        + 'last = { type = "block", inputs = ["stack", "mask"], tied = "table" }\n'
    )
    read = load(write(tmp_path, text))
    assert {layer.id: (layer.tied, layer.experts, layer.key_heads) for layer in read.layers} == {
        10: ("", 0, 0), 11: ("table", 0, 0), **dict.fromkeys(range(12, 16), ("", 8, 4)), 16: ("table", 8, 4),
    }  # fmt: skip
    assert read.tied_layers == {"table": (11, 16)}
    assert load(write(tmp_path, to_toml(read), "again.toml")) == read
    assert load(to_upstream(read)) == read
    tied = replace(read, layers=tuple(replace(layer, tied="table") for layer in read.layers))
    assert load(write(tmp_path, to_toml(tied), "tied.toml")) == tied
    for name, right in (("experts", 8), ("key_heads", 4)):
        for wrong in ("0", '"a"'):
            with pytest.raises(InputError, match=f"types.block.{name}"):
                load(write(tmp_path, text.replace(f"{name} = {right}", f"{name} = {wrong}")))
    with pytest.raises(InputError, match=r"layers.start.tied"):
        load(write(tmp_path, text.replace('tied = "table" }\nfirst', "tied = 3 }\nfirst")))


@pytest.mark.parametrize(
    ("memory_bytes", "bandwidth_bytes_per_s", "lines"),
    [
        (80e9, 42.5e9, ['memory = "80GB"', 'bandwidth = "42.5GB/s"']),
        (8 * 2.0**30, 25 * 2.0**30, ['memory = "8GiB"', 'bandwidth = "25GiB/s"']),
        (78908923838.0, 1e9 / 3, ["memory = 78908923838  # 73.49 GiB", "bandwidth = 333333333.3333333  # 317.9 MiB/s"]),
        (100.0, 5000.0, ["memory = 100", "bandwidth = 5000"]),
    ],
)
def test_sizes_are_written_as_people_read_them_and_read_back_exactly(
    memory_bytes: float, bandwidth_bytes_per_s: float, lines: list[str]
) -> None:
    layer = Layer(0, "a", {1: (Tmpc("p", 0.1),)})
    links = (Link(bandwidth_bytes_per_s * 2, 4), Link(bandwidth_bytes_per_s))
    instance = Instance([layer], [], cluster=Cluster(8, memory_bytes, links), batch=Batch(8))
    text = to_toml(instance)
    assert text.splitlines()[5:7] == lines
    back = load_text(text)
    assert (back.memory_bytes, back.cluster.links) == (memory_bytes, links)
