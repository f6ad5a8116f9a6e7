"""Models whose layers stand in a row: each reads what the one before it makes, and nothing else."""

from __future__ import annotations

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable
from piper_ray.model.in_order import layers_in_order
from piper_ray.model.instance import Instance


def require_chain(instance: Instance, title: str) -> None:
    """Raises UsageError, with the first layer that is at odds. title: of the runtime that asks for it."""
    order = layers_in_order(instance)
    for before, layer in zip((None, *order), order, strict=False):
        sources = instance.neighbours[layer][0]
        if set(sources) != ({before} - {None}):
            read = " and ".join(_named(instance, source) for source in sources) or "no other layer"
            expected = "nothing" if before is None else _named(instance, before)
            raise UsageError(
                f"{title} hands each layer what the one before it makes; here {_named(instance, layer)} reads {read}, "
                f"and {expected} is before it"
            )


def _named(instance: Instance, layer: int) -> str:
    found = instance.layer_by_id[layer]
    return f'layer {layer} ("{printable(found.path or found.name)}")'
