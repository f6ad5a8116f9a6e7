"""Found schemes as further TMPCs of an estimated workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.mode import ALL_REPLICAS, FOUND, OF_RUNTIMES, Mode, Sharding
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.costs import sync_bytes, times_of
from piper_ray.workloads.estimate.memory import backward_bytes
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.schemes.document import digest_of, in_full
from piper_ray.workloads.schemes.frontier import USUAL_IN_FLIGHT, FoundScheme, KindSchemes, find_schemes
from piper_ray.workloads.schemes.graph import TensorPlacement
from piper_ray.workloads.schemes.names import name_of
from piper_ray.workloads.schemes.scheme import Scheme


def with_schemes(estimate: Estimate, kinds: Sequence[KindSchemes], zero: bool) -> Instance:
    """The estimate's workload with a TMPC for each scheme, whose word ``found_schemes`` finds. zero: also with
    one that shares the optimizer's state among all replicas."""
    instance, architecture = estimate.instance, estimate.architecture
    made = {
        (of.kind.key, of.degree): [
            tmpc_of_scheme(found, of.kind.on(of.degree), estimate, shared)
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


@dataclass(frozen=True)
class SchemeOffer:
    """Makes an estimate's workload with schemes that none of its own modes expresses in full. zero: also with the
    optimizer's state shared among all replicas. more: schemes that plans asked for, by the digest of what they belong
    to."""

    zero: bool
    more: Mapping[str, tuple[Scheme, ...]] = field(default_factory=dict)

    def __call__(self, estimate: Estimate, check: Callable[[], None]) -> Instance:
        """Finds the schemes at all degrees. check: called meanwhile; an exception from it ends the search."""
        degrees = [t for t in estimate.instance.degrees if 1 < t <= estimate.setting.stack.domain]
        return with_schemes(estimate, [one for t in degrees for one in self.kinds(estimate, t, check)], self.zero)

    def kinds(self, estimate: Estimate, degree: int, check: Callable[[], None]) -> list[KindSchemes]:
        """The schemes of each kind of layer. check: as above."""
        found = (
            find_schemes(estimate, kind, degree, USUAL_IN_FLIGHT, lambda _: check())
            for kind in estimate.architecture.kinds
        )
        return [self._offered(one) for one in found]

    def _offered(self, of: KindSchemes) -> KindSchemes:
        of = with_more(of, self.more.get(of.digest, ())) if of.priced is not None else of
        return replace(of, found=tuple(one for one in of.found if one.name not in OF_RUNTIMES))


def with_more(of: KindSchemes, schemes: Sequence[Scheme]) -> KindSchemes:
    """Returns the offer with these schemes of the kind added."""
    assert of.priced is not None
    graph, known = of.priced.graph, [one.scheme for one in of.found]
    more = (FoundScheme(name_of(one, graph), one) for one in schemes if one not in known)
    return replace(of, found=(*of.found, *more))


def room_again_bytes(kind: LayerKind, degree: int, border: TensorPlacement, estimate: Estimate) -> float:
    """The part of the workspace that a backward pass may use to recompute; below 0 where its passes need more anyway.
    kind: on this number of devices."""
    mode = LayerMode(degree=degree, sequence_parallel=bool(border.axis))
    return estimate.setting.workspace_bytes - backward_bytes(kind, mode)


def tmpc_of_scheme(found: FoundScheme, kind: LayerKind, estimate: Estimate, shared: bool) -> Tmpc:
    """Makes the TMPC as ``costs.tmpc_of`` does for a mode. The scheme itself says what it recomputes: it goes together
    with layers that recompute other things. kind: on the scheme's devices."""
    scheme = found.scheme
    figures, setting = scheme.figures, estimate.setting
    training = setting.training
    numbers = figures.state_bytes / (training.weight_bytes + training.gradient_bytes + training.optimizer_bytes)
    sequence = bool(scheme.border.axis)
    around = found.name == OF_RUNTIMES[-1]
    mode = Mode(
        context=scheme.degree if around else 1,
        sequence_parallel=sequence and not around,
        optimizer_shards=ALL_REPLICAS if shared else 1,
        sharding=Sharding.OPTIMIZER if shared else Sharding.NONE,
    )
    excess = 0.0
    if scheme.again or not kind.recomputable:  # a layer that occurs once in a model is charged for what its passes need
        excess = max(0.0, figures.again_bytes - room_again_bytes(kind, scheme.degree, scheme.border, estimate))
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
        mode=mode,
    )
