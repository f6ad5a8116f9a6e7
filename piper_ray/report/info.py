"""What an instance holds, and what solving it will take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from piper_ray.engine.preview import lattice_input
from piper_ray.model import arguments
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.model.solution import BlockStats, Forecast
from piper_ray.workloads.formats.load import instance_of
from piper_ray.workloads.formats.plans import Document, header

if TYPE_CHECKING:
    from piper_ray.workloads.formats.load import Source


def info(instance: Instance | Source, *, contract: Contract = Contract.SAFE) -> dict[str, object]:
    """The document of ``info --json``: the instance's figures, its TMPCs by degree, and the forecast of a solve.

    contract: as in ``SolveOptions``. Raises InputError for an instance that is not sound, UsageError for arguments that
    make no sense.

    >>> import piper_ray
    >>> found = piper_ray.info(piper_ray.estimate("bert-large", "A100-80"))
    >>> found["instance"]["layers"], found["forecast"]["downsets"]
    (26, 27)
    """
    found, contract = instance_of(instance), arguments.choice("contract", contract, Contract)
    planned = lattice_input(found, contract)
    return info_document(found, planned.forecast, planned.blocks)


def info_document(instance: Instance, forecast: Forecast, blocks: BlockStats | None) -> Document:
    """What ``info`` found."""
    return {
        **header("info", instance),
        "tensor_parallel_degrees": list(instance.degrees),
        "tmpcs": degree_rows(instance),
        "blocks": None if blocks is None else asdict(blocks),
        "forecast": asdict(forecast),
    }


def degree_rows(instance: Instance) -> list[Document]:
    """For each tensor-parallel degree: how many layers and TMPCs have it, and how many of these recompute."""
    rows: list[Document] = []
    for degree in instance.degrees:
        lists = [layer.tmpcs.get(degree, ()) for layer in instance.layers]
        tmpcs = [tmpc for tmpcs in lists for tmpc in tmpcs]
        rows.append(
            {
                "tensor_parallel_degree": degree,
                "layers": sum(1 for tmpcs_of_layer in lists if tmpcs_of_layer),
                "tmpcs": len(tmpcs),
                "recompute": sum(tmpc.recompute for tmpc in tmpcs),
            }
        )
    return rows
