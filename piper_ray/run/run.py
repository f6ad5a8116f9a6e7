"""``piper_ray.run``: the command ``piper-ray run`` as a function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from piper_ray.model import arguments
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.stop import Stop
from piper_ray.workloads.measure.arguments import PARAMETERS

if TYPE_CHECKING:
    from piper_ray.model.instance import Instance
    from piper_ray.run.result import Run
    from piper_ray.workloads.formats.load import Source


@arguments.named_as_parameters(PARAMETERS)
def run(
    model: str,
    plan: Plan | Source,
    instance: Instance | Source | None = None,
    *,
    schedule: Schedule | ScheduleName | str | None = None,
    steps: int = 20,
    warm_up: int = 3,
    device: str = "cpu",
    sharing: str = "ddp",
    microbatches: int | None = None,
    microbatch: int | None = None,
    arguments_of_model: Mapping[str, object] | None = None,
    inputs: Iterable[str] = (),
) -> Run:
    """Trains a PyTorch model by a plan, in processes on this machine, and measures it.

    model, arguments_of_model, inputs: as ``profile`` takes them. plan: of a workload with module paths; a ``Plan``
    needs its ``instance``, which also makes the promise that the run is held against; without one it is what the plan's
    document says. schedule: None, the plan's own. steps: measured, after ``warm_up`` others. device: "cpu" or "cuda",
    where each rank takes a GPU. sharing: "ddp" or "fully-shard", how replicas of a stage share their work.
    microbatches, microbatch: N, and samples of one, in place of the plan's.

    Raises UsageError for a plan that torch's pipelines cannot run, InputError for a model that the plan does not fit
    and for what goes wrong in it, LimitError where memory is not enough, and ClusterError where a process is lost.

    >>> import piper_ray
    >>> piper_ray.run("models.py:small_gpt", "plan.json", "workload.toml", steps=5)  # doctest: +SKIP
    """
    from piper_ray.run.launch import launch
    from piper_ray.run.prepare import prepared

    job, promise = prepared(
        model,
        plan,
        instance,
        schedule=schedule,
        steps=arguments.positive("steps", steps),
        warm_up=arguments.whole_numbers("warm_up", [warm_up])[0],
        device=device,
        sharing=sharing,
        microbatches=microbatches,
        microbatch=microbatch,
        arguments_of_model=arguments_of_model or {},
        inputs=inputs,
    )
    stop: Stop[Any] = Stop()
    return promise.given_to(launch(job, lambda _done, _all: None, stop))
