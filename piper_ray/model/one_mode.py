"""The constraint that all layers of a model run in one mode, and the TMPCs that a mode leaves to a layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from piper_ray.model.constraints import Constraint, Scope, choices_made
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.mode import Mode, Recomputation, Sharding, share_of
from piper_ray.model.plan import Plan

_AXES = {
    "context": "context parallelism",
    "spread": "spread of experts",
    "sequence_parallel": "sequence parallelism",
    "shares": "what replicas share",
    "gathered": "what is kept gathered",
    "offload": "offload of activations",
    "recomputation": "recomputation",
}
"""The parts of a mode, in words. If a layer has no TMPC with all parts of a mode, earlier parts take precedence."""

_FIELDS = {"spread": ("experts", "expert_tensor"), "shares": ("optimizer_shards", "sharding")}
_PLAIN = Mode()


def _axis_text(mode: Mode, axis: str) -> str:
    """``selective recomputation``, or ``no sequence parallelism``."""
    if getattr(mode, axis) == getattr(_PLAIN, axis):
        return f"no {_AXES[axis]}"
    return replace(_PLAIN, **{name: getattr(mode, name) for name in _FIELDS.get(axis, (axis,))}).text


def context_of(instance: Instance, plan: Plan) -> int:
    """The largest context-parallel degree of any stage; 1 without context parallelism."""
    contexts = (tmpc.mode.context for stage in plan.stages for _, _, tmpc in choices_made(instance, stage))
    return max(contexts, default=1)


def tmpcs_under(row: Sequence[Tmpc], mode: Mode) -> tuple[Tmpc, ...]:
    """The TMPCs of a layer at one degree that may be used when the whole model runs in ``mode``.

    A layer that lacks a part of the mode runs without it, and a layer that always has a part keeps it. Context
    parallelism is an exception, because it divides the tokens that layers pass on: a layer without that degree has no
    TMPC left.
    """
    return tuple(row[place] for place in _Places([tmpc.mode for tmpc in row], tuple(_AXES)).under(mode))


class _Places:
    """The positions of ``tmpcs_under`` in a row of TMPCs with these modes, if only the parts ``axes`` are required.

    Modes are many and have most parts in common, so what a mode's first parts leave is kept for others."""

    def __init__(self, row: Sequence[Mode], axes: Sequence[str]) -> None:
        self._row, self._axes, self._known = row, axes, dict[tuple[object, ...], tuple[int, ...]]()

    def under(self, mode: Mode) -> tuple[int, ...]:
        asked: tuple[object, ...] = ()
        left = tuple(range(len(self._row)))
        for axis in self._axes:
            value = getattr(mode, axis)
            asked += (value.parts if axis == "recomputation" else value,)
            if asked not in self._known:
                self._known[asked] = self._left(left, axis, value)
            left = self._known[asked]
        return left

    def _left(self, left: tuple[int, ...], axis: str, asked: object) -> tuple[int, ...]:
        """Of these positions those with the value that is asked for, or else with the plain one, or else all."""
        values = [getattr(self._row[place], axis) for place in left]
        if isinstance(asked, Recomputation):
            asked = share_of(asked, values)
        for wanted in (asked, getattr(_PLAIN, axis)):
            found = tuple(place for place, value in zip(left, values, strict=True) if value == wanted)
            if found or axis == "context":
                return found
        return left


def missing_of(chosen: Iterable[tuple[Tmpc, Mode]]) -> list[str]:
    """The parts of the required modes that no layer's TMPC has, in words."""
    asked: set[str] = set()
    had: set[str] = set()
    for tmpc, mode in chosen:
        for axis in _AXES:
            value, own = getattr(mode, axis), getattr(tmpc.mode, axis)
            if axis == "recomputation":
                asked |= _parts_texts(value)
                had |= _parts_texts(own)
            elif value != getattr(_PLAIN, axis):
                text = _axis_text(mode, axis)
                asked.add(text)
                if own == value:
                    had.add(text)
    return sorted(asked - had)


def _parts_texts(recomputation: Recomputation) -> set[str]:
    """A text for each recomputed part."""
    return {Recomputation((part,)).text for part in recomputation.parts}


