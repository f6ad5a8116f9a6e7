"""Instances and files for the tests of the readers: random ones, mutated ones, and what every loaded one must keep."""

from __future__ import annotations

import copy
import graphlib
import json
import math
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from piper_ray.model.cluster import Link
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.workloads.formats.load import to_toml, to_upstream

WORKLOAD = """\
name = "chain"
[cluster]
devices = 4
microbatches = 8
memory = "64KiB"
bandwidth = "2kB/s"
[types.in]
tmpcs = [{ t = 1, id = "vanilla", time_s = 0, activation = 8 }]
[types.block]
inputs = ["1KiB", 100]
tmpcs = [
  { t = 1, id = "vanilla", time_s = [0.5, 0.25], weights = 1024, activation = 200, fixed = 2048 },
  { t = 2, id = "vanilla", time_s = 0.3, weights = 512, activation = 150, fixed = 900, forward_sync = [5, 6] },
  { t = [1, 2], id = "activation recomp", time_s = 0.7, activation = 20, fixed = 2048, backward_sync = 9 },
]
[layers]
mask = { type = "in" }
start = { type = "in" }
first = { type = "block", inputs = ["start", "mask"] }
stack = { continues = "first", length = 4, inputs = ["previous", "mask"] }
end = { type = "in", id = 9 }
[graph]
edges = [{ from = "stack", to = "end", bytes = "2KiB" }]
"""

PROFILE = "".join(
    f"node{number} -- {name} -- forward_compute_time={number}.5, backward_compute_time=1.000, "
    f"activation_size={activation}, parameter_size={number}00.0\n"
    for number, name, activation in [
        (1, "Input0", "0.0"),
        (2, "Conv2d(3, 64)", "4096.0"),
        (3, "LSTM(8, 8)", "[64.0; 32.0]"),
        (4, "__getitem__(0)", "64.0"),
        (5, "__getitem__(1)", "32.0"),
        (6, "Add", "64.0"),
    ]
) + "".join(f"\tnode{u} -- node{v}\n" for u, v in [(1, 2), (2, 3), (3, 4), (3, 5), (4, 6), (2, 6)])

# What stands in for a value of a JSON document; the texts that start with "raw:" are put into the file as they are.
NASTY: list[object] = [
    None, True, False, 0, -1, 1, 2, 3, 1.5, -0.0, 0.5, 1e-300, 5e-324, 1e29, 1e300, 10**30, 2**53, 2**63, -(2**70),
    math.inf, -math.inf, math.nan, "", "1", "-1", "vanilla", "nodes", "\x00", "\x7f\x1b[31m", "ü\u2028", [], {}, [[]],
    [{}], {"1": 1}, {"": {}}, [1, 2], "raw:1e400", "raw:" + "9" * 5000, "raw:" + "[" * 2000 + "]" * 2000,
    'raw:{"a": 1, "a": 2}', 'raw:"\\ud800"', "raw:", "raw:01", "raw:'x'",
]  # fmt: skip

# What stands in for a token of any text.
TOKENS = [
    "", "0", "1", "-1", "2", "1.5", "1e30", "1e31", "1e400", "nan", "inf", "-inf", "true", "9" * 5000, '"', "'", "[",
    "]", "{", "}", "=", ",", ".", "\t", "\n", "\r", " -- ", "node", "#", "\\", "\x00", "ü", '"1GiB"', "[1, 2]", "{}",
    "previous", "previous = {}", "[layers]", "[types.in]", "base = \"x\"", "length = 100000000", "1979-05-27", "0x10",
    "1_000",
]  # fmt: skip


