"""The rule of a search on devices of several kinds, if the cost of an edge does not follow from single stages: the edge
may skip stages, and its rate depends on the kinds of devices at both its ends.

The plans of a node have certain layers on certain kinds. Its edges are charged at the fastest rate possible, so that
``FlushSearch`` gives a bound; the plan that it finds is valued at its true rates. If these differ, and an end of such
an edge may be on several kinds, the node is divided into one for each kind. If all ends are on one kind, the bound is
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.flush.mixes import possible_kinds, unpassed_edges
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.flush.task_search import ChosenStages, of_batch_s
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.ledger import TIE, Ledger
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.passes import passes_of
from piper_ray.model.stop import StoppedBy


@dataclass(eq=False)
class KindNode:
    """The plans of ``instance``, whose layers may be limited to TMPCs for some kinds of devices."""

    instance: Instance
    lower_s: float


@dataclass(frozen=True)
class ChosenInNode(ChosenStages):
    """Stages of a plan valued at the true rates of its edges. workload: the node's, which numbers variants and
    options."""

    workload: FlushWorkload


@dataclass
class KindSearch:
    """Searches nodes, those of the least bound first.

    search_of: searches a node's plans with a ledger of its own. charged: returns a plan valued at its true rates, and
    float64[n]: for each vertex the seconds that the search left out at edges whose other end it is.
    """

    root: Instance
    ledger: Ledger[Any]
    search_of: Callable[[Instance, Ledger[Any]], Any]
    charged: Callable[[Instance, Any, Any], tuple[Any, FloatArray]]
    left_open: StoppedBy | None = None

    def __post_init__(self) -> None:
        self.ledger.cases = {0: KindNode(self.root, 0.0)}

    def efforts(self) -> Generator[None, None, None]:
        """Searches the node of the least bound until the bound is met or that node cannot be divided."""
        while not self.ledger.is_near(self.ledger.upper_s) and not self.ledger.proved:
            nodes = dict(self.ledger.cases)
            key = min(nodes, key=lambda k: (nodes[k].lower_s, k))
            node = nodes.pop(key)
            assert isinstance(node, KindNode)
            made = self._search(node)
            first = max([key, *nodes]) + 1
            self.ledger.cases = nodes | {first + k: child for k, child in enumerate(made)}
            if made == [node] and not self.ledger.is_near(self.ledger.upper_s):
                return  # the bound is not met, and the node cannot be divided
            yield

    def _search(self, node: KindNode) -> list[KindNode]:
        """Searches a node, and returns the nodes that remain open."""
        ledger = self.ledger
        part = Ledger[Any](ledger.microbatches, ledger.limits, cases={0: node}, best=ledger.best)
        workload = self.search_of(node.instance, part)
        if part.stopped_by is not None and part.stopped_by.ends_all:
            ledger.stopped_by = part.stopped_by
        self.left_open = self.left_open or part.left_open
        node.lower_s = max(node.lower_s, part.lower_s)
        if part.best is None or part.best is ledger.best:
            return [node] if node.lower_s < ledger.beaten_from_s else []
        found, missed_s = self.charged(node.instance, workload, part.best)
        found_s = part.best.value_s
        ledger.offer(found, "search")
        if found.value_s <= found_s * (1.0 + TIE):
            return [KindNode(node.instance, node.lower_s)] if node.lower_s >= found.value_s * (1.0 - PROOF) else [node]
        layer, kinds = open_end(node.instance, workload, missed_s)
        return [KindNode(on_kind(node.instance, layer, kind), node.lower_s) for kind in kinds] or [node]


def open_end(instance: Instance, workload: Any, missed_s: FloatArray) -> tuple[int, list[str]]:
    """Returns the layer at whose edges the search left out most, and the kinds that it may be on; none: no layer's kind
    would tell more."""
    kinds = possible_kinds(workload.lattice.graph, workload.placed)
    open_ends = [v for v, missed in enumerate(missed_s) if len(kinds[v]) > 1 and missed > 0.0]
    end = max(open_ends, key=lambda v: (missed_s[v], -v), default=None)
    names = instance.cluster.kind_names
    return (0, []) if end is None else (workload.lattice.graph.layer_ids[end], [names[g] for g in sorted(kinds[end])])


def on_kind(instance: Instance, layer: int, kind: str) -> Instance:
    """Returns the instance with a layer on devices of one kind alone."""
    own = instance.layer_by_id[layer]
    only = replace(own, tmpcs={t: tuple(x for x in row if x.kind == kind) for t, row in own.tmpcs.items()})
    layers = tuple(only if x.id == layer else x for x in instance.layers)
    return replace(instance, layers=layers).checked_as(instance)


def charged_truly(instance: Instance, workload: FlushWorkload, chosen: ChosenStages) -> tuple[ChosenInNode, FloatArray]:
    """``KindSearch.charged`` for plans under a flush."""
    graph, names = workload.lattice.graph, instance.cluster.kind_names
    stage_of: dict[int, int] = {}
    tmpc_of: dict[int, Tmpc] = {}
    for k, (r, options) in enumerate(zip(chosen.variant.tolist(), chosen.options, strict=True)):
        for v, o in options.tolist():
            stage_of[v], tmpc_of[v] = k, workload.tmpcs[r][v][o]
    kind_of = [names[workload.placed[r].kind] for r in chosen.variant]
    unpassed = unpassed_edges(graph)
    seconds, missed_s = np.zeros_like(chosen.seconds), np.zeros(graph.size)
    seconds[:, 2] = chosen.seconds[:, 2]
    for v, k in stage_of.items():
        passes = passes_of(tmpc_of[v])
        seconds[k, :2] += passes.forward_s, passes.backward_s
    for e, (tail, head, index) in enumerate(graph.edges):
        one, other, edge = stage_of[tail], stage_of[head], instance.edges[index]
        if one == other:
            continue
        counted = workload.rates.go_out[chosen.variant[one], e], workload.rates.come_in[chosen.variant[other], e]
        rate = counted[0] if unpassed[e] else instance.cluster.rate_between(kind_of[one], kind_of[other])
        sent = edge.communication_bytes + tmpc_of[tail].backward_sync_bytes.get(edge.target, 0.0)
        received = edge.communication_bytes + tmpc_of[head].forward_sync_bytes.get(edge.source, 0.0)
        for k, size, assumed, end in ((one, sent, counted[0], head), (other, received, counted[1], tail)):
            seconds[k, :2] += size / rate
            missed_s[end] += size / rate - size / assumed
    for h, (ends, index) in enumerate(graph.tensors):
        stages = {stage_of[v] for v in ends}
        if len(stages) == 1:
            continue
        rate, tensor = instance.cluster.slowest_rate(kind_of[k] for k in stages), instance.tensors[index]
        seconds[list(stages), :2] += tensor.forward_bytes / rate, tensor.backward_bytes / rate
        missed_s[list(ends)] += max(tensor.forward_bytes / rate - workload.arrays.tensor_forward_s[h], 0.0)
    batch_s = of_batch_s(chosen.task, seconds)
    return ChosenInNode(chosen.task, chosen.variant, chosen.options, seconds, batch_s, workload), missed_s
