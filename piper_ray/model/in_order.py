"""Layers in one order, as runtimes run a model, and an instance held to it: each tensor relayed from stage to stage."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import pairwise

from piper_ray.model.instance import Edge, Instance, Tensor
from piper_ray.model.plan import Plan


def layers_in_order(instance: Instance) -> tuple[int, ...]:
    """Layer ids in the order of the file; where an edge runs backwards there, what it comes from goes first."""
    place = {layer.id: index for index, layer in enumerate(instance.layers)}
    before, after = {}, {}
    for layer, (sources, targets) in instance.neighbours.items():
        before[layer], after[layer] = len(sources), targets
    ready = [place[layer] for layer, count in before.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        layer = instance.layers[heapq.heappop(ready)].id
        order.append(layer)
        for target in after[layer]:
            before[target] -= 1
            if before[target] == 0:
                heapq.heappush(ready, place[target])
    return tuple(order)


def as_planned(instance: Instance, plan: Plan) -> Instance:
    """What a plan is charged for: the instance, or the chain of its layers where the plan keeps their order."""
    return in_order(instance) if plan.keeps_order else instance


def in_order(instance: Instance) -> Instance:
    """The same layers as a chain in ``layers_in_order``, and what moves between them handed on from each to the next.

    What an edge carries crosses every border between its ends, and each stage on the way receives it and sends it on:
    so c counts between each layer and the next, from its source to its target. The edge itself stays for what its ends
    add (fw and bw), which relays do not pay. A tensor with several ends is relayed once, from its first to its last.
    Every formula holds unchanged; each plan of the result is one of the instance, its stages runs of the order.
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
    found = Instance(
        instance.layers,
        (
            *(Edge(*hop, size) for hop, size in zip(hops, hop_bytes, strict=True)),
            *(replace(edge, communication_bytes=0.0) for edge in jumps),
        ),
        name=instance.name,
        tensors=tuple(
            Tensor(hop, forward, backward)
            for hop, forward, backward in zip(hops, forward_bytes, backward_bytes, strict=True)
            if forward > 0.0 or backward > 0.0
        ),
        notes=instance.notes,
        cluster=instance.cluster,
        batch=instance.batch,
        schedule=instance.schedule,
        model=instance.model,
    )
    if instance.checked:
        found.mark_checked()
    return found
