"""TMPCs in flat arrays: their figures, what each is charged for edges, and the least figures of each vertex."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.layer_graph import LayerGraph, offsets, runs
from piper_ray.model.instance import Instance, Tmpc

TIME, WEIGHTS, A, B, SHARED = range(5)
"""Columns of an option's figures."""

figures_of = attrgetter("time_per_sample_s", "weights_bytes", "activation_bytes", "fixed_bytes", "shared_bytes")

TmpcTable: TypeAlias = Sequence[Sequence[Sequence[Tmpc]]]
"""The options by variant and vertex."""


class Options(NamedTuple):
    """Options in groups of one variant and vertex, which may be empty. Groups are ordered by variant, then by
    vertex."""

    variants: int
    vertices: int
    start: IndexArray  # int64[groups + 1]
    figures: FloatArray  # float64[options, 5], see above
    filled: IndexArray  # int64[filled], the groups that are not empty
    fastest: IndexArray  # int64[filled], an option: least time; of equally fast ones (they trade a for b) the least a
    least: FloatArray  # float64[filled, 5]
    most: FloatArray

    @classmethod
    def of(cls, tmpcs: TmpcTable, vertices: int) -> Options:
        counts = [len(of_vertex) for of_variant in tmpcs for of_vertex in of_variant]
        rows = [figures_of(tmpc) for of_variant in tmpcs for of_vertex in of_variant for tmpc in of_vertex]
        start, figures = offsets(counts), np.array(rows, np.float64).reshape(len(rows), 5)
        filled = np.flatnonzero(counts)
        order = np.lexsort((figures[:, A], figures[:, TIME], np.repeat(np.arange(len(counts)), counts)))
        return cls(
            variants=len(tmpcs),
            vertices=vertices,
            start=start,
            figures=figures,
            filled=filled,
            fastest=order[start[filled]],
            least=np.minimum.reduceat(figures, start[filled]),
            most=np.maximum.reduceat(figures, start[filled]),
        )

    def option_start(self) -> IndexArray:
        """Returns int64[r, n + 1]: the first option of each vertex, and the end of the last."""
        groups = np.arange(self.variants)[:, None] * self.vertices + np.arange(self.vertices + 1)
        starts: IndexArray = self.start[groups]
        return starts

    def variant_of_option(self) -> IndexArray:
        """Returns int64[options]: the variant of each option."""
        return np.repeat(
            np.arange(self.variants), np.diff(self.start).reshape(self.variants, self.vertices).sum(axis=1)
        )

    def missing(self) -> IndexArray:
        """Returns int64[n, r]: 1 if a vertex has no option."""
        empty = (np.diff(self.start) == 0).astype(np.int64)
        return np.ascontiguousarray(empty.reshape(self.variants, self.vertices).T)

    def differ(self, figure: int) -> IndexArray:
        """Returns int64[r]: 1 if the options of some vertex differ in a figure."""
        found = np.zeros(self.variants * self.vertices, np.int64)
        found[self.filled] = self.least[:, figure] != self.most[:, figure]
        of_variant: IndexArray = found.reshape(self.variants, self.vertices).max(axis=1, initial=0)
        return of_variant

    def by_vertex(self, of_filled: FloatArray) -> FloatArray:
        """Returns float64[n, r] from a figure of each filled group; 0 for the others."""
        found = np.zeros(self.variants * self.vertices)
        found[self.filled] = of_filled
        return np.ascontiguousarray(found.reshape(self.variants, self.vertices).T)


