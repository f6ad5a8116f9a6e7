"""How a TMPC runs its layer, as its id says, and the constraint that whole models are run in one such way."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from piper_ray.model.constraints import Constraint, Scope
from piper_ray.model.figures import plural
from piper_ray.model.recomputation import Recomputation, share_of

if TYPE_CHECKING:
    from piper_ray.model.instance import Instance, Tmpc
    from piper_ray.model.plan import Plan


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

    optimizer_shards: replicas that share the optimizer's state, and what else ``sharding`` says; 1 without sharding,
    ALL_REPLICAS for all that a stage has. offload: of activations. context: groups that share a sequence's tokens, so
    that the devices of a replica are t times as many. experts: ranks that experts are spread over, expert_tensor:
    devices that share each; None: over the t devices. gathered: what sequence parallelism gathers stays whole.
    """

    recomputation: Recomputation | None = Recomputation.NONE
    sequence_parallel: bool = False
    optimizer_shards: int = 1
    offload: bool = False
    context: int = 1
    experts: int | None = None
    expert_tensor: int = 1
    sharding: Sharding = Sharding.OPTIMIZER
    gathered: bool = False

    @property
    def spread(self) -> tuple[int | None, int]:
        """How experts lie."""
        return self.experts, self.expert_tensor

    @property
    def shares(self) -> tuple[Sharding, int]:
        """What replicas share out, and how many; of nothing one."""
        return (Sharding.NONE, 1) if self.optimizer_shards == 1 else (self.sharding, self.optimizer_shards)

    @property
    def text(self) -> str:
        """For people: ``sequence parallelism, full recomputation``."""
        parts = ["sequence parallelism"] if self.sequence_parallel else []
        parts += ["gathered tensors kept"] if self.gathered else []
        parts += [f"context parallelism {self.context}"] if self.context > 1 else []
        if self.experts is not None:
            each = f", {self.expert_tensor} GPUs each" if self.expert_tensor > 1 else ""
            parts.append(f"experts over {self.experts} ranks{each}")
        if self.recomputation not in (None, Recomputation.NONE):
            parts.append(self.recomputation.text)
        if self.optimizer_shards != 1:
            count = "as many shards as replicas" if self.optimizer_shards == ALL_REPLICAS else None
            parts.append(f"{_SHARED[self.sharding]} in {count or f'{self.optimizer_shards} shards'}")
        parts += ["activations in host memory"] if self.offload else []
        return ", ".join(parts) or "nothing beside the degrees"


_SHARED = {
    Sharding.NONE: "nothing",
    Sharding.OPTIMIZER: "optimizer state",
    Sharding.GRADIENTS: "optimizer state and gradients",
    Sharding.WEIGHTS: "weights, gradients and optimizer state",
}

_AXES = {
    "context": "context parallelism",
    "spread": "spread of experts",
    "sequence_parallel": "sequence parallelism",
    "shares": "what replicas share",
    "gathered": "what is kept gathered",
    "offload": "offload of activations",
    "recomputation": "recomputation",
}
"""What settings are made of, in words; of a layer that has not got all of one, the first are kept to."""

_FIELDS = {"spread": ("experts", "expert_tensor"), "shares": ("optimizer_shards", "sharding")}
_PLAIN = Setting()
_AXES_OF_ONE_DEGREE = tuple(_AXES)[1:]


def _axis_text(setting: Setting, axis: str) -> str:
    """``selective recomputation``, or ``no sequence parallelism``."""
    if getattr(setting, axis) == getattr(_PLAIN, axis):
        return f"no {_AXES[axis]}"
    return replace(_PLAIN, **{name: getattr(setting, name) for name in _FIELDS.get(axis, (axis,))}).text


def setting_of(tmpc: Tmpc) -> Setting:
    """As estimates and measurements write it: words joined by +, such as ``sp+full+zero8``.

    An id of other words says nothing; then a TMPC that recomputes recomputes its layer in full.
    """
    return _setting(tmpc.id, tmpc.recompute)


_ESTIMATED = "-estimated"
"""How ids of measured workloads end where a figure is an estimate."""

_NUMBERED = re.compile(r"(zero2x|zero|fsdp|cp|ep|etp)(\d{1,9})")


