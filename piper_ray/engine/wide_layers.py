"""A solve on single layers that have too many downsets to list: on those alone that plans as good can use."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field

from piper_ray.cost.variants import layer_without_choice
from piper_ray.engine.evaluation.backend import Backend, Display
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.forecast import bytes_per_downset, downset_limit
from piper_ray.engine.lattice.downsets import build_lattice
from piper_ray.engine.layer_answers import Answers, without_plan
from piper_ray.engine.partition.evaluation import NoMachine, Partitioning
from piper_ray.engine.partition.setting import PartitionSetting
from piper_ray.engine.preparation import Outline, PointShape, Preparation
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.inexact import Inexact
from piper_ray.engine.search.partitioned import Outgrown, PartitionedSearch
from piper_ray.engine.search.planning import Planning
from piper_ray.engine.search.search import Search
from piper_ray.engine.search.wide import CELLS, WideSearch
from piper_ray.engine.tables.problem import LatticeTables, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.errors import ChoiceTooHard, ClusterError, LimitError
from piper_ray.model.events import Note, StepFinished
from piper_ray.model.solution import Infeasibility, Solution, SolveStats, Status
from piper_ray.model.stop import StoppedBy, StopSearch

_MANY, _MANY_A_LAYER = 1_000_000, 10_000
"""Downsets from which those alone that count have been measured to be sooner told than all are evaluated: in all, and
for each layer, as potentials take longer the more layers there are."""

LISTED = 50_000
"""Downsets that are listed of a graph whose own could not be counted: well under a second's."""

_NONE_FITS = Infeasibility("no plan fits (the graph is too wide to tell the memory that would do)", None)


def is_wide(outline: Outline) -> bool:
    """Whether there are so many downsets that it is better not to list them all, fit they or not."""
    downsets = outline.contracted.downsets
    if downsets is None:
        # Too many to count, or too entangled: traced operators have few.
        try:
            build_lattice(outline.graph, LISTED)
        except LimitError:
            return True
        return False
    return downsets > max(_MANY, _MANY_A_LAYER * outline.graph.size)


def pays(request: SolveRequest, outline: Outline) -> bool:
    """Whether to begin with the downsets that count. A checkpoint keeps what is known of all of them."""
    if request.options.resume is not None or not is_wide(outline):
        return False
    return layer_without_choice(request.instance, outline.variants) is None and has_room(request, outline)


def solve_wide_layers(request: SolveRequest, outline: Outline) -> Solution | WideFindings:
    """The plan of least time, or the best one by a limit; or what was found, where all downsets are wanted: where those
    that count are more than fit, or take too long to tell, and where there is no plan, to tell why.
    """
    instance, graph = request.instance, outline.graph
    request.note(f"{_all_downsets(outline)}: those alone are listed that plans as good as the best can use")
    if request.options.resume is not None:
        request.note("nothing is kept for later of a graph whose downsets are too many to list")
    with request.open_backend() as backend:
        backend.listen(request.listener)
        wide = WideSearch(
            Planning(instance, outline.contraction),
            graph,
            build_options(instance, graph, outline.variants),
            request.restrictions.data_parallel_degrees(instance),
            backend,
            request.limits,
            request.listener,
            request.started_s,
        )
        found = WideFindings(wide, outline, backend)
        request.stop.offer(found.so_far)
        try:
            workload = wide.live(_room(request, outline))
        except StopSearch as stop:
            return found.stopped(stop.reason)
        except KeyboardInterrupt:
            return found.stopped(StoppedBy.INTERRUPT)
        except (ChoiceTooHard, Inexact) as error:
            return found.cut_short(error)
        if workload is not None:
            return _solve_on(workload, request, outline, wide, backend, found.seconds)
        if wide.outgrown:
            if isinstance(backend, Partitioning):
                return _solve_on_partitions(request, found, backend)
            request.note("more downsets count than fit here; on a cluster each machine would have a part of them")
        if wide.incumbent is not None and wide.bracket.is_done(request.options.gap):
            return found.stopped(StoppedBy.GAP)
        return found


def has_room(request: SolveRequest, outline: Outline) -> bool:
    """Whether the downsets of one chain fit, at least."""
    return _room(request, outline) > outline.graph.size


def _room(request: SolveRequest, outline: Outline) -> int:
    """How many downsets fit."""
    return downset_limit(outline.graph, len(outline.variants), None, request.options.memory_limit_bytes)


