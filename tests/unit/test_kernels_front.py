"""Pareto fronts of states against lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.kernels.front import add_bound, insert, is_dominated

State = tuple[int, int]


class Front:
    """A front under test: states (tally, sum) in the kernels' arrays, which hold garbage behind the last."""

    def __init__(self, room: int) -> None:
        self.tallies = np.full(room, -(10**9), np.int64)
        self.sums = np.full(room, -(10**9), np.int64)
        self.size = 0

    def is_dominated(self, state: State) -> bool:
        return bool(is_dominated(self.tallies, self.sums, self.size, *state))

    def insert(self, state: State) -> None:
        self.size = insert(self.tallies, self.sums, self.size, *state)

    @property
    def states(self) -> list[State]:
        return list(zip(self.tallies[: self.size].tolist(), self.sums[: self.size].tolist(), strict=True))


def dominates(one: State, other: State) -> bool:
    return one[0] <= other[0] and one[1] <= other[1]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40))
def test_against_a_list_of_all_states(states: list[State]) -> None:
    front = Front(len(states) + 1)
    seen: list[State] = []
    for state in states:
        dominated = any(dominates(other, state) for other in seen)
        assert front.is_dominated(state) == dominated
        if not dominated:
            front.insert(state)
        seen.append(state)
        pareto = {s for s in seen if not any(o != s and dominates(o, s) for o in seen)}
        assert front.states == sorted(pareto, key=lambda s: s[1])
        costs = [cost for cost, _ in front.states]
        assert costs == sorted(set(costs), reverse=True)


def test_by_hand() -> None:
    front = Front(4)
    assert not front.is_dominated((5, 5))
    front.insert((5, 5))
    assert front.is_dominated((5, 5))
    assert front.is_dominated((6, 5))
    assert front.is_dominated((5, 6))
    assert not front.is_dominated((4, 6))
    assert not front.is_dominated((6, 4))
    front.insert((6, 4))
    front.insert((4, 6))
    assert front.states == [(6, 4), (5, 5), (4, 6)]
    front.insert((3, 5))  # as large a sum as one, and cheaper than two
    assert front.states == [(6, 4), (3, 5)]
    front.insert((3, 1))  # takes the place of all
    assert front.states == [(3, 1)]


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40))
def test_bounds_in_little_room(room: int, states: list[State]) -> None:
    """Each state is as large in both as one of those kept, which are a front; of no more states than room, all are."""
    front = Front(room)
    for state in states:
        front.size = add_bound(front.tallies, front.sums, front.size, *state)
    kept = front.states
    assert len(kept) <= room
    assert all(any(dominates(bound, state) for bound in kept) for state in states)
    assert kept == sorted(kept, key=lambda s: s[1])
    assert not any(one != other and dominates(one, other) for one in kept for other in kept)
    pareto = {s for s in states if not any(o != s and dominates(o, s) for o in states)}
    if len(states) <= room:
        assert set(kept) == pareto