@lru_cache(4096)
def _setting(tmpc_id: str, recompute: bool) -> Setting:
    words = [word.removesuffix(_ESTIMATED) for word in tmpc_id.split("+")]
    recomputation = Recomputation.FULL if recompute else Recomputation.NONE
    for word in words:
        if word.partition("-")[0] == "selective":
            recomputation = Recomputation.of(word)
    numbers = {match[1]: max(1, int(match[2])) for word in words if (match := _NUMBERED.fullmatch(word))}
    shards, sharding = ALL_REPLICAS if "zero" in words else 1, Sharding.OPTIMIZER
    for name, what in (("zero", Sharding.OPTIMIZER), ("zero2x", Sharding.GRADIENTS), ("fsdp", Sharding.WEIGHTS)):
        if name in numbers:
            shards, sharding = numbers[name], what
    return Setting(
        recomputation,
        "sp" in words,
        shards,
        "offload" in words,
        context=numbers.get("cp", 1),
        experts=numbers.get("ep"),
        expert_tensor=numbers.get("etp", 1),
        sharding=sharding,
        gathered="gathered" in words,
    )


def context_of(instance: Instance, plan: Plan) -> int:
    """The most groups that share a sequence in any of its stages; 1 without context parallelism."""
    chosen = (
        setting_of(tmpc).context
        for stage in plan.stages
        for layer, tmpc_id in stage.tmpc_ids.items()
        for tmpc in instance.layer_by_id[layer].tmpcs[stage.tensor_parallel_degree]
        if tmpc.id == tmpc_id
    )
    return max(chosen, default=1)


def tmpcs_under(row: Sequence[Tmpc], setting: Setting) -> tuple[Tmpc, ...]:
    """Of a layer's TMPCs at one degree those that a model run in this setting leaves.

    A layer that has not got what is asked for runs without it, and one that cannot do without keeps what it has; but
    for context parallelism, which divides the tokens that layers hand on: without it nothing is left.
    """
    return tuple(row[place] for place in _places_under([setting_of(tmpc) for tmpc in row], setting))


def _places_under(row: Sequence[Setting], setting: Setting) -> tuple[int, ...]:
    """As ``tmpcs_under``: of TMPCs of these settings."""
    left = tuple(place for place, own in enumerate(row) if own.context == setting.context)
    for axis in _AXES_OF_ONE_DEGREE:
        asked = getattr(setting, axis)
        if asked is None:
            continue
        if axis == "recomputation":
            asked = share_of(asked, (row[place].recomputation for place in left))
        for wanted in (asked, getattr(_PLAIN, axis)):
            found = tuple(place for place in left if getattr(row[place], axis) == wanted)
            if found:
                left = found
                break
    return left


def missing_of(chosen: Iterable[tuple[Tmpc, Setting]]) -> list[str]:
    """What no layer's TMPC has of the setting that layers were to run in, in words."""
    asked: set[str] = set()
    had: set[str] = set()
    for tmpc, setting in chosen:
        own = setting_of(tmpc)
        for axis in _AXES:
            value = getattr(setting, axis)
            if axis == "recomputation":
                asked |= _parts_texts(value)
                had |= _parts_texts(own.recomputation)
            elif value is not None and value != getattr(_PLAIN, axis):
                text = _axis_text(setting, axis)
                asked.add(text)
                if getattr(own, axis) == value:
                    had.add(text)
    return sorted(asked - had)


def _parts_texts(recomputation: Recomputation | None) -> set[str]:
    """A text for each part that is computed again."""
    return {Recomputation((part,)).text for part in (recomputation.parts if recomputation else ())}


