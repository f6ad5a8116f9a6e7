"""Graphs of single operators, as a tracer gives them: far too wide to plan one by one."""

from __future__ import annotations

from piper_ray.model.instance import Edge, Instance, Layer, Tmpc

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
