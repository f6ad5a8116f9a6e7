"""``solve``: the whole way from an instance to a proved plan. Only puts the parts together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from piper_ray.compiled.observers import observed
from piper_ray.cost.variants import layer_without_choice
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.blocks.solve import merge_operators, solve_by_blocks
from piper_ray.engine.checkpoint import Checkpoint, Identity
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.forecast import forecast
from piper_ray.engine.lattice.graph import LayerGraph
from piper_ray.engine.preparation import Outline, Preparation, prepare
from piper_ray.engine.search.infeasibility import explain
from piper_ray.engine.search.search import Search
from piper_ray.engine.tables.problem import build_problem
from piper_ray.model import arguments
from piper_ray.model.errors import LimitError, UsageError
from piper_ray.model.events import Compiling, Listener, Note, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import BlockStats, Forecast, Infeasibility, Solution, SolveStats, Status
from piper_ray.model.stop import INTERRUPT, Stop, StopSearch
from piper_ray.workloads.formats.load import Source, instance_of

_UNEXPLAINED = Infeasibility("no plan fits (the search for the memory that would do was stopped)", None)


def forecast_solve(instance: Instance | Source, restrictions: Restrictions = Restrictions()) -> Forecast:
    """Size of the lattice, and what a solve will take in memory and time."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    return _forecast(Outline.of(instance_of(instance), restrictions))


def _forecast(outline: Outline) -> Forecast:
    return forecast(outline.graph, outline.contracted.downsets, len(outline.variants))


@dataclass(frozen=True)
class LatticeInput:
    """What a solve builds its lattice on: the layers, or blocks of them (then with ``blocks``), contracted safely."""

    instance: Instance
    outline: Outline
    blocks: BlockStats | None

    @property
    def forecast(self) -> Forecast:
        return _forecast(self.outline)


def lattice_input(
    instance: Instance, contract: Contract = Contract.SAFE, restrictions: Restrictions = Restrictions()
) -> LatticeInput:
    """Raises LimitError if the operators cannot be merged into few enough blocks."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    instance = instance_of(instance)
    outline = Outline.of(instance, restrictions)
    merged_too = arguments.choice("contract", contract, Contract) is Contract.OPERATORS
    if merged_too and layer_without_choice(instance, outline.variants) is not None:
        merged_too = False  # there is no plan, whatever is merged
    found = merge_operators(instance, outline.variants, outline.contracted) if merged_too else None
    if found is None:
        return LatticeInput(instance, outline, None)
    merged, blocks = found
    return replace(lattice_input(merged.instance, Contract.SAFE, restrictions), blocks=blocks)


def solve(
    instance: Instance | Source,
    *,
    restrictions: Restrictions = Restrictions(),
    options: SolveOptions = SolveOptions(),
    backend: Backend | None = None,
    listener: Listener = silent,
    prepared: Preparation | None = None,
    stop: Stop[Solution] | None = None,
) -> Solution:
    """The plan of least time per sample, with proof; or the best one found when a limit or an interrupt comes first.

    instance: may be what ``load`` takes, such as a path. Without ``backend`` threads of this process do the work.
    prepared: of this graph and shape, to be shared by many solves; what it cost is in none of their stats. stop: ends
    the search as an interrupt does, and is offered the solution so far.

    Raises LimitError if the lattice does not fit, InputError with all faults of an instance that is not sound,
    UsageError for arguments that make no sense, and StopSearch if ``stop`` asks before the search began.
    """
    _check_arguments(restrictions, options, backend, listener, prepared, stop)
    with observed(compiling=lambda: listener(Compiling()), note=lambda text: listener(Note(text))):
        return _solve(instance, restrictions, options, backend, listener, prepared, stop or Stop())


def _solve(
    instance: Instance | Source,
    restrictions: Restrictions,
    options: SolveOptions,
    backend: Backend | None,
    listener: Listener,
    prepared: Preparation | None,
    stop: Stop[Solution],
) -> Solution:
    started = time.perf_counter()
    given, instance = instance, instance_of(instance)
    if given is not instance:
        for note in instance.notes:
            listener(Note(note))
    if options.contract is Contract.OPERATORS:
        return _solve_by_blocks(instance, restrictions, options, backend, listener, stop)
    shared = prepared is not None
    if prepared is None:
        prepared = prepare(instance, restrictions, options.memory_limit_bytes, listener)
    elif not prepared.serves(instance, restrictions):
        raise UsageError("prepared for another graph, or under other restrictions: prepare anew, or leave it out")
    outline, workload = prepared.outline, prepared.workload
    if workload is None:
        return _without_plan(Status.INFEASIBLE, prepared.impossible, _no_stats(instance, outline.graph))
    lattice = workload.lattice
    stop.check()
    began = time.perf_counter()
    problem = build_problem(workload, instance, restrictions.data_parallelism)
    scaling_s = time.perf_counter() - began
    lattice_s = 0.0 if shared else prepared.lattice_s
    stage_costs_s = scaling_s if shared else prepared.stage_costs_s + scaling_s

    began = time.perf_counter()
    with (
        _checkpoint(instance, restrictions, options.resume, listener, stop) as checkpoint,
        _executor(backend, options.threads) as executor,
        closing(Evaluations(executor, checkpoint)) as evaluations,
    ):
        executor.listen(listener)
        search = Search(
            instance,
            outline.contraction,
            problem,
            evaluations,
            gap=options.gap,
            deadline=None if options.time_limit_s is None else started + options.time_limit_s,
            stop=stop,
            listener=listener,
            started=started,
        )

        def solution(stopped_by: str | None, infeasibility: Infeasibility, pairs: int | None) -> Solution:
            stats = SolveStats(
                layers=len(instance.layers),
                contracted_layers=outline.graph.size,
                downsets=lattice.size,
                levels=lattice.levels,
                pairs=pairs,
                threads=executor.threads,
                lattice_s=lattice_s,
                stage_costs_s=stage_costs_s,
                search_s=time.perf_counter() - began,
                evaluations=tuple(search.evaluations),
                cluster=executor.stats(),
            )
            return _solution(search, stopped_by, infeasibility, stats)

        stop.offer(lambda: solution(INTERRUPT, _UNEXPLAINED, None))
        search.run()
        infeasibility = _explain(search) if search.bracket.exhausted else _UNEXPLAINED
        return solution(search.stopped_by, infeasibility, prepared.pairs)


def _solution(search: Search, stopped_by: str | None, infeasibility: Infeasibility, stats: SolveStats) -> Solution:
    """What the search has found, at whatever moment. infeasibility: for the case that there is no plan."""
    incumbent, lower_s = search.incumbent, search.bracket.lower
    if incumbent is None:
        if search.bracket.exhausted:
            return _without_plan(Status.INFEASIBLE, infeasibility, stats)
        return Solution(Status.UNKNOWN, None, lower_s, None, stats, stopped_by=stopped_by)
    plan, time_per_sample_s = incumbent
    return Solution(
        status=Status.OPTIMAL if search.proved else Status.FEASIBLE,
        time_per_sample=time_per_sample_s,
        lower_bound=min(lower_s, time_per_sample_s),
        plan=plan,
        stats=stats,
        stopped_by=stopped_by,
    )


def _check_arguments(
    restrictions: object, options: object, backend: object, listener: object, prepared: object, stop: object
) -> None:
    """Raises UsageError for each that is something else, and for two that contradict."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    arguments.of_kind("options", options, SolveOptions, "SolveOptions")
    arguments.of_kind("prepared", prepared, (Preparation, type(None)), "a Preparation")
    arguments.of_kind("stop", stop, (Stop, type(None)), "a Stop")
    arguments.function("listener", listener)
    if backend is not None and not callable(getattr(backend, "evaluate_downsets", None)):
        raise UsageError(f"backend must be a backend, such as RayBackend('auto'), not {arguments.shown(backend)}")
    if prepared is not None and isinstance(options, SolveOptions) and options.contract is Contract.OPERATORS:
        raise UsageError("prepared is for single layers; leave it out, or contract=OPERATORS")


