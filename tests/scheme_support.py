"""Small layers with random prices, for tests of schemes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from piper_ray.workloads.schemes.graph import OperatorFamily, OperatorGraph, Step, TensorPlacement, Value
from piper_ray.workloads.schemes.prices import PassPhase, StepPrice, WeightBytes
from piper_ray.workloads.schemes.rules import Strategy

LENGTHS = {"s": 4, "h": 3, "a": 4, "d": 2, "f": 8, "E": 4, "V": 6, "z": 2}
SIZES = {"s": 4, "a": 4, "f": 8, "E": 4, "V": 6, "z": 2}


@cache
def _random(*words: object) -> float:
    letters = [ord(letter) for letter in repr(words)]
    return float(np.random.default_rng(letters).uniform(0.1, 1.0))


@dataclass(frozen=True)
class RandomPrices:
    """Of everything, by its name: the same each time it is asked."""

    seed: int
    with_host: bool = True

    @property
    def weight(self) -> WeightBytes:
        return WeightBytes(18.0, 4.0)

    def _random(self, *words: object) -> float:
        return _random(self.seed, *words)

    def step(self, step: Step, strategy: Strategy) -> StepPrice | None:
        share = 0.4 if strategy.axis else 1.0
        key = step.name, strategy.text
        host = [self._random("host", *key, k) if self.with_host else 0.0 for k in range(3)]
        forward_s, backward_s = share * self._random("forward", *key), 2.0 * share * self._random("backward", *key)
        return StepPrice(forward_s, backward_s, host[0], host[1], host[2], 0.5 * backward_s)

    def move_s(self, value: Value, source: TensorPlacement, target: TensorPlacement, phase: PassPhase) -> float | None:
        if target.partial:
            return 0.0 if phase is PassPhase.GRADIENT and not source.partial else None
        if target.axis and not (source.axis or source.partial):
            return 0.0
        return 0.3 * self._random("move", value.name, source.text, target.text, phase.value)

    def once_s(self, value: Value) -> float:
        return 0.1 * self._random("once", value.name)


def made(lengths: dict[str, int], steps: tuple[Step, ...], axes: dict[str, str], weights: str = "") -> OperatorGraph:
    """axes: of each value, a letter each. weights: names of values, with blanks between."""
    values = {}
    for name, letters in axes.items():
        count = float(np.prod([lengths[axis] for axis in letters]))
        values[name] = Value(name, tuple(letters), 2.0 * count, count if name in weights.split() else 0.0)
    return OperatorGraph("small", values, steps, ("x",), steps[-1].outputs[:1], SIZES)


def words_layer() -> OperatorGraph:
    """Words looked up, a scan over them, and their loss: nothing arrives or leaves."""
    steps = (
        Step("look up", OperatorFamily.LOOKUP, ("n", "T"), ("x",), (), ("n",)),
        Step("in", OperatorFamily.CONTRACTION, ("x", "W"), ("u",), (), ("x", "W")),
        Step("scan", OperatorFamily.ROWS, ("u",), ("v",), ("s",), ("u",)),
        Step("logits", OperatorFamily.CONTRACTION, ("v", "V"), ("y",), (), ("v", "V")),
        Step("loss", OperatorFamily.LOSS, ("y", "n"), ("l",), (), ("y", "n")),
    )
    axes = {"n": "s", "T": "Vh", "x": "sh", "W": "ha", "u": "sa", "v": "sa", "V": "aV", "y": "sV", "l": "s"}
    graph = made(LENGTHS, steps, axes, "T W V")
    values = {name: replace(value, has_gradient=name not in "nl") for name, value in graph.values.items()}
    return replace(graph, values=values, arriving=(), leaving=())


def crossing_layer() -> OperatorGraph:
    """Attention of what arrives to other tokens, which arrive, too."""
    product = OperatorFamily.CONTRACTION
    steps = (
        Step("to q", product, ("x", "Q"), ("q",), (), ("x", "Q")),
        Step("to k", product, ("c", "K"), ("k",), (), ("c", "K")),
        Step("to v", product, ("c", "L"), ("v",), (), ("c", "L")),
        Step("core", OperatorFamily.ATTENTION, ("q", "k", "v"), ("o",), ("s",), ("q", "k", "v")),
        Step("out", product, ("o", "P"), ("y",), (), ("o", "P")),
    )
    axes = {"x": "sh", "c": "zh", "q": "sad", "k": "zad", "v": "zad", "o": "sad", "y": "sh", "P": "adh"}
    return replace(made(LENGTHS, steps, axes | dict.fromkeys("QKL", "had"), "Q K L P"), arriving=("x", "c"))


def attention_layer() -> OperatorGraph:
    """A norm, attention with three projections in and one out, and a residual sum."""
    rows, product = OperatorFamily.ROWS, OperatorFamily.CONTRACTION

    def projected(name: str) -> Step:
        return Step(f"to {name}", product, ("n", f"W{name}"), (name,), (), ("n", f"W{name}"))

    steps = (
        Step("norm", rows, ("x", "g"), ("n",), ("h",), ("x", "g")),
        *(projected(name) for name in "qkv"),
        Step("core", OperatorFamily.ATTENTION, tuple("qkv"), ("o",), ("s",), tuple("qkv"), on_ring=True),
        Step("out", product, ("o", "Wo"), ("p",), (), ("o", "Wo")),
        Step("sum", OperatorFamily.SUM, ("x", "p"), ("y",)),
    )
    heads = dict.fromkeys("qkvo", "sad") | {f"W{name}": "had" for name in "qkv"} | {"Wo": "adh"}
    return made(LENGTHS, steps, {"x": "sh", "g": "h", "n": "sh", "p": "sh", "y": "sh", **heads}, "g Wq Wk Wv Wo")


def feeding_layer(experts: bool = False) -> OperatorGraph:
    """A norm, two products with a function between, with experts or without, and a residual sum."""
    product = OperatorFamily.CONTRACTION
    routed = (
        Step("scores", product, ("n", "R"), ("l",), (), ("n", "R")),
        Step("route", OperatorFamily.ROWS, ("l",), ("r",), ("E",), ("l",)),
        Step("send", product, ("n", "r"), ("c",), (), ("n", "r")),
    )
    read, inner, e = ("c", "sEf", "E") if experts else ("n", "sf", "")
    steps = (
        Step("norm", OperatorFamily.ROWS, ("x",), ("n",), ("h",), ("x",)),
        *(routed if experts else ()),
        Step("in", product, (read, "W"), ("u",), (), (read, "W")),
        Step("function", OperatorFamily.POINTWISE, ("u",), ("v",), (), ("u",)),
        Step("out", product, ("v", "V"), ("p",), (), ("v", "V")),
        Step("sum", OperatorFamily.SUM, ("x", "p"), ("y",)),
    )
    axes = {"x": "sh", "n": "sh", "u": inner, "v": inner, "W": f"{e}hf", "V": f"{e}fh", "p": "sh", "y": "sh"}
    axes |= {"R": "hE", "l": "sE", "r": "sE", "c": "sEh"} if experts else {}
    return made(LENGTHS, steps, axes, "W V R" if experts else "W V")


def chain_layer() -> OperatorGraph:
    """Two products with a function between."""
    steps = (
        Step("product", OperatorFamily.CONTRACTION, ("x", "W"), ("u",), (), ("x", "W")),
        Step("function", OperatorFamily.POINTWISE, ("u",), ("v",), (), ("u",)),
        Step("back", OperatorFamily.CONTRACTION, ("v", "V"), ("y",), (), ("v", "V")),
    )
    return made({"s": 4, "f": 8, "h": 3}, steps, {"x": "h", "u": "f", "v": "f", "W": "hf", "V": "fh", "y": "h"}, "W V")


def norm_layer() -> OperatorGraph:
    """A norm that two read, and a sum."""
    steps = (
        Step("norm", OperatorFamily.ROWS, ("x",), ("n",), ("h",), ("x",)),
        Step("one", OperatorFamily.POINTWISE, ("n",), ("u",), (), ("n",)),
        Step("sum", OperatorFamily.SUM, ("n", "u"), ("y",)),
    )
    return made({"s": 4, "h": 3}, steps, dict.fromkeys("xnuy", "sh"))


def random_layer(seed: int) -> OperatorGraph:
    """Five to eight operators of any families, each of which reads what others made. Two axes may be divided."""
    draw = np.random.default_rng(seed)
    axes, steps, weights = {"x": "sh"}, list[Step](), list[str]()

    def add(family: OperatorFamily, read: list[str], letters: str, along: str = "", *, on_ring: bool = False) -> None:
        made = f"v{len(steps)}"
        axes[made] = letters
        kept = [name for name in (*read, made) if draw.random() < 0.6]
        steps.append(Step(made, family, tuple(read), (made,), tuple(along), tuple(kept), on_ring))

    def weight(letters: str) -> str:
        weights.append(f"w{len(steps)}")
        axes[weights[-1]] = letters
        return weights[-1]

    count = int(draw.integers(5, 9))
    while len(steps) < count:
        values = [name for name in axes if name not in weights]
        unread = [name for name in values if not any(name in step.inputs for step in steps)] or values
        one = str(draw.choice(unread if draw.random() < 0.7 else values))
        alike = [name for name in values if axes[name] == axes[one] and name != one]
        what = draw.random()
        if what < 0.45:
            summed = str(draw.choice([axis for axis in axes[one] if axis != "s" or len(axes[one]) == 1]))
            new = str(draw.choice([axis for axis in "hafE" if axis not in axes[one]]))
            add(OperatorFamily.CONTRACTION, [one, weight(summed + new)], axes[one].replace(summed, new))
        elif what < 0.55:
            add(OperatorFamily.ROWS, [one, weight("h")] if "h" in axes[one] else [one], axes[one], axes[one][-1])
        elif what < 0.65 and alike:
            add(OperatorFamily.ATTENTION, [one, *alike[:2]], axes[one], "s", on_ring=bool(draw.random() < 0.5))
        elif what < 0.85 and alike:
            add(OperatorFamily.SUM, [one, str(draw.choice(alike))], axes[one])
        else:
            add(OperatorFamily.POINTWISE, [one, *alike[: int(draw.integers(2))]], axes[one])
    graph = made(LENGTHS, tuple(steps), axes, " ".join(weights))
    read = {name for step in steps for name in step.inputs}
    divided = draw.choice([*SIZES][:4], 2, replace=False)
    leaving = tuple(step.name for step in steps if step.name not in read)
    return replace(graph, leaving=leaving, sizes={str(axis): SIZES[axis] for axis in divided})
