"""The memory of each rank of a layout, by the way its software uses memory.

Also a layout written as one line of words: ``tp=4,pp=8,dp=2,vpp=2,mbs=1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from piper_ray.calibrate.layouts import Laid
from piper_ray.calibrate.runs import PublishedRun, note_words
from piper_ray.model.arguments import choice, did_you_mean
from piper_ray.model.errors import Fault, InputError
from piper_ray.model.fields import plain_fields
from piper_ray.model.mode import Recomputation, Sharding
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.workloads.estimate.doubt import memory_doubt
from piper_ray.workloads.estimate.layout import Layout, PricedLayout
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.ranks import Chunk, RankLayout, RankMemory, memory_of_rank
from piper_ray.workloads.estimate.runtimes import DEFAULT, Loss, Traits, held_by
from piper_ray.workloads.estimate.software import Precision, software_named
from piper_ray.workloads.formats.faults import Faults

_FULLY_SHARDED = "fsdp"
_HALF_PRECISION = "nemo"


def traits_of(run: PublishedRun, laid: Laid) -> Traits:
    """The traits that the run states, else those of its generation of software."""
    precision, usual = laid.stack.precision, DEFAULT
    traits = held_by(laid.software, half=precision is Precision.FP16)
    if traits is None and laid.layout.sharding is Sharding.WEIGHTS:
        traits = held_by(_FULLY_SHARDED)
    traits = traits or held_by("megatron-2021", half=precision is Precision.FP16) or usual
    halved = held_by(_HALF_PRECISION) or usual
    if run.gradients == "bf16":
        traits = replace(traits, states=halved.states)
    elif run.gradients == "fp32" and traits.states == halved.states:
        traits = replace(traits, states=usual.states)
    if run.optimizer_on_host:
        traits = replace(traits, states=replace(traits.states, optimizer=0.0, step=0.0))
    loss = choice("loss", run.loss, Loss) if run.loss else traits.loss
    of_stack = laid.stack.traits
    return replace(traits, loss=loss, fp8=of_stack.fp8, context_all_to_all=of_stack.context_all_to_all)


def memory_of_ranks(
    plan: PricedLayout, layout: Layout, sharding: Sharding, traits: Traits, recomputed: Sequence[int] | None = None
) -> list[RankMemory]:
    """The memory of each rank. recomputed: for each stage of the plan the number of its first blocks that recompute;
    None: all."""
    ranks = rank_layouts(plan, layout, sharding, recomputed)
    lists = flush_lists(plan.schedule, len(ranks), layout.microbatches)
    names = {kind.value: kind.name for kind in ActionKind}
    return [
        memory_of_rank(rank, [(names[kind], chunk) for kind, chunk, _ in actions.tolist()], traits)
        for rank, actions in zip(ranks, lists, strict=True)
    ]


def rank_layouts(
    plan: PricedLayout, layout: Layout, sharding: Sharding, recomputed: Sequence[int] | None = None
) -> list[RankLayout]:
    """The part of the model on each rank of a pipeline."""
    of_stage = [[plan.layers[layer] for layer in stage.layers] for stage in plan.plan.stages]
    if recomputed is not None:
        of_stage = [_first(stage, count) for stage, count in zip(of_stage, recomputed, strict=True)]
    experts = max(mode.expert_ranks * mode.expert_tensor for _, mode in plan.layers)
    replicas = layout.shards or layout.data * layout.context
    degrees = (layout.tensor, layout.context, layout.data, layout.pipeline, layout.expert or 1)
    return [
        RankLayout(
            chunks=[of_stage[stage] for stage in layout.schedule.stages_of_rank(rank, layout.pipeline)],
            replicas=replicas,
            expert_replicas=max(1, layout.tensor * replicas // experts),
            sharding=sharding,
            ranks=layout.pipeline,
            rank=rank,
            groups=1 + sum(degree > 1 for degree in degrees),  # with the group of all ranks
        )
        for rank in range(layout.pipeline)
    ]


def _first(stage: Chunk, count: int) -> list[tuple[LayerKind, LayerMode]]:
    """The stage with recomputation in its first ``count`` blocks only."""
    found = []
    for kind, mode in stage:
        count -= kind.recomputable
        found.append((kind, mode if count >= 0 else replace(mode, recomputation=Recomputation.NONE)))
    return found


@dataclass(frozen=True)
class LayoutMemory:
    """The memory of each rank of a layout, the result of ``piper_ray.memory``.

    layout: its degrees, schedule and batch, by name. ranks: of one pipeline, the first stage's first; all pipelines are
    equal. device_bytes: the part of the GPU's memory that programs can use, if a GPU is named. assumed: assumptions
    about what the layout does not state. notes: what it states that the figures do not include.

    >>> import piper_ray
    >>> found = piper_ray.memory("llama3-8b", "tp=2,pp=2,dp=2", gpu="H100-SXM")
    >>> found.fits
    True
    """

    model: str
    parameters: int
    layout: Mapping[str, object]
    software: str
    precision: str
    ranks: tuple[RankMemory, ...]
    gpu: str | None = None
    device_bytes: float | None = None
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def needed_bytes(self) -> float:
        """The memory that each GPU needs: allocations of the fullest rank, and what is reserved in addition."""
        return max(rank.device_bytes for rank in self.ranks)

    @property
    def likely_bytes(self) -> tuple[float, float]:
        """The range that contains the measured figure in 9 of 10 cases."""
        return memory_doubt(software_named(self.software)).range_bytes(self.needed_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the GPU has enough memory; None if no GPU is named."""
        return None if self.device_bytes is None else self.needed_bytes <= self.device_bytes


