"""Planning by blocks of operators: exact on the blocks, then improved layer by layer, with a bound for all plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_ray.engine.blocks.block_instance import MergedOperators, merge_operators
from piper_ray.engine.blocks.single_layers import Improved, SingleLayers, Under2bw, UnderFlush, WithChunks
from piper_ray.engine.flush.solve import instance_under
from piper_ray.engine.ledger import Bounded, Ledger
from piper_ray.engine.preparation import Outline
from piper_ray.engine.request import SolveRequest, is_by_degrees
from piper_ray.engine.search.planning import ValuedPlan
from piper_ray.model.events import StepFinished
from piper_ray.model.options import Contract
from piper_ray.model.passes import with_passes
from piper_ray.model.schedule import CHUNKED, Schedule
from piper_ray.model.solution import Solution, SolveStats, Status
from piper_ray.model.stop import Stop, StoppedBy

_CHAIN_GAP = 1e-4
"""How exactly borders within blocks are placed: far finer than what the blocks may cost."""

_MOST_ON_CHAIN = 1_000
"""Layers up to which a chain of single layers takes seconds; it gains a percent or two."""

_STOPPED_EARLY = (StoppedBy.TIME_LIMIT, StoppedBy.INTERRUPT, StoppedBy.CHOICE_TOO_HARD, StoppedBy.INEXACT)


def solve_by_blocks(request: SolveRequest, schedules: Sequence[Schedule]) -> Solution:
    """The best plan of whole blocks, improved on a chain of single layers that passes its stages' borders if short.

    schedules: of one name, with the numbers of chunks that may be. Value, plan and bound are of the layers: all their
    work over all devices, or the dearest of them. So a plan of blocks is "optimal" only if it meets that, and that no
    plan of blocks fits proves nothing of the layers. Raises as the solve of single layers, and LimitError if the
    operators cannot be merged into few enough blocks.
    """
    layers = _single_layers(request, schedules)
    outline = Outline.of(layers.request.instance, request.restrictions)
    exact = replace(request, options=replace(request.options, contract=Contract.SAFE))
    merged = merge_operators(layers.request.instance, outline, layers.downsets)
    if merged is None:
        return layers.solve(exact)
    merging_s = time.perf_counter() - request.started_s
    stats = merged.stats
    request.listener(StepFinished("blocks", merging_s, f"{stats.layers:,} layers in {stats.blocks:,} blocks"))
    request.note("the bounds of this log are those of plans of whole blocks")
    part: Stop[Solution] = request.stop.part()
    run = _BlockRun(layers, merged, schedules[0], merging_s)
    request.stop.offer(lambda: None if (so_far := part.answer()) is None else run.answer(so_far, StoppedBy.INTERRUPT))
    return run.improved(layers.solve(replace(exact, instance=merged.blocks.instance, stop=part)))


def _single_layers(request: SolveRequest, schedules: Sequence[Schedule]) -> SingleLayers:
    schedule = schedules[0]
    if schedule.name in CHUNKED:
        return WithChunks(replace(request, instance=with_passes(request.instance, request.note)), schedules)
    by_degrees = is_by_degrees(schedule, request.restrictions)
    if not by_degrees:
        request.restrictions.require_stages_alone("solve")
    else:
        request = replace(request, instance=instance_under(schedule, request.instance, request.note))
    outline = Outline.of(request.instance, request.restrictions)
    return UnderFlush(request, outline, schedule) if by_degrees else Under2bw(request, outline)


@dataclass(frozen=True)
class _BlockRun:
    """From a solution of the blocks to one of the layers."""

    layers: SingleLayers
    merged: MergedOperators
    schedule: Schedule
    merging_s: float

    def improved(self, of_blocks: Solution) -> Solution:
        """Where the blocks' solve ended early, or the chain is long, what is known is the answer."""
        request = self.layers.request
        request.stop.offer(lambda: self.answer(of_blocks, StoppedBy.INTERRUPT))
        known = self._expanded(of_blocks)
        short = len(request.instance.layers) <= _MOST_ON_CHAIN
        if known is None or of_blocks.stopped_by in _STOPPED_EARLY or not short:
            return self.answer(of_blocks, of_blocks.stopped_by)
        limits = replace(request.limits, gap=max(request.options.gap, _CHAIN_GAP))
        began_s = time.perf_counter()
        return self.answer(of_blocks, None, self.layers.improved(known, limits), time.perf_counter() - began_s)

    def _expanded(self, of_blocks: Solution) -> Improved | None:
        """The plan of the blocks, in layers."""
        if of_blocks.plan is None or of_blocks.time_per_sample_s is None:
            return None
        plan = self.merged.blocks.expand(of_blocks.plan, self.layers.request.instance)
        return self.layers.valued(plan, of_blocks.time_per_sample_s)

    def answer(
        self,
        of_blocks: Solution,
        stopped_by: StoppedBy | None,
        improved: Improved | None = None,
        search_s: float = 0.0,
    ) -> Solution:
        """The better one of the blocks' plan and ``improved``. search_s: what came after the blocks' own solve."""
        request, known = self.layers.request, self._expanded(of_blocks)
        best = known
        if improved is not None and known is not None and improved.time_per_sample_s < known.time_per_sample_s:
            best = improved
        reasons = (stopped_by, of_blocks.stopped_by, None if improved is None else improved.stopped_by)
        lower_s, gap = self.layers.lower_bound_s, request.options.gap
        near = best is not None and lower_s >= best.time_per_sample_s * (1.0 - gap)
        early = StoppedBy.GAP if near else next((x for x in reasons if x in _STOPPED_EARLY), StoppedBy.OPERATOR_BLOCKS)
        ledger = Ledger[ValuedPlan](
            cases={0: Bounded(lower_s)},
            best=None if best is None else ValuedPlan(best.plan, best.time_per_sample_s),
            stopped_by=early,
        )
        found = ledger.answer(
            lambda valued: valued.plan,
            lambda _: of_blocks.schedule,
            self._stats(of_blocks.stats, search_s, improved),
            of_blocks.step,
            of_blocks.infeasibility,
        )
        proved = of_blocks.status is Status.OPTIMAL
        blocks = replace(self.merged.stats, time_per_sample_s=of_blocks.time_per_sample_s, proved=proved)
        return replace(found, blocks=blocks)

    def _stats(self, before: SolveStats, search_s: float, improved: Improved | None) -> SolveStats:
        return replace(
            before,
            layers=len(self.layers.request.instance.layers),
            lattice_s=before.lattice_s + self.merging_s,
            search_s=before.search_s + search_s,
            evaluations=(*before.evaluations, *(() if improved is None else improved.evaluations)),
        )
