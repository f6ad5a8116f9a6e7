"""Found schemes as further TMPCs of an estimated workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.mode import ALL_REPLICAS, FOUND, OF_RUNTIMES, Mode, Recomputation, Sharding
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.costs import sync_bytes, times_of
from piper_ray.workloads.estimate.memory import backward_bytes
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.schemes.document import digest_of, in_full
from piper_ray.workloads.schemes.frontier import USUAL_IN_FLIGHT, FoundScheme, KindSchemes, find_schemes


def with_schemes(estimate: Estimate, kinds: Sequence[KindSchemes], zero: bool) -> Instance:
    """The estimate's workload with a TMPC for each scheme, which ``found_words`` tells. zero: and one that shares the
    optimizer's state among all replicas."""
    instance, architecture = estimate.instance, estimate.architecture
    made = {
        (of.kind.key, of.degree): [
            _tmpc(found, of.kind.on(of.degree), estimate, shared)
            for found in of.found
            for shared in ((False, True) if zero else (False,))
        ]
        for of in kinds
        if of.kind is not None
    }
    layers = []
    for layer, node, (before, after) in zip(instance.layers, architecture.nodes, architecture.tensors, strict=True):
        rows = {t: [*row] for t, row in layer.tmpcs.items()}
        for (key, degree), tmpcs in made.items():
            for tmpc in tmpcs if key == node.kind.key else ():
                beside = [
                    {
                        x: sync_bytes(size, degree // tmpc.mode.context, tmpc.mode, estimate.setting)
                        for x, size in side.items()
                    }
                    for side in (before, after)
                ]
                rows.setdefault(degree, []).append(tmpc.between(*beside))
        layers.append(replace(layer, tmpcs={t: tuple(rows[t]) for t in sorted(rows)}))
    documents = {
        f"{FOUND}{digest_of(found.scheme)}": {"name": found.name, **in_full(found.scheme, of.priced)}
        for of in kinds
        for found in of.found
        if of.priced is not None
    }
    return replace(instance, layers=tuple(layers), schemes=documents).checked_as(instance)


def offering_schemes(zero: bool) -> Callable[[Estimate, Callable[[], None]], Instance]:
    """The workload of an estimate with schemes that none of its own modes says in full, at all its degrees. The second
    argument is called meanwhile; what it raises ends the search."""

    def offered(estimate: Estimate, check: Callable[[], None]) -> Instance:
        degrees = [t for t in estimate.instance.degrees if 1 < t <= estimate.setting.stack.domain]
        kinds = [
            find_schemes(estimate, kind, t, USUAL_IN_FLIGHT, lambda _: check())
            for kind in estimate.architecture.kinds
            for t in degrees
        ]
        others = [replace(x, found=tuple(one for one in x.found if one.name not in OF_RUNTIMES)) for x in kinds]
        return with_schemes(estimate, others, zero)

    return offered


def _tmpc(found: FoundScheme, kind: LayerKind, estimate: Estimate, shared: bool) -> Tmpc:
    """As ``costs.tmpc_of`` makes it of a mode: what a backward pass makes again is charged beyond the workspace."""
    scheme = found.scheme
    figures, setting = scheme.figures, estimate.setting
    training = setting.training
    numbers = figures.state_bytes / (training.weight_bytes + training.gradient_bytes + training.optimizer_bytes)
    sequence = bool(scheme.border.axis)
    around = found.name == OF_RUNTIMES[-1]
    mode = Mode(
        context=scheme.degree if around else 1,
        recomputation=Recomputation.FULL if scheme.again else Recomputation.NONE,
        sequence_parallel=sequence and not around,
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
    words = (
        [f"cp{scheme.degree}"] * around
        + ["sp"] * mode.sequence_parallel
        + [f"{FOUND}{digest_of(scheme)}"]
        + ["zero"] * shared
    )
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
