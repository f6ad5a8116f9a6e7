"""The rules that make a plan valid for an instance, whatever it costs: every layer in one stage, no edge backwards,
known TMPCs.

Also the order of layers in which runtimes run a model, the instance in which tensors are relayed along that order, and,
for screens and files, the link at which each stage hands over to the next.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import pairwise

from piper_ray.model.arguments import did_you_mean
from piper_ray.model.cluster import Cluster
from piper_ray.model.figures import plural
from piper_ray.model.instance import Edge, Instance, Tensor, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import FLUSHED, Schedule


def layers_in_order(instance: Instance) -> tuple[int, ...]:
    """Layer ids in the order of the file. Where an edge runs backwards in the file, its source is moved before its
    target."""
    place = {layer.id: index for index, layer in enumerate(instance.layers)}
    befores = {layer: before for layer, (before, _) in instance.neighbours.items()}
    if all(place[one] < place[layer] for layer, before in befores.items() for one in before):
        return tuple(place)
    sorter = TopologicalSorter(befores)
    sorter.prepare()
    ready: list[int] = []
    order = []
    while sorter.is_active():
        for layer in sorter.get_ready():
            heapq.heappush(ready, place[layer])
        order.append(instance.layers[heapq.heappop(ready)].id)
        sorter.done(order[-1])
    return tuple(order)


def unpassed_edges(instance: Instance) -> frozenset[tuple[int, int]]:
    """The ends of the edges that no stage can lie between: each other layer is before the source or after the
    target."""
    order = layers_in_order(instance)
    before, after = dict.fromkeys(order, 0), dict.fromkeys(order, 0)  # bit masks of positions
    for place, layer in enumerate(order):
        for target in instance.neighbours[layer][1]:
            before[target] |= before[layer] | 1 << place
    for place, layer in reversed([*enumerate(order)]):
        for source in instance.neighbours[layer][0]:
            after[source] |= after[layer] | 1 << place
    others, edges = len(order) - 2, {(edge.source, edge.target) for edge in instance.edges}
    return frozenset((u, v) for u, v in edges if before[u].bit_count() + after[v].bit_count() == others)


def as_planned(instance: Instance, plan: Plan) -> Instance:
    """The instance that a plan is charged by: the chain of its layers if the plan keeps their order."""
    return in_order(instance) if plan.keeps_order else instance


def in_order(instance: Instance) -> Instance:
    """The same layers as a chain in ``layers_in_order``; tensors between other layers are relayed along the chain.

    An edge's tensor crosses every border between its ends, and each stage on the way receives it and sends it on. So
    its c counts between each layer and the next, from its source to its target. The edge itself stays for the bytes
    that its ends add (fw and bw), which relays do not pay. A tensor with several ends is relayed once, from its first
    to its last. All cost formulas stay the same. Each plan of the result is one of the instance whose stages are runs
    of the order.
    """
    order = layers_in_order(instance)
    place = {layer: index for index, layer in enumerate(order)}
    hop_bytes = [0.0] * max(0, len(order) - 1)
    forward_bytes, backward_bytes = hop_bytes.copy(), hop_bytes.copy()
    for edge in instance.edges:
        for gap in range(place[edge.source], place[edge.target]):
            hop_bytes[gap] += edge.communication_bytes
    for tensor in instance.tensors:
        ends = [place[layer] for layer in tensor.layers]
        for gap in range(min(ends), max(ends)):
            forward_bytes[gap] += tensor.forward_bytes
            backward_bytes[gap] += tensor.backward_bytes
    hops = list(pairwise(order))
    jumps = [edge for edge in instance.edges if place[edge.target] > place[edge.source] + 1]
    edges = (
        *(Edge(*hop, size) for hop, size in zip(hops, hop_bytes, strict=True)),
        *(replace(edge, communication_bytes=0.0) for edge in jumps),
    )
    tensors = tuple(
        Tensor(hop, forward, backward)
        for hop, forward, backward in zip(hops, forward_bytes, backward_bytes, strict=True)
        if forward > 0.0 or backward > 0.0
    )
    return replace(instance, edges=edges, tensors=tensors).checked_as(instance)


def with_fastest_borders(instance: Instance) -> Instance:
    """The instance with less to send at borders: what takes as long at the outermost link as all of it at the fastest.
    In this instance no plan is slower than with places (``Plan.places``) in the given one. The given one, if links do
    not differ."""
    cluster = instance.cluster.holding(instance.devices)
    share, unpassed = cluster.bandwidth_bytes_per_s / cluster.level_bytes_per_s(0), unpassed_edges(instance)
    if share == 1.0:
        return instance

    def less(tmpc: Tmpc, layer: int) -> Tmpc:
        into = {u: x * share if (u, layer) in unpassed else x for u, x in tmpc.forward_sync_bytes.items()}
        out = {v: x * share if (layer, v) in unpassed else x for v, x in tmpc.backward_sync_bytes.items()}
        return tmpc.changed(forward_sync_bytes=into, backward_sync_bytes=out)

    layers = [
        replace(layer, tmpcs={t: tuple(less(x, layer.id) for x in row) for t, row in layer.tmpcs.items()})
        if any(x.forward_sync_bytes or x.backward_sync_bytes for row in layer.tmpcs.values() for x in row)
        else layer
        for layer in instance.layers
    ]
    edges = [
        replace(x, communication_bytes=x.communication_bytes * share) if (x.source, x.target) in unpassed else x
        for x in instance.edges
    ]
    return replace(instance, layers=tuple(layers), edges=tuple(edges)).checked_as(instance)


def partition_violations(instance: Instance, plan: Plan) -> list[str]:
    """Sentences about empty stages, and about layers in no stage, in several stages, or not in the instance."""
    violations = []
    stage_of: dict[int, int] = {}
    for number, stage in enumerate(plan.stages, start=1):
        if not stage.layers:
            violations.append(f"stage {number} is empty")
        for layer in stage.layers:
            if layer not in instance.layer_by_id:
                violations.append(f"stage {number}: layer {layer} is not in the instance")
            elif layer not in stage_of:
                stage_of[layer] = number
            elif stage_of[layer] == number:
                violations.append(f"layer {layer} is listed twice in stage {number}")
            else:
                violations.append(f"layer {layer} is in stage {stage_of[layer]} and again in stage {number}")
    violations += [f"layer {layer.id} is in no stage" for layer in instance.layers if layer.id not in stage_of]
    return violations


def edge_violations(instance: Instance, plan: Plan) -> list[str]:
    """Sentences about edges that run backwards. If there are none, every stage is contiguous: no path leaves it and
    returns.

    For a plan that keeps the layers' order, sentences about layers out of order: in that order no edge runs backwards.
    """
    if plan.keeps_order:
        return order_violations(instance, plan)
    stage_of = {layer: number for number, stage in enumerate(plan.stages, start=1) for layer in stage.layers}
    return [
        f"edge {edge.source} -> {edge.target} runs backwards, from stage {stage_of[edge.source]} "
        f"to stage {stage_of[edge.target]}"
        for edge in instance.edges
        if edge.source in stage_of and edge.target in stage_of and stage_of[edge.source] > stage_of[edge.target]
    ]


def order_violations(instance: Instance, plan: Plan) -> list[str]:
    """Sentences about layers that are in an earlier stage than the layer before them in the layers' order."""
    stage_of = {layer: number for number, stage in enumerate(plan.stages, start=1) for layer in stage.layers}
    return [
        f"layer {after} comes after layer {before} in the layers' order, but stands before it, in stage "
        f"{stage_of[after]}"
        for before, after in pairwise(layer for layer in layers_in_order(instance) if layer in stage_of)
        if stage_of[before] > stage_of[after]
    ]


