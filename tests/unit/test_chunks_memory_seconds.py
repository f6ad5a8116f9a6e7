"""What limited memory costs a rank, against the dual of the same program, and against all choices of options."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from piper_ray.engine.chunks.memory_seconds import fastest_options, memory_seconds, passes_that_differ
from piper_ray.engine.kernels.chunk_bound import APART, FIGURE, LayerKinds
from piper_ray.engine.kernels.types import FloatArray, IndexArray

PASSES = slice(FIGURE.forward_s, FIGURE.weight_s + 1)


class Rank(NamedTuple):
    kinds: LayerKinds
    counts: IndexArray
    held: FloatArray
    memory_bytes: float

    def options(self, kind: int) -> range:
        return range(*self.kinds.option_start[kind : kind + 2].tolist())

    def more_s(self, option: int, kind: int) -> float:
        """Seconds of a layer beyond the least of each kind of pass."""
        seconds = self.kinds.figures[:, PASSES]
        return float((seconds[option] - seconds[self.options(kind)].min(axis=0)).sum())

    def bytes_(self, option: int, held: float) -> float:
        figures = self.kinds.figures[option]
        return float(held * figures[FIGURE.activation] + figures[FIGURE.fixed])


def random_rank(rng: np.random.Generator) -> Rank:
    """Two kinds of up to three options each, in two chunks, at up to three moments."""
    start = np.cumsum([0, *rng.integers(1, 4, 2)])
    figures = np.zeros((start[-1], len(FIGURE)))
    columns = [FIGURE.forward_s, FIGURE.input_s, FIGURE.activation, FIGURE.fixed]
    figures[:, columns] = rng.integers(0, 5, (start[-1], 4))
    two, s = np.ones(2, np.int64), np.zeros(2, np.int64)
    kinds = LayerKinds(4 * two, two, s, two, s + APART, start, figures, np.zeros(start[-1]))
    held = rng.integers(0, 4, (rng.integers(1, 4), 2)).astype(np.float64)
    return Rank(kinds, rng.integers(0, 3, (4, 2, 2)), held, float(rng.integers(0, 30)))


def test_it_is_the_most_that_any_price_of_a_byte_says() -> None:
    rng, costs, unfit = np.random.default_rng(4), 0, 0
    for _ in range(150):
        rank = random_rank(rng)
        found, fits = memory_seconds(rank.counts, rank.kinds, rank.held, rank.memory_bytes)
        for n, counts in enumerate(rank.counts):
            least_s, holds = 0.0, True
            for moment in rank.held:
                cells = [
                    (
                        int(counts[turn, kind]),
                        [(rank.more_s(o, kind), rank.bytes_(o, moment[turn])) for o in rank.options(kind)],
                    )
                    for turn, kind in product(range(2), range(2))
                ]
                pairs = [(a, b) for _, options in cells for a, b in product(options, options) if a[1] < b[1]]
                for price in (0.0, *(max(0.0, (a[0] - b[0]) / (b[1] - a[1])) for a, b in pairs)):
                    priced = sum(often * min(s + price * b for s, b in options) for often, options in cells)
                    least_s = max(least_s, priced - price * rank.memory_bytes)
                holds &= sum(often * min(b for _, b in options) for often, options in cells) <= rank.memory_bytes
            assert fits[n] == holds
            assert not holds or found[n] == pytest.approx(least_s, rel=1e-6, abs=1e-6)
            costs, unfit = costs + (holds and least_s > 0.0), unfit + (not holds)
    assert costs > 30
    assert unfit > 100


def test_no_choice_of_options_that_fits_takes_less() -> None:
    rng, tight = np.random.default_rng(5), 0
    for _ in range(60):
        rank = random_rank(rng)
        found, fits = memory_seconds(rank.counts, rank.kinds, rank.held, rank.memory_bytes)
        for n, counts in enumerate(rank.counts):
            layers = [(turn, kind) for turn, kind in product(range(2), range(2)) for _ in range(counts[turn, kind])]
            least_s = np.inf
            for chosen in product(*(rank.options(kind) for _, kind in layers)) if len(layers) < 6 else ():
                of_layers = [*zip(layers, chosen, strict=True)]
                if all(
                    sum(rank.bytes_(o, moment[turn]) for (turn, _), o in of_layers) <= rank.memory_bytes
                    for moment in rank.held
                ):
                    least_s = min(least_s, sum(rank.more_s(o, kind) for (_, kind), o in of_layers))
            if least_s < np.inf:
                assert fits[n]
                assert found[n] <= least_s
                tight += found[n] > 0.9 * least_s > 0.0
    assert tight > 3


def test_the_fastest_options_have_the_least_of_each_figure() -> None:
    rank = random_rank(np.random.default_rng(1))
    fastest, figures = fastest_options(rank.kinds), rank.kinds.figures
    assert fastest.option_start.tolist() == [0, 1, 2]
    for kind in range(2):
        assert (fastest.figures[kind] == figures[rank.options(kind)].min(axis=0)).all()
    differ = [k for k in range(3) if any(np.ptp(figures[rank.options(kind), PASSES][:, k]) > 0.0 for kind in range(2))]
    assert passes_that_differ(rank.kinds).tolist() == differ
    assert differ == [0]