@dataclass(frozen=True)
class OneSetting(Constraint):
    """Sequence and context parallelism, spread of experts, sharding and recomputation are one for all layers.

    recomputed: names of the parts that may be computed again (``Recomputation.parts``); None: any. by_layer: each
    layer recomputes as it likes, within these. sequence_parallel, optimizer_sharding, offload, context, experts,
    gathered: whether there may be any. most_sharding: what replicas may share besides the optimizer's state.
    experts_in_sequence: a model with experts has sequence parallelism where t > 1.
    always_gathered: sequence parallelism without recomputation keeps what it gathers, of layers that have the choice.
    own_key_heads: each of t devices has heads of keys and values of its own, none a copy of another's. Sequence
    parallelism needs a sample's tokens, where the workload says them, to be a multiple of a replica's devices.
    """

    recomputed: tuple[str, ...] | None = None
    by_layer: bool = False
    sequence_parallel: bool = True
    optimizer_sharding: bool = True
    offload: bool = False
    context: bool = False
    experts: bool = False
    gathered: bool = False
    always_gathered: bool = False
    most_sharding: Sharding = Sharding.OPTIMIZER
    experts_in_sequence: bool = False
    own_key_heads: bool = False

    def __post_init__(self) -> None:
        if self.recomputed is not None:
            object.__setattr__(self, "recomputed", tuple(sorted(set(self.recomputed))))

    def may_recompute(self, recomputation: Recomputation | None) -> bool:
        """Whether all parts of it may be computed again."""
        able = self.recomputed
        return recomputation is None or able is None or all(part in able for part in recomputation.parts)

    @property
    def scope(self) -> Scope:
        return Scope.PLAN

    def settings(self, instance: Instance) -> tuple[Setting, ...]:
        """All that a plan of the instance may be run in, the plainest first."""
        rows = [[setting_of(tmpc) for row in layer.tmpcs.values() for tmpc in row] for layer in instance.layers]
        seen = {one for row in rows for one in row}
        kinds: list[Recomputation | None] = [None]
        if not self.by_layer:
            kinds = [kind for kind in _common_recomputations(rows) if self.may_recompute(kind)]
        sequence = [False, True] if self.sequence_parallel and _has(seen, "sequence_parallel", True) else [False]
        if self.experts_in_sequence and any(layer.experts for layer in instance.layers):
            sequence = sequence[-1:]
        most = self.most_sharding if self.optimizer_sharding else Sharding.NONE
        shares = sorted({_PLAIN.shares, *(one.shares for one in seen if one.shares[0] <= most)})
        offload = [False, True] if self.offload and _has(seen, "offload", True) else [False]
        contexts = sorted(set.intersection(*({one.context for one in row} for row in rows))) if rows else [1]
        contexts = contexts if self.context else [context for context in contexts if context == 1]
        spreads = sorted({one.spread for one in seen}, key=lambda x: (x[0] or 0, x[1])) if self.experts else []
        if _PLAIN.spread not in spreads:
            spreads.insert(0, _PLAIN.spread)
        gathered = [False, True] if self.gathered and _has(seen, "gathered", True) else [False]
        keeps = self.always_gathered and len(gathered) > 1
        return tuple(
            Setting(kind, sp, shards, kept, context, *spread, max(sharding, Sharding.OPTIMIZER), whole)
            for kind, context, spread, sp, whole, (sharding, shards), kept in itertools.product(
                kinds, contexts, spreads, sequence, gathered, shares, offload
            )
            if (sp or not whole) and (whole or not keeps or not sp or kind != Recomputation.NONE)
        )

    def under(self, instance: Instance, setting: Setting) -> Instance:
        """The instance whose layers have the TMPCs of that setting alone. All its plans are run in it."""
        return next(self.under_each(instance, [setting]))

    def under_each(self, instance: Instance, settings: Iterable[Setting]) -> Iterator[Instance]:
        """``under`` each of these. Rows of one kind, of which there are few, are looked at once."""
        kind_of: dict[tuple[tuple[str, bool], ...], int] = {}
        kinds: list[tuple[list[int], list[Setting]]] = []  # places of known kinds of recomputation, their settings
        rows: list[list[tuple[int, tuple[Tmpc, ...], int]]] = []  # of each layer: degree, TMPCs, kind of row
        for layer in instance.layers:
            rows.append([])
            for t, row in layer.tmpcs.items():
                kind = kind_of.setdefault(tuple((tmpc.id, tmpc.recompute) for tmpc in row), len(kinds))
                if kind == len(kinds):
                    places = self._places_of_known_kinds(row)
                    kinds.append((places, [setting_of(row[place]) for place in places]))
                rows[-1].append((t, row, kind))
        for setting in settings:
            left = [[places[place] for place in _places_under(own, setting)] for places, own in kinds]
            able = {t for t in instance.degrees if self._undivided(instance, setting, t) is None}
            layers = tuple(
                replace(
                    layer,
                    tmpcs={
                        t: tuple(row[x] for x in left[kind]) for t, row, kind in of_layer if left[kind] and t in able
                    },
                )
                for layer, of_layer in zip(instance.layers, rows, strict=True)
            )
            found = replace(instance, layers=layers)
            if instance.checked:
                found.mark_checked()
            yield found

    def divides_key_heads(self, instance: Instance, degree: int) -> bool:
        """Whether tensor parallelism of that degree leaves heads of keys and values for each device, if it has to."""
        return not self.own_key_heads or instance.key_heads % degree == 0

    def _undivided(self, instance: Instance, setting: Setting, devices: int) -> str | None:
        """What so many devices of a replica cannot divide in that setting, in words; None: they divide all."""
        degree, tokens = max(1, devices // setting.context), instance.batch.tokens_per_sample
        if not self.divides_key_heads(instance, degree):
            heads = plural(instance.key_heads, "head")
            return f"tensor-parallel degree {degree} does not divide the model's {heads} of keys and values"
        if setting.sequence_parallel and tokens is not None and tokens % devices:
            return f"sequence parallelism: {devices} devices of a replica do not divide {tokens} tokens of a sample"
        return None

    def _places_of_known_kinds(self, row: Sequence[Tmpc]) -> list[int]:
        """Of TMPCs that recompute as the constraint allows it; all where none does."""
        places = [place for place, tmpc in enumerate(row) if self.may_recompute(setting_of(tmpc).recomputation)]
        return places or list(range(len(row)))

    def _left(self, row: Sequence[Tmpc], setting: Setting) -> tuple[Tmpc, ...]:
        return tmpcs_under([row[place] for place in self._places_of_known_kinds(row)], setting)

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        chosen: list[tuple[int, Sequence[Tmpc], Tmpc]] = []
        undivided: dict[str | None, None] = {}
        for stage in plan.stages:
            for layer_id in stage.layers:
                layer = instance.layer_by_id.get(layer_id)
                row = () if layer is None else layer.tmpcs.get(stage.tensor_parallel_degree, ())
                tmpc = next((x for x in row if x.id == stage.tmpc_ids.get(layer_id)), None)
                if tmpc is not None:
                    chosen.append((layer_id, row, tmpc))
                    undivided[self._undivided(instance, setting_of(tmpc), stage.tensor_parallel_degree)] = None
        yield from (what for what in undivided if what is not None)
        settings = self.settings(instance)
        against: dict[Setting, list[tuple[int, Tmpc]]] = {}
        for setting in settings:
            against[setting] = [
                (layer_id, tmpc) for layer_id, row, tmpc in chosen if tmpc not in self._left(row, setting)
            ]
            if not against[setting]:
                return
        nearest = min(against, key=lambda setting: len(against[setting]))
        yield from self._differing(settings, nearest, against[nearest])

    def _differing(
        self, settings: Sequence[Setting], nearest: Setting, against: Sequence[tuple[int, Tmpc]]
    ) -> Iterator[str]:
        """What of the layers' TMPCs no setting has, else what is not one for all; nearest: that most layers run in."""
        mixed: dict[str, tuple[int, Tmpc]] = {}
        told: set[str] = set()
        for layer, tmpc in against:
            own = setting_of(tmpc)
            for axis in _AXES:
                value, asked = getattr(own, axis), getattr(nearest, axis)
                allowed = {getattr(setting, axis) for setting in settings}
                free = axis == "recomputation" and self.may_recompute(value)
                if value not in allowed and not free:
                    text = _axis_text(own, axis)
                    if text not in told:
                        yield f"{text} is not possible; layer {layer} runs as {tmpc.id!r}"
                    told.add(text)
                elif asked is not None and not _agrees(value, asked):
                    mixed.setdefault(axis, (layer, tmpc))
        for axis, (layer, tmpc) in mixed.items() if not told else ():
            yield (
                f"{_AXES[axis]} is not one for all layers: layer {layer} runs as {tmpc.id!r}, others with "
                f"{_axis_text(nearest, axis)}"
            )
        if not told and not mixed:  # in a layer that has what is asked for and runs without it
            layer, tmpc = against[0]
            yield f"layers run in ways that are not one for all, such as layer {layer} as {tmpc.id!r}"


def _agrees(value: object, asked: object) -> bool:
    """Whether a layer that runs with ``value`` does what is asked of all; it may lack parts that others have."""
    if isinstance(value, Recomputation) and isinstance(asked, Recomputation):
        return value.within(asked) and (value.parts != ()) == (asked.parts != ())
    return value == asked


def _common_recomputations(rows: Iterable[Sequence[Setting]]) -> list[Recomputation]:
    """What can be asked of all layers at once so that each computes again just those of these parts that it has.

    Runtimes take one list of parts for a whole model: of a list, a layer that has no TMPC for its share of it would do
    more in the run than in the plan. rows: the settings of each layer's TMPCs.
    """
    of_row = {frozenset(one.recomputation for one in row if one.recomputation is not None) for row in rows}
    selective = [{one for one in row if one != Recomputation.FULL} | {Recomputation.NONE} for row in of_row]
    unions = {Recomputation.NONE}
    for choices in selective:
        unions = {Recomputation.of_parts(one.parts + other.parts) for one in unions for other in choices}
    known = [{part for one in choices for part in one.parts} for choices in selective]
    common = [
        union
        for union in unions
        if all(
            Recomputation.of_parts(parts.intersection(union.parts)) in choices
            for parts, choices in zip(known, selective, strict=True)
        )
    ]
    full = [Recomputation.FULL] if any(Recomputation.FULL in row for row in of_row) else []
    return sorted(common, key=lambda one: (len(one.parts), one.parts)) + full


def _has(seen: set[Setting], axis: str, value: object) -> bool:
    """Whether some TMPC has it."""
    return any(getattr(setting, axis) == value for setting in seen)