def random_instance(rng: random.Random, most_layers: int = 6) -> Instance:
    """A small instance that can have anything: shuffled and negative ids, odd degrees, no edges, many TMPCs."""
    count = rng.randint(1, most_layers)
    ids = rng.sample(range(-3, 40), count)
    density = rng.choice([0.0, 0.3, 0.7, 1.0])
    pairs = [(u, v) for i, u in enumerate(ids) for v in ids[i + 1 :] if rng.random() < density]
    if rng.random() < 0.5:
        pairs.sort(key=lambda pair: ids.index(pair[1]))
    else:
        rng.shuffle(pairs)
    order = ids if rng.random() < 0.5 else rng.sample(ids, count)
    repetitive = rng.random() < 0.5  # few different figures, so that layers share types

    def figure() -> float:
        return float(rng.choice([0, 1, 2])) if repetitive else round(rng.choice([0.0, rng.random() * 100, 1e-3]), 6)

    def tmpc(layer: int, tmpc_id: str) -> Tmpc:
        return Tmpc(
            tmpc_id,
            figure(),
            figure(),
            figure(),
            figure(),
            {u: figure() for u, v in pairs if v == layer},
            {v: figure() for u, v in pairs if u == layer},
            rng.random() < 0.2,
            figure() if shards else 0.0,
            rng.choice([1, 2, 8]) if shards else 1,
        )

    shards = rng.random() < 0.3
    ends = [rng.sample(ids, rng.randint(2, count)) for _ in range(rng.choice([0, 0, 1, 3]))] if count > 1 else []
    names = ["block", "block", 'odd "name" \\ \x7f ü', ""]
    plain = Instance(
        layers=tuple(
            Layer(
                layer,
                rng.choice(names),
                {
                    t: tuple(
                        tmpc(layer, tmpc_id) for tmpc_id in ["vanilla", "activation recomp", "x"][: rng.randint(1, 3)]
                    )
                    for t in rng.sample([1, 2, 3, 8], rng.randint(1, 2))
                },
            )
            for layer in order
        ),
        edges=tuple(Edge(u, v, figure()) for u, v in pairs),
        devices=rng.randint(1, 12),
        microbatches=rng.choice([1, 2, 6, 12]),
        memory_bytes=float(rng.randint(1, 2000)),
        bandwidth_bytes_per_s=round(rng.random() * 100 + 0.1, 3),
        name=rng.choice(["", "random", "näme"]),
        tensors=tuple(Tensor(tuple(layers), figure(), figure()) for layers in ends),
    )
    return with_more_said(rng, plain)


def with_more_said(rng: random.Random, instance: Instance) -> Instance:
    """Half of the time with what files may leave out: passes, paths, samples, tokens, links; each by turns."""
    if rng.random() < 0.5:
        return instance
    parted, weighed = rng.choice([0.0, 0.5, 1.0]), rng.random() < 0.5
    path = rng.choice(["", "model.layers.{}", "{}.blocks.7", "a{{1}}.{}", 'odd "path" \\ ü'])

    def said(tmpc: Tmpc) -> Tmpc:
        if rng.random() >= parted:
            return tmpc
        share = rng.choice([0.0, 1 / 3, 0.5, 1.0, rng.random()])
        forward_s = tmpc.time_per_sample_s * share
        rest_s = tmpc.time_per_sample_s - forward_s
        backward_s = rng.choice([None, rest_s, rest_s * (1 + 1e-13)])
        return replace(tmpc, forward_s=forward_s, backward_s=backward_s, weight_s=rest_s / 2 if weighed else None)

    layers = tuple(
        replace(
            layer,
            tmpcs={t: tuple(map(said, row)) for t, row in layer.tmpcs.items()},
            path=path.format(index + 3) if rng.random() < 0.9 else "",
        )
        for index, layer in enumerate(instance.layers)
    )
    inner = [Link(round(rng.random() * 1000 + 0.1, 3), size) for size in rng.choice([(), (2,), (4, 8)])]
    return replace(
        instance,
        layers=layers,
        cluster=replace(instance.cluster, links=(*inner, *instance.cluster.links)),
        batch=replace(
            instance.batch,
            samples_per_microbatch=rng.choice([None, 1, 16]),
            tokens_per_sample=rng.choice([None, 1024]),
        ),
        measured_threads=rng.choice([None, 1, 64]),
    )


