"""The TMPC choices of a block against all combinations."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from piper_ray.engine.blocks.block_instance import BlockChoice, combine
from piper_ray.model.instance import Tmpc
from tests.lengths import long_after

BLOCK_OF = {0: 0, 1: 0, 2: 0, 7: 1, 8: 2, 9: 2}
EDGES = [(7, 0), (0, 1), (0, 2), (1, 8), (2, 8), (2, 9)]


def random_tmpcs(rng: Random) -> dict[int, list[Tmpc]]:
    def figure() -> float:
        return float(rng.randint(0, 3))

    return {
        layer: [
            Tmpc(f"x{number}", figure(), figure(), figure(), figure(),
                 {u: figure() for u, v in EDGES if v == layer}, {w: figure() for u, w in EDGES if u == layer},
                 shared_bytes=figure())
            for number in range(rng.randint(1, 3))
        ]
        for layer in (0, 1, 2)
    }  # fmt: skip


def figures(choice: BlockChoice) -> tuple[float, ...]:
    p, w, a, b, shared = choice.figures
    return (p, w, a, a + b, a + b + shared, choice.forward_bytes[1], choice.backward_bytes[2])


def all_figures(tmpcs: dict[int, list[Tmpc]]) -> dict[tuple[str, ...], tuple[float, ...]]:
    found: dict[tuple[str, ...], tuple[float, ...]] = {}
    for chosen in product(*(tmpcs[layer] for layer in (0, 1, 2))):
        p, w, a, b, shared = (
            sum(x.time_per_sample_s for x in chosen), sum(x.weights_bytes for x in chosen),
            sum(x.activation_bytes for x in chosen), sum(x.fixed_bytes for x in chosen),
            sum(x.shared_bytes for x in chosen),
        )  # fmt: skip
        forward = chosen[0].forward_sync_bytes[7]
        backward = chosen[1].backward_sync_bytes[8] + sum(chosen[2].backward_sync_bytes.values())
        found[tuple(x.id for x in chosen)] = (p, w, a, a + b, a + b + shared, forward, backward)
    return found


def never_worse(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(x <= y for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("seed", long_after(4, range(16)))
def test_what_none_beats_is_kept_and_costs_what_its_layers_cost(seed: int) -> None:
    tmpcs = random_tmpcs(Random(seed))
    combinations = all_figures(tmpcs)
    found = combine((0, 1, 2), tmpcs, BLOCK_OF, most=10**6)
    assert found.dropped == 0
    kept = {tuple(choice.tmpc_ids[layer] for layer in (0, 1, 2)): figures(choice) for choice in found.choices}
    assert all(combinations[ids] == value for ids, value in kept.items())
    assert all(any(never_worse(value, other) for value in kept.values()) for other in combinations.values())
    values = list(kept.values())
    assert not any(never_worse(one, other) for one in values for other in values if one is not other)


@pytest.mark.parametrize("seed", long_after(3, range(10)))
def test_of_too_many_the_extremes_stay(seed: int) -> None:
    tmpcs = random_tmpcs(Random(seed))
    every = combine((0, 1, 2), tmpcs, BLOCK_OF, most=10**6).choices
    few = combine((0, 1, 2), tmpcs, BLOCK_OF, most=3)
    assert few.dropped > 0 or len(few.choices) == len(every)
    assert min(figures(choice)[0] for choice in few.choices) == min(figures(choice)[0] for choice in every)
    combinations = all_figures(tmpcs)
    for choice in few.choices:
        assert combinations[tuple(choice.tmpc_ids[layer] for layer in (0, 1, 2))] == figures(choice)


def test_a_layer_without_tmpc_leaves_the_block_without_choice() -> None:
    tmpcs = random_tmpcs(Random(0)) | {1: []}
    assert combine((0, 1, 2), tmpcs, BLOCK_OF).choices == ()
