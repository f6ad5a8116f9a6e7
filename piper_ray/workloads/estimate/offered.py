"""Which of the further ways to run layers a model has: attention for context parallelism, experts to spread."""

from __future__ import annotations

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.modes import Mode, Offer
from piper_ray.workloads.estimate.operators import Architecture, LayerKind


def require_offered(architecture: Architecture, offer: Offer) -> None:
    """Raises UsageError for context parallelism or experts of a model that cannot have them."""
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
                    f"--expert-parallel {ranks}: the {kind.value('E'):,.0f} experts of {kind.name} cannot be spread "
                    "evenly over so many ranks"
                )


def attends(kind: LayerKind) -> bool:
    """Whether it is attention over tokens, keys and values of which can go around."""
    core = any(operator.on_chip or "scores" in operator.name for operator in kind.operators)
    return core and {"s", "b", "a", "g", "d"} <= kind.symbols.keys()


def heads_handed_out(kind: LayerKind, mode: Mode) -> bool:
    """Whether an all-to-all can give each device whole heads in place of tokens."""
    return mode.context == 1 or all(heads % mode.devices == 0 for heads in kind.heads[:1])
