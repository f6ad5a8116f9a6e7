"""What proves a solution's bound, as a certificate: the states of one more evaluation, just below it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from piper_ray.certificate.certificate import Certificate, Tails, charged, require_certifiable
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.forecast import downset_limit
from piper_ray.engine.levels import instances
from piper_ray.engine.preparation import Outline, prepare
from piper_ray.engine.tables.problem import build_problem
from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop
from piper_ray.workloads.formats import instance_of
from piper_ray.workloads.formats.load import Source

_ANY_TIME_S = 1e200
"""What every stage keeps within."""


def certify(
    instance: Instance | Source,
    solution: Solution,
    *,
    restrictions: Restrictions = Restrictions(),
    threads: int | None = None,
    memory_limit: float | str | None = None,
    backend: Backend | None = None,
    stop: Stop[Any] | None = None,
) -> Certificate:
    """What proves the solution's lower bound; of an optimal one, that nothing below (1 - 1e-9) of its time exists, and
    of an infeasible one that there is no plan.

    instance, restrictions: those that it was solved for. Takes one evaluation of the lattice: as long as the last ones
    of the solve, or longer where these knew more of what a plan may still use.
    threads: one for each core if not given. memory_limit: as for ``solve``. backend: who does the work; None: threads
    of this process.
    Raises UsageError for what has no certificate: another schedule than "2bw", constraints on more than a stage, blocks
    of operators; and for a solution of another instance. LimitError where the downsets, all of them, do not fit.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1, schedule="2bw")
    >>> piper_ray.certify(bert, solution).bound_s >= solution.time_per_sample_s * (1 - 1e-8)
    True
    """
    instance = instance_of(instance)
    arguments.of_kind("solution", solution, Solution, "a Solution")
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    contract = Contract.SAFE if solution.blocks is None else Contract.OPERATORS
    require_certifiable(restrictions, solution.schedule, contract)
    limit_bytes = SolveOptions().changed(memory_limit=memory_limit).memory_limit_bytes
    require_listable(instance, restrictions, limit_bytes)
    bound_s = certifiable_s(solution)
    if backend is not None:
        return _certify(instance, restrictions, bound_s, limit_bytes, backend, stop or Stop())
    with closing(LocalBackend(threads)) as own:
        return _certify(instance, restrictions, bound_s, limit_bytes, own, stop or Stop())


def require_listable(instance: Instance, restrictions: Restrictions, memory_limit_bytes: float | None) -> None:
    """Raises LimitError where more downsets than fit are known to come: a certificate is of all of them, also where a
    solve looks at a few."""
    for level in instances(charged(instance, restrictions)):
        outline = Outline.of(level, restrictions)
        downset_limit(outline.graph, len(outline.variants), outline.contracted.downsets, memory_limit_bytes)


def certifiable_s(solution: Solution) -> float:
    """What can be proved of all plans' times, somewhat below what the search has found."""
    if solution.status is Status.OPTIMAL and solution.time_per_sample_s is not None:
        return solution.time_per_sample_s * (1.0 - PROOF)
    return solution.lower_bound_s * (1.0 - PROOF)


def _certify(
    instance: Instance,
    restrictions: Restrictions,
    bound_s: float,
    limit_bytes: float | None,
    backend: Backend,
    stop: Stop[Any],
) -> Certificate:
    levels = instances(charged(instance, restrictions))
    tails = tuple(_tails(level, restrictions, bound_s, limit_bytes, backend, stop) for level in levels)
    return Certificate(instance.digest, instance.name, restrictions, bound_s, tails)


def _tails(
    instance: Instance,
    restrictions: Restrictions,
    bound_s: float,
    limit_bytes: float | None,
    backend: Backend,
    stop: Stop[Any],
) -> Tails:
    made = prepare(instance, restrictions, limit_bytes)
    contraction, graph = made.outline.contraction, made.outline.graph
    if made.workload is None or bound_s == 0.0:
        return _written(instance.devices, graph.layer_ids, contraction.keeper, np.zeros((1, 1), np.uint64), *_EMPTY)
    problem = build_problem(made.workload, instance, restrictions.data_parallel_degrees(instance))
    kept: list[StateTables] = []

    def keep(states: StateTables) -> None:
        kept[:] = [states]

    outcome = evaluate_threshold(
        problem,
        backend,
        min(bound_s, _ANY_TIME_S),
        on_progress=lambda _: stop.check(),
        on_finished=keep,
    )
    if outcome.feasible:
        raise UsageError(
            f"the solution's bound of {bound_s:.9g} s does not hold for this instance under these restrictions: give "
            "those that it was solved for"
        )
    if not kept:
        return _written(instance.devices, graph.layer_ids, contraction.keeper, np.zeros((1, 1), np.uint64), *_EMPTY)
    fronts, bits = kept[0].fronts, problem.lattice.bits
    live = np.flatnonzero(fronts.states)
    counts = fronts.states[live]
    at = np.repeat(fronts.start[live] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return _written(
        instance.devices,
        graph.layer_ids,
        contraction.keeper,
        bits[np.repeat(live, counts)],
        fronts.tally[at],
        fronts.data_parallel_sum[at],
    )


_EMPTY = np.zeros(1, np.int64), np.zeros(1, np.int64)


def _written(
    devices: int,
    layers: Sequence[int],
    joined: Any,
    bits: Any,
    used_devices: Any,
    data_parallel_sum: Any,
) -> Tails:
    width = (len(layers) + 7) // 8
    members = np.ascontiguousarray(bits.astype("<u8")).view(np.uint8).reshape(bits.shape[0], -1)
    return Tails(
        devices=devices,
        layers=tuple(layers),
        joined=dict(joined),
        members=np.ascontiguousarray(np.pad(members, ((0, 0), (0, max(0, width - members.shape[1]))))[:, :width]),
        used_devices=used_devices,
        data_parallel_sum=data_parallel_sum,
    )
