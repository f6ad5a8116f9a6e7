"""What torch's pipelines need to know of a plan, whoever made it: a job, or an exported folder."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.run.job import Job, LayerJob, Replicas, pass_lists
from piper_ray.simulate.actions import ActionKind

Pass = tuple[ActionKind, int, int]
"""Its kind, its stage, and its microbatch among those of a replica."""


@dataclass(frozen=True)
class PipelinePlan:
    """stages: the layers of each, front to back. passes: for each place (rank of one pipeline) its list, in order.
    replicas: d. sharing: how replicas share their work. weight_type: PyTorch's name of the weights' type; empty where
    nobody says.
    """

    stages: tuple[tuple[LayerJob, ...], ...]
    passes: tuple[tuple[Pass, ...], ...]
    replicas: int
    sharing: Replicas
    weight_type: str = ""

    @classmethod
    def of(cls, job: Job) -> PipelinePlan:
        """Raises UsageError where the schedule cannot run so many microbatches on so many ranks."""
        return cls(job.stages, tuple(map(tuple, pass_lists(job))), job.replicas, job.sharing)

    @property
    def places(self) -> int:
        """p: ranks of one pipeline."""
        return len(self.passes)

    @property
    def ranks(self) -> int:
        """p d: rank r d + i is replica i of place r."""
        return self.places * self.replicas

    @property
    def microbatches(self) -> int:
        """m, of a replica."""
        return 1 + max(k for passes in self.passes for _, _, k in passes)

    @property
    def splits(self) -> bool:
        """Whether a backward pass is done in two parts."""
        return any(kind is ActionKind.I for passes in self.passes for kind, _, _ in passes)

    def stages_of(self, place: int) -> list[int]:
        """What a place holds, ascending."""
        return sorted({stage for _, stage, _ in self.passes[place]})
