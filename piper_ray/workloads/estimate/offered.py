"""The further ways to run layers that a model is offered: those that it can have, that save enough memory, and that may
be the best choice somewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import le

from piper_ray.model.errors import UsageError
from piper_ray.model.mode import CHEAP, EVERY_SECOND_PRODUCT, Recomputation, Sharding
from piper_ray.workloads.estimate.costs import LayerCosts
from piper_ray.workloads.estimate.memory import kept_bytes
from piper_ray.workloads.estimate.modes import LayerMode, Offer, recomputation_of
from piper_ray.workloads.estimate.operators import Architecture, LayerKind, LayerNode
from piper_ray.workloads.estimate.roofline import forward_s
from piper_ray.workloads.estimate.software import Stack


def require_offered(architecture: Architecture, offer: Offer) -> None:
    """Raises UsageError if the model cannot have the offered context parallelism or experts."""
    contexts = [context for context in offer.contexts if context > 1]
    for kind in architecture.kinds if contexts else ():
        if kind.recomputable and not attends(kind):
            raise UsageError(
                f"--context-parallel: {kind.name} of {architecture.name} has no attention over a sequence whose tokens "
                "groups could share; leave it out"
            )
        for context in contexts:
            if kind.recomputable and kind.value("s") % (2 * context):
                raise UsageError(
                    f"--context-parallel {context}: {kind.value('s'):,.0f} tokens are no multiple of {2 * context}; "
                    "each group takes two pieces of a sequence, an early and a late one, so that causal attention is "
                    "shared evenly"
                )
    routed = [kind for kind in architecture.kinds if kind.experts]
    if offer.experts and not routed:
        raise UsageError(f"--expert-parallel: {architecture.name} has no experts; leave it out")
    for kind in routed:
        for ranks in offer.experts:
            if kind.value("E") % ranks:
                raise UsageError(
                    f"--expert-parallel {ranks}: the {kind.value('E'):,.0f} experts of {kind.name} cannot be divided "
                    "evenly among that many ranks"
                )
        if kind.symbols.get("m", 0) % offer.expert_tensor:
            raise UsageError(
                f"--expert-tensor-parallel {offer.expert_tensor}: the inner width of {kind.name}'s experts, "
                f"{kind.value('m'):,.0f}, cannot be divided evenly among that many GPUs"
            )


def attends(kind: LayerKind) -> bool:
    """Whether the kind has attention over tokens, whose keys and values can go around a ring."""
    core = any(operator.on_chip or "scores" in operator.name for operator in kind.operators)
    return core and {"s", "b", "a", "g", "d"} <= kind.symbols.keys()


def heads_handed_out(kind: LayerKind, mode: LayerMode) -> bool:
    """Whether an all-to-all can give each device whole heads instead of tokens."""
    return mode.context == 1 or all(heads % mode.devices == 0 for heads in kind.heads[:1])


_LEAST_SAVED = 0.01
"""The least share of all kept activations that a part has to save to be offered by itself."""


@dataclass(frozen=True)
class _Part:
    """A part that can be recomputed. saved_bytes: bytes that it saves; again_s: seconds that it costs. Both of a
    microbatch in all layers on one device."""

    name: str
    saved_bytes: float
    again_s: float


def offered_recomputations(
    architecture: Architecture, stack: Stack, asked: Sequence[Recomputation] = ()
) -> tuple[Recomputation, ...]:
    """The offered recomputations: none, full, those that the user asks for, and selective ones, each of which saves
    more and costs more than the one before.

    A runtime takes one list of parts for all layers. Of n parts that matter n lists are offered: parts are added in the
    order of time per saved byte. So the lists lie near the best trade-offs, without pricing all 2^n.
    """
    nodes = [node for node in architecture.nodes if node.kind.recomputable]
    found: list[Recomputation] = []
    if EVERY_SECOND_PRODUCT in stack.software.selective:
        found.append(Recomputation((EVERY_SECOND_PRODUCT,)))
    else:
        found += _growing(nodes, stack)
        if not found and stack.software.selective and any(CHEAP in node.kind.parts for node in nodes):
            found.append(Recomputation.SELECTIVE)  # a model that no runtime here has such switches for
    return tuple(dict.fromkeys((Recomputation.NONE, *asked, *found, Recomputation.FULL)))


def _growing(nodes: Sequence[LayerNode], stack: Stack) -> list[Recomputation]:
    kinds, counts = {node.kind.key: node.kind for node in nodes}, Counter(node.kind.key for node in nodes)
    kept = (counts[key] * kept_bytes(kind, LayerMode(degree=1), stack.traits) for key, kind in kinds.items())
    least_bytes = _LEAST_SAVED * sum(kept)
    parts = [
        _part(name, [(kind, counts[key]) for key, kind in kinds.items()], stack) for name in stack.software.selective
    ]
    worth = sorted((part for part in parts if part.saved_bytes > least_bytes), key=lambda x: x.again_s / x.saved_bytes)
    found: list[Recomputation] = []
    names: list[str] = []
    for part in worth:
        if any(_covers(name, part.name, kinds.values()) for name in names):
            continue
        names = [name for name in names if not _covers(part.name, name, kinds.values())] + [part.name]
        found.append(Recomputation.of_parts(names))
    return found


def _part(name: str, kinds: Sequence[tuple[LayerKind, int]], stack: Stack) -> _Part:
    """The saving and the cost of a part in all layers. kinds: the kinds with their numbers of layers."""
    saved_bytes = again_s = 0.0
    for kind, count in kinds:
        mode = LayerMode(degree=1, recomputation=recomputation_of(kind, Recomputation((name,))))
        saved_bytes += count * (
            kept_bytes(kind, LayerMode(degree=1), stack.traits) - kept_bytes(kind, mode, stack.traits)
        )
        again_s += count * sum(mode.share_again(x) * forward_s(x, kind, mode, stack) for x in kind.operators)
    return _Part(name, saved_bytes, again_s)


def _covers(one: str, other: str, kinds: Iterable[LayerKind]) -> bool:
    """Whether recomputing the first part recomputes everything that the second one does."""
    made = [saved.again for kind in kinds for operator in kind.operators for saved in operator.saved]
    return all(one in again for again in made if other in again)


def undominated(costs: Mapping[LayerMode, LayerCosts]) -> dict[LayerMode, LayerCosts]:
    """The modes of a kind that may be the best choice somewhere, and all modes with at most one further option."""
    alike: dict[Hashable, list[LayerMode]] = {}  # whose layers are divided in the same way
    for mode in costs:
        alike.setdefault(_division(mode), []).append(mode)
    return {
        mode: found
        for mode, found in costs.items()
        if _options(mode) < 2
        or not any(_never_loses(other, costs[other], mode, found) for other in alike[_division(mode)])
    }


ModesOfKinds = dict[str, dict[LayerMode, LayerCosts]]
"""The figures of each kind of layer, by key, in each mode."""


def without_needless(costs: ModesOfKinds, tried: Sequence[tuple[int, int]]) -> ModesOfKinds:
    """Removes spreads of experts that are the best choice in no kind, since a launch has one spread for all."""
    for spread in reversed(tried):
        others = {key: {x: found for x, found in of.items() if x.spread != spread} for key, of in costs.items()}
        if all(_is_needless(of, others[key]) for key, of in costs.items()):
            costs = others
    return costs


def _is_needless(costs: Mapping[LayerMode, LayerCosts], others: Mapping[LayerMode, LayerCosts]) -> bool:
    """Whether the others never lose to any mode that is not among them."""
    alike: dict[Hashable, list[LayerMode]] = {}
    for mode in others:
        alike.setdefault(_all_but_spread(mode), []).append(mode)
    return all(
        any(_never_loses(other, others[other], mode, found) for other in alike.get(_all_but_spread(mode), ()))
        for mode, found in costs.items()
        if mode not in others
    )


def _all_but_spread(mode: LayerMode) -> Hashable:
    return mode.degree, mode.context, mode.shares, mode.sequence_parallel, mode.recomputation, mode.offload


def _division(mode: LayerMode) -> Hashable:
    return mode.degree, mode.context, mode.experts, mode.expert_tensor


def _options(mode: LayerMode) -> int:
    further = (mode.context > 1, mode.experts is not None, mode.offload, mode.gathered)
    return sum((*further, mode.sharding > Sharding.OPTIMIZER))


def _never_loses(one: LayerMode, of_one: LayerCosts, other: LayerMode, of_other: LayerCosts) -> bool:
    """Whether one mode is at least as good as another in every stage, if both divide layers alike; of equal modes the
    earlier one stays."""
    if one is other:
        return False
    if one.least_data_parallel_degree > other.least_data_parallel_degree:
        return False
    if other.sequence_parallel and not one.sequence_parallel:
        return False  # which hands more on
    mine, theirs = of_one.compared, of_other.compared
    return mine != theirs and all(map(le, mine, theirs))
