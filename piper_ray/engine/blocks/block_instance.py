"""Makes an instance whose layers are blocks, and turns its plans into plans of the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from piper_ray.cost.plan import places, stage_of
from piper_ray.cost.variants import Variant, layer_without_choice
from piper_ray.engine.lattice.blocks import MOST_DOWNSETS, find_blocks
from piper_ray.engine.preparation import Outline
from piper_ray.engine.tables.flat_options import SHARED, TIME, WEIGHTS, A, B, figures_of
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.mode import Mode, mode_of
from piper_ray.model.plan import Plan
from piper_ray.model.solution import BlockStats
from piper_ray.simulate.stages import pass_times

MOST_CHOICES = 32
"""Largest number of choices for each block and variant."""

Rows = npt.NDArray[np.float64]

_FIGURES = 5


@dataclass(frozen=True)
class BlockChoice:
    """One TMPC for each layer of a block, and their cost together. Tensors within the block cost nothing.

    figures: p, w, a, b and the bytes that replicas share out. forward_bytes, backward_bytes: fw and bw for each
    neighbouring block.
    """

    tmpc_ids: Mapping[int, str]
    figures: tuple[float, float, float, float, float]
    forward_bytes: Mapping[int, float]
    backward_bytes: Mapping[int, float]


@dataclass(frozen=True)
class Choices:
    """The choices of a block. dropped: the number of undominated combinations that are not among ``choices``."""

    choices: tuple[BlockChoice, ...]
    dropped: int


def combine(
    members: Sequence[int], tmpcs: Mapping[int, Sequence[Tmpc]], block_of: Mapping[int, int], most: int = MOST_CHOICES
) -> Choices:
    """Returns the choices of the block of ``members``; none if one of them has no TMPC in this variant.

    block_of: the block of each layer. If there are too many, those with the least of each figure are kept, and an even
    spread over the times.
    """
    if not all(tmpcs[layer] for layer in members):
        return Choices((), 0)
    own = block_of[members[0]]
    every = [tmpc for layer in members for tmpc in tmpcs[layer]]  # one may have a neighbour that another does not
    before = sorted({block_of[u] for tmpc in every for u in tmpc.forward_sync_bytes} - {own})
    after = sorted({block_of[w] for tmpc in every for w in tmpc.backward_sync_bytes} - {own})
    columns = _FIGURES + len(before) + len(after)
    rows = np.zeros((1, columns))
    picked = np.zeros((1, len(members)), np.int64)
    dropped = 0
    for index, layer in enumerate(members):
        options = np.array([_row(tmpc, block_of, before, after) for tmpc in tmpcs[layer]])
        kept = _unbeaten(options)
        rows = (rows[:, None, :] + options[kept][None, :, :]).reshape(-1, columns)
        picked = np.repeat(picked, kept.size, axis=0)
        picked[:, index] = np.tile(kept, picked.shape[0] // kept.size)
        if kept.size > 1:
            best = _unbeaten(rows)
            chosen = best[_spread(rows[best], most)]
            dropped += best.size - chosen.size
            rows, picked = rows[chosen], picked[chosen]
    return Choices(
        tuple(
            BlockChoice(
                {layer: tmpcs[layer][option].id for layer, option in zip(members, of_row, strict=True)},
                (row[TIME], row[WEIGHTS], row[A], row[B], row[SHARED]),
                dict(zip(before, row[_FIGURES:], strict=False)),
                dict(zip(after, row[_FIGURES + len(before) :], strict=True)),
            )
            for row, of_row in zip(rows.tolist(), picked.tolist(), strict=True)
        ),
        dropped,
    )


def _row(tmpc: Tmpc, block_of: Mapping[int, int], before: Sequence[int], after: Sequence[int]) -> list[float]:
    """Returns the figures of a TMPC, then fw and bw summed for each neighbouring block."""
    extras = (before, tmpc.forward_sync_bytes), (after, tmpc.backward_sync_bytes)
    sums = [
        sum(size for neighbour, size in sizes.items() if block_of[neighbour] == block)
        for blocks, sizes in extras
        for block in blocks
    ]
    return [*figures_of(tmpc), *sums]


def _unbeaten(rows: Rows) -> npt.NDArray[np.int64]:
    """Returns the rows that no other dominates (as ``variants.undominated``); the first of equal ones."""
    figures = rows.copy()
    # a y + b + shared / d with y, d >= 1
    figures[:, B] += figures[:, A]
    figures[:, SHARED] += figures[:, B]
    figures = figures[:, (figures != figures[0]).any(axis=0)]
    if figures.shape[1] == 0:
        return np.zeros(1, np.int64)
    never_worse = (figures[:, None, :] <= figures[None, :, :]).all(axis=2)  # [one, other]
    first = np.tri(rows.shape[0], k=-1, dtype=bool).T
    return np.flatnonzero(~(never_worse & (~never_worse.T | first)).any(axis=0))


def _spread(rows: Rows, most: int) -> npt.NDArray[np.int64]:
    if rows.shape[0] <= most:
        return np.arange(rows.shape[0])
    least = {int(rows[:, column].argmin()) for column in range(rows.shape[1])}
    least.add(int((rows[:, A] + rows[:, B]).argmin()))
    least.add(int((rows[:, A] + rows[:, B] + rows[:, SHARED]).argmin()))
    by_time = np.argsort(rows[:, TIME], kind="stable")
    even = by_time[np.linspace(0, by_time.size - 1, most).round().astype(np.int64)].tolist()
    return np.array(sorted(least | set(even)), np.int64)


@dataclass(frozen=True)
class BlockInstance:
    """``instance`` has layer i for ``members[i]``. A plan of it is one of the original, at the same cost.

    choices: by block, tensor-parallel degree and TMPC id. dropped: the number of combinations of TMPCs left out, over
    all blocks.
    """

    instance: Instance
    members: tuple[tuple[int, ...], ...]
    choices: Mapping[tuple[int, int, str], BlockChoice]
    dropped: int

    def expand(self, plan: Plan, original: Instance) -> Plan:
        """Returns the same plan in layers of ``original``. With places it may take longer there, where stages can lie
        between the ends of more edges."""
        place, stages = places(original), []
        for stage in plan.stages:
            chosen: dict[int, str] = {}
            for block in stage.layers:
                chosen |= self.choices[block, stage.tensor_parallel_degree, stage.tmpc_ids[block]].tmpc_ids
            stages.append(stage_of(place, chosen, stage.data_parallel_degree, stage.tensor_parallel_degree))
        return Plan(tuple(stages), places=plan.places)


def build_instance(
    instance: Instance, variants: Sequence[Variant], members: Sequence[tuple[int, ...]]
) -> BlockInstance:
    """Builds the instance with blocks as layers. Their TMPCs are combinations of the layers' TMPCs in each variant.

    The variants already reflect the restrictions. A block's TMPC has the recomputation, the least data-parallel degree
    and the spread of experts of its variant, so that the same restrictions leave each variant its own TMPCs.
    """
    block_of = {layer: block for block, of_block in enumerate(members) for layer in of_block}
    choices: dict[tuple[int, int, str], BlockChoice] = {}
    tmpcs: list[dict[int, list[Tmpc]]] = [{} for _ in members]
    dropped = 0
    for variant in variants:
        mode = _with_spread(variant)
        for block, of_block in enumerate(members):
            found = combine(of_block, variant.tmpcs, block_of)
            dropped += found.dropped
            listed = tmpcs[block].setdefault(variant.degree, [])
            for choice in found.choices:
                tmpc_id = str(len(listed))
                choices[block, variant.degree, tmpc_id] = choice
                time_s, weights, activation, fixed, shared = choice.figures
                forward_s, weight_s = _passes(time_s, _chosen(variant, choice))
                listed.append(
                    Tmpc(
                        tmpc_id,
                        time_s,
                        weights,
                        activation,
                        fixed,
                        choice.forward_bytes,
                        choice.backward_bytes,
                        recompute=variant.recompute is True,
                        shared_bytes=shared,
                        least_data_parallel_degree=variant.least_data_parallel_degree,
                        forward_s=forward_s,
                        weight_s=weight_s,
                        mode=mode,
                    )
                )
    layers = tuple(
        Layer(
            block,
            _name(instance, of_block),
            {t: tuple(row) for t, row in tmpcs[block].items() if row},
            ", ".join(dict.fromkeys(filter(None, (instance.layer_by_id[layer].path for layer in of_block)))),
        )
        for block, of_block in enumerate(members)
    )
    blocks = replace(instance, layers=layers, edges=_edges(instance, block_of), tensors=_tensors(instance, block_of))
    return BlockInstance(blocks, tuple(members), choices, dropped)


def _with_spread(variant: Variant) -> Mode:
    """Returns the variant's recomputation, and experts that are spread over whole groups of all its layers."""
    modes = [tmpc.mode for row in variant.tmpcs.values() for tmpc in row]
    groups = [mode.experts * mode.expert_tensor for mode in modes if mode.experts is not None]
    return replace(mode_of("", variant.recompute is True), experts=math.lcm(*groups) if groups else None)


