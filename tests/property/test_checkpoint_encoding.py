"""Whatever is put on record comes back bit for bit."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from piper_ray.engine.checkpoint.checkpoint import (
    decode_levels,
    decode_results,
    encode_levels,
    encode_results,
    outcome_of,
    outcome_row,
)
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome, TracedStage
from piper_ray.engine.kernels.types import LevelStates
from tests.checkpoint_support import IDENTITY, Clock, opened, same_levels, same_outcome

any_float = st.floats(allow_nan=False) | st.sampled_from([float("inf"), -0.0, 0.0, 5e-324, 1.7976931348623157e308])
any_count = st.integers(0, 2**63 - 1)
counters = arrays.arrays(np.int64, st.integers(0, 5), elements=any_count)
keys = st.builds(EvaluationKey.of, any_float, any_float, st.booleans())
stages = st.builds(TracedStage, any_count, any_count, any_count, any_count, any_count, any_float)
outcomes = st.builds(
    Outcome,
    st.booleans(),
    any_count,
    st.lists(stages, max_size=4).map(tuple),
    st.floats(0.0, 1.0),
    any_count,
    any_count,
    counters,
)


@st.composite
def level_states(draw: st.DrawFn) -> LevelStates:
    most = draw(st.sampled_from([0, 1, 255, 256, 65_536, 2**32, 2**63 - 1]))
    counts = draw(arrays.arrays(np.int64, st.integers(0, 6), elements=st.integers(0, 3)))
    figures = arrays.arrays(np.int64, int(counts.sum()), elements=st.integers(0, most))
    return LevelStates(counts, draw(figures), draw(figures), draw(counters))


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(any_float, any_float, any_float, any_float, st.booleans())
def test_keys_are_equal_only_bit_for_bit(
    memory: float, time_s: float, memory2: float, time2_s: float, few: bool
) -> None:
    same = bits(memory) == bits(memory2) and bits(time_s) == bits(time2_s)
    assert (EvaluationKey.of(memory, time_s, few) == EvaluationKey.of(memory2, time2_s, few)) == same
    assert EvaluationKey.of(memory, time_s, few) != EvaluationKey.of(memory, time_s, not few)
    assert EvaluationKey.of(memory, time_s, few) == EvaluationKey.of(np.float64(memory), np.float64(time_s), few)


@given(st.dictionaries(keys, outcomes, max_size=4))
def test_outcomes_come_back(recorded: dict[EvaluationKey, Outcome]) -> None:
    rows = {str(key): outcome_row(outcome) for key, outcome in recorded.items()}
    facts, found = decode_results(encode_results(IDENTITY.facts, rows))
    assert facts == IDENTITY.facts
    assert list(found) == list(rows)
    assert all(same_outcome(outcome_of(found[str(key)]), recorded[key]) for key in recorded)


@given(keys, level_states())
def test_levels_come_back(key: EvaluationKey, states: LevelStates) -> None:
    facts, found_key, found = decode_levels(encode_levels(IDENTITY.facts, key, states))
    assert facts == IDENTITY.facts
    assert found_key == key
    assert same_levels(found, states)
    assert all(array.flags.writeable for array in found)


@given(st.dictionaries(keys, outcomes, min_size=1, max_size=3), keys, level_states())
def test_a_checkpoint_gives_back_what_it_took(
    recorded: dict[EvaluationKey, Outcome], key: EvaluationKey, states: LevelStates
) -> None:
    assume(key not in recorded)
    clock = Clock()
    with TemporaryDirectory() as folder:
        with opened(Path(folder), clock=clock) as checkpoint:
            assert all(checkpoint.record_outcome(key, outcome) for key, outcome in recorded.items())
            clock.now_s += 10.0
            assert checkpoint.record_levels(key, lambda: states)
        with opened(Path(folder)) as checkpoint:
            assert all(same_outcome(checkpoint.outcome(key), outcome) for key, outcome in recorded.items())
            assert same_levels(checkpoint.levels(key), states)


def test_narrow_integers_make_small_files() -> None:
    """Two million states, one byte each for two figures that compress to less."""
    counts = np.full(1_000_000, 2, np.int64)
    wide = np.tile(np.arange(200, dtype=np.int64), 10_000)
    states = LevelStates(counts, wide, wide[::-1].copy(), np.zeros(4, np.int64))
    size = len(encode_levels(IDENTITY.facts, EvaluationKey.of(1.0, 1.0), states))
    assert size < (counts.nbytes + 2 * wide.nbytes) / 100
