"""What people do by hand on devices of several kinds: equal runs of layers, runs by speed, one kind alone.

All degrees, all orders of the kinds and all devices of each are tried. Layers all recompute, or none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InvalidPlan, UsageError
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance, Tmpc, divisors
from piper_ray.model.plan import Plan, Stage
from piper_ray.planners.planner import OfKinds, Proposal
from piper_ray.planners.runs import topological_order


@dataclass(frozen=True)
class KindRuns(OfKinds):
    """Stages of each kind next to each other. by_speed: a stage gets layers in proportion to the speed of its kind; if
    not, all get as many."""

    by_speed: bool

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        plans = sorted(_plans(instance, restrictions, self.by_speed), key=lambda one: one[0])
        best: Plan | None = None
        best_s, tried = float("inf"), 0
        for least_s, plan in plans:
            if least_s >= best_s:
                break
            try:
                tried += 1
                value_s = evaluate(instance, plan).time_per_sample_s
            except (InvalidPlan, UsageError):  # too much memory
                continue
            if value_s < best_s:
                best, best_s = plan, value_s
        return Proposal(best, len(plans), f"{plural(tried, 'layout')} of {len(plans):,} valued")


@dataclass(frozen=True)
class OneKind(OfKinds):
    """The best plan on the devices of one kind alone, whichever kind is the fastest."""

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        from piper_ray.engine.solve import solve  # kernels are loaded where they are needed
        from piper_ray.model.apart import on_kind

        found: list[tuple[float, str, Plan]] = []
        for kind in sorted(instance.cluster.kind_names):
            own = on_kind(instance, kind)
            solution = None if own is None else solve(own, restrictions=restrictions)
            if solution is not None and solution.plan is not None and solution.time_per_sample_s is not None:
                stages = tuple(replace(stage, kind=kind) for stage in solution.plan.stages)
                found.append((solution.time_per_sample_s, kind, replace(solution.plan, stages=stages)))
        tried = len(instance.cluster.kind_names)
        if not found:
            return Proposal(None, tried, "nothing fits on the devices of one kind")
        _, kind, plan = min(found, key=lambda one: one[0])
        return Proposal(plan, tried, f"on {kind} alone")


def _plans(instance: Instance, restrictions: Restrictions, by_speed: bool) -> Iterator[tuple[float, Plan]]:
    """Each with what none of its samples takes less than: a stage's microbatches, once all stages in front had one."""
    cluster, order, n = instance.cluster, topological_order(instance), len(instance.layers)
    names = sorted(cluster.kind_names)

    def chosen(layer: int, t: int, kind: str, recompute: bool) -> Tmpc | None:
        row = [x for x in instance.layer_by_id[layer].tmpcs.get(t, ()) if x.kind == kind]
        usable = [x for x in row if x.recompute is recompute] or row
        return min(usable, key=lambda x: x.time_per_sample_s, default=None)

    for recompute in (False, True):
        of_kind = {
            (kind, t): [chosen(layer, t, kind, recompute) for layer in order]
            for kind in names
            for t in instance.degrees
        }
        for d, degrees in product(divisors(instance.microbatches), product(instance.degrees, repeat=len(names))):
            t_of = dict(zip(names, degrees, strict=True))
            most = {kind: cluster.of_kind(kind).devices // (d * t_of[kind]) for kind in names}
            if not 0 < sum(most.values()) <= n:
                continue
            for kinds in permutations(kind for kind in names if most[kind] > 0):
                of_stage = [kind for kind in kinds for _ in range(most[kind])]
                own = [of_kind[kind, t_of[kind]] for kind in of_stage]
                if any(x is None for row in own for x in row):
                    continue
                times_s = np.array([[x.time_per_sample_s for x in row if x is not None] for row in own])
                share = 1.0 / times_s.sum(axis=1) if by_speed else np.ones(len(own))
                cuts = np.rint(np.cumsum(share) / share.sum() * n).astype(int)
                starts = np.append(0, cuts[:-1])
                if (cuts <= starts).any():
                    continue
                stages = []
                for a, b, kind, row in zip(starts, cuts, of_stage, own, strict=True):
                    ids = {v: x.id for v, x in zip(order[a:b], row[a:b], strict=True) if x is not None}
                    stages.append(Stage(tuple(sorted(ids)), d, t_of[kind], ids, kind))
                stage_s = np.array([row[a:b].sum() for row, a, b in zip(times_s, starts, cuts, strict=True)])
                ahead_s = np.append(0.0, np.cumsum(stage_s)[:-1])
                least_s = float((ahead_s + instance.microbatches // d * stage_s).max()) / instance.microbatches
                plan = Plan(tuple(stages))
                if not any(restrictions.violations(instance, plan)):
                    yield least_s, plan
