"""A first run: that kernels are compiled is told of, and a second process compiles some of them meanwhile.

Each function compiles what one way to plan needs late, or inside of what it needs first. Its arguments are of the types
that kernels are called with, and of no size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from piper_ray.compiled.beside import compile_beside
from piper_ray.compiled.jit import compile_for
from piper_ray.compiled.observers import observed
from piper_ray.model.cores import usable_cores
from piper_ray.model.events import Compiling, Listener, Note


def compiling_told(
    listener: Listener, threads: int | None, beside: Callable[[], None] | None = None
) -> AbstractContextManager[None]:
    """threads: that the caller may have; with one, or one core, nothing runs beside. beside: a function of a module."""

    def begins() -> None:
        if beside is not None and min(threads or usable_cores(), usable_cores()) > 1:
            compile_beside(beside.__module__, beside.__qualname__)
        listener(Compiling())

    return observed(compiling=begins, note=lambda text: listener(Note(text)))


def of_papers_schedule() -> None:
    """The choice of TMPCs, which the evaluation's kernel calls, what its states leave outside, and the way back to a
    plan."""
    from piper_ray.engine.kernels.buckets import empty_buckets, empty_groups, no_members
    from piper_ray.engine.kernels.completion import bound_completions
    from piper_ray.engine.kernels.evaluation import trace_stages
    from piper_ray.engine.kernels.scan import make_scratch
    from piper_ray.engine.kernels.selection import exact_fit, fill_slot, make_step_cache
    from piper_ray.engine.kernels.types import FrontArrays, StageKey, StateArrays, Target, frozen
    from piper_ray.engine.tables.nothing import tables_of_nothing

    tables = tables_of_nothing()
    steps, limits = make_step_cache(tables), np.zeros(1, np.int64)
    compile_for(exact_fit, StageKey(0, 0, 0), 1, 1, tables, 1.0)
    compile_for(fill_slot, steps, tables.options, 0, 0, 0, 1)
    target = frozen(Target(1.0, 1, 0, limits, limits))
    fronts = FrontArrays(*(np.zeros(1, np.int64) for _ in FrontArrays._fields))
    sizes = tables.lattice, tables.costs
    arrays = StateArrays(tables, target, fronts, no_members(*sizes), empty_buckets(1, *sizes), empty_groups(1, *sizes))
    left = np.zeros(1, np.int64)
    compile_for(bound_completions, 0, 1, arrays, make_scratch(tables, 1, steps), left, left, left)
    compile_for(trace_stages, 0, 0, arrays, steps, np.zeros((1, 5), np.int64))
    _simulation()  # which is asked for last


def of_papers_frontier() -> None:
    """The choice of TMPCs, which evaluations of listed stages call, and what reads or makes evaluations."""
    from piper_ray.engine.kernels.selection import fill_slot, make_step_cache
    from piper_ray.engine.kernels.stages import ChoiceCache, StageArrays
    from piper_ray.engine.kernels.staircase import (
        CurveArrays,
        Exactness,
        StageTables,
        ValuedFronts,
        WorkBounds,
        best_state,
        walk,
    )
    from piper_ray.engine.tables.nothing import tables_of_nothing

    _knapsack()
    tables = tables_of_nothing()
    steps, integers, seconds = make_step_cache(tables), np.zeros(1, np.int64), np.zeros(1)
    compile_for(fill_slot, steps, tables.options, 0, 0, 0, 1)
    known = StageTables(
        tables,
        StageArrays(integers, integers, np.zeros((1, 1))),
        WorkBounds(seconds, seconds),
        steps,
        ChoiceCache(integers, seconds, seconds),
        ValuedFronts(integers, integers, integers, integers, seconds, integers, integers, seconds),
    )
    compile_for(best_state, known, True)
    curve = CurveArrays(integers, seconds, seconds, True, 1)
    compile_for(walk, curve, 0, 1, known, Exactness(1.0, 1.0, 1.0), 1, 1)


def of_flush() -> None:
    """The choice of TMPCs, which the search for tails calls, and the time of a step."""
    from piper_ray.engine.kernels.flush_choices import choice_front, least_time_choice
    from piper_ray.engine.kernels.flush_simulation import simulate_step

    integers, seconds = np.zeros(1, np.int64), np.zeros(1)
    compile_for(least_time_choice, integers, np.zeros((1, 4)), 1.0, integers)
    compile_for(choice_front, integers, np.zeros((1, 4)), 1.0, 1.0, 1)
    compile_for(simulate_step, 1, 1, seconds, seconds, seconds)
    _simulation()


def of_chunks() -> None:
    """The simulation of the plan that is found."""
    _simulation()


def _knapsack() -> None:
    from piper_ray.engine.kernels.knapsack import least_cost
    from piper_ray.engine.kernels.types import Items

    seconds, integers = np.zeros(1), np.zeros(1, np.int64)
    compile_for(least_cost, Items(integers, seconds, seconds), 1.0, 1.0, True, integers)


def _simulation() -> None:
    from piper_ray.simulate.kernels.circles import gaining_circle
    from piper_ray.simulate.kernels.events import Program, simulate_events

    integers, seconds = np.zeros(1, np.int64), np.zeros(1)
    arrays = {name: seconds if name.endswith("_s") else integers for name in Program._fields}
    compile_for(simulate_events, Program(**arrays | {"microbatches": 1, "latency_s": 0.0}))  # type: ignore[arg-type]
    compile_for(gaining_circle, integers, integers, seconds, 1)
