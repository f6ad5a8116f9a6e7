"""Instances for tests: named ones, shapes of any size, seeded random ones, and a Hypothesis strategy.

Most figures are small integers, so that ties occur and memory fits to the byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc

VANILLA, RECOMPUTE = "vanilla", "activation recomp"
_IDS = (VANILLA, RECOMPUTE, "offload", "selective")


def build(
    tmpcs: Mapping[int, Mapping[int, Sequence[Tmpc]]],
    edges: Mapping[tuple[int, int], float],
    *,
    devices: int = 4,
    microbatches: int = 4,
    memory_bytes: float = 1e6,
    bandwidth_bytes_per_s: float = 4.0,
    name: str = "",
) -> Instance:
    """An instance from tmpcs[layer][t] and edges[u, v] = c. fw and bw that are not given are zero."""

    def complete(layer: int, tmpc: Tmpc) -> Tmpc:
        forward = {u: tmpc.forward_sync_bytes.get(u, 0.0) for u, v in edges if v == layer}
        backward = {v: tmpc.backward_sync_bytes.get(v, 0.0) for u, v in edges if u == layer}
        return replace(tmpc, forward_sync_bytes=forward, backward_sync_bytes=backward)

    return Instance(
        layers=tuple(
            Layer(layer, f"layer{layer}", {t: tuple(complete(layer, tmpc) for tmpc in row) for t, row in rows.items()})
            for layer, rows in tmpcs.items()
        ),
        edges=tuple(Edge(u, v, float(c)) for (u, v), c in edges.items()),
        devices=devices,
        microbatches=microbatches,
        memory_bytes=float(memory_bytes),
        bandwidth_bytes_per_s=float(bandwidth_bytes_per_s),
        name=name,
    )


def tmpc(time_s: float, weights: float = 0, activation: float = 0, fixed: float = 0, name: str = VANILLA) -> Tmpc:
    return Tmpc(name, float(time_s), float(weights), float(activation), float(fixed), recompute=name == RECOMPUTE)


def _plain_layer() -> dict[int, list[Tmpc]]:
    """Vanilla or recomputed, on one device or two; twice the devices take more than half the time."""
    return {
        1: [tmpc(6, 4, 5, 6), tmpc(8, 4, 1, 8, RECOMPUTE)],
        2: [tmpc(4, 2, 3, 3), tmpc(5, 2, 1, 4, RECOMPUTE)],
    }


def equal_chain(length: int, **cluster: float) -> Instance:
    """Equal layers, one after the other."""
    edges = {(v, v + 1): 1.0 for v in range(length - 1)}
    return _on_cluster(build({v: _plain_layer() for v in range(length)}, edges, name="equal chain"), cluster)


def two_towers(height: int, **cluster: float) -> Instance:
    """Two chains of ``height`` layers that start from one layer and end in another: (height + 1)^2 + 2 downsets."""
    left, right = range(1, height + 1), range(height + 1, 2 * height + 1)
    end = 2 * height + 1
    edges = {(u, u + 1): 1.0 for tower in (left, right) for u in tower[:-1]}
    edges |= {(0, tower[0]): 2.0 for tower in (left, right)} | {(tower[-1], end): 2.0 for tower in (left, right)}
    return _on_cluster(build({v: _plain_layer() for v in range(end + 1)}, edges, name="two towers"), cluster)


def parallel_branches(blocks: int, branches: int, **cluster: float) -> Instance:
    """As Inception: blocks in series, each ``branches`` layers side by side between a fork and a join."""
    edges: dict[tuple[int, int], float] = {}
    fork = 0
    for _ in range(blocks):
        join = fork + branches + 1
        for branch in range(fork + 1, join):
            edges |= {(fork, branch): 1.0, (branch, join): 2.0}
        fork = join
    return _on_cluster(build({v: _plain_layer() for v in range(fork + 1)}, edges, name="parallel branches"), cluster)


def _on_cluster(instance: Instance, cluster: Mapping[str, float]) -> Instance:
    return replace(instance, **cluster)  # type: ignore[arg-type]


def named_instances() -> dict[str, Instance]:
    """At most six layers each: small enough for brute force."""
    half_as_fast = {1: [tmpc(6, 2, 1, 2)], 3: [tmpc(4, 1, 1, 1)]}
    cases = [
        build({7: _plain_layer()}, {}, name="one layer"),
        equal_chain(4, memory_bytes=30.0),
        two_towers(2, devices=3, memory_bytes=40.0),
        parallel_branches(1, 3, devices=3, memory_bytes=50.0),
        build({v: _plain_layer() for v in (3, 1, 2)}, {}, memory_bytes=25.0, name="no edges"),
        build({v: _plain_layer() for v in range(4)}, {(0, 1): 1, (2, 3): 1}, memory_bytes=25.0, name="disconnected"),
        build({0: {2: [tmpc(3)]}, 1: _plain_layer(), 2: {2: [tmpc(3)]}}, {(0, 1): 1, (1, 2): 1}, name="no t = 1"),
        build({0: {1: [tmpc(2)]}, 1: {2: [tmpc(2)]}}, {(0, 1): 1}, name="no degree in common"),
        build(dict.fromkeys(range(3), half_as_fast), {(0, 1): 1, (1, 2): 1}, devices=5, name="degrees 1 and 3"),
        build({v: {1: [tmpc(0)]} for v in range(3)}, {(0, 1): 0, (1, 2): 0}, name="no cost at all"),
        build({0: {1: [tmpc(0)]}, 1: _plain_layer(), 2: _plain_layer()}, {(0, 2): 1, (1, 2): 1}, name="free source"),
        # Vanilla takes 6 + 5y. Two stages of d = 1 hold y = 2 and 1: 16 and 11 bytes.
        build({0: _plain_layer(), 1: _plain_layer()}, {(0, 1): 1}, devices=2, memory_bytes=16.0, name="exact fit"),
        build({0: _plain_layer(), 1: _plain_layer()}, {(0, 1): 1}, devices=2, memory_bytes=6.9, name="does not fit"),
        build(
            {v: {1: [tmpc(3, 1, 2, 2), tmpc(3, 1, 2, 2, "offload"), tmpc(4, 2, 3, 3, "x")]} for v in range(3)},
            {(0, 1): 1, (1, 2): 1},
            name="dominated and equal TMPCs",
        ),
        # Five microbatches: d is 1 or 5, and no sum of degrees is above 5.
        build({v: _plain_layer() for v in range(2)}, {(0, 1): 1}, devices=12, microbatches=5, name="prime batch"),
    ]
    return {instance.name: instance for instance in cases}


def random_instance(
    seed: int, *, most_layers: int = 5, most_devices: int = 6, most_tmpcs: int = 4, density: float | None = None
) -> Instance:
    """A random DAG with anything in it that an instance may have; by turns small integers and arbitrary figures.

    Half of them ask for least data-parallel degrees, share memory among replicas, or have tensors with several ends.

    density: the share of pairs of layers with an edge, 1 being a chain with all shortcuts; random if None.
    """
    rng = random.Random(seed)
    integers = rng.random() < 0.6

    def figure(most: int) -> float:
        if rng.random() < 0.15:
            return 0.0
        return float(rng.randint(0, most)) if integers else rng.uniform(0.0, most)

    plain = _random_instance(rng, figure, (most_layers, most_devices, most_tmpcs), density)
    return with_extras(random.Random(f"extras {seed}"), plain)


def with_extras(rng: random.Random, instance: Instance) -> Instance:
    """Half of the time with what Piper's inputs do not have, each by turns."""
    if rng.random() < 0.5:
        return instance
    sharing, asking = rng.random() < 0.6, rng.random() < 0.6

    def extended(row: tuple[Tmpc, ...]) -> tuple[Tmpc, ...]:
        return tuple(
            replace(
                x,
                shared_bytes=float(rng.choice([0, 0, 1, 4, 9])) if sharing else 0.0,
                least_data_parallel_degree=rng.choice([1, 1, 2, 3, 4]) if asking and number else 1,
            )
            for number, x in enumerate(row)
        )

    layers = tuple(
        replace(layer, tmpcs={t: extended(row) for t, row in layer.tmpcs.items()}) for layer in instance.layers
    )
    return replace(instance, layers=layers, tensors=_some_tensors(rng, instance))


