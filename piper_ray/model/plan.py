"""A plan: the stages, front to back, with their degrees and each layer's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import html_table, plural, range_text
from piper_ray.model.schedule import Schedule
from piper_ray.model.units import as_tuple, convert_fields, count, counts, plain

_MOST_DEGREES = 8


@dataclass(frozen=True)
class Stage:
    """One pipeline stage on ``data_parallel_degree * tensor_parallel_degree`` devices.

    layers: ids of its layers, in the order of the instance's file.

    tmpc_ids: the id of each layer's TMPC at this tensor-parallel degree, by layer id.

    kind: the kind of its devices, if the cluster has several.

    >>> Stage((0, 1), data_parallel_degree=4, tensor_parallel_degree=2, tmpc_ids={0: "plain", 1: "full"}).devices
    8
    """

    layers: tuple[int, ...]
    data_parallel_degree: int
    tensor_parallel_degree: int
    tmpc_ids: Mapping[int, str]
    kind: str = ""

    def __post_init__(self) -> None:
        convert_fields(self, counts, "layers")
        convert_fields(self, count, "data_parallel_degree", "tensor_parallel_degree")

    @property
    def devices(self) -> int:
        """The number of devices: d t."""
        return self.data_parallel_degree * self.tensor_parallel_degree


@dataclass(frozen=True)
class Plan:
    """The stages from front to back: a tensor of an edge stays within a stage or goes to a later one.

    keeps_order: the stages are runs of the layers' order, and tensors are relayed through each stage that they skip
    (``in_order``). in_flight: the number of microbatches whose activations a replica of each stage keeps under an
    asynchronous schedule; None: ceil(s / d). shares: if there are pipelines of one kind of devices each, the
    microbatches of each kind, whose stages then come one after the other.

    places: without a flush, on nodes: the number of devices behind each stage, idle ones included. Stages lie in
    order and groups count from the back. A border has the link of the smallest group that holds both its stages
    (``Cluster.shared_level``). Where a stage is not whole in a group, its place is a multiple of the blocks that its
    ring counts on (``Cluster.place_blocks``), so these are. None: the blocks of stages lie in any order, and all
    borders are charged at the outermost link.

    >>> Plan((Stage((0,), 2, 1, {0: "plain"}), Stage((1,), 1, 4, {1: "plain"}))).devices
    6
    """

    stages: tuple[Stage, ...]
    keeps_order: bool = False
    in_flight: tuple[int, ...] | None = None
    shares: tuple[tuple[str, int], ...] = ()
    places: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        convert_fields(self, as_tuple, "stages", "shares")
        convert_fields(self, plain, "keeps_order")
        if self.places is not None:
            convert_fields(self, counts, "places")
        if self.in_flight is not None:
            convert_fields(self, counts, "in_flight")

    def __repr__(self) -> str:
        if not self._readable:
            return f"Plan(stages={self.stages!r})"
        text = f"Plan({plural(len(self.stages), 'stage')} on {plural(self.devices, 'device')}"
        degrees = f"; d x t: {self.degrees_text}" if self.stages else ""
        return f"{text}{degrees}{'; order kept' if self.keeps_order else ''}{self._in_flight_text})"

    def _repr_html_(self) -> str:
        if not self._readable:
            return html_table("Plan", [("stages", repr(self.stages))])
        rows = [
            (
                str(number),
                f"{range_text(stage.layers)} ({len(stage.layers)})",
                str(stage.data_parallel_degree),
                str(stage.tensor_parallel_degree),
                f"{stage.devices:,}",
            )
            for number, stage in enumerate(self.stages, start=1)
        ]
        caption = f"Plan: {plural(len(self.stages), 'stage')} on {plural(self.devices, 'device')}"
        return html_table(caption, rows, ("stage", "layers", "d", "t", "devices"))

    @property
    def _in_flight_text(self) -> str:
        if self.in_flight is None:
            return ""
        shown = ", ".join(map(str, self.in_flight[:_MOST_DEGREES]))
        return f"; in flight {shown}{', ...' if len(self.in_flight) > _MOST_DEGREES else ''}"

    @property
    def _readable(self) -> bool:
        """Whether it has the right types: a plan is checked when it is used, but may be shown before."""
        try:
            return all(stage.devices > 0 and range_text(stage.layers) for stage in self.stages) and bool(
                self._in_flight_text or self.in_flight is None
            )
        except (AttributeError, TypeError, ValueError):
            return False

    @property
    def devices(self) -> int:
        """The number of devices of all stages together."""
        return sum(stage.devices for stage in self.stages)

    @property
    def span(self) -> int:
        """The number of devices up to the front of the first stage, with idle ones between stages."""
        if self.places is None:
            return self.devices
        return max((at + stage.devices for at, stage in zip(self.places, self.stages, strict=False)), default=0)

    @property
    def degrees_text(self) -> str:
        """``256x1, 128x1 (8 stages), 64x2``: neighbouring stages with equal degrees are written once."""
        runs = []
        for (d, t), stages in groupby(self.stages, lambda s: (s.data_parallel_degree, s.tensor_parallel_degree)):
            count = len(list(stages))
            runs.append(f"{d}x{t}" if count == 1 else f"{d}x{t} ({count} stages)")
        return ", ".join(runs if len(runs) <= _MOST_DEGREES else [*runs[: _MOST_DEGREES - 1], "..."])

    @property
    def data_parallel_sum(self) -> int:
        """The sum of the data-parallel degrees of all stages."""
        return sum(stage.data_parallel_degree for stage in self.stages)

    @property
    def ranks(self) -> tuple[range, ...]:
        """The ranks of each stage, numbered from 0, front to back; the ranks of a replica are consecutive."""
        starts = list(accumulate((stage.devices for stage in self.stages), initial=0))
        return tuple(range(first, end) for first, end in pairwise(starts))

    def ranks_under(self, schedule: Schedule) -> tuple[range, ...]:
        """The ranks of each stage under a schedule that may put several stages on the same devices."""
        merged = self.by_rank(schedule)
        count = len(merged.stages)
        found = {
            stage: ranks
            for place, ranks in enumerate(merged.ranks)
            for stage in (schedule.stages_of_rank(place, count) if count < len(self.stages) else (place,))
        }
        return tuple(found[stage] for stage in range(len(self.stages)))

    def by_rank(self, schedule: Schedule) -> Plan:
        """The plan with all chunks of a rank merged into one stage; the plan itself if each rank has one chunk.

        Chunks of a rank share their devices, so they have equal degrees; those of the first chunk are taken.
        """
        if schedule.v == 1 or len(self.stages) % schedule.v:
            return self
        count = len(self.stages) // schedule.v
        chunks_of = (schedule.stages_of_rank(rank, count) for rank in range(count))
        return Plan(tuple(self._merged([self.stages[stage] for stage in chunks]) for chunks in chunks_of))

    @staticmethod
    def _merged(chunks: Sequence[Stage]) -> Stage:
        layers = tuple(layer for chunk in chunks for layer in chunk.layers)
        tmpc_ids = {layer: tmpc_id for chunk in chunks for layer, tmpc_id in chunk.tmpc_ids.items()}
        first = chunks[0]
        return Stage(layers, first.data_parallel_degree, first.tensor_parallel_degree, tmpc_ids, first.kind)

    def to_dict(self) -> dict[str, object]:
        """Upstream's plan document (``stages[].nodes`` and so on), ready for ``json.dump``."""
        return {"stages": self.stage_dicts(), **self.rule_dict()}

    def rule_dict(self) -> dict[str, object]:
        """The plan's fields other than its stages, where they differ from the default."""
        order: dict[str, object] = {"keeps_order": True} if self.keeps_order else {}
        shared: dict[str, object] = {"microbatches": dict(self.shares)} if self.shares else {}
        lists = {"in_flight": self.in_flight, "places": self.places}
        return order | shared | {name: list(figures) for name, figures in lists.items() if figures is not None}

    def require_one_pipeline(self, what: str) -> None:
        """Raises UsageError for pipelines of one kind each. what: what does not take these, in words."""
        if self.shares:
            raise UsageError(
                f"{what}: not of a plan with pipelines of one kind of devices each, whose figures verify shows; "
                "expected one with the same pipeline on all devices"
            )

    def stage_dicts(self) -> list[dict[str, object]]:
        """The ``stages`` of that document."""
        return [
            {
                "nodes": list(stage.layers),
                "dataParallelDegree": stage.data_parallel_degree,
                "tensorParallelDegree": stage.tensor_parallel_degree,
                "TMPCids": {str(layer): stage.tmpc_ids[layer] for layer in stage.layers},
                **({"kind": stage.kind} if stage.kind else {}),
            }
            for stage in self.stages
        ]
