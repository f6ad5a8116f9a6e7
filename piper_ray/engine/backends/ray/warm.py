"""Compiles the kernels that a worker needs, or loads them, before the first chunk comes."""

from __future__ import annotations

import numpy as np

from piper_ray.engine.evaluation.state_tables import StateTables, evaluate_downsets, no_states
from piper_ray.engine.kernels.selection import make_step_cache
from piper_ray.engine.kernels.types import Earlier, Target, frozen
from piper_ray.engine.tables.nothing import tables_of_nothing


def compile_kernels() -> None:
    """By an evaluation of the empty downset."""
    limits = np.zeros(1, np.int64)
    states = StateTables(tables_of_nothing(), frozen(Target(1.0, 1, 0, limits, limits)))
    cache = make_step_cache(states.tables)
    evaluate_downsets(1, 1, states.arrays, Earlier(0, no_states(0)), cache)
    states.take(no_states(0))