def _solve_on(
    workload: LatticeTables,
    request: SolveRequest,
    outline: Outline,
    wide: WideSearch,
    backend: Backend,
    lattice_s: float,
) -> Solution:
    """As if there were no other downsets. lattice_s: what listing these took."""
    instance, restrictions = request.instance, request.restrictions
    of_all = "" if outline.contracted.downsets is None else f" of {outline.contracted.downsets:,}"
    request.listener(StepFinished("lattice", lattice_s, f"{workload.lattice.size:,}{of_all} downsets"))
    shape = PointShape.of(instance, restrictions)
    made = Preparation(instance.layers, instance.edges, shape, outline, workload, None, lattice_s, 0.0)
    problem = build_problem(workload, instance, restrictions.data_parallel_degrees(instance))
    with closing(Evaluations(backend)) as evaluations:
        search = Search(wide.planning, problem, evaluations, request.limits, request.listener, request.started_s)
        search.begin_with(wide.incumbent, wide.bracket.lower)
        answers = Answers(search, made, backend, lattice_s, 0.0)
        request.stop.offer(answers.so_far)
        search.run()
        return answers.at_the_end()


def _solve_on_partitions(
    request: SolveRequest, found: WideFindings, partitioning: Partitioning
) -> Solution | WideFindings:
    """Where downsets that count do not fit here: on as many machines as there are; what is known, if not there."""
    wide, outline = found.search, found.outline
    setting = PartitionSetting(wide.planning.instance, wide.graph, wide.options, tuple(wide.degrees), CELLS)
    size_bytes = bytes_per_downset(wide.graph, len(outline.variants))
    search = PartitionedSearch(
        wide,
        lambda: partitioning.crew(setting, size_bytes, request.limits.check),
        _room(request, outline),
        found.display,
    )
    found.partitioned = search
    try:
        search.run()
    except StopSearch as stop:
        return found.stopped(stop.reason)
    except KeyboardInterrupt:
        return found.stopped(StoppedBy.INTERRUPT)
    except (ChoiceTooHard, Inexact) as error:
        return found.cut_short(error)
    except Outgrown as outgrown:
        request.note(str(outgrown))
        return found
    except (NoMachine, ClusterError) as error:
        if wide.incumbent is None and isinstance(error, ClusterError):
            raise
        request.note(str(error))
        found.machines_failed = True
        return found
    if wide.bracket.exhausted:
        return without_plan(_NONE_FITS, found.stats())
    return found.stopped(StoppedBy.GAP)


def _all_downsets(outline: Outline) -> str:
    downsets = outline.contracted.downsets
    return "more downsets than can be counted quickly" if downsets is None else f"{downsets:,} downsets"


@dataclass
class WideFindings:
    """What is known before there is a lattice, or without one on any machine, at whatever moment.

    machines_failed: those of a cluster that had room for all that count, or might have had.
    """

    search: WideSearch
    outline: Outline
    display: Display
    began_s: float = field(default_factory=time.perf_counter)
    partitioned: PartitionedSearch | None = None
    machines_failed: bool = False

    @property
    def seconds(self) -> float:
        """What it has taken so far."""
        return time.perf_counter() - self.began_s

    def so_far(self) -> Solution:
        """For other threads too."""
        return self.stopped(StoppedBy.INTERRUPT)

    def at_the_end(self) -> Solution | None:
        """Where all downsets do not fit either; None if nothing is known of a plan."""
        if self.search.bracket.exhausted:
            return without_plan(_NONE_FITS, self.stats())
        if self.search.incumbent is None:
            return None
        return self.stopped(StoppedBy.NO_MACHINE if self.machines_failed else StoppedBy.TOO_MANY_DOWNSETS)

    def stopped(self, reason: StoppedBy) -> Solution:
        """``reason``: unless the plan is proved to be the best by then."""
        incumbent, bracket = self.search.incumbent, self.search.bracket
        if incumbent is None:
            return Solution(Status.UNKNOWN, None, bracket.lower, None, self.stats(), stopped_by=reason)
        time_s = incumbent.time_per_sample_s
        return Solution(
            status=Status.OPTIMAL if bracket.closed else Status.FEASIBLE,
            time_per_sample_s=time_s,
            lower_bound_s=self.search.proved_s(time_s) if bracket.closed else min(bracket.lower, time_s),
            plan=incumbent.plan,
            stats=self.stats(),
            stopped_by=None if bracket.closed else reason,
        )

    def cut_short(self, error: ChoiceTooHard | Inexact) -> Solution:
        """The plan known; raises the error if there is none."""
        if self.search.incumbent is None:
            raise error
        if isinstance(error, ChoiceTooHard):
            return self.stopped(StoppedBy.CHOICE_TOO_HARD)
        self.search.forget_bound()
        self.search.listener(Note(str(error)))
        return self.stopped(StoppedBy.INEXACT)

    def stats(self) -> SolveStats:
        graph, partitioned = self.outline.graph, self.partitioned
        listed = 0 if partitioned is None else partitioned.downsets
        return SolveStats(
            layers=len(self.search.planning.instance.layers),
            contracted_layers=graph.size,
            downsets=listed or self.outline.contracted.downsets or 0,
            levels=graph.size + 1,
            pairs=None,
            threads=self.display.threads,
            lattice_s=0.0,
            stage_costs_s=0.0,
            search_s=self.seconds,
            evaluations=() if partitioned is None else tuple(partitioned.stats),
            cluster=self.display.stats(),
        )
