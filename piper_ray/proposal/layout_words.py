"""The layout of a plan, in the words of runtimes: ``mbs 1, TP 4, CP 1, PP 4, DP 4, ZeRO-1, 1f1b``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from piper_ray.model.constraints import choices_made
from piper_ray.model.instance import Tmpc
from piper_ray.model.mode import Recomputation, Sharding, share_of
from piper_ray.proposal.demand import Proposed
from piper_ray.workloads.estimate.exchanges import NEAR_RANKS, dispatcher_of
from piper_ray.workloads.estimate.software import TokenDispatcher

_SHARING = {
    Sharding.NONE: "no sharding",
    Sharding.OPTIMIZER: "ZeRO-1",
    Sharding.GRADIENTS: "ZeRO-2",
    Sharding.WEIGHTS: "FSDP",
}


_ON_HOST = "optimizer on CPU"
EACH_SITE = "pipelines at each site"


@dataclass(frozen=True)
class LayoutWords:
    """The layout of a plan with one d and one t for all stages.

    microbatch: in samples. tensor: devices that share a layer, without the groups that share a sequence. expert: the
    most ranks over which a layer's experts are spread; t if nothing else is chosen; None: no layer has experts.
    dispatcher: how tokens reach experts, unless by all-to-all in a node. sharding: that of most layers. recomputation:
    None if layers differ. each_site: whether there are pipelines at each of several sites. tensor_of: the degree of
    each kind of devices that the plan uses, if they differ; then tensor is the largest. kinds: those of the stages.
    """

    microbatch: int
    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int | None
    expert_tensor: int
    sequence_parallel: bool
    sharding: Sharding
    shards: int
    recomputation: Recomputation | None
    offload: bool
    optimizer_on_host: bool
    schedule: str
    chunks: int
    tensor_of: tuple[tuple[str, int], ...] = ()
    dispatcher: str | None = None
    each_site: bool = False
    kinds: tuple[str, ...] = field(default=(), compare=False)

    @property
    def tensor_text(self) -> str:
        """``4``, or ``4 on A100-80, 8 on H100-SXM``."""
        return ", ".join(f"{degree} on {kind}" for kind, degree in self.tensor_of) or str(self.tensor)

    @property
    def sharing(self) -> str:
        """``ZeRO-1``, ``FSDP over 8``, ``no sharding``, ``optimizer on CPU``."""
        if self.optimizer_on_host:
            return _ON_HOST
        over = f" over {self.shards}" if self.shards > 1 and self.shards < self.data * self.context else ""
        return _SHARING[self.sharding] + over

    @property
    def recomputed(self) -> str:
        """``no recomputation``, ``full recomputation``."""
        return "recomputation by stage" if self.recomputation is None else self.recomputation.text

    @property
    def scheduled(self) -> str:
        """``1f1b``, ``interleaved, 5 chunks``."""
        return self.schedule if self.chunks == 1 else f"{self.schedule}, {self.chunks} chunks"

    @property
    def text(self) -> str:
        """The whole layout in words."""
        degrees = [f"mbs {self.microbatch}", f"TP {self.tensor_text}", f"CP {self.context}", f"PP {self.pipeline}"]
        degrees.append(f"DP {self.data}")
        if self.expert is not None:
            degrees.append(f"EP {self.expert}")
        if self.expert_tensor > 1:
            degrees.append(f"ETP {self.expert_tensor}")
        if self.dispatcher is not None:
            degrees[-1] += f" ({self.dispatcher} dispatch)"
        more = [self.sharing, *["SP"] * self.sequence_parallel, self.scheduled, self.recomputed]
        more += ["activations offloaded"] * self.offload + [EACH_SITE] * self.each_site
        return ", ".join([*degrees, *more])

    @property
    def short(self) -> str:
        """``mbs 1, TP 4, PP 4, DP 4, ZeRO-1, 1f1b``: without degrees of 1 and without what is switched off."""
        degrees = {"TP": self.tensor, "CP": self.context, "PP": self.pipeline, "DP": self.data, "EP": self.expert or 1}
        said = [f"mbs {self.microbatch}", *(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)]
        said += [self.sharing] * (self.optimizer_on_host or self.sharding is not Sharding.NONE) + [self.scheduled]
        said += [self.recomputed] * (self.recomputation != Recomputation.NONE)
        return ", ".join([*said, *["offload"] * self.offload, *[EACH_SITE] * self.each_site])

    def simpler_in(self, best: LayoutWords) -> list[str]:
        """What this plan does without, or has less of, compared with ``best``."""
        found = []
        for name, mine, theirs in (
            ("CP", self.context, best.context),
            ("TP", self.tensor, best.tensor),
            ("PP", self.pipeline, best.pipeline),
            ("EP", self.expert or 1, best.expert or 1),
            ("chunks", self.chunks, best.chunks),
        ):
            if mine < theirs:
                found.append(f"no {name}" if mine == 1 else f"{'fewer' if name == 'chunks' else 'less'} {name}")
        if self.recomputation == Recomputation.NONE != best.recomputation:
            found.append("no recomputation")
        if self.sharding < best.sharding and not self.optimizer_on_host:
            found.append(self.sharing)
        if best.optimizer_on_host and not self.optimizer_on_host:
            found.append("optimizer on GPUs")
        if best.offload and not self.offload:
            found.append("no offload")
        return found


def layout_words(one: Proposed) -> LayoutWords:
    """The words for a plan that a search found."""
    chosen = [found for stage in one.plan.stages for found in choices_made(one.instance, stage)]
    modes = Counter(tmpc.mode for _, _, tmpc in chosen)
    first, schedule = one.plan.stages[0], one.simulation.schedule
    context = max(mode.context for mode in modes)
    spread = max((mode for mode in modes if mode.experts is not None), key=lambda mode: mode.experts or 0, default=None)
    usual = max(modes, key=lambda mode: (modes[mode], mode.id))
    tensor_of = {stage.kind: stage.tensor_parallel_degree // context for stage in one.plan.stages}
    over = max(tensor_of.values()) if any(layer.experts for layer in one.instance.layers) else None
    expert_tensor = max(mode.expert_tensor for mode in modes)
    expert = over if spread is None else spread.experts
    alone = first.data_parallel_degree * context == 1  # there is no other replica to share with
    return LayoutWords(
        microbatch=one.samples,
        tensor=max(tensor_of.values()),
        context=context,
        pipeline=len(one.plan.stages) // schedule.v,
        data=first.data_parallel_degree,
        expert=expert,
        expert_tensor=expert_tensor,
        sequence_parallel=any(mode.sequence_parallel for mode in modes),
        sharding=Sharding.NONE if alone else usual.sharding,
        shards=usual.optimizer_shards,
        recomputation=_common_recomputation(chosen),
        offload=any(mode.offload for mode in modes),
        optimizer_on_host=one.on_host,
        schedule=schedule.name.value,
        chunks=schedule.v,
        tensor_of=tuple(tensor_of.items()) if len(set(tensor_of.values())) > 1 else (),
        dispatcher=_dispatcher(one, (expert or 1) * expert_tensor),
        each_site=bool(one.instance.cluster.sites),
        kinds=tuple(stage.kind for stage in one.plan.stages),
    )


def _dispatcher(one: Proposed, ranks: int) -> str | None:
    """How tokens reach experts on ``ranks`` ranks; None if it does not matter."""
    model = one.instance.model
    how = None if model is None or ranks == 1 else dispatcher_of(model, ranks)
    return None if how is None or (how is TokenDispatcher.ALL_TO_ALL and ranks <= NEAR_RANKS) else how.value


def _common_recomputation(chosen: Iterable[tuple[int, Sequence[Tmpc], Tmpc]]) -> Recomputation | None:
    """The recomputation that a launch asks of all layers, each of which follows it with the parts that it has; None if
    layers differ in another way.

    chosen: for each layer the TMPCs that it may have, and its own.
    """
    made = {(frozenset(x.mode.recomputation for x in row), own.mode.recomputation) for _, row, own in chosen}
    asked = {own for _, own in made} - {Recomputation.NONE}
    if Recomputation.FULL in asked and len(asked) > 1:
        return None
    union = Recomputation.of_parts(part for own in asked for part in own.parts)
    return union if all(share_of(union, known) == own for known, own in made) else None


def differences(one: LayoutWords, other: LayoutWords) -> str:
    """``PP 8, not 4; CP 2, not 1``: in what the first layout differs from the second."""
    words = {"microbatch": "mbs", "tensor_text": "TP", "context": "CP", "pipeline": "PP", "data": "DP", "expert": "EP"}
    found = [
        f"{word} {getattr(one, name) or 1}, not {getattr(other, name) or 1}"
        for name, word in words.items()
        if getattr(one, name) != getattr(other, name)
    ]
    found += [
        f"{getattr(one, name)}, not {getattr(other, name)}"
        for name in ("sharing", "scheduled", "recomputed")
        if getattr(one, name) != getattr(other, name)
    ]
    if one.dispatcher != other.dispatcher:
        mine, theirs = (words.dispatcher or TokenDispatcher.ALL_TO_ALL.value for words in (one, other))
        found.append(f"{mine} dispatch, not {theirs}")
    if one.each_site != other.each_site:
        found.append(EACH_SITE if one.each_site else "pipelines through all sites")
    if one.pipeline == other.pipeline and any(one.kinds) and one.kinds != other.kinds:
        found.append(f"stages on {', '.join(one.kinds)}, not {', '.join(other.kinds)}")
    if one.offload != other.offload:
        found.append("activations offloaded" if one.offload else "nothing offloaded")
    return "; ".join(found) or "nothing but which layers a stage has"