def _chosen(variant: Variant, choice: BlockChoice) -> list[Tmpc]:
    return [tmpc for layer, tmpc_id in choice.tmpc_ids.items() for tmpc in variant.tmpcs[layer] if tmpc.id == tmpc_id]


def _passes(time_s: float, chosen: Sequence[Tmpc]) -> tuple[float | None, float | None]:
    """Returns the seconds of the forward pass and of the weight gradients of a block, as in simulations; None unless
    they are known for each layer. The block's recomputation does not determine that of its layers: only some may
    recompute."""
    if any(tmpc.forward_s is None for tmpc in chosen):
        return None, None
    passes = [pass_times(tmpc) for tmpc in chosen]
    whole_s = min(sum(one.forward_s for one in passes), time_s)  # the sum of the parts may round to more than the whole
    return whole_s, min(sum(one.weight_s for one in passes), time_s - whole_s)


def _edges(instance: Instance, block_of: Mapping[int, int]) -> tuple[Edge, ...]:
    """Returns one edge for each two blocks with tensors between them, with the cost of all these."""
    sizes: dict[tuple[int, int], float] = {}
    for edge in instance.edges:
        ends = block_of[edge.source], block_of[edge.target]
        if ends[0] != ends[1]:
            sizes[ends] = sizes.get(ends, 0.0) + edge.communication_bytes
    return tuple(Edge(*ends, size) for ends, size in sorted(sizes.items()))


