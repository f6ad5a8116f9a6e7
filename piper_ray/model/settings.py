"""How a TMPC runs its layer, as its id says, and the constraint that whole models are run in one such way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from piper_ray.model import arguments
from piper_ray.model.constraints import Constraint, Scope
from piper_ray.model.errors import UsageError

if TYPE_CHECKING:
    from piper_ray.model.instance import Instance, Tmpc
    from piper_ray.model.plan import Plan


class Recomputation(str, Enum):
    """What a backward pass makes again: nothing, what is cheap for the memory that it takes, or the whole layer."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Sharding(IntEnum):
    """What replicas share out: nothing, the optimizer's state (ZeRO-1, Megatron's distributed optimizer), gradients too
    (ZeRO-2), or weights too (ZeRO-3, FSDP)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    WEIGHTS = 3


ALL_REPLICAS = 0
"""In place of a number of replicas: however many a stage has."""


@dataclass(frozen=True)
class Setting:
    """How layers run beside their degrees. recomputation: None where each layer has its own.

    optimizer_shards: replicas that share the optimizer's state; 1 without sharding. offload: of activations.
    """

    recomputation: Recomputation | None = Recomputation.NONE
    sequence_parallel: bool = False
    optimizer_shards: int = 1
    offload: bool = False

    @property
    def text(self) -> str:
        """For people: ``sequence parallelism, full recomputation``."""
        parts = ["sequence parallelism"] if self.sequence_parallel else []
        if self.recomputation not in (None, Recomputation.NONE):
            parts.append(f"{self.recomputation.value} recomputation")
        parts += [f"optimizer state in {self.optimizer_shards} shards"] if self.optimizer_shards > 1 else []
        parts += ["activations in host memory"] if self.offload else []
        return ", ".join(parts) or "nothing beside the degrees"


_AXES = ("sequence_parallel", "optimizer_shards", "offload", "recomputation")
_PLAIN = Setting()


def setting_of(tmpc: Tmpc) -> Setting:
    """As estimates and measurements write it: words joined by +, such as ``sp+full+zero8``.

    An id of other words says nothing; then a TMPC that recomputes recomputes its layer in full.
    """
    return _setting(tmpc.id, tmpc.recompute)


@lru_cache(1024)
def _setting(tmpc_id: str, recompute: bool) -> Setting:
    words = [word.partition("-")[0] for word in tmpc_id.split("+")]
    recomputation = Recomputation.FULL if recompute else Recomputation.NONE
    if "selective" in words:
        recomputation = Recomputation.SELECTIVE
    shards = [int(word[4:]) for word in words if word.startswith("zero") and word[4:].isdecimal()]
    return Setting(recomputation, "sp" in words, max([1, *shards]), "offload" in words)


def tmpcs_under(row: Sequence[Tmpc], setting: Setting) -> tuple[Tmpc, ...]:
    """Of a layer's TMPCs at one degree those that a model run in this setting leaves.

    A layer that has not got what is asked for runs without it, and one that cannot do without keeps what it has.
    """
    left = tuple(row)
    for axis in _AXES:
        asked = getattr(setting, axis)
        if asked is None:
            continue
        for wanted in (asked, getattr(_PLAIN, axis)):
            found = tuple(tmpc for tmpc in left if getattr(setting_of(tmpc), axis) == wanted)
            if found:
                left = found
                break
    return left


@dataclass(frozen=True)
class OneSetting(Constraint):
    """Sequence parallelism, shards of the optimizer's state and kind of recomputation are one for all layers.

    recomputations: the kinds that may be. by_layer: each layer has a kind of its own among these. sequence_parallel,
    optimizer_sharding, offload: whether there may be any.
    """

    recomputations: tuple[Recomputation, ...] = tuple(Recomputation)
    by_layer: bool = False
    sequence_parallel: bool = True
    optimizer_sharding: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        kinds = tuple(arguments.choice("recomputations", kind, Recomputation) for kind in self.recomputations)
        if Recomputation.NONE not in kinds:
            raise UsageError(f"recomputations must have none among them, not {arguments.shown(self.recomputations)}")
        object.__setattr__(self, "recomputations", kinds)

    @property
    def scope(self) -> Scope:
        return Scope.PLAN

    def settings(self, instance: Instance) -> tuple[Setting, ...]:
        """All that a plan of the instance may be run in, the plainest first."""
        seen = {setting_of(tmpc) for layer in instance.layers for row in layer.tmpcs.values() for tmpc in row}
        kinds: list[Recomputation | None] = [None]
        if not self.by_layer:
            kinds = [
                kind for kind in Recomputation if kind in self.recomputations and _has(seen, "recomputation", kind)
            ]
        sequence = [False, True] if self.sequence_parallel and _has(seen, "sequence_parallel", True) else [False]
        shards = sorted({1, *(x.optimizer_shards for x in seen)}) if self.optimizer_sharding else [1]
        offload = [False, True] if self.offload and _has(seen, "offload", True) else [False]
        return tuple(Setting(*x) for x in itertools.product(kinds, sequence, shards, offload))

    def under(self, instance: Instance, setting: Setting) -> Instance:
        """The instance whose layers have the TMPCs of that setting alone. All its plans are run in it."""
        layers = tuple(
            replace(layer, tmpcs={t: tmpcs_under(self._of_known_kinds(row), setting) for t, row in layer.tmpcs.items()})
            for layer in instance.layers
        )
        found = replace(instance, layers=layers)
        if instance.checked:
            found.mark_checked()
        return found

    def _of_known_kinds(self, row: tuple[Tmpc, ...]) -> tuple[Tmpc, ...]:
        return tuple(tmpc for tmpc in row if setting_of(tmpc).recomputation in self.recomputations) or row

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        chosen = []
        for stage in plan.stages:
            for layer_id in stage.layers:
                layer = instance.layer_by_id.get(layer_id)
                row = () if layer is None else layer.tmpcs.get(stage.tensor_parallel_degree, ())
                tmpc = next((x for x in row if x.id == stage.tmpc_ids.get(layer_id)), None)
                if tmpc is not None:
                    chosen.append((layer_id, row, tmpc))
        against: list[tuple[int, Tmpc]] = []
        for setting in self.settings(instance):
            against = [
                (layer_id, tmpc)
                for layer_id, row, tmpc in chosen
                if tmpc not in tmpcs_under(self._of_known_kinds(row), setting)
            ]
            if not against:
                return
        ids = list(dict.fromkeys(tmpc.id for _, _, tmpc in chosen))
        yield f"layers run in ways that are not one for all, such as {', '.join(map(repr, ids[:4]))}"


def _has(seen: set[Setting], axis: str, value: object) -> bool:
    """Whether some TMPC has it; without recomputation every layer may run that has not got the choice."""
    return value is Recomputation.NONE or any(getattr(setting, axis) == value for setting in seen)