def _some_tensors(rng: random.Random, instance: Instance) -> tuple[Tensor, ...]:
    """Of any layers, whether or not edges join them."""
    ids = [layer.id for layer in instance.layers]
    if len(ids) < 2:
        return ()
    return tuple(
        Tensor(tuple(rng.sample(ids, rng.randint(2, len(ids)))), float(rng.randint(0, 3)), float(rng.randint(0, 3)))
        for _ in range(rng.choice([0, 1, 2, 4]))
    )


def _random_instance(
    rng: random.Random, figure: Callable[[int], float], most: tuple[int, int, int], density: float | None
) -> Instance:
    most_layers, most_devices, most_tmpcs = most
    ids = rng.sample(range(100), rng.randint(1, most_layers))
    share = rng.choice([0.0, 0.3, 0.6, 1.0]) if density is None else density
    pairs = [(u, v) for i, u in enumerate(ids) for v in ids[i + 1 :] if rng.random() < share]
    edges = {pair: figure(3) for pair in pairs}
    degrees = rng.choice([[1], [1, 2], [1, 3], [2, 3], [1, 2, 4]])
    common = rng.choice(degrees)  # every layer has it, so that few instances are infeasible for that alone

    def one_tmpc(layer: int, number: int) -> Tmpc:
        return Tmpc(
            _IDS[number],
            figure(12),
            figure(6),
            figure(3),
            figure(6),
            {u: figure(2) for u, v in pairs if v == layer},
            {v: figure(2) for u, v in pairs if u == layer},
            recompute=_IDS[number] == RECOMPUTE,
        )

    tmpcs = {
        layer: {
            t: [one_tmpc(layer, number) for number in range(rng.randint(1, most_tmpcs))]
            for t in degrees
            if t == common or rng.random() < 0.7
        }
        for layer in rng.sample(ids, len(ids))
    }
    return build(
        tmpcs,
        edges,
        devices=rng.randint(1, most_devices),
        microbatches=rng.choice([1, 2, 3, 4, 5, 6, 8, 12]),
        memory_bytes=_some_memory(rng, tmpcs),
        bandwidth_bytes_per_s=float(rng.choice([1, 4, 16])),
    )


