"""The devices of one kind alone."""

from __future__ import annotations

from dataclasses import replace

from piper_ray.model.instance import Instance


def on_kind(instance: Instance, kind: str) -> Instance | None:
    """The same on the devices of one kind alone; None where they cannot run some layer."""
    (own,) = (x.cluster for x in instance.cluster.kinds if x.name == kind)
    layers = []
    for layer in instance.layers:
        rows = {t: tuple(replace(x, kind="") for x in row if x.kind == kind) for t, row in layer.tmpcs.items()}
        rows = {t: row for t, row in rows.items() if row}
        if not rows:
            return None
        layers.append(replace(layer, tmpcs=rows))
    return replace(instance, layers=tuple(layers), cluster=own).checked_as(instance)