def device_violations(instance: Instance, plan: Plan, chunks: int = 1) -> list[str]:
    """Sentences about more devices than the cluster has, of any kind, and about replicas that are not equally many at
    each site.

    chunks: the number of chunks per rank, which share its devices.
    """
    kinds = instance.cluster.kinds
    sites = instance.cluster.sites
    violations = [
        f"stage {number}: its {stage.data_parallel_degree} replicas cannot be shared out to {len(sites)} equal parts"
        for number, stage in enumerate(plan.stages, start=1)
        if sites and stage.data_parallel_degree % len(sites)
    ]
    violations += _place_violations(instance, plan)
    used = plan.devices // chunks
    if used > instance.devices:
        violations.append(f"the plan uses {used} devices, {instance.devices} are there")
    for kind in kinds:
        used = sum(stage.devices for stage in plan.stages if stage.kind == kind.name) // chunks
        if used > kind.cluster.devices:
            of = f"{'at' if instance.kind_word == 'site' else 'of'} {instance.kind_word} {kind.name}"
            violations.append(f"the plan uses {used} devices {of}, {kind.cluster.devices} are there")
    return violations


def _place_violations(instance: Instance, plan: Plan) -> list[str]:
    """Sentences about places that stages cannot have: see ``Plan.places``."""
    if plan.places is None:
        return []
    if instance.cluster.kinds or instance.cluster.sites:
        return ["the plan has places, which are for devices of one kind at one site"]
    if len(plan.places) != len(plan.stages):
        return [f"the plan has {plural(len(plan.places), 'place')} for {plural(len(plan.stages), 'stage')}"]
    cluster, limit, violations = instance.cluster.holding(plan.span), instance.devices, list[str]()
    for number, (at, stage) in enumerate(zip(plan.places, plan.stages, strict=True), start=1):
        end = at + stage.devices
        if not 0 <= at <= end <= limit:
            violations.append(f"stage {number}: its devices {at} to {end - 1} are not all below {limit}")
        limit = min(limit, at)
        blocks = cluster.place_blocks(stage.data_parallel_degree, stage.tensor_parallel_degree)
        cut = [block for block in blocks[: cluster.shared_level(at, end)] if at % block]
        if cut:
            violations.append(
                f"stage {number}: at place {at} groups of devices do not hold its blocks of {cut[0]} whole"
            )
    return violations