def _some_memory(rng: random.Random, tmpcs: Mapping[int, Mapping[int, Sequence[Tmpc]]]) -> float:
    """Loose, or what some layers need to the byte with some choice and y: tight as a rule."""
    if rng.random() < 0.2:
        return 1e6
    some = rng.sample(sorted(tmpcs), rng.randint(1, len(tmpcs)))
    y = rng.randint(1, 4)
    chosen = [rng.choice([x for row in tmpcs[layer].values() for x in row]) for layer in some]
    return max(1.0, sum(x.activation_bytes * y + x.fixed_bytes for x in chosen))


@st.composite
def instances(
    draw: st.DrawFn, most_layers: int = 5, most_devices: int = 6, most_tmpcs: int = 4, most_degrees: int = 2
) -> Instance:
    """Small instances of small integers, which shrink to fewer layers, edges and TMPCs."""
    small = st.integers(0, 3).map(float)
    least_degrees = draw(st.sampled_from([[1], [1, 2], [1, 3, 4]]))
    shared = draw(st.sampled_from([st.just(0.0), st.integers(0, 6).map(float)]))
    count = draw(st.integers(1, most_layers))
    ids = draw(st.permutations(range(count)))
    pairs = [(u, v) for i, u in enumerate(ids) for v in ids[i + 1 :] if draw(st.booleans())]
    degrees = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=most_degrees, unique=True))

    def one_tmpc(layer: int, number: int) -> Tmpc:
        return Tmpc(
            _IDS[number],
            float(draw(st.integers(0, 8))),
            draw(small),
            draw(small),
            draw(small),
            {u: draw(small) for u, v in pairs if v == layer},
            {v: draw(small) for u, v in pairs if u == layer},
            recompute=_IDS[number] == RECOMPUTE,
            shared_bytes=draw(shared),
            least_data_parallel_degree=draw(st.sampled_from(least_degrees)),
        )

    tmpcs = {
        layer: {
            t: [one_tmpc(layer, number) for number in range(draw(st.integers(1, most_tmpcs)))]
            for t in degrees
            if t == degrees[0] or draw(st.booleans())
        }
        for layer in range(count)
    }
    instance = build(
        tmpcs,
        {pair: draw(small) for pair in pairs},
        devices=draw(st.integers(1, most_devices)),
        microbatches=draw(st.sampled_from([1, 2, 3, 4, 6])),
        memory_bytes=float(draw(st.one_of(st.integers(1, 30), st.just(1000)))),
        bandwidth_bytes_per_s=float(draw(st.sampled_from([1, 2, 8]))),
    )
    ends = st.lists(st.integers(0, count - 1), min_size=min(2, count), max_size=count, unique=True).map(tuple)
    tensors = st.lists(st.builds(Tensor, ends, small, small), max_size=2) if count > 1 else st.just([])
    return replace(instance, tensors=tuple(draw(tensors)))


