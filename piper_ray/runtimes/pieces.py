"""A model as runtimes build it: an embedding, a row of equal blocks, optional predictors, and a head. Or a chain, in
which each layer reads the output of the one before it. A vision tower in front of a decoder belongs to the first
piece."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.plan_rules import layers_in_order

_IN_LIST = re.compile(r"(?P<list>.*?)\.?(?<![^.])(?P<index>\d+)(?:\.|$)")
_BLOCK_NAME = re.compile(r"layer|block", re.IGNORECASE)
_TOWER = re.compile(r"(^|\.)(visual|vision)", re.IGNORECASE)


@dataclass(frozen=True)
class ModelPieces:
    """Piece 0 is the embedding, with a tower in front of it; 1 to ``blocks`` are the blocks; the last piece is the
    head.

    members: layer ids of each piece, in the model's order. predictors: how many layers predict further tokens
    (multi-token prediction). If there are any, they form the piece before the head, because runtimes keep them
    together.
    """

    members: tuple[tuple[int, ...], ...]
    predictors: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.head - (2 if self.predictors else 1)

    @property
    def head(self) -> int:
        """The number of the last piece."""
        return len(self.members) - 1

    @cached_property
    def of_layer(self) -> dict[int, int]:
        """For each layer id the piece that the layer is in."""
        return {layer: piece for piece, members in enumerate(self.members) for layer in members}

    def is_block(self, piece: int) -> bool:
        """Whether the piece is a block."""
        return 0 < piece <= self.blocks

    def is_predictor(self, piece: int) -> bool:
        """Whether the piece consists of the predictors."""
        return self.blocks < piece < self.head

    def of_stages(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """The pieces of each stage of a plan. Raises UsageError if several stages share a piece."""
        stages = tuple(tuple(sorted({self.of_layer[layer] for layer in stage.layers})) for stage in plan.stages)
        seen = Counter(piece for stage in stages for piece in stage)
        for number, stage in enumerate(stages, start=1):
            for piece in stage:
                if seen[piece] > 1:
                    raise UsageError(
                        f"stage {number} holds a part of {self.name(piece)} alone, which runtimes keep whole"
                    )
        return stages

    def name(self, piece: int) -> str:
        """The piece's name in messages; blocks are counted from 0, as in runtimes."""
        if self.is_block(piece):
            return f"block {piece - 1}"
        if self.is_predictor(piece):
            return "the predictors"
        return "the embedding" if piece == 0 else "the head"


def pieces_of(instance: Instance) -> ModelPieces:
    """Finds blocks by the layers' paths (``model.layers.17``), or by their names if there are no paths.

    Raises UsageError for a model that does not have this form, naming the first layer that does not fit.
    """
    order = layers_in_order(instance)
    keys = _block_keys(instance, order)
    inside = [position for position, key in enumerate(keys) if key is not None]
    if not inside:
        raise UsageError(
            f"{_named(instance)} has no row of equal blocks by its layers' paths or names; a plan for this "
            "runtime needs an embedding, equal blocks and a head"
        )
    first, last = inside[0], inside[-1]
    members: list[tuple[int, ...]] = [order[:first]]
    open_key: object = None
    for position in range(first, last + 1):
        key = keys[position]
        if key is None:
            raise UsageError(f"{_layer(instance, order[position])} stands between blocks and belongs to none of them")
        if key == open_key:
            members[-1] = (*members[-1], order[position])
        else:
            members.append((order[position],))
            open_key = key
    _check_alike(instance, members[1:])
    _check_row(instance, members[1:])
    predictors = tuple(layer for layer in order[last + 1 :] if instance.layer_by_id[layer].predictor)
    head = order[last + 1 + len(predictors) :]
    if set(predictors).intersection(head):
        raise UsageError(f"{_layer(instance, predictors[-1])} predicts further tokens and comes after the head")
    members += [predictors] if predictors else []
    members.append(head)
    return ModelPieces(tuple(members), len(predictors))