def chosen_tmpcs(instance: Instance, stage: Stage, number: int) -> tuple[dict[int, Tmpc], list[str]]:
    """The stage's TMPC for each of its layers in the instance, and sentences about choices that are not possible."""
    t = stage.tensor_parallel_degree
    chosen: dict[int, Tmpc] = {}
    violations: list[str] = []
    if stage.kind not in (names := instance.cluster.kind_names):
        said = f"is on {instance.kind_word} {stage.kind!r}" if stage.kind else f"does not say its {instance.kind_word}"
        there = f"the workload has {', '.join(names)}" if any(names) else "all devices of the workload are alike"
        return chosen, [f"stage {number} {said}; {there}"]
    for layer_id in dict.fromkeys(stage.layers):
        layer = instance.layer_by_id.get(layer_id)
        if layer is None:
            continue
        if layer_id not in stage.tmpc_ids:
            violations.append(f"stage {number}: layer {layer_id} has no TMPC chosen")
            continue
        wanted = stage.tmpc_ids[layer_id]
        offered = {tmpc.id: tmpc for tmpc in layer.tmpcs.get(t, ()) if tmpc.kind == stage.kind}
        if wanted in offered:
            chosen[layer_id] = offered[wanted]
            least = offered[wanted].least_data_parallel_degree
            if 1 <= stage.data_parallel_degree < least:
                violations.append(
                    f"stage {number}: TMPC {wanted!r} of layer {layer_id} needs a data-parallel degree of at least "
                    f"{least}, the stage has {stage.data_parallel_degree}"
                )
        elif offered:
            violations.append(
                f"stage {number}: layer {layer_id} has no TMPC {wanted!r} at tensor-parallel degree {t}, only "
                + ", ".join(repr(tmpc_id) for tmpc_id in offered)
                + did_you_mean(str(wanted), offered)
            )
        else:
            violations.append(f"stage {number}: layer {layer_id} has no TMPC at tensor-parallel degree {t}")
    strangers = [layer_id for layer_id in stage.tmpc_ids if layer_id not in stage.layers]
    violations += [
        f"stage {number}: a TMPC is chosen for layer {layer_id}, not in this stage" for layer_id in strangers
    ]
    return chosen, violations


@dataclass(frozen=True)
class StageBorder:
    """group_devices: of the group with a link of its own that both stages lie in; None: the plan counts on none. kinds:
    where they differ, of this stage's devices and of the next one's."""

    bandwidth_bytes_per_s: float
    group_devices: int | None = None
    kinds: tuple[str, str] | None = None


def lies_in_groups(cluster: Cluster, plan: Plan, schedule: Schedule) -> bool:
    """Whether the links of its borders and replicas follow from where its stages lie: there are several links, and one
    d and one t on each kind of devices."""
    degrees = {(stage.kind, stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in plan.stages}
    has_links = any(len(own.links) > 1 for own in cluster.alike)
    return has_links and schedule.name in FLUSHED and len(degrees) == len({stage.kind for stage in plan.stages})


def stage_borders(cluster: Cluster, plan: Plan, schedule: Schedule) -> tuple[StageBorder, ...]:
    """Of each two neighbouring stages, front to back. None where all have one link, ranks hold several stages, or
    pipelines are of one kind each.

    What goes to a stage further on is charged at the outermost link.
    """
    stages, places = plan.stages, plan.places if schedule.asynchronous else None
    if plan.shares or schedule.v > 1 or (len(cluster.links) == 1 and not cluster.kinds):
        return ()
    kinds = [stage.kind for stage in stages]
    in_groups, found = lies_in_groups(cluster, plan, schedule), []
    for place, (one, other) in enumerate(pairwise(kinds), start=1):
        own = cluster.of_kind(one)
        level, sending = len(own.links) - 1 if cluster.kinds else own.level_holding(plan.span), None
        if places is not None:
            level = own.shared_level(places[place], places[place - 1] + stages[place - 1].devices)
        if in_groups:
            sending = stages[place].devices
            level = own.border_level(kinds[place:].count(one), own.border_periods(sending, kinds.count(one)))
        border = StageBorder(own.level_bytes_per_s(level, sending), own.links[level].devices)
        found.append(border if one == other else StageBorder(cluster.rate_between(one, other), kinds=(one, other)))
    return tuple(found)