def on_one_and_two(time_s: float, weights: float, activation: float, fixed: float) -> dict[int, list[Tmpc]]:
    """Choices with t of 1, and with t of 2 in 0.6 of the time."""
    return {
        1: kept_and_recomputed(time_s, weights, activation, fixed, 5.0),
        2: kept_and_recomputed(0.6 * time_s, weights / 2, activation / 2, fixed / 2, 5.0),
    }


def kept_and_recomputed(time_s: float, weights: float, activation: float, fixed: float, less: float) -> list[Tmpc]:
    """All activations kept, or recomputed in a third more time: then ``less`` times less of them is kept."""
    return [
        Tmpc(VANILLA, time_s, weights, activation, fixed),
        Tmpc(RECOMPUTE, 1.33 * time_s, weights, activation / less, 1.1 * fixed, recompute=True),
    ]


def encoder_decoder(
    seed: int, encoder: int, decoder: int, *, embedding: bool = True, small_first: bool = False
) -> Instance:
    """An encoder of equal layers, the last of which all layers of a decoder read: it is the hub. embedding: whether the
    decoder begins with a small layer, which may come before all else. The decoder has at least three other layers.
    small_first: whether the encoder's first layer is small."""
    rng = random.Random(seed)
    sizes = [[rng.choice((1, 2, 3, 5)) for _ in range(2)] for _ in range(2)]

    def layer(side: int) -> dict[int, list[Tmpc]]:
        time_s, weights = sizes[side]
        return {1: [tmpc(time_s, weights, 4, 2), tmpc(time_s + 1, weights, 1, 2, RECOMPUTE)]}

    count = encoder + embedding + decoder
    rows = {v: layer(v >= encoder) for v in range(count)}
    if embedding:
        rows[encoder] = {1: [tmpc(0.125, 1, 1, 1)]}
    if small_first:
        rows[0] = {1: [tmpc(0.125, 1, 1, 1)]}
    along = {v: rng.choice((1.0, 2.0, 3.0)) for v in range(2)}
    edges = {(v, v + 1): along[v >= encoder] for v in range(count - 1) if v != encoder - 1}
    edges |= {(encoder - 1, v): rng.choice((0.5, 1.0)) for v in range(encoder + embedding, count)}
    devices, microbatches = rng.choice((2, 3, 4)), rng.choice((2, 4, 6))
    memory_bytes = rng.choice((25.0, 40.0, 1e6))
    instance = build(rows, edges, devices=devices, microbatches=microbatches, memory_bytes=memory_bytes)
    return replace(instance, name=f"encoder-decoder {seed}")
