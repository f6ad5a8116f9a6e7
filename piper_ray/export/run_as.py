"""What a user's layout states in addition to its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Recomputation
from piper_ray.model.schedule import ScheduleName
from piper_ray.simulate.run import Transfers
from piper_ray.workloads.estimate.software import TokenDispatcher


@dataclass(frozen=True)
class RunMesh:
    """Successive pipeline ranks with degrees of their own, on devices of one kind. kind: "" if there is only one."""

    kind: str
    pipeline_ranks: int
    tensor_parallel: int
    expert_parallel: int | None


@dataclass(frozen=True)
class RunAs:
    """How a layout is run. None: as the layout states, or else 1; for the data-parallel degree, what the ranks allow.

    expert_parallel, expert_tensor: ranks that experts are spread over, and those that share one. recomputed_layers:
    with full recomputation, the number of first blocks in each stage that recompute, one number or one per stage; None:
    all.
    gathered: tensors that sequence parallelism gathers are kept, if nothing is recomputed. optimizer_shards: replicas
    that divide the optimizer's state, or ALL_REPLICAS. weights_sharded: whether they also divide weights and gradients.
    optimizer_on_host: whether that state is in host memory. dispatcher: how tokens reach experts; overlaps_experts:
    whether that overlaps with passes. group: microbatches that pass through a chunk before the next. world: the number
    of all ranks; None: the number of the workload's devices. meshes: if pipeline ranks differ in kind or degrees.
    kinds: of the devices of each pipeline rank, where they are known and a layout does not say them.
    """

    pipeline_ranks: int | None = None
    tensor_parallel: int | None = None
    context_parallel: int | None = None
    expert_parallel: int | None = None
    expert_tensor: int | None = None
    data_parallel: int | None = None
    schedule: ScheduleName | None = None
    recomputation: Recomputation | None = None
    recomputed_layers: int | tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    gathered: bool | None = None
    optimizer_shards: int | None = None
    weights_sharded: bool | None = None
    optimizer_on_host: bool | None = None
    dispatcher: TokenDispatcher | None = None
    overlaps_experts: bool | None = None
    group: int | None = None
    world: int | None = None
    meshes: tuple[RunMesh, ...] | None = None
    kinds: tuple[str, ...] | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> RunAs:
        """The figures that have the names of fields here; others are ignored."""
        return cls(**{one.name: said[one.name] for one in fields(cls) if one.name in said})

    def over(self, other: RunAs) -> RunAs:
        """These values, and the other's where there is none here."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        return replace(other, **own)

    def meshes_of(self, ranks: int) -> tuple[RunMesh, ...]:
        """The meshes; one of ``ranks`` pipeline ranks if they do not differ."""
        return self.meshes or (RunMesh("", ranks, self.tensor_parallel or 1, self.expert_parallel),)


AS_IT_SAYS = RunAs()
"""No values in addition to a layout."""


@dataclass(frozen=True)
class ReadLayout:
    """A layout that was read. stages: the pieces of each stage. run_as: what the layout says besides its stages. notes:
    a sentence for each setting that a plan cannot hold. transfers: how stages pass on tensors. of_times: notes on times
    alone.
    """

    stages: tuple[tuple[int, ...], ...]
    run_as: RunAs
    notes: tuple[str, ...] = ()
    source: str = ""
    batch: Mapping[str, object] = field(default_factory=dict)
    transfers: Transfers = Transfers.IN_PASSES
    of_times: tuple[str, ...] = ()


def check_batch(instance: Instance, source: str, said: Mapping[str, object]) -> None:
    """Raises UsageError if the samples of the layout differ from those of the workload.

    said: as in ``ReadLayout.batch``.
    """
    samples, length = instance.batch.samples_per_microbatch, instance.batch.tokens_per_sample
    microbatch, batch, tokens = map(said.get, ("microbatch_samples", "global_batch_samples", "tokens_per_sample"))
    if isinstance(microbatch, int) and samples is not None and microbatch != samples:
        raise UsageError(
            f"{source}: microbatches of {plural(microbatch, 'sample')}, but the workload's times are of {samples}: "
            f"make the workload with --microbatch-size {microbatch}"
        )
    if isinstance(tokens, int) and length is not None and tokens != length:
        raise UsageError(
            f"{source}: samples of {tokens} tokens, but the workload's have {length}: make the workload with "
            f"--tokens {tokens}"
        )
    of_each = microbatch if isinstance(microbatch, int) else samples
    if isinstance(batch, int) and of_each and batch != instance.microbatches * of_each:
        fitting = f" (--microbatches {batch // of_each})" if batch % of_each == 0 < batch else ""
        raise UsageError(
            f"{source}: a batch of {batch} samples; the workload's has {instance.microbatches * of_each}{fitting}"
        )


def positive(name: str, value: int) -> int:
    """Raises UsageError for a number below 1. name: as the user wrote it."""
    if value < 1:
        raise UsageError(f"{name} {value}: expected a positive number")
    return value
