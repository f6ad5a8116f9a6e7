"""Pipelines of one kind of devices each, among which the microbatches of a batch are shared out; and equal sites.

A plan of these is the plan of each kind for its part of the batch. What is charged for gradients: each stage's replicas
sum them in a ring through all kinds, as if each kind were one of as many equal sites with stages like its own. The
batch takes as long as the kind that takes longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from piper_ray.model.instance import Instance, Layer, Tmpc, with_rows
from piper_ray.model.plan import Plan


def at_each_site(site: Instance, names: Sequence[str], between_bytes_per_s: float | None) -> Instance:
    """The same batch on several sites like this one, with pipelines at each. Replicas that share state or experts are
    at one site."""
    count = len(names)

    def rows(layer: Layer) -> dict[int, tuple[Tmpc, ...]]:
        return {t: tuple(_at_site(tmpc, count) for tmpc in row) for t, row in layer.tmpcs.items()}

    cluster = replace(
        site.cluster,
        devices=site.cluster.devices * count,
        sites=tuple(names),
        between_bytes_per_s=between_bytes_per_s,
    )
    return replace(site, layers=with_rows(site.layers, rows), cluster=cluster).checked_as(site)


def _at_site(tmpc: Tmpc, count: int) -> Tmpc:
    least = tmpc.least_data_parallel_degree
    return tmpc if least == 1 else tmpc.changed(least_data_parallel_degree=least * count)


def on_kind(instance: Instance, kind: str) -> Instance | None:
    """The same on the devices of one kind alone; None where they cannot run some layer."""
    (own,) = (x.cluster for x in instance.cluster.kinds if x.name == kind)
    layers = []
    for layer in instance.layers:
        rows = {t: tuple(replace(x, kind="") for x in row if x.kind == kind) for t, row in layer.tmpcs.items()}
        rows = {t: row for t, row in rows.items() if row}
        if not rows:
            return None
        layers.append(replace(layer, tmpcs=rows))
    return replace(instance, layers=tuple(layers), cluster=own).checked_as(instance)


def beside_others(instance: Instance, kind: str, kinds: int) -> Instance | None:
    """The instance by which a kind is charged if ``kinds`` kinds have microbatches, itself among them: that many sites
    like it. None if it cannot run some layer."""
    own = on_kind(instance, kind)
    if own is None or kinds == 1:
        return own
    return at_each_site(own, [str(number) for number in range(kinds)], instance.cluster.between_bytes_per_s)


@dataclass(frozen=True)
class KindPipelines:
    """The pipelines of one kind. instance, plan: those of as many equal sites as there are parts (``beside_others``),
    with all of their microbatches. stages: of the whole plan."""

    kind: str
    microbatches: int
    stages: range
    instance: Instance
    plan: Plan


def parts_of(instance: Instance, plan: Plan) -> Iterator[KindPipelines | str]:
    """The parts of a plan that is shared out; a text for what is wrong."""
    count, first, names = len(plan.shares), 0, {kind.name for kind in instance.cluster.kinds}
    if sum(n for _, n in plan.shares) != instance.microbatches:
        yield f"kinds have {sum(n for _, n in plan.shares)} microbatches, not the {instance.microbatches} of a batch"
    if [kind for kind, _ in plan.shares] != list(dict.fromkeys(stage.kind for stage in plan.stages)):
        yield "the kinds of the stages are not those with microbatches, one after the other"
        return
    for kind, n in plan.shares:
        stages = range(first, first + sum(stage.kind == kind for stage in plan.stages))
        first = stages.stop
        made = beside_others(instance, kind, count) if kind in names else None
        if made is None or any(plan.stages[place].kind != kind for place in stages):
            yield f"{kind}: not a kind of devices that can run all layers, with its stages one after the other"
            continue
        own = tuple(
            replace(plan.stages[place], kind="", data_parallel_degree=plan.stages[place].data_parallel_degree * count)
            for place in stages
        )
        made = made.replace(microbatches=n * count)
        yield KindPipelines(kind, n, stages, made, Plan(own, plan.keeps_order))


def as_sites(instance: Instance, plan: Plan) -> tuple[Instance, Plan]:
    """A plan of equal pipelines on each of all kinds, which are equal too, as one at equal sites; any other plan as it
    is."""
    parts = [*parts_of(instance, plan)] if len(plan.shares) == len(instance.cluster.kinds) > 1 else []
    first, *others = parts or [""]
    if not isinstance(first, KindPipelines) or any(
        isinstance(x, str) or (x.plan, x.instance.digest) != (first.plan, first.instance.digest) for x in others
    ):
        return instance, plan
    cluster = replace(first.instance.cluster, sites=tuple(kind for kind, _ in plan.shares))
    return replace(first.instance, cluster=cluster).checked_as(instance), first.plan


def of_one_kind(plan: Plan, kind: str, kinds: int) -> Plan:
    """The pipelines of a kind, from its plan at as many equal sites as there are kinds."""
    stages = (
        replace(stage, kind=kind, data_parallel_degree=stage.data_parallel_degree // kinds) for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def shared_plan(parts: Sequence[tuple[str, int, Plan]]) -> Plan:
    """The plan of parts. parts: of each a kind, its microbatches, and its pipelines."""
    stages = tuple(stage for _, _, plan in parts for stage in plan.stages)
    kept = any(plan.keeps_order for _, _, plan in parts)
    return Plan(stages, kept, shares=tuple((kind, n) for kind, n, _ in parts))
