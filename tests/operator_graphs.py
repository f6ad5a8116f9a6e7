"""Graphs of single operators, as a tracer gives them: far too wide to plan one by one."""

from __future__ import annotations

from random import Random

from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from tests.instances import build, on_one_and_two

MIB = float(2**20)


class _Trace:
    """Operators in the order in which they run; each one's activation is what its consumers get."""

    def __init__(self) -> None:
        self.operators: list[tuple[str, float, float, float]] = []
        self.edges: list[Edge] = []

    def __call__(self, name: str, time_us: float, weights_mib: float, activation_mib: float, *inputs: int) -> int:
        number = len(self.operators)
        self.edges += [Edge(tail, number, self.operators[tail][3]) for tail in dict.fromkeys(inputs)]
        self.operators.append((name, time_us * 1e-6, weights_mib * MIB, activation_mib * MIB))
        return number

    def instance(self, devices: int) -> Instance:
        forward: list[dict[int, float]] = [{} for _ in self.operators]
        backward: list[dict[int, float]] = [{} for _ in self.operators]
        for edge in self.edges:
            forward[edge.target][edge.source] = 0.0
            backward[edge.source][edge.target] = 0.0
        layers = tuple(
            Layer(v, name, {1: (Tmpc("vanilla", p, w, a, 3 * w, forward[v], backward[v]),)})
            for v, (name, p, w, a) in enumerate(self.operators)
        )
        return Instance(layers, tuple(self.edges), devices, 512, 80e9, 50e9, "operators")


def transformer_operators(blocks: int = 48, heads: int = 12, devices: int = 64) -> Instance:
    """A decoder with each attention head's operators apart, a mask that all of them read, and residuals."""
    op = _Trace()
    mask = op("mask", 0, 0, 1)
    x = op("embedding", 10, 100, 8, op("tokens", 0, 0, 0.01))
    share = 8 / heads
    for block in range(blocks):

        def named(name: str, block: int = block) -> str:
            return f"block {block} {name}"

        normed = op(named("norm 1"), 10, 0.01, 8, x)
        attended = []
        for head in range(heads):
            query, key, value = (op(named(f"{part} {head}"), 20, 1, share, normed) for part in "qkv")
            masked = op(named(f"mask {head}"), 5, 0, 1, op(named(f"scores {head}"), 20, 0, 1, query, key), mask)
            weights = op(named(f"softmax {head}"), 10, 0, 1, masked)
            attended.append(op(named(f"attend {head}"), 20, 0, share, weights, value))
        projected = op(named("project"), 100, 4, 8, op(named("concat"), 1, 0, 8, *attended))
        x = op(named("add 1"), 2, 0, 8, projected, x)
        widened = op(named("gelu"), 20, 0, 32, op(named("up"), 400, 16, 32, op(named("norm 2"), 10, 0.01, 8, x)))
        x = op(named("add 2"), 2, 0, 8, op(named("down"), 400, 16, 8, widened), x)
    op("loss", 1000, 100, 1, x)
    return op.instance(devices)


