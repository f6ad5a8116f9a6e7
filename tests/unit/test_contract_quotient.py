"""Blocks stay acyclic however they merge: every answer of Quotient is that of a search over all paths."""

from __future__ import annotations

from random import Random

import pytest

from piper_ray.engine.lattice.blocks import Quotient
from tests.lengths import long_after


def edges_between(blocks: list[list[int]], edges: list[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    block_of = {v: index for index, block in enumerate(blocks) for v in block}
    sizes: dict[tuple[int, int], float] = {}
    for tail, head, size in edges:
        ends = block_of[tail], block_of[head]
        if ends[0] != ends[1]:
            sizes[ends] = sizes.get(ends, 0.0) + size
    return sizes


def longer_path(pairs: set[tuple[int, int]], tail: int, head: int) -> bool:
    """Whether a path of two edges or more leads from tail to head: the slow twin."""
    pending = [w for u, w in pairs if u == tail and w != head]
    seen: set[int] = set()
    while pending:
        v = pending.pop()
        if v not in seen:
            seen.add(v)
            pending += [w for u, w in pairs if u == v]
    return head in seen


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_merging_along_edges_is_refused_where_it_would_make_a_cycle_and_only_there(seed: int) -> None:
    rng = Random(seed)
    size = rng.randint(2, 14)
    names = rng.sample(range(size), size)  # so that numbers say nothing of the order
    density = rng.choice([0.15, 0.3, 0.6])
    edges = [
        (names[i], names[j], float(rng.randint(1, 9)))
        for i in range(size)
        for j in range(i + 1, size)
        if rng.random() < density
    ]
    quotient = Quotient(size, edges)
    while True:
        blocks = quotient.blocks()
        between = edges_between(blocks, edges)
        assert all(tail < head for tail, head in between)  # listed front to back, so without cycles
        assert sorted(v for block in blocks for v in block) == list(range(size))
        key = {index: next(v for v in block if v in quotient.members) for index, block in enumerate(blocks)}
        assert {(key[tail], key[head]): size for (tail, head), size in between.items()} == {
            (tail, head): size for tail, heads in quotient.successors.items() for head, size in heads.items()
        }
        if not between:
            break
        tail, head = rng.choice(sorted(between))
        count = len(quotient)
        merged = quotient.merge(key[tail], key[head])
        assert merged is not longer_path(set(between), tail, head)
        assert len(quotient) == count - merged


def test_blocks_without_edges_merge() -> None:
    quotient = Quotient(4, [(0, 1, 1.0)])
    quotient.merge_apart(2, 3)
    assert sorted(map(sorted, quotient.blocks())) == [[0], [1], [2, 3]]