class IncidentEdges(NamedTuple):
    """The edges that enter and that leave each vertex, by their numbers in the graph, in one run per vertex."""

    in_start: IndexArray  # int64[n + 1]
    in_edge: IndexArray
    out_start: IndexArray  # int64[n + 1]
    out_edge: IndexArray

    @classmethod
    def of(cls, graph: LayerGraph) -> IncidentEdges:
        into: list[list[int]] = [[] for _ in range(graph.size)]
        out: list[list[int]] = [[] for _ in range(graph.size)]
        for e, (tail, head, _) in enumerate(graph.edges):
            into[head].append(e)
            out[tail].append(e)
        return cls(*runs(into), *runs(out))

    def into(self, v: int) -> IndexArray:
        return self.in_edge[self.in_start[v] : self.in_start[v + 1]]

    def out(self, v: int) -> IndexArray:
        return self.out_edge[self.out_start[v] : self.out_start[v + 1]]


class Charges(NamedTuple):
    """The bytes c + extra that each option pays for each edge of its vertex: first for edges that enter, then for edges
    that leave."""

    start: IndexArray  # int64[options]: first of its charges
    variant: IndexArray  # int64[..]: of the option
    place: IndexArray  # int64[..]: e for an edge that enters, the number of all edges + e for one that leaves
    size: FloatArray  # float64[..], bytes
    in_least: FloatArray  # float64[e, r]: the least that the vertex at an edge's head pays; 0 if it has no option
    out_least: FloatArray  # the same for the vertex at its tail
    differ: IndexArray  # int64[r]: 1 if the charges of a vertex's options differ

    @classmethod
    def of(cls, instance: Instance, graph: LayerGraph, tmpcs: TmpcTable, incident: IncidentEdges) -> Charges:
        vertices = range(graph.size)
        in_edges, out_edges = ([of(v).tolist() for v in vertices] for of in (incident.into, incident.out))
        # The figures of an edge are filed under the layers that its ends name. An edge with a contracted end costs
        # nothing.
        edges = [instance.edges[index] for _, _, index in graph.edges]
        sources = [[edges[e].source for e in of_vertex] for of_vertex in in_edges]
        targets = [[edges[e].target for e in of_vertex] for of_vertex in out_edges]
        # In a variant each edge has a place for entering, and after all of these one for leaving.
        places = [[*ins, *(len(edges) + e for e in outs)] for ins, outs in zip(in_edges, out_edges, strict=True)]
        none = repeat(0.0)
        extra: list[float] = []
        at: list[int] = []
        counts: list[int] = []
        ends = [0]
        for of_variant in tmpcs:
            for of_vertex, before, after, own in zip(of_variant, sources, targets, places, strict=True):
                for tmpc in of_vertex:
                    extra += map(tmpc.forward_sync_bytes.get, before, none)
                    extra += map(tmpc.backward_sync_bytes.get, after, none)
                    at += own
                    counts.append(len(own))
            ends.append(len(at))
        variant = np.repeat(np.arange(len(tmpcs)), np.diff(ends))
        place = np.array(at, np.int64)
        sizes = np.array([edge.communication_bytes for edge in edges] * 2, np.float64)
        size = sizes[place] + np.array(extra, np.float64)
        least = np.full((len(tmpcs), 2 * len(edges)), np.inf)
        most = np.full((len(tmpcs), 2 * len(edges)), -np.inf)
        np.minimum.at(least, (variant, place), size)
        np.maximum.at(most, (variant, place), size)
        paid = np.where(most < least, 0.0, least).reshape(len(tmpcs), 2, len(edges))
        return cls(
            start=offsets(counts)[:-1].copy(),
            variant=variant,
            place=place,
            size=size,
            in_least=np.ascontiguousarray(paid[:, 0].T),
            out_least=np.ascontiguousarray(paid[:, 1].T),
            differ=np.any(least < most, axis=1).astype(np.int64),
        )

    def at_rates(self, slower: FloatArray) -> Charges:
        """Returns the charges multiplied by ``slower``, float64[r, 2 e]: a factor for each variant and place."""
        into, out = np.split(slower.T, 2)
        return self._replace(
            size=self.size * slower[self.variant, self.place],
            in_least=self.in_least * into,
            out_least=self.out_least * out,
        )
