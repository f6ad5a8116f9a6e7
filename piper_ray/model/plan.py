"""A plan: the stages, front to back, with their degrees and each layer's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from piper_ray.model.plain import as_tuple, convert_fields, count, counts
from piper_ray.model.schedule import Schedule


@dataclass(frozen=True)
class Stage:
    """One pipeline stage on ``data_parallel_degree * tensor_parallel_degree`` devices.

    layers: ids of its layers, in the order of the instance's file.
    tmpc_ids: for each of these layers the id of its TMPC at this tensor-parallel degree.
    """

    layers: tuple[int, ...]
    data_parallel_degree: int
    tensor_parallel_degree: int
    tmpc_ids: Mapping[int, str]

    def __post_init__(self) -> None:
        convert_fields(self, counts, "layers")
        convert_fields(self, count, "data_parallel_degree", "tensor_parallel_degree")

    @property
    def devices(self) -> int:
        """d t."""
        return self.data_parallel_degree * self.tensor_parallel_degree


@dataclass(frozen=True)
class Plan:
    """Stages front to back: what flows along an edge stays within a stage or goes to a later one."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        convert_fields(self, as_tuple, "stages")

    @property
    def devices(self) -> int:
        """Of all stages together."""
        return sum(stage.devices for stage in self.stages)

    @property
    def data_parallel_sum(self) -> int:
        """Of the data-parallel degrees of all stages."""
        return sum(stage.data_parallel_degree for stage in self.stages)

    @property
    def ranks(self) -> tuple[range, ...]:
        """The ranks of each stage: from 0 on, front to back, those of a replica side by side."""
        starts = list(accumulate((stage.devices for stage in self.stages), initial=0))
        return tuple(range(first, end) for first, end in pairwise(starts))

    def ranks_under(self, schedule: Schedule) -> tuple[range, ...]:
        """The same where a schedule may put several stages on the same devices."""
        merged = self.by_rank(schedule)
        count = len(merged.stages)
        found = {
            stage: ranks
            for place, ranks in enumerate(merged.ranks)
            for stage in (schedule.stages_of_rank(place, count) if count < len(self.stages) else (place,))
        }
        return tuple(found[stage] for stage in range(len(self.stages)))

    def by_rank(self, schedule: Schedule) -> Plan:
        """What each rank runs as one stage: all chunks of a rank together, which is the plan itself where it has one.

        Their degrees are those of its first chunk; chunks of a rank share their devices, so that all have the same.
        """
        if schedule.v == 1 or len(self.stages) % schedule.v:
            return self
        count = len(self.stages) // schedule.v
        return Plan(
            tuple(
                self._merged([self.stages[stage] for stage in schedule.stages_of_rank(rank, count)])
                for rank in range(count)
            )
        )

    @staticmethod
    def _merged(chunks: Sequence[Stage]) -> Stage:
        layers = tuple(layer for chunk in chunks for layer in chunk.layers)
        tmpc_ids = {layer: tmpc_id for chunk in chunks for layer, tmpc_id in chunk.tmpc_ids.items()}
        return Stage(layers, chunks[0].data_parallel_degree, chunks[0].tensor_parallel_degree, tmpc_ids)

    def to_dict(self) -> dict[str, object]:
        """Upstream's plan document (``stages[].nodes`` and so on), ready for ``json.dump``."""
        return {"stages": self.stage_dicts()}

    def stage_dicts(self) -> list[dict[str, object]]:
        """The stages of that document."""
        return [
            {
                "nodes": list(stage.layers),
                "dataParallelDegree": stage.data_parallel_degree,
                "tensorParallelDegree": stage.tensor_parallel_degree,
                "TMPCids": {str(layer): stage.tmpc_ids[layer] for layer in stage.layers},
            }
            for stage in self.stages
        ]