class _Branches:
    """Operators with t of 1 and 2 and two choices each, their figures off by up to a tenth; q, k and v are branches."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._tmpcs: dict[int, dict[int, list[Tmpc]]] = {}
        self._edges: dict[tuple[int, int], float] = {}
        self._output_mib: list[float] = []

    def __call__(self, time_ms: float, weights_mib: float, output_mib: float, *inputs: int) -> int:
        number, off = len(self._tmpcs), self._rng.uniform
        time_s, weights = time_ms * 1e-3 * off(0.9, 1.1), weights_mib * MIB * off(0.9, 1.1)
        kept, fixed = output_mib * MIB * off(0.9, 1.1), 0.5 * output_mib * MIB * off(0.9, 1.1)
        self._tmpcs[number] = on_one_and_two(time_s, weights, kept, fixed)
        self._output_mib.append(output_mib)
        self._edges |= {(tail, number): self._output_mib[tail] * MIB for tail in inputs}
        return number

    def attention(self, x: int, encoded: int | None = None, mask: int | None = None) -> int:
        """encoded: what keys and values are made of, if not of x."""
        normed = self(0.05, 0.0, 4.0, x)
        of = normed if encoded is None else encoded
        query, key, value = self(0.4, 6.0, 4.0, normed), self(0.4, 6.0, 4.0, of), self(0.4, 6.0, 4.0, of)
        scores = self(0.5, 0.0, 8.0, query, key, *(() if mask is None else (mask,)))
        attended = self(0.4, 0.0, 4.0, self(0.2, 0.0, 8.0, scores), value)
        return self(0.05, 0.0, 4.0, self(0.4, 6.0, 4.0, attended), x)

    def mlp(self, x: int) -> int:
        widened = self(0.2, 0.0, 16.0, self(1.5, 24.0, 16.0, self(0.05, 0.0, 4.0, x)))
        return self(0.05, 0.0, 4.0, self(1.5, 24.0, 4.0, widened), x)

    def convolutions(self, x: int, time: int, level: int) -> int:
        mib, weights = 16.0 / 2**level, 4.0 * 2**level
        first = self(1.0, weights, mib, self(0.05, 0.0, mib, x))
        shifted = self(0.05, 0.0, mib, first, self(0.02, 0.1, 0.01, time))
        return self(0.05, 0.0, mib, self(1.0, weights, mib, self(0.05, 0.0, mib, shifted)), x)

    def experts(self, x: int, count: int) -> int:
        normed = self(0.05, 0.0, 4.0, x)
        router = self(0.1, 0.2, 1.0, normed)
        outputs = [
            self(0.6, 24.0, 2.0, self(0.1, 0.0, 4.0, self(0.6, 24.0, 4.0, normed, router))) for _ in range(count)
        ]
        return self(0.05, 0.0, 4.0, self(0.2, 0.0, 4.0, *outputs), x)

    def instance(self, devices: int, memory_gib: float) -> Instance:
        """N = 64, 25 GiB/s."""
        return build(
            self._tmpcs,
            self._edges,
            devices=devices,
            microbatches=64,
            memory_bytes=memory_gib * 2**30,
            bandwidth_bytes_per_s=25.0 * 2**30,
        )


def traced_mixture(blocks: int, experts: int, seed: int, devices: int = 64, memory_gib: float = 4.0) -> Instance:
    op = _Branches(seed)
    mask, x = op(0.0, 0.0, 1.0), op(0.5, 60.0, 4.0)
    for _ in range(blocks):
        x = op.experts(op.attention(x, mask=mask), experts)
    op(3.0, 60.0, 4.0, x)
    return op.instance(devices, memory_gib)


def traced_encoder_decoder(
    encoder: int, decoder: int, seed: int, devices: int = 64, memory_gib: float = 4.0
) -> Instance:
    """Each block of the decoder reads the encoder's output."""
    op = _Branches(seed)
    mask, x = op(0.0, 0.0, 1.0), op(0.5, 60.0, 4.0)
    for _ in range(encoder):
        x = op.mlp(op.attention(x))
    encoded, y = op(0.05, 0.0, 4.0, x), op(0.5, 60.0, 4.0)
    for _ in range(decoder):
        y = op.mlp(op.attention(op.attention(y, mask=mask), encoded))
    op(3.0, 60.0, 4.0, y)
    return op.instance(devices, memory_gib)


def traced_towers(count: int, blocks: int, seed: int, devices: int = 64, memory_gib: float = 4.0) -> Instance:
    op = _Branches(seed)
    inputs, outputs = op(0.0, 0.0, 4.0), []
    for _ in range(count):
        x = op(0.5, 30.0, 4.0, inputs)
        for _ in range(blocks):
            x = op.mlp(op.attention(x))
        outputs.append(x)
    op(1.0, 10.0, 4.0, *outputs)
    return op.instance(devices, memory_gib)


def traced_u_net(levels: int, blocks: int, seed: int, devices: int = 64, memory_gib: float = 8.0) -> Instance:
    """All blocks read the embedding of a time step, and those below the first level a text. Each block on the way up
    reads one on the way down."""
    op = _Branches(seed)
    time, text = op(0.05, 1.0, 0.01, op(0.05, 1.0, 0.01)), op(0.05, 0.0, 0.25)
    x = op(0.5, 1.0, 16.0)
    ways = [x]
    for level in range(levels):
        for _ in range(blocks):
            x = op.convolutions(x, time, level)
            x = op.attention(op.attention(x), text) if level else x
            ways.append(x)
        if level < levels - 1:
            x = op(0.3, 4.0 * 2**level, 8.0 / 2**level, x)
            ways.append(x)
    for level in reversed(range(levels)):
        for _ in range(blocks + 1):
            joined = op(0.05, 0.0, 32.0 / 2**level, x, ways.pop())
            x = op.convolutions(joined, time, level)
            x = op.attention(op.attention(x), text) if level else x
        x = op(0.3, 4.0 * 2**level, 32.0 / 2**level, x) if level else x
    op(0.5, 1.0, 16.0, x)
    return op.instance(devices, memory_gib)
