"""The tables of a solve under a flush: the lattice, and the options of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from piper_ray.cost.variants import Variant, least_by_passes
from piper_ray.engine.flush.border_bound import BorderBound
from piper_ray.engine.flush.mixes import (
    BorderRates,
    EdgeRates,
    Placed,
    edge_rates,
    placed_variants,
    tensor_rates,
)
from piper_ray.engine.kernels.flush_stages import AheadArrays
from piper_ray.engine.kernels.flush_types import SUM, FlushTables
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.downsets import Lattice
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.tables.flat_options import SHARED, WEIGHTS, A, B, Charges, IncidentEdges, Options
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.passes import passes_of

_QUANTILES = (0.25, 0.5, 0.75)
_PRICED_BYTES = 100e6
"""Memory for all priced sums, in bytes."""


class LayerValues(NamedTuple):
    """The figures of each vertex that ``FlushTables`` sums over each downset, for all prices of memory."""

    sums: FloatArray  # float64[r, n, len(SUM)]
    in_flight: IndexArray  # int64[k]
    memory_s: FloatArray  # float64[r, k * c]
    priced_s: FloatArray  # float64[r, n, k * c]


@dataclass(frozen=True)
class FlushWorkload:
    """The tables of a solve under a flush.

    tmpcs: ``tmpcs[r][v]`` are the options of vertex v in placed variant r, in the order of ``arrays``, the fastest
    first. rates: at which edges are charged. border_rates: of borders. ahead_of: figures of the layers in front of each
    downset, by sets of variants, computed as needed. border_labelling: given on graphs with many downsets or layers;
    stage_labelling: then given too, if there is one. borders_of: bounds by the cheapest borders, for the same sets of
    variants.
    """

    lattice: Lattice
    placed: tuple[Placed, ...]
    tmpcs: tuple[tuple[tuple[Tmpc, ...], ...], ...]
    rates: EdgeRates
    border_rates: BorderRates
    values: LayerValues
    arrays: FlushTables
    ahead_of: dict[tuple[int, ...], AheadArrays] = field(default_factory=dict)
    border_labelling: Labelling | None = None
    stage_labelling: Labelling | None = None
    borders_of: dict[tuple[int, ...], BorderBound | None] = field(default_factory=dict)

    @property
    def tmpcs_alone(self) -> tuple[tuple[tuple[Tmpc, ...], ...], ...]:
        """The options of each variant once, for any number of neighbours of its stages."""
        return tuple({id(x.variant): row for x, row in zip(self.placed, self.tmpcs, strict=True)}.values())

    def borders(self, bounding: IndexArray) -> BorderBound | None:
        """Returns the bound by cheapest borders for these variants; None if it is not used or does not exist."""
        variants = tuple(bounding.tolist())
        if self.border_labelling is not None and variants not in self.borders_of:
            self.borders_of[variants] = BorderBound.of(
                self.lattice.graph, self.border_labelling, self.stage_labelling, self.arrays, bounding
            )
        return self.borders_of.get(variants)


def build_workload(
    instance: Instance, lattice: Lattice, variants: Sequence[Variant], border_rates: BorderRates
) -> FlushWorkload:
    """Builds the tables: options that no other option dominates, their sums over downsets, and what crosses borders."""
    graph = lattice.graph
    placed = placed_variants(variants, instance.cluster, border_rates)
    rates = edge_rates(graph, placed, instance.cluster, border_rates)
    of_tensors = tensor_rates(graph, placed, instance.cluster)
    alone = {
        id(x): tuple(least_by_passes(x.tmpcs[layer], _seconds, sync_first=True) for layer in graph.layer_ids)
        for x in variants
    }
    tmpcs = tuple(alone[id(x.variant)] for x in placed)
    options, edges = Options.of(tmpcs, graph.size), IncidentEdges.of(graph)
    charges = Charges.of(instance, graph, tmpcs, edges)
    seconds = np.array(
        [_seconds(tmpc) for of_variant in tmpcs for row in of_variant for tmpc in row], np.float64
    ).reshape(-1, 2)
    charge_s = charges.size / np.concatenate((rates.come_in, rates.go_out), axis=1)[charges.variant, charges.place]
    in_s, out_s = charges.in_least / rates.come_in.T, charges.out_least / rates.go_out.T
    tensors = [instance.tensors[index] for _, index in graph.tensors]
    pays_more = _pays_more(options, charges, charge_s, np.concatenate((in_s, out_s)).T)
    values = LayerValues(
        _layer_figures(options, seconds, pays_more), *_priced(options, seconds.sum(axis=1), instance.microbatches)
    )
    arrays = FlushTables(
        **_of_lattice(lattice, values),
        tensor_forward_s=np.array([tensor.forward_bytes for tensor in tensors], np.float64) / of_tensors,
        tensor_backward_s=np.array([tensor.backward_bytes for tensor in tensors], np.float64) / of_tensors,
        edge_in_s=np.ascontiguousarray(in_s.T),
        edge_out_s=np.ascontiguousarray(out_s.T),
        option_start=options.option_start(),
        option_forward_s=seconds[:, 0].copy(),
        option_backward_s=seconds[:, 1].copy(),
        option_weights=options.figures[:, WEIGHTS].copy(),
        option_activation=options.figures[:, A].copy(),
        option_fixed=options.figures[:, B].copy(),
        option_shared=options.figures[:, SHARED].copy(),
        charge_start=charges.start,
        charge_s=charge_s,
        **edges._asdict(),
    )
    return FlushWorkload(lattice, tuple(placed), tmpcs, rates, border_rates, frozen(values), frozen(arrays))


def tables_on(lattice: Lattice, known: FlushTables, values: LayerValues) -> FlushTables:
    """Returns the tables of the same layers on other downsets."""
    return frozen(known._replace(**_of_lattice(lattice, values)))


def tables_of_rows(tables: FlushTables, rows: IndexArray) -> FlushTables:
    """Returns the tables of some of the downsets. rows: int64[..], ascending, with the first and the last one."""
    crossing_start, crossing = _runs_of_rows(tables.crossing_start, tables.crossing, rows)
    cut_start, cut = tables.cut_start, tables.cut
    if tables.tensor_bits.shape[0] > 0:
        cut_start, cut = _runs_of_rows(cut_start, cut, rows)
    some = tables._replace(
        bits=tables.bits[rows],
        crossing_start=crossing_start,
        crossing=crossing,
        cut_start=cut_start,
        cut=cut,
        sums=np.ascontiguousarray(tables.sums[:, rows]),
        priced_s=np.ascontiguousarray(tables.priced_s[:, rows]),
    )
    return frozen(some)


def _runs_of_rows(start: IndexArray, values: IndexArray, rows: IndexArray) -> tuple[IndexArray, IndexArray]:
    sizes = np.diff(start)[rows]
    ends = np.cumsum(sizes)
    at = np.arange(sizes.sum()) + np.repeat(start[rows] - ends + sizes, sizes)
    return np.append(0, ends), values[at]


def _of_lattice(lattice: Lattice, values: LayerValues) -> dict[str, Any]:
    """Returns the fields of ``FlushTables`` that depend on the downsets."""
    arrays, variants = lattice.arrays, len(values.sums)
    prices = len(_QUANTILES)
    counts = max(1, int(_PRICED_BYTES / (8 * variants * prices * lattice.size)))
    in_flight = values.in_flight[:counts]
    priced = values.priced_s[:, :, : in_flight.size * prices]
    return {
        "bits": arrays.bits,
        "crossing_start": arrays.crossing_start,
        "crossing": arrays.crossing,
        "edge_tail": arrays.edge_tail,
        "edge_head": arrays.edge_head,
        "tensor_bits": arrays.tensor_bits,
        "cut_start": arrays.cut_start,
        "cut": arrays.cut,
        "sums": np.stack([lattice.sums(of_variant) for of_variant in values.sums]),
        "in_flight": in_flight,
        "memory_s": np.ascontiguousarray(values.memory_s[:, : priced.shape[2]]),
        "priced_s": np.stack([lattice.sums(of_variant) for of_variant in priced]),
    }


def _priced(options: Options, time_s: FloatArray, microbatches: int) -> tuple[IndexArray, FloatArray, FloatArray]:
    """Returns in_flight, memory_s and priced_s of ``LayerValues``. time_s: float64[options].

    Any price gives a bound. It is close for prices that some choices pay: the extra time of an option over the fastest,
    per byte that it saves. Some quantiles of these are taken.
    """
    in_flight, prices = _spread(microbatches), len(_QUANTILES)
    memory_s = np.zeros((options.variants, in_flight.size * prices))
    priced_s = np.zeros((options.variants, options.vertices, memory_s.shape[1]))
    variant = options.variant_of_option()
    held = options.figures[:, A, None] * in_flight + options.figures[:, B, None]
    fastest = np.repeat(options.fastest, np.diff(options.start)[options.filled])
    saved, longer_s = held[fastest] - held, (time_s - time_s[fastest])[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        paid_s = np.where((saved > 0.0) & (longer_s > 0.0), longer_s / saved, np.nan)
    for r in range(options.variants):
        of_variant = variant == r
        for k in range(in_flight.size):
            paid = paid_s[of_variant, k]
            if np.isfinite(paid).any():
                memory_s[r, k * prices : (k + 1) * prices] = np.nanquantile(paid, _QUANTILES)
        priced = time_s[of_variant, None] + np.repeat(held[of_variant], prices, axis=1) * memory_s[r]
        starts = options.option_start()[r]
        some = starts[:-1] < starts[1:]
        priced_s[r, some] = np.minimum.reduceat(priced, starts[:-1][some] - starts[0])
    return in_flight, memory_s, priced_s


def _spread(microbatches: int) -> IndexArray:
    """Returns int64[k]: 1, 2, 3, 4, 6, 8, 12, ... up to ``microbatches``."""
    doubled = 2 ** np.arange(int(microbatches).bit_length())
    found = np.unique(np.append(doubled, 3 * doubled[:-1] // 2))
    return found[found <= microbatches].astype(np.int64)


def _seconds(tmpc: Tmpc) -> tuple[float, float]:
    """Returns the seconds of the forward and of the backward pass."""
    passes = passes_of(tmpc)
    return passes.forward_s, passes.backward_s


def _pays_more(options: Options, charges: Charges, charge_s: FloatArray, least_s: FloatArray) -> FloatArray:
    """Returns float64[filled]: 1 if a vertex's fastest option does not have the least weights or pays more than the
    least for some edge. charge_s: of the charges. least_s: float64[r, 2 e], by ``Charges.place``."""
    fast = options.start[options.filled]
    pays = np.append(0, np.cumsum(charge_s != least_s[charges.variant, charges.place]))
    ends = np.append(charges.start, charge_s.size)
    more = pays[ends[fast + 1]] > pays[ends[fast]]
    found: FloatArray = (more | (options.figures[fast, WEIGHTS] != options.least[:, WEIGHTS])).astype(np.float64)
    return found


def _layer_figures(options: Options, seconds: FloatArray, mixed: FloatArray) -> FloatArray:
    """Returns float64[r, n, len(SUM)]. seconds: float64[options, 2], of the forward and the backward pass."""
    starts = options.start[options.filled]
    fast, fast_s = options.figures[starts], seconds[starts]
    least_s = np.minimum.reduceat(seconds, starts)
    of_filled = {
        SUM.least_s: fast_s.sum(axis=1),
        SUM.least_forward_s: least_s[:, 0],
        SUM.least_backward_s: least_s[:, 1],
        SUM.least_weights: options.least[:, WEIGHTS],
        SUM.least_activation: options.least[:, A],
        SUM.least_fixed: options.least[:, B],
        SUM.least_shared: options.least[:, SHARED],
        SUM.fast_forward_s: fast_s[:, 0],
        SUM.fast_activation: fast[:, A],
        SUM.fast_fixed: fast[:, B],
        SUM.fast_shared: fast[:, SHARED],
        SUM.mixed: mixed,
    }
    values = np.zeros((options.variants, options.vertices, len(SUM)))
    for column, figures in of_filled.items():
        values[:, :, column] = options.by_vertex(figures).T
    values[:, :, SUM.missing] = options.missing().T
    return values
