"""Reports what a solve will work on, and how much time and memory it will take, without solving."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.blocks.block_instance import merge_operators
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import build_graph, count_downsets
from piper_ray.engine.preparation import Outline, forecast, is_wide
from piper_ray.model import arguments
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import BlockStats, Forecast
from piper_ray.workloads.formats.load import Source, instance_of


@dataclass(frozen=True)
class LatticeInput:
    """The graph on which a solve builds its lattice: the layers or, if ``blocks`` is given, blocks of them."""

    instance: Instance
    outline: Outline
    blocks: BlockStats | None = None

    restrictions: Restrictions = Restrictions()

    @property
    def is_wide(self) -> bool:
        """Whether a solve under "2bw" lists only the useful downsets."""
        return is_wide(self.outline)

    @property
    def forecast(self) -> Forecast:
        """The forecast for the size of the lattice. If only useful downsets are listed, the time is not known
        beforehand."""
        found = forecast(self.outline.graph, self.outline.downsets, len(self.outline.variants))
        return replace(found, seconds=None) if self.is_wide else found


def forecast_solve(instance: Instance | Source, restrictions: Restrictions = Restrictions()) -> Forecast:
    """Returns the size of the lattice, and roughly the memory and time of a solve under the instance's schedule."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    instance = instance_of(instance)
    if Schedule.first_of(instance.schedule) == PAPERS_SCHEDULE and not restrictions.plan_wide:
        return lattice_input(instance, restrictions=restrictions).forecast
    # If all stages have one d and one t, no layers are merged: see ``flush.solve``.
    variants, graph = stage_variants(instance, restrictions), build_graph(instance, without_contraction())
    return forecast(graph, count_downsets(graph), sum(variant.degree <= instance.devices for variant in variants))


def lattice_input(
    instance: Instance | Source, contract: Contract = Contract.SAFE, restrictions: Restrictions = Restrictions()
) -> LatticeInput:
    """Returns the input of the lattice. Raises LimitError if the operators cannot be merged into few enough blocks."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    contract = arguments.choice("contract", contract, Contract)
    instance = instance_of(instance)
    outline = Outline.of(instance, restrictions)
    merged = merge_operators(instance, outline, outline.downsets) if contract is Contract.OPERATORS else None
    if merged is None:
        return LatticeInput(instance, outline, restrictions=restrictions)
    blocks = merged.blocks.instance
    return LatticeInput(blocks, Outline.of(blocks, restrictions), merged.stats, restrictions)
