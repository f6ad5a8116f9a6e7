"""Parts of plans by counts of layers: together they have each plan once, and none has the fractional plan."""

from __future__ import annotations

import numpy as np

from piper_ray.engine.chunks.layer_counts import LayerCounts
from piper_ray.engine.kernels.chunk_bound import APART, FIGURE, LayerKinds


def kinds(layers: list[int], layer_s: list[float], stages: int) -> LayerKinds:
    size = len(layers)
    figures = np.zeros((size, len(FIGURE)))
    figures[:, FIGURE.forward_s] = layer_s
    return LayerKinds(
        np.array(layers),
        np.ones(size, np.int64),
        np.zeros(size, np.int64),
        np.full(size, stages - 1),
        np.full(size, APART),
        np.arange(size + 1),
        figures,
        np.zeros(size),
    )


def test_parts_have_each_plan_once_and_not_the_fractional_one() -> None:
    rng, divided, open_ended = np.random.default_rng(1), 0, 0
    for _ in range(300):
        stages, size = int(rng.integers(2, 7)), int(rng.integers(1, 3))
        of = kinds(rng.integers(2, 9, size).tolist(), rng.uniform(1.0, 3.0, size).tolist(), stages)
        plan = np.array([np.bincount(rng.integers(0, stages, n), minlength=stages) for n in of.layers])
        counts = LayerCounts.any(of, stages)
        for _ in range(5):
            wide = [*of.layers[:, None] * rng.dirichlet(np.full(stages, 5.0), size)]
            shares = np.clip(wide, counts.least, counts.most)
            parts = counts.parts(of, shares)
            if not parts:
                break
            holding = [one for one in parts if ((one.least <= plan) & (plan <= one.most)).all()]
            assert len(holding) == 1
            assert not any(((one.least <= shares) & (shares <= one.most)).all() for one in parts)
            divided += 1
            open_ended += (parts[-1].least == counts.least).all()
            counts = holding[0]
    assert divided > 500
    assert open_ended > 50


def test_24_layers_in_23_chunks_are_two_in_some_chunk() -> None:
    of = kinds([24, 1], [1.0, 0.01], 23)
    shares = np.array([np.full(23, 24 / 23), np.full(23, 1 / 23)])
    parts = LayerCounts.any(of, 23).parts(of, shares)
    assert [part.least[0].argmax() for part in parts] == [*range(23)]
    assert all(part.least[0].max() == 2 for part in parts)
    assert all((part.most[0, :chunk] == 1).all() for chunk, part in enumerate(parts))