def _tensors(instance: Instance, block_of: Mapping[int, int]) -> tuple[Tensor, ...]:
    """Returns the tensors with ends in several blocks."""
    found = []
    for tensor in instance.tensors:
        ends = tuple(sorted({block_of[layer] for layer in tensor.layers}))
        if len(ends) > 1:
            found.append(replace(tensor, layers=ends))
    return tuple(found)


def _name(instance: Instance, members: Sequence[int]) -> str:
    first, last = instance.layer_by_id[members[0]].name, instance.layer_by_id[members[-1]].name
    return first if len(members) == 1 else f"{first} to {last}, {len(members)} layers"


@dataclass(frozen=True)
class MergedOperators:
    """The blocks as an instance of their own, and what the merge gave up."""

    blocks: BlockInstance
    stats: BlockStats


def merge_operators(instance: Instance, outline: Outline, downsets: int | None) -> MergedOperators | None:
    """Merges operators into blocks. None if the layers are few enough, or one of them has no TMPC that is allowed.
    downsets: of the layers; None: too many to count.

    Raises LimitError if they cannot be merged into few enough blocks.
    """
    variants = outline.alike
    if (downsets is not None and downsets <= MOST_DOWNSETS) or layer_without_choice(instance, variants) is not None:
        return None
    found = find_blocks(instance, variants, outline.contraction, MOST_DOWNSETS)
    blocks = build_instance(instance, variants, found.members)
    stats = BlockStats(
        layers=len(instance.layers),
        blocks=len(found.members),
        downsets_before=downsets,
        downsets=found.downsets,
        largest_share=found.largest_share,
        choices_dropped=blocks.dropped,
    )
    return MergedOperators(blocks, stats)