def _block_keys(instance: Instance, order: Sequence[int]) -> list[object]:
    """For each position in the order a key that differs between blocks; None outside of blocks."""
    layers = [instance.layer_by_id[layer] for layer in order]
    towers = _tower_before(instance, order)
    found = [
        None if layer.predictor or place < towers else _IN_LIST.match(layer.path) for place, layer in enumerate(layers)
    ]
    lists = list(dict.fromkeys(match["list"] for match in found if match is not None))
    if len(lists) > 1:
        raise UsageError(
            f"{_named(instance)} has several rows of blocks, {' and '.join(map(printable, lists[:3]))}; this runtime "
            "knows models with one"
        )
    if lists:
        keys: list[object] = [None if match is None else int(match["index"]) for match in found]
        _check_rising(instance, order, keys)
        return keys
    return [
        position if _BLOCK_NAME.search(layer.name) and not layer.predictor else None
        for position, layer in enumerate(layers)
    ]


def _tower_before(instance: Instance, order: Sequence[int]) -> int:
    """The number of layers of a vision tower whose tokens the decoder reads; 0 if there is none."""
    seeing = [place for place, layer in enumerate(order) if _TOWER.search(instance.layer_by_id[layer].path)]
    count = seeing[-1] + 1 if seeing else 0
    chained = all(instance.neighbours[layer][0] == (before,) for before, layer in pairwise(order[: count + 1]))
    return count if chained and count < len(order) else 0


def _check_rising(instance: Instance, order: Sequence[int], keys: Sequence[object]) -> None:
    numbers = [(layer, key) for layer, key in zip(order, keys, strict=True) if isinstance(key, int)]
    expected = numbers[0][1] if numbers else 0
    for layer, key in numbers:
        if key not in (expected, expected + 1):
            raise UsageError(f"{_layer(instance, layer)} is of block {key} where {expected} or {expected + 1} is due")
        expected = key


def _check_alike(instance: Instance, blocks: Sequence[Sequence[int]]) -> None:
    """Raises UsageError unless blocks of several layers consist of the same layers, by name."""
    if all(len(block) == 1 for block in blocks):
        return
    wanted = [instance.layer_by_id[layer].name for layer in blocks[0]]
    for number, block in enumerate(blocks):
        if [instance.layer_by_id[layer].name for layer in block] != wanted:
            raise UsageError(
                f"block {number} of {_named(instance)} is not made of the same layers as block 0; this runtime knows "
                "equal blocks in a row"
            )


def _check_row(instance: Instance, blocks: Sequence[Sequence[int]]) -> None:
    """Raises UsageError unless each block reads the output of the one before it."""
    for before, block in pairwise(blocks):
        if not any(source in before for layer in block for source in instance.neighbours[layer][0]):
            raise UsageError(
                f"{_layer(instance, block[0])} does not read what {_layer(instance, before[-1])} makes: "
                f"{_named(instance)} is no single row of blocks"
            )


def require_chain(instance: Instance, title: str) -> None:
    """Raises UsageError, naming the first layer that does not fit, unless layers form a chain. title: the runtime's
    title."""
    order = layers_in_order(instance)
    for before, layer in zip((None, *order), order, strict=False):
        sources = instance.neighbours[layer][0]
        if set(sources) != ({before} - {None}):
            read = " and ".join(_layer(instance, source) for source in sources) or "no other layer"
            expected = "nothing" if before is None else _layer(instance, before)
            raise UsageError(
                f"{title} hands each layer what the one before it makes; here {_layer(instance, layer)} reads {read}, "
                f"and {expected} is before it"
            )


def _named(instance: Instance) -> str:
    return printable(instance.name) or "the model"


def _layer(instance: Instance, layer: int) -> str:
    found = instance.layer_by_id[layer]
    return f'layer {layer} ("{printable(found.path or found.name)}")'