def chained_instance(rng: random.Random) -> Instance:
    """As ``repeated_layer``, with what else an instance may say of its layers."""
    return with_more_said(rng, repeated_layer(rng))


def repeated_layer(rng: random.Random) -> Instance:
    """An instance with a chain that repeats a layer, each fed by the one before and some by a common source."""
    length, fed = rng.randint(2, 9), rng.random() < 0.7
    first = rng.randint(0, 50)
    chain = list(range(first + 1, first + 1 + length))
    pairs = [(u, v) for v in chain for u in ([v - 1] if v > chain[0] else []) + ([first] if fed else [])]
    times = [rng.choice([0.1, 0.2]) for _ in chain]

    def layer(number: int, time_s: float, name: str) -> Layer:
        forward = {u: 4.0 for u, v in pairs if v == number}
        return Layer(
            number, name, {1: (Tmpc("a", time_s, 1.0, 2.0, 3.0, forward, {v: 5.0 for u, v in pairs if u == number}),)}
        )

    layers = [layer(first, 0.0, "mask")] + [layer(v, time_s, "block") for v, time_s in zip(chain, times, strict=True)]
    edges = tuple(Edge(u, v, 7.0 if u == first else 8.0) for u, v in pairs)
    tensors = (Tensor((rng.choice(chain), first), 1.0, 2.0),) if rng.random() < 0.3 else ()
    return Instance(tuple(layers), edges, 4, 8, 100.0, 10.0, "chained", tensors)


def mutated_files(seed: int, count: int, folder: Path) -> Iterator[Path]:
    """``count`` files, most of them broken somewhere, each written to ``folder`` when its turn comes."""
    rng = random.Random(seed)
    for number in range(count):
        kind = rng.choice(["json", "json", "toml", "toml", "txt"])
        if kind == "json" and rng.random() < 0.7:
            data = _mutated_document(rng, to_upstream(random_instance(rng, 4))).encode("utf-8", "surrogatepass")
        else:
            data = _mutated_text(rng, _seed_text(rng, kind), _seed_text(rng, rng.choice(["json", "toml", "txt"])))
        path = folder / f"mutated-{number}.{kind}"
        path.write_bytes(data)
        yield path
        path.unlink()


def _seed_text(rng: random.Random, kind: str) -> str:
    if kind == "txt":
        return PROFILE
    instance = random_instance(rng, 4) if rng.random() < 0.7 else chained_instance(rng)
    if kind == "json":
        return json.dumps(to_upstream(instance), indent=rng.choice([None, 1]))
    return WORKLOAD if rng.random() < 0.4 else to_toml(instance)


def _mutated_document(rng: random.Random, document: dict[str, object]) -> str:
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        containers = [document, *_containers(document)]
        container: Any = rng.choice([found for found in containers if found] or [document])
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        if not keys:
            continue
        key = rng.choice(keys)
        action = rng.choice(["drop", "replace", "replace", "replace", "swap", "copy", "rename"])
        if action == "drop":
            del container[key]
        elif action == "replace":
            container[key] = copy.deepcopy(rng.choice(NASTY))
        elif action == "swap":
            other = rng.choice(keys)
            container[key], container[other] = container[other], container[key]
        elif action == "copy":
            value = copy.deepcopy(container[rng.choice(keys)])
            if isinstance(container, list):
                container.append(value)
            else:
                container[key] = value
        elif isinstance(container, dict):
            container[rng.choice(["0", "1", "-1", "x", "mbsInBatch", "maxBatchSize", "types", "5"])] = container.pop(
                key
            )
    text = json.dumps(document)
    for value in NASTY:
        if isinstance(value, str) and value.startswith("raw:"):
            text = text.replace(json.dumps(value), value.removeprefix("raw:"))
    return text


