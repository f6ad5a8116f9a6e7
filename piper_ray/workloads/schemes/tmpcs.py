"""Found schemes as further TMPCs of an estimated workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.mode import ALL_REPLICAS, FOUND, Mode, Recomputation, Sharding
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.costs import sync_bytes, times_of
from piper_ray.workloads.estimate.memory import backward_bytes
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.schemes.document import digest_of, in_full
from piper_ray.workloads.schemes.frontier import KindSchemes
from piper_ray.workloads.schemes.scheme import Scheme


def with_schemes(estimate: Estimate, kinds: Sequence[KindSchemes], zero: bool) -> Instance:
    """The estimate's workload with a TMPC for each scheme. zero: and one that shares the optimizer's state among all
    replicas."""
    instance, architecture = estimate.instance, estimate.architecture
    made = {
        (of.kind.key, of.degree): [
            _tmpc(found.scheme, of.kind.on(of.degree), estimate, shared)
            for found in of.found
            for shared in ((False, True) if zero else (False,))
        ]
        for of in kinds
    }
    layers = []
    for layer, node, (before, after) in zip(instance.layers, architecture.nodes, architecture.tensors, strict=True):
        rows = {t: [*row] for t, row in layer.tmpcs.items()}
        for (key, degree), tmpcs in made.items():
            for tmpc in tmpcs if key == node.kind.key else ():
                beside = [
                    {index: sync_bytes(size, degree, tmpc.mode, estimate.setting) for index, size in side.items()}
                    for side in (before, after)
                ]
                rows.setdefault(degree, []).append(tmpc.between(*beside))
        layers.append(replace(layer, tmpcs={t: tuple(rows[t]) for t in sorted(rows)}))
    documents = {
        f"{FOUND}{digest_of(found.scheme)}": in_full(found.scheme, of.priced)
        for of in kinds
        for found in of.found
        if of.priced is not None
    }
    return replace(instance, layers=tuple(layers), schemes=documents).checked_as(instance)


def _tmpc(scheme: Scheme, kind: LayerKind, estimate: Estimate, shared: bool) -> Tmpc:
    """As ``costs.tmpc_of`` makes it of a mode: what a backward pass makes again is charged beyond the workspace."""
    figures, setting = scheme.figures, estimate.setting
    training = setting.training
    numbers = figures.state_bytes / (training.weight_bytes + training.gradient_bytes + training.optimizer_bytes)
    sequence = bool(scheme.border.axis)
    mode = Mode(
        recomputation=Recomputation.FULL if scheme.again else Recomputation.NONE,
        sequence_parallel=sequence,
        optimizer_shards=ALL_REPLICAS if shared else 1,
        sharding=Sharding.OPTIMIZER if shared else Sharding.NONE,
    )
    excess = 0.0
    if scheme.again or not kind.recomputable:  # what stands once in a model is charged for what its passes need
        beside = backward_bytes(kind, LayerMode(degree=scheme.degree, sequence_parallel=sequence))
        excess = max(0.0, figures.again_bytes + beside - setting.workspace_bytes)
    optimizer = training.optimizer_bytes * numbers if shared else 0.0
    copies = figures.copied * (1.0 - 1.0 / scheme.degree)  # of weights that t devices hold these share the state, too
    weights = figures.weights_bytes
    if shared:  # gradients are scattered, and weights gathered
        weights = (weights + numbers * training.weight_bytes) / 2.0
    words = ["sp"] * sequence + [f"{FOUND}{digest_of(scheme)}"] + ["zero"] * shared
    return Tmpc(
        id="+".join(words),
        **times_of(figures.time_s, figures.forward_s, figures.weight_s),
        weights_bytes=float(math.ceil(weights)),
        activation_bytes=float(math.ceil(figures.activation_bytes)),
        fixed_bytes=float(math.ceil(figures.state_bytes - optimizer + excess)),
        shared_bytes=float(math.ceil(optimizer - training.optimizer_bytes * copies)) if shared else 0.0,
        recompute=bool(scheme.again),
        mode=mode,
    )
