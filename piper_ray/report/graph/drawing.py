"""``piper_ray.draw``: an instance's layer graph as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ray.engine.preview import lattice_input
from piper_ray.model import arguments
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.report.graph.picture import check_path, draw_graph
from piper_ray.workloads.formats.load import instance_of

if TYPE_CHECKING:
    from piper_ray.workloads.formats.load import Source


def draw(instance: Instance | Source, path: str | os.PathLike[str], *, contract: Contract = Contract.SAFE) -> None:
    """Write the layer graph as .svg, .png, .pdf or .dot, with the number of downsets at each cut.

    contract: as in ``SolveOptions``; OPERATORS draws blocks. Raises LimitError for graphs that nobody could read,
    UsageError for arguments that make no sense and for a file that cannot be written.

    >>> import piper_ray
    >>> piper_ray.draw(piper_ray.estimate("bert-large", "A100-80"), "graph.dot")
    """
    target = Path(arguments.location("path", path))
    check_path(target)
    contract = arguments.choice("contract", contract, Contract)
    planned = lattice_input(instance_of(instance), contract)
    members = planned.outline.contraction.members(planned.instance)
    draw_graph(planned.instance, planned.outline.graph, members, target)