@dataclass(frozen=True)
class OneMode(Constraint):
    """All layers have the same sequence and context parallelism, spread of experts, sharding and recomputation.

    recomputed: names of the parts that may be recomputed (``Recomputation.parts``); None: any. by_layer: each layer
    chooses its own recomputation among these. sequence_parallel, optimizer_sharding, offload, context, experts,
    gathered: whether it is allowed. most_sharding: the most that replicas may divide.
    expert_tensor: whether several devices may share an expert.
    experts_in_sequence: a model with experts has sequence parallelism where t > 1.
    always_gathered: with sequence parallelism and without recomputation, layers that have the choice keep gathered
    tensors.
    own_key_heads: each of t devices has its own heads of keys and values, without copies. If the workload states a
    sample's tokens, sequence parallelism needs them to be a multiple of a replica's devices.
    """

    recomputed: tuple[str, ...] | None = None
    by_layer: bool = False
    sequence_parallel: bool = True
    optimizer_sharding: bool = True
    offload: bool = False
    context: bool = False
    experts: bool = False
    expert_tensor: bool = False
    gathered: bool = False
    always_gathered: bool = False
    most_sharding: Sharding = Sharding.OPTIMIZER
    experts_in_sequence: bool = False
    own_key_heads: bool = False

    def __post_init__(self) -> None:
        if self.recomputed is not None:
            object.__setattr__(self, "recomputed", tuple(sorted(set(self.recomputed))))

    def may_recompute(self, recomputation: Recomputation) -> bool:
        """Whether all parts of ``recomputation`` may be recomputed."""
        return self.recomputed is None or set(self.recomputed).issuperset(recomputation.parts)

    @property
    def _axes(self) -> tuple[str, ...]:
        """The parts of a mode that all layers have in common."""
        return tuple(axis for axis in _AXES if axis != "recomputation" or not self.by_layer)

    scope = Scope.PLAN

    def modes(self, instance: Instance) -> tuple[Mode, ...]:
        """All modes that a plan of the instance may run in, the simplest first. With by_layer, recomputation is left
        open."""
        every = ([tmpc.mode for row in layer.tmpcs.values() for tmpc in row] for layer in instance.priced_layers)
        rows = [*{tuple(map(id, row)): row for row in every}.values()]
        seen = {one for row in rows for one in row}
        kinds = [Recomputation.NONE]
        if not self.by_layer:
            kinds = [kind for kind in _common_recomputations(rows) if self.may_recompute(kind)]
        sequence = _choices(seen, "sequence_parallel", self.sequence_parallel)
        if self.experts_in_sequence and any(layer.experts for layer in instance.layers):
            sequence = sequence[-1:]
        most = self.most_sharding if self.optimizer_sharding else Sharding.NONE
        shares = sorted({_PLAIN.shares, *(one.shares for one in seen if one.sharding <= most)})
        contexts = sorted(set.intersection(*({one.context for one in row} for row in rows))) if rows else [1]
        contexts = contexts if self.context else [context for context in contexts if context == 1]
        able = {one.spread for one in seen if self.expert_tensor or one.expert_tensor == 1} if self.experts else set()
        spreads = sorted(able, key=lambda x: (x[0] or 0, x[1]))
        if _PLAIN.spread not in spreads:
            spreads.insert(0, _PLAIN.spread)
        gathered = _choices(seen, "gathered", self.gathered)
        keeps = self.always_gathered and not self.by_layer and len(gathered) > 1
        return tuple(
            Mode(kind, sp, shards, kept, context, *spread, sharding, whole)
            for kind, context, spread, sp, whole, (sharding, shards), kept in itertools.product(
                kinds, contexts, spreads, sequence, gathered, shares, _choices(seen, "offload", self.offload)
            )
            if (sp or not whole) and (whole or not keeps or not sp or kind != Recomputation.NONE)
        )

    def under_each(self, instance: Instance, modes: Iterable[Mode]) -> Iterator[Instance]:
        """For each of these modes the instance with only that mode's TMPCs, so that all its plans run in that mode.

        There are few different rows of modes; each is examined once.
        """
        kind_of: dict[tuple[Mode, ...], int] = {}
        kinds: list[tuple[list[int], _Places]] = []  # positions with an allowed recomputation
        rows: list[list[tuple[int, tuple[Tmpc, ...], int]]] = []  # by layer: degree, TMPCs, kind of row
        for layer in instance.layers:
            rows.append([])
            for t, row in layer.tmpcs.items():
                modes_of_row = tuple(tmpc.mode for tmpc in row)
                kind = kind_of.setdefault(modes_of_row, len(kinds))
                if kind == len(kinds):
                    places = self._places_of_known_kinds(modes_of_row)
                    kinds.append((places, _Places([modes_of_row[place] for place in places], self._axes)))
                rows[-1].append((t, row, kind))
        for mode in modes:
            left = [[places[place] for place in own.under(mode)] for places, own in kinds]
            able = {t for t in instance.degrees if self._undivided(instance, mode, t) is None}
            layers = tuple(
                layer.having(
                    {t: tuple(row[x] for x in left[kind]) for t, row, kind in of_layer if left[kind] and t in able}
                )
                for layer, of_layer in zip(instance.layers, rows, strict=True)
            )
            yield replace(instance, layers=layers).checked_as(instance)

    def divides_key_heads(self, instance: Instance, degree: int) -> bool:
        """Whether tensor parallelism of this degree gives each device its own heads of keys and values, if that is
        required."""
        return not self.own_key_heads or instance.key_heads % degree == 0

    def _undivided(self, instance: Instance, mode: Mode, devices: int) -> str | None:
        """What ``devices`` devices of a replica cannot divide in this mode, in words; None if they divide
        everything."""
        degree, tokens = max(1, devices // mode.context), instance.batch.tokens_per_sample
        if not self.divides_key_heads(instance, degree):
            heads = plural(instance.key_heads, "head")
            return f"tensor-parallel degree {degree} does not divide the model's {heads} of keys and values"
        if mode.sequence_parallel and tokens is not None and tokens % devices:
            return f"sequence parallelism: {devices} devices of a replica do not divide {tokens} tokens of a sample"
        return None

    def _places_of_known_kinds(self, row: Sequence[Mode]) -> list[int]:
        """The positions of modes whose recomputation the constraint allows; all positions if there are none."""
        places = [place for place, mode in enumerate(row) if self.may_recompute(mode.recomputation)]
        return places or list(range(len(row)))

    def violations(self, instance: Instance, plan: Plan) -> Iterator[str]:
        chosen: list[tuple[int, Tmpc]] = []
        kinds: dict[tuple[int, ...], tuple[list[Mode], list[int]]] = {}  # of rows: modes, indices into chosen
        undivided: dict[str | None, None] = {}
        for stage in plan.stages:
            for layer_id, row, tmpc in choices_made(instance, stage):
                modes_of_row = [one.mode for one in row]
                kinds.setdefault(tuple(map(id, modes_of_row)), (modes_of_row, []))[1].append(len(chosen))
                chosen.append((layer_id, tmpc))
                undivided[self._undivided(instance, tmpc.mode, stage.tensor_parallel_degree)] = None
        yield from (what for what in undivided if what is not None)
        able = []
        for known, numbers in kinds.values():
            own = [known[place] for place in self._places_of_known_kinds(known)]
            able.append((own, _Places(own, self._axes), numbers))
        modes, against = self.modes(instance), dict[Mode, list[int]]()
        for mode in modes:
            against[mode] = found = []
            for own, places, numbers in able:
                left = {own[place] for place in places.under(mode)}
                found += [number for number in numbers if chosen[number][1].mode not in left]
            if not found:
                return
        nearest = min(against, key=lambda mode: len(against[mode]))
        yield from self._differing(modes, nearest, [chosen[number] for number in sorted(against[nearest])])

    def _differing(self, modes: Sequence[Mode], nearest: Mode, against: Sequence[tuple[int, Tmpc]]) -> Iterator[str]:
        """Reports what layers do that no mode allows, or else where they differ. nearest: the mode that most layers
        follow."""
        mixed: dict[str, tuple[int, Tmpc]] = {}
        told: set[str] = set()
        for layer, tmpc in against:
            for axis in _AXES:
                value, asked = getattr(tmpc.mode, axis), getattr(nearest, axis)
                allowed = {getattr(mode, axis) for mode in modes}
                free = axis == "recomputation" and self.may_recompute(tmpc.mode.recomputation)
                if value not in allowed and not free:
                    text = _axis_text(tmpc.mode, axis)
                    if text not in told:
                        yield f"{text} is not possible; layer {layer} runs as {tmpc.id!r}"
                    told.add(text)
                elif axis in self._axes and not _agrees(value, asked):
                    mixed.setdefault(axis, (layer, tmpc))
        for axis, (layer, tmpc) in mixed.items() if not told else ():
            yield (
                f"{_AXES[axis]} is not one for all layers: layer {layer} runs as {tmpc.id!r}, others with "
                f"{_axis_text(nearest, axis)}"
            )
        if not told and not mixed:  # some layer could follow the common mode, but runs without a part of it
            layer, tmpc = against[0]
            yield f"layers run in ways that are not one for all, such as layer {layer} as {tmpc.id!r}"


def _agrees(value: object, asked: object) -> bool:
    """Whether a layer with ``value`` follows ``asked``; a layer may lack parts of a recomputation."""
    if isinstance(value, Recomputation) and isinstance(asked, Recomputation):
        return value.within(asked) and (value.parts != ()) == (asked.parts != ())
    return value == asked


def _common_recomputations(rows: Iterable[Sequence[Mode]]) -> list[Recomputation]:
    """The recomputations of a whole model under which each layer recomputes exactly those of the parts that it has.

    Runtimes take one list of parts for a whole model. A layer without a TMPC for its share of such a list would
    recompute more in the run than in the plan. rows: the modes of each layer's TMPCs.
    """
    of_row = {frozenset(one.recomputation for one in row) for row in rows}
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


def _choices(seen: set[Mode], axis: str, allowed: bool) -> list[bool]:
    """The values of an axis: False, and also True if that is allowed and some TMPC has it."""
    return [False, True] if allowed and any(getattr(mode, axis) for mode in seen) else [False]