def layout_document(layout: Layout) -> dict[str, object]:
    """A layout by the names of its parts."""
    return {
        **plain_fields(layout, ("tensor", "pipeline", "data", "context")),
        "expert": layout.expert or 1,
        "expert_tensor": layout.expert_tensor,
        **layout.schedule.to_dict(),
        "microbatch": layout.samples,
        "global_batch": layout.batch,
        "tokens": layout.tokens,
        "sequence_parallel": layout.mode.sequence_parallel,
        "recomputation": layout.recomputation.text,
        "shared_by_replicas": layout.sharding.text,
        "optimizer_on_host": layout.optimizer_on_host,
        "devices": layout.devices,
    }


SOURCE = "layout"

_NAMES: Mapping[str, str] = {
    **{name: name for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "gpus", "seq", "recompute", "schedule")},
    **{name: name for name in ("group", "stages", "gradients", "loss", "precision", "software")},
    "mbs": "microbatch",
    "gbs": "global_batch",
    "sp": "sequence_parallel",
    "zero": "optimizer_sharding",
    "fsdp": "optimizer_sharding",
    "optimizer_on_host": "optimizer_on_host",
}
"""The field of a run for each word."""

_WORD = re.compile(r"(?P<name>[A-Za-z]\w*)(?:=(?P<value>[\w.+-]+))?")
_SHARDED = {"0": "none", "1": "zero1", "2": "zero2", "3": "fsdp"}


def are_words(text: str) -> bool:
    """Whether the text consists of words with values only."""
    return "=" in text and all(_WORD.fullmatch(word) for word in _split(text))


def run_of_words(text: str) -> PublishedRun:
    """A run with this layout and nothing else. Raises InputError with all faults."""
    said: dict[str, object] = {}
    faults = Faults()
    for word in _split(text):
        match = _WORD.fullmatch(word)
        name, value = (match["name"].lower(), match["value"]) if match else (word, None)
        if name not in _NAMES:
            faults.at(name, f"is no word of a layout; expected {', '.join(_NAMES)}{did_you_mean(name, _NAMES)}")
        elif _NAMES[name] in said:
            faults.at(name, "is said twice")
        elif name == "fsdp" and value is not None:
            faults.at(name, f"takes no value, as all replicas share weights; say fsdp,dp={value}")
        else:
            said[_NAMES[name]] = _value(name, value)
    run = faults.model(PublishedRun, said, "")
    if run is None or faults:
        note_words(said, "", faults)
        words = {field: word for word, field in _NAMES.items()}
        raise InputError(SOURCE, [Fault(words.get(fault.path, fault.path), fault.message) for fault in faults.found])
    return run


def _split(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _value(name: str, text: str | None) -> object:
    if text is None:
        return "fsdp" if name == "fsdp" else True
    if name == "zero":
        return _SHARDED.get(text, text)
    if name == "stages":
        return [int(size) if size.isdecimal() else size for size in text.split("+")]
    if text.isdecimal() and name != "precision":
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text.replace("+", ","))