def _containers(value: object) -> Iterator[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        if isinstance(item, (dict, list)):
            yield item
            yield from _containers(item)


def _mutated_text(rng: random.Random, text: str, other: str) -> bytes:
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        at = rng.randrange(len(text) + 1)
        action = rng.choice(["cut", "token", "token", "number", "number", "drop line", "repeat line", "splice"])
        lines = text.splitlines(keepends=True)
        line = rng.randrange(len(lines)) if lines else 0
        if action == "cut":
            text = text[:at]
        elif action == "token":
            text = text[:at] + rng.choice(TOKENS) + text[at + rng.choice([0, 0, 1, 3]) :]
        elif action == "number":
            digits = [i for i, character in enumerate(text) if character.isdigit()]
            at = rng.choice(digits) if digits else at
            text = text[:at] + rng.choice(TOKENS) + text[at + 1 :]
        elif action == "drop line":
            text = "".join(lines[:line] + lines[line + 1 :])
        elif action == "repeat line":
            text = "".join(lines[: line + 1] + lines[line:])
        else:
            start = rng.randrange(len(other) + 1)
            text = text[:at] + other[start : start + rng.randrange(200)] + text[at:]
    data = bytearray(text.encode())
    if data and rng.random() < 0.15:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def assert_consistent(instance: Instance) -> None:
    """What every loaded instance keeps, told without the reader's code."""
    ids = [layer.id for layer in instance.layers]
    assert ids
    assert len(set(ids)) == len(ids)
    pairs = [(edge.source, edge.target) for edge in instance.edges]
    assert len(set(pairs)) == len(pairs)
    graph: dict[int, set[int]] = {layer: set() for layer in ids}
    leaving: dict[int, set[int]] = {layer: set() for layer in ids}
    for source, target in pairs:
        graph[target].add(source)
        leaving[source].add(target)
    assert graph.keys() == leaving.keys() == set(ids)
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(ids)  # raises CycleError on a cycle
    figures = [edge.communication_bytes for edge in instance.edges]
    for layer in instance.layers:
        assert type(layer.id) is int
        layer.name.encode()
        assert layer.tmpcs
        for t, tmpcs in layer.tmpcs.items():
            assert type(t) is int
            assert t >= 1
            assert tmpcs
            assert len({tmpc.id for tmpc in tmpcs}) == len(tmpcs)
            for tmpc in tmpcs:
                assert type(tmpc.recompute) is bool
                assert tmpc.forward_sync_bytes.keys() == graph[layer.id]
                assert tmpc.backward_sync_bytes.keys() == leaving[layer.id]
                figures += [tmpc.time_per_sample_s, tmpc.weights_bytes, tmpc.activation_bytes, tmpc.fixed_bytes]
                if tmpc.forward_s is not None:
                    assert tmpc.backward_s is not None
                    assert math.isclose(tmpc.forward_s + tmpc.backward_s, tmpc.time_per_sample_s, rel_tol=2e-9)
                    figures += [tmpc.forward_s, tmpc.backward_s]
                figures += [*tmpc.forward_sync_bytes.values(), *tmpc.backward_sync_bytes.values()]
    for figure in figures:
        assert type(figure) is float
        assert math.isfinite(figure)
        assert math.copysign(1.0, figure) == 1.0
    assert type(instance.devices) is type(instance.microbatches) is int
    assert min(instance.devices, instance.microbatches) >= 1
    assert 0.0 < instance.memory_bytes < math.inf
    assert 0.0 < instance.bandwidth_bytes_per_s < math.inf


@contextmanager
def named_pipe(path: Path) -> Iterator[Path]:
    """Whoever reads it waits, and gets nothing after a while, so that no test waits for ever."""
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    end = threading.Timer(30.0, os.close, (writer,))
    end.start()
    try:
        yield path
    finally:
        end.cancel()
        os.close(writer)
