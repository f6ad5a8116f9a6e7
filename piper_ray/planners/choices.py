"""One configuration for each layer, the same way in all stages: a degree t, and recomputation everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ray.cost.variants import ANY_DEGREE, stage_variants
from piper_ray.engine.tables.tmpc_options import fastest
from piper_ray.model.constraints import Recompute
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.restrictions import Restrictions


@dataclass(frozen=True)
class UniformChoice:
    """degree: t. tmpcs: for each layer id the TMPC it runs in whatever stage it is.

    least_data_parallel_degree, most_data_parallel_degree: of the stages that this choice is for.
    """

    degree: int
    tmpcs: Mapping[int, Tmpc]
    least_data_parallel_degree: int = 1
    most_data_parallel_degree: int = ANY_DEGREE

    @property
    def recompute_words(self) -> str:
        recomputes = any(tmpc.recompute for tmpc in self.tmpcs.values())
        return "recomputation everywhere" if recomputes else "no recomputation"


def uniform_choices(instance: Instance, restrictions: Restrictions) -> tuple[UniformChoice, ...]:
    """All that the restrictions leave, by ascending degree, nowhere before everywhere, few replicas before many.

    Of several TMPCs with the same role (recomputing or not) a layer runs the fastest; a layer without the choice
    keeps what it has. A degree that some layer cannot run at is left out.
    """
    if restrictions.recompute in (Recompute.AUTO, Recompute.FIRST_K, Recompute.ONE_FOR_ALL):
        restrictions = restrictions.with_recompute(Recompute.ALL_OR_NONE)
    choices: list[UniformChoice] = []
    for variant in stage_variants(instance, restrictions):
        if all(variant.tmpcs.values()):
            choice = UniformChoice(
                variant.degree,
                {layer_id: fastest(tmpcs) for layer_id, tmpcs in variant.tmpcs.items()},
                variant.least_data_parallel_degree,
                variant.most_data_parallel_degree,
            )
            if choice not in choices:
                choices.append(choice)
    return tuple(choices)
