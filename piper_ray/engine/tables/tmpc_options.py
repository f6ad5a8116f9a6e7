"""The TMPC choices of the contracted graph, in flat arrays for the kernels. They do not depend on K, N, M, B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from piper_ray.cost.variants import Variant, undominated
from piper_ray.engine.kernels.types import FloatArray, IndexArray, OptionArrays
from piper_ray.engine.lattice.layer_graph import LayerGraph, offsets
from piper_ray.engine.tables.flat_options import SHARED, TIME, WEIGHTS, A, B, Charges, IncidentEdges, Options
from piper_ray.model.instance import Instance, Tmpc

_IN_FLIGHT = 8.0
"""Microbatches in flight for which memory is priced. Half as many would do as well."""


class VertexCosts(NamedTuple):
    """The least figures of each vertex in each variant, over all its options. Zero if it has none.

    work_s, weights_bytes, least_a, least_b, least_shared, fast_a, fast_b, fast_shared: float64[n, r]; ``fast`` is of
    the fastest option. missing: int64[n, r], 1 if there is no option.
    many_s, one_s: float64[n, r], the least extra cost of an option over the time of the fastest, if its memory is
    priced with infinitely many microbatches in flight, and with one.
    in_bytes, out_bytes: float64[e, r], the least charge (c + extra) of an edge in the stage of its head, and of its
    tail.
    """

    work_s: FloatArray
    weights_bytes: FloatArray
    least_a: FloatArray
    least_b: FloatArray
    fast_a: FloatArray
    fast_b: FloatArray
    least_shared: FloatArray
    fast_shared: FloatArray
    many_s: FloatArray
    one_s: FloatArray
    missing: IndexArray
    in_bytes: FloatArray
    out_bytes: FloatArray


@dataclass(frozen=True)
class TmpcOptions:
    """All data of TMPCs that the solver uses. ``tmpcs[r][v]`` are the options in the order of ``arrays``.

    In ``arrays``, option_resync_s holds w and charge_s holds c + extra, both in bytes: see ``in_seconds``.
    tensor_bytes: float64[h], both passes. shares: whether any option has bytes that replicas share out.
    """

    variants: tuple[Variant, ...]
    tmpcs: tuple[tuple[tuple[Tmpc, ...], ...], ...]
    least: VertexCosts
    arrays: OptionArrays
    tensor_bytes: FloatArray
    shares: bool

    def in_seconds(self, resync_s_per_byte: FloatArray, transfer_s_per_byte: float) -> OptionArrays:
        """Returns the arrays with weights as 4 w / (N B), for each variant, and charges as 2 (c + extra) / B."""
        of_variant = np.array([sum(map(len, rows)) for rows in self.tmpcs], np.int64)
        return self.arrays._replace(
            option_resync_s=self.arrays.option_resync_s * np.repeat(resync_s_per_byte, of_variant),
            charge_s=self.arrays.charge_s * transfer_s_per_byte,
        )


def build_options(
    instance: Instance, graph: LayerGraph, variants: Sequence[Variant], slower: FloatArray | None = None
) -> TmpcOptions:
    """Flattens the variants' TMPCs, without the dominated ones, in vertex order.

    slower: float64[r, 2 e], for clusters with several rates: the time of a byte that enters by an edge, then of one
    that leaves by it, relative to its time at the cluster's bandwidth.
    """
    rows, kept = [[variant.tmpcs[x] for x in graph.layer_ids] for variant in variants], dict[int, tuple[Tmpc, ...]]()
    for row in chain(*rows):
        if id(row) not in kept:  # variants at different places share rows
            kept[id(row)] = undominated(row)
    tmpcs = tuple(tuple(kept[id(row)] for row in of_variant) for of_variant in rows)
    options, incident = Options.of(tmpcs, graph.size), IncidentEdges.of(graph)
    charges = Charges.of(instance, graph, tmpcs, incident)
    if slower is not None:
        charges = charges.at_rates(slower)
    classes = _Classes.of(options)
    price_s = _price_s(options)
    figures, choices = np.ascontiguousarray(options.figures.T), np.ascontiguousarray(classes.choices.T)
    arrays = OptionArrays(
        degree=np.array([variant.degree for variant in variants], np.int64),
        uniform=1 - np.maximum(options.differ(WEIGHTS), charges.differ),
        option_start=options.option_start(),
        option_p_s=figures[TIME],
        option_resync_s=figures[WEIGHTS],
        option_a=figures[A],
        option_b=figures[B],
        option_shared=figures[SHARED],
        charge_start=charges.start,
        charge_s=charges.size,
        **incident._asdict(),
        class_start=classes.start,
        class_of=classes.of_vertex,
        choice_start=classes.choice_start,
        choice_p_s=choices[TIME],
        choice_a=choices[A],
        choice_b=choices[B],
        choice_shared=choices[SHARED],
        choices_share=options.differ(SHARED),
        price_s=price_s,
    )
    tensors = [instance.tensors[index] for _, index in graph.tensors]
    return TmpcOptions(
        tuple(variants),
        tmpcs,
        _least(options, charges, price_s),
        arrays,
        np.array([tensor.forward_bytes + tensor.backward_bytes for tensor in tensors], np.float64),
        bool(np.any(figures[SHARED] > 0.0)),
    )


def _price_s(options: Options) -> FloatArray:
    """Returns float64[r]: a price of memory for each microbatch in flight. For each variant it is the median of what
    options take longer than the fastest per byte that they save. Any price gives a bound; a price that choices pay
    gives a close one.
    """
    fastest = np.repeat(options.fastest, np.diff(options.start)[options.filled])
    apart = options.figures - options.figures[fastest]
    saved_bytes = -(apart[:, A] + apart[:, B] / _IN_FLIGHT)
    saving = np.flatnonzero(saved_bytes > 0.0)
    paid_s, variant = apart[saving, TIME] / saved_bytes[saving], options.variant_of_option()[saving]
    price_s = np.zeros(options.variants)
    for r in range(options.variants):
        of_variant = np.sort(paid_s[variant == r])
        if of_variant.size > 0:
            price_s[r] = of_variant[of_variant.size // 2]
    return price_s


class _Classes(NamedTuple):
    """Classes of vertices, for each variant, whose options differ from the fastest by the same amounts."""

    start: IndexArray  # int64[r + 1]
    of_vertex: IndexArray  # int64[r, n], -1 for vertices with at most one option
    choice_start: IndexArray  # int64[classes + 1]
    choices: FloatArray  # float64[.., 5]: figures of the other options minus the fastest's

    @classmethod
    def of(cls, options: Options) -> _Classes:
        of_option = np.repeat(options.fastest, np.diff(options.start)[options.filled])
        others = np.flatnonzero(of_option != np.arange(of_option.size))
        apart = options.figures[others] - options.figures[of_option[others]]
        apart[:, WEIGHTS] = 0.0  # choices are made by classes only where they do not change the cost of weights
        apart += 0.0  # turns -0.0 into 0.0
        bounds = np.searchsorted(others, options.start)
        of_vertex = np.full((options.variants, options.vertices), -1, np.int64)
        starts, first_choices = [0], list[tuple[int, int]]()
        for variant in range(options.variants):
            classes: dict[bytes, int] = {}
            for vertex in range(options.vertices):
                group = variant * options.vertices + vertex
                begin, end = int(bounds[group]), int(bounds[group + 1])
                if begin == end:
                    continue
                key = apart[begin:end].tobytes()
                if key not in classes:
                    classes[key] = len(first_choices)
                    first_choices.append((begin, end))
                of_vertex[variant, vertex] = classes[key]
            starts.append(len(first_choices))
        rows = [row for begin, end in first_choices for row in range(begin, end)]
        choice_start = offsets(end - begin for begin, end in first_choices)
        return cls(np.array(starts, np.int64), of_vertex, choice_start, apart[rows])


def fastest(options: Sequence[Tmpc]) -> Tmpc:
    """Returns the option of least time; among equally fast ones, which trade a for b, the one of least a."""
    return min(options, key=lambda tmpc: (tmpc.time_per_sample_s, tmpc.activation_bytes))


def _least(options: Options, charges: Charges, price_s: FloatArray) -> VertexCosts:
    fast = options.figures[options.fastest]

    def least(figure: int) -> FloatArray:
        return options.by_vertex(options.least[:, figure])

    def of_fastest(figure: int) -> FloatArray:
        return options.by_vertex(fast[:, figure])

    def priced(in_flight_inverse: float) -> FloatArray:
        held = options.figures[:, A] + options.figures[:, B] * in_flight_inverse
        priced_s = options.figures[:, TIME] + price_s[options.variant_of_option()] * held
        return options.by_vertex(np.minimum.reduceat(priced_s, options.start[options.filled]) - fast[:, TIME])

    return VertexCosts(
        work_s=least(TIME),
        weights_bytes=least(WEIGHTS),
        least_a=least(A),
        least_b=least(B),
        fast_a=of_fastest(A),
        fast_b=of_fastest(B),
        many_s=priced(0.0),
        one_s=priced(1.0),
        least_shared=least(SHARED),
        fast_shared=of_fastest(SHARED),
        missing=options.missing(),
        in_bytes=charges.in_least,
        out_bytes=charges.out_least,
    )
