"""What a solve will work on, and what it will take, without solving."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.blocks.solve import merge_operators
from piper_ray.engine.forecast import forecast, memory_bytes
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.counting import count_downsets
from piper_ray.engine.lattice.layer_graph import build_graph
from piper_ray.engine.preparation import Outline, prepare
from piper_ray.engine.search.expected import expected_search_s, expected_wide_s
from piper_ray.engine.search.planning import Planning
from piper_ray.engine.search.wide import WideSearch
from piper_ray.engine.tables.problem import build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.engine.wide_layers import LISTED, is_wide
from piper_ray.model import arguments
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import BlockStats, Forecast
from piper_ray.workloads.formats.load import Source, instance_of

_LOOKED_INTO, _MOST_BYTES = (100, 1_000_000), 4e9
"""Downsets, and memory: of the lattices that are looked into for a forecast."""


@dataclass(frozen=True)
class LatticeInput:
    """What a solve builds its lattice on: the layers, or blocks of them (then with ``blocks``), contracted safely."""

    instance: Instance
    outline: Outline
    blocks: BlockStats | None = None

    restrictions: Restrictions = Restrictions()

    @property
    def forecast(self) -> Forecast:
        """Wide lattices are looked into, which takes about a second: their time is no matter of their size alone.

        Of those that are not listed whole (``is_wide``) it is the time for the downsets that count, and the memory of
        all.
        """
        known, graph, variants = self.quick_forecast, self.outline.graph, len(self.outline.variants)
        if self.is_wide:
            return replace(known, seconds=self._wide_s)
        limit_bytes = _MOST_BYTES
        if known.downsets is None:
            limit_bytes = min(limit_bytes, memory_bytes(graph, variants, LISTED))
        elif not _LOOKED_INTO[0] <= known.downsets <= _LOOKED_INTO[1]:
            return known
        try:
            made = prepare(self.instance, self.restrictions, limit_bytes, outline=self.outline)
        except LimitError:
            return known
        if made.workload is None:
            return known
        if known.downsets is None:
            known = forecast(graph, made.workload.lattice.size, variants)
        degrees = self.restrictions.data_parallel_degrees(self.instance)
        seconds = expected_search_s(self.instance, build_problem(made.workload, self.instance, degrees))
        return known if seconds is None else replace(known, seconds=made.lattice_s + made.stage_costs_s + seconds)

    @property
    def _wide_s(self) -> float | None:
        instance, outline, degrees = self.instance, self.outline, self.restrictions.data_parallel_degrees(self.instance)
        options = build_options(instance, outline.graph, outline.variants)
        with closing(LocalBackend(1)) as backend:
            planning = Planning(instance, outline.contraction)
            return expected_wide_s(WideSearch(planning, outline.graph, options, degrees, backend))

    @property
    def is_wide(self) -> bool:
        """Whether a solve under "2bw" lists those downsets alone that plans as good as the best can use."""
        return is_wide(self.outline)

    @property
    def quick_forecast(self) -> Forecast:
        """From the size of the lattice alone."""
        return forecast(self.outline.graph, self.outline.contracted.downsets, len(self.outline.variants))


def forecast_solve(
    instance: Instance | Source, restrictions: Restrictions = Restrictions(), *, quick: bool = False
) -> Forecast:
    """Size of the lattice, and what a solve under the instance's schedule will take in memory and time.

    quick: the time by the size alone.
    """
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    instance = instance_of(instance)
    if Schedule.first_of(instance.schedule) == PAPERS_SCHEDULE and not restrictions.plan_wide:
        planned = lattice_input(instance, restrictions=restrictions)
        return planned.quick_forecast if quick else planned.forecast
    # With one d and one t for all stages no layers are merged: see ``flush.preparation``.
    variants, graph = stage_variants(instance, restrictions), build_graph(instance, without_contraction())
    return forecast(graph, count_downsets(graph), sum(variant.degree <= instance.devices for variant in variants))


def lattice_input(
    instance: Instance | Source, contract: Contract = Contract.SAFE, restrictions: Restrictions = Restrictions()
) -> LatticeInput:
    """Raises LimitError if the operators cannot be merged into few enough blocks."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    contract = arguments.choice("contract", contract, Contract)
    instance = instance_of(instance)
    outline = Outline.of(instance, restrictions)
    merged = merge_operators(instance, outline) if contract is Contract.OPERATORS else None
    if merged is None:
        return LatticeInput(instance, outline, restrictions=restrictions)
    blocks = merged.blocks.instance
    return LatticeInput(blocks, Outline.of(blocks, restrictions), merged.stats, restrictions)