def _solve_by_blocks(
    instance: Instance,
    restrictions: Restrictions,
    options: SolveOptions,
    backend: Backend | None,
    listener: Listener,
    stop: Stop[Solution],
) -> Solution:
    outline = Outline.of(instance, restrictions)
    impossible = layer_without_choice(instance, outline.variants)
    if impossible is not None:
        return _without_plan(Status.INFEASIBLE, impossible, _no_stats(instance, outline.graph))

    def solve_exactly(blocks: Instance, stop: Stop[Solution]) -> Solution:
        exact = replace(options, contract=Contract.SAFE)
        return _solve(blocks, restrictions, exact, backend, listener, None, stop)

    return solve_by_blocks(instance, outline, restrictions, options, listener, solve_exactly, stop)


@contextmanager
def _executor(backend: Backend | None, threads: int | None) -> Iterator[Backend]:
    """The caller's backend, which stays open, or threads of our own, which end with the solve."""
    if backend is not None:
        yield backend
        return
    with closing(LocalBackend(threads)) as own:
        yield own


@contextmanager
def _checkpoint(
    instance: Instance, restrictions: Restrictions, location: str | None, listener: Listener, stop: Stop[Solution]
) -> Iterator[Checkpoint | None]:
    """Open for the time of the solve, if one is wanted."""
    if location is None:
        yield None
        return
    identity = Identity.of(instance, restrictions)
    with Checkpoint.open(location, identity, on_warning=lambda text: listener(Note(text))) as checkpoint:
        if checkpoint.answers:
            listener(Note(f"resumed from {location}: {checkpoint.answers} evaluations are on record"))
        with stop.ending(checkpoint.close):
            yield checkpoint


def _explain(search: Search) -> Infeasibility:
    """An interrupt, the time limit or a TMPC choice too hard costs the figure here, not the answer."""
    try:
        return explain(search.instance, search.problem, search.executor, search.check)
    except (KeyboardInterrupt, StopSearch, LimitError):
        return _UNEXPLAINED


def _without_plan(status: Status, infeasibility: Infeasibility | None, stats: SolveStats) -> Solution:
    return Solution(status, None, float("inf"), None, stats, infeasibility)


def _no_stats(instance: Instance, graph: LayerGraph) -> SolveStats:
    return SolveStats(
        layers=len(instance.layers),
        contracted_layers=graph.size,
        downsets=0,
        levels=0,
        pairs=None,
        threads=0,
        lattice_s=0.0,
        stage_costs_s=0.0,
        search_s=0.0,
        evaluations=(),
    )
