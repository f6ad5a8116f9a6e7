"""The instance whose layers are blocks, and the way back from its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from piper_ray.cost.variants import Variant, layer_without_choice
from piper_ray.engine.blocks.blocks import MOST_DOWNSETS, find_blocks
from piper_ray.engine.blocks.choices import BlockChoice, combine
from piper_ray.engine.preparation import Outline
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.solution import BlockStats
from piper_ray.simulate.stages import pass_times


@dataclass(frozen=True)
class BlockInstance:
    """``instance`` has layer i for ``members[i]``; a plan of it is one of the original, at the same cost.

    choices: by block, tensor-parallel degree and TMPC id. dropped: combinations of TMPCs left out, over all blocks.
    """

    instance: Instance
    members: tuple[tuple[int, ...], ...]
    choices: Mapping[tuple[int, int, str], BlockChoice]
    dropped: int

    def expand(self, plan: Plan, original: Instance) -> Plan:
        """The same plan in layers of ``original``."""
        position = {layer.id: index for index, layer in enumerate(original.layers)}
        stages = []
        for stage in plan.stages:
            chosen: dict[int, str] = {}
            for block in stage.layers:
                chosen |= self.choices[block, stage.tensor_parallel_degree, stage.tmpc_ids[block]].tmpc_ids
            layers = tuple(sorted(chosen, key=position.__getitem__))
            tmpc_ids = {layer: chosen[layer] for layer in layers}
            stages.append(Stage(layers, stage.data_parallel_degree, stage.tensor_parallel_degree, tmpc_ids))
        return Plan(tuple(stages))


def build_instance(
    instance: Instance, variants: Sequence[Variant], members: Sequence[tuple[int, ...]]
) -> BlockInstance:
    """The blocks as layers: their TMPCs are combinations of the layers' in each variant.

    The restrictions are in the variants already. A block's TMPC is marked as recomputing, and with a least
    data-parallel degree, as its variant is, so that the same restrictions leave each variant what belongs to it.
    """
    block_of = {layer: block for block, of_block in enumerate(members) for layer in of_block}
    choices: dict[tuple[int, int, str], BlockChoice] = {}
    tmpcs: list[dict[int, list[Tmpc]]] = [{} for _ in members]
    dropped = 0
    for variant in variants:
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


def _chosen(variant: Variant, choice: BlockChoice) -> list[Tmpc]:
    return [tmpc for layer, tmpc_id in choice.tmpc_ids.items() for tmpc in variant.tmpcs[layer] if tmpc.id == tmpc_id]


def _passes(time_s: float, chosen: Sequence[Tmpc]) -> tuple[float | None, float | None]:
    """The forward pass of all, and their weight gradients, as simulations have them; None unless the passes of each are
    known. The block's own recomputation says nothing of its layers': some may recompute and some not."""
    if any(tmpc.forward_s is None for tmpc in chosen):
        return None, None
    passes = [pass_times(tmpc) for tmpc in chosen]
    whole_s = min(sum(one.forward_s for one in passes), time_s)  # the sum of the parts may round to more than the whole
    return whole_s, min(sum(one.weight_s for one in passes), time_s - whole_s)


def _edges(instance: Instance, block_of: Mapping[int, int]) -> tuple[Edge, ...]:
    """One edge for each two blocks with tensors between them: what all of these cost together."""
    sizes: dict[tuple[int, int], float] = {}
    for edge in instance.edges:
        ends = block_of[edge.source], block_of[edge.target]
        if ends[0] != ends[1]:
            sizes[ends] = sizes.get(ends, 0.0) + edge.communication_bytes
    return tuple(Edge(*ends, size) for ends, size in sorted(sizes.items()))


def _tensors(instance: Instance, block_of: Mapping[int, int]) -> tuple[Tensor, ...]:
    """The tensors with ends in several blocks."""
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
    """The blocks as an instance of their own, and what was given up."""

    blocks: BlockInstance
    stats: BlockStats


def merge_operators(instance: Instance, outline: Outline, downsets: int | None) -> MergedOperators | None:
    """None if the layers are few enough as they are, or one of them has no TMPC that is allowed. downsets: of the
    layers; None: too many to count.

    Raises LimitError if they cannot be merged into few enough blocks.
    """
    variants, contracted = outline.alike, outline.contracted
    if (downsets is not None and downsets <= MOST_DOWNSETS) or layer_without_choice(instance, variants) is not None:
        return None
    found = find_blocks(instance, variants, contracted, MOST_DOWNSETS)
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
