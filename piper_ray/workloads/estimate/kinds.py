"""One workload on several kinds of GPUs, made from one estimate for each; and on several sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from piper_ray.model.apart import at_each_site
from piper_ray.model.cluster import Cluster, DeviceKind
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Layer, Tmpc, with_rows
from piper_ray.workloads.estimate.build import Estimate


def on_several_kinds(of_kind: Mapping[str, Instance], between_bytes_per_s: float | str | None = None) -> Instance:
    """of_kind: the same model, batch and microbatch on the devices of each kind, by the kind's name.
    between_bytes_per_s: the rate between stages on different kinds; None: that of the slower network.

    An edge's bytes count messages at the rate of the kind's network: the most of them are taken. Raises UsageError for
    workloads of different layers.

    >>> import piper_ray
    >>> of_kind = {gpu: piper_ray.estimate("llama3-8b", gpu, global_batch=64) for gpu in ("A100-80", "H100-SXM")}
    >>> on_several_kinds(of_kind, "40GB/s").devices
    16
    """
    of_kind = {name: _numbered(one, number) for number, (name, one) in enumerate(of_kind.items(), start=1)}
    first, *others = of_kind.values()
    shape = [(layer.id, layer.name) for layer in first.layers]
    for other in others:
        if [(layer.id, layer.name) for layer in other.layers] != shape or other.batch != first.batch:
            raise UsageError("workloads of several kinds of devices must have the same layers and the same batch")
    kinds = [DeviceKind(name, instance.cluster) for name, instance in of_kind.items()]
    slowest = min(kind.cluster.bandwidth_bytes_per_s for kind in kinds)
    layers = [
        replace(layer, tmpcs=_rows({name: x.layers[k] for name, x in of_kind.items()}))
        for k, layer in enumerate(first.layers)
    ]
    edges = [
        replace(edge, communication_bytes=max(x.edges[k].communication_bytes for x in of_kind.values()))
        for k, edge in enumerate(first.edges)
    ]
    notes = tuple(dict.fromkeys(note for instance in of_kind.values() for note in instance.notes))
    cluster = Cluster.of_kinds(kinds, slowest if between_bytes_per_s is None else between_bytes_per_s)
    gpus = {"" if x.model is None else x.model.gpu for x in of_kind.values()}
    model = first.model
    if model is not None and len(gpus) > 1:
        model = replace(model, gpu="" if "" in gpus else "several")
    schemes = {name: scheme for instance in of_kind.values() for name, scheme in instance.schemes.items()}
    joined = replace(
        first,
        layers=tuple(layers),
        edges=tuple(edges),
        cluster=cluster,
        model=model,
        notes=notes,
        schemes=schemes,
    )
    return joined.checked_as(first)


def _numbered(instance: Instance, number: int) -> Instance:
    """The same with words of their own for found schemes, which cost something else on each kind."""
    if number == 1 or not instance.schemes:
        return instance
    words = {word: f"{word}-{number}" for word in instance.schemes}

    def rows(layer: Layer) -> dict[int, tuple[Tmpc, ...]]:
        named = {
            t: [(x, "+".join(words.get(word, word) for word in x.id.split("+"))) for x in row]
            for t, row in layer.tmpcs.items()
        }
        return {t: tuple(x if x.id == own else x.changed(id=own) for x, own in row) for t, row in named.items()}

    schemes = {words[word]: scheme for word, scheme in instance.schemes.items()}
    return replace(instance, layers=with_rows(instance.layers, rows), schemes=schemes).checked_as(instance)


def joined(of_kind: Mapping[str, Estimate], between_bytes_per_s: float | None = None) -> Estimate:
    """Joins estimates in the same way, with what each was made from. Raises UsageError."""
    if len(of_kind) == 1:
        return next(iter(of_kind.values()))
    kinds = tuple(of_kind.values())
    instance = on_several_kinds({name: one.instance for name, one in of_kind.items()}, between_bytes_per_s)
    return replace(kinds[0], instance=instance, devices=instance.devices, kinds=kinds)


def with_sites(site: Estimate, names: Sequence[str], between_bytes_per_s: float) -> Estimate:
    """The same batch by pipelines at each of several sites like this one."""
    instance = at_each_site(site.instance, names, between_bytes_per_s)
    return replace(site, instance=instance, devices=instance.devices)


def _rows(of_kind: Mapping[str, Layer]) -> dict[int, tuple[Tmpc, ...]]:
    rows: dict[int, tuple[Tmpc, ...]] = {}
    for name, layer in of_kind.items():
        for t, row in layer.tmpcs.items():
            rows[t] = rows.get(t, ()) + tuple(tmpc.changed(kind=name) for tmpc in row)
    return {t: rows[t] for t in sorted(rows)}
