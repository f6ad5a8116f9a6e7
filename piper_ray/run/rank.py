"""A rank's process: joins the others, trains, and reports the result.

    python -m piper_ray.run.rank FOLDER

``launch`` starts it, with the environment variables that torchrun gives its processes. FOLDER contains job.pickle; rank
0 writes run.pickle and progress there, and a rank that fails writes error-RANK.pickle. The process ends with its
launcher, because its standard input then closes.

It trains in steps. Each begins at the same time on all ranks, is timed, and is gathered on the first rank. The peak
memory of tensors is reported by the allocator on a GPU, and counted on a CPU. The optimizer is AdamW, with
full-precision weights and moments for parameters of half precision, as profiles count them.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from piper_ray.model.errors import ClusterError, Fault, InputError, LimitError, PiperRayError, UsageError
from piper_ray.run.asynchronous import AsynchronousStage
from piper_ray.run.data import Data, PassInputs
from piper_ray.run.job import Failure, Job, PipelinePlan, RankRun, Run, Stretch
from piper_ray.run.pipeline import PassFailed, Pipeline
from piper_ray.run.scheme_ranks import follow
from piper_ray.run.schemes import SchemeJob
from piper_ray.workloads.measure.factory import find_factory, parse_input, place_of, words_of
from piper_ray.workloads.measure.heap import keep_freed_memory
from piper_ray.workloads.measure.meta import room_bytes

_LR = 1e-4
_FULL_BYTES = 4


def optimizer_of(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW if all parameters have full precision, else ``MasterAdamW``."""
    trained = list(parameters)
    is_full = all(one.element_size() >= _FULL_BYTES for one in trained)
    return (torch.optim.AdamW if is_full else MasterAdamW)(trained, lr=_LR)


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose state holds, for a parameter of half precision, an fp32 copy in addition to its two moments: 12
    bytes. Without the copy, an update smaller than a 256th of a bf16 weight is lost."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates parameter by parameter, so that only one gradient exists in fp32 at a time. closure: must be None."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    weights = parameter.detach().float()
                    moments = torch.zeros_like(weights), torch.zeros_like(weights)
                    state["step"] = torch.tensor(0.0)
                    state["weights"], state["exp_avg"], state["exp_avg_sq"] = weights, *moments
                adamw(
                    [state["weights"]],
                    [parameter.grad.float()],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [state["step"]],
                    foreach=False,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                parameter.copy_(state["weights"])


class _AllocatedBytes:
    """Memory as a GPU's allocator reports it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self.forget_peak()

    def __exit__(self, *error: object) -> None:
        pass

    def held(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _LiveBytes(TorchDispatchMode):
    """The bytes of storages that operations return, until nobody uses them any more. Memory that an operation needs
    internally is not counted. Operations take longer inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.held(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def held(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts these tensors."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._storages and self._storages[key][0]() is not None:
                continue
            size = storage.nbytes()
            self._storages[key] = weakref.ref(storage, partial(self._gone, key)), size
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def forget_peak(self) -> None:
        """Starts a new peak from what is held now."""
        self.peak_bytes = self._live_bytes

    def _gone(self, key: int, gone: weakref.ref[Any]) -> None:
        held, size = self._storages[key]
        self._live_bytes -= size
        if held is gone:
            del self._storages[key]


def peak_memory(device: torch.device) -> _AllocatedBytes | _LiveBytes:
    """A context in which peak memory is tracked. On a CPU, tensors that existed before count only if they are
    ``held``."""
    return _AllocatedBytes(device) if device.type == "cuda" else _LiveBytes()


_CPU = torch.device("cpu")
_FOLLOWED = 2
"""The steps in which memory is tracked; the optimizer creates its state in the first."""

Progress = Callable[[int], None]
"""Called with the number of finished steps, including those of the warm-up."""


class RankTraining:
    """A rank's part of a job: its pipeline, and the microbatches that the job's factory gives.

    Its data are the same on every rank. is_bare: the whole model was traced without values, and stages got values of
    their own. Raises InputError and UsageError for a model that the plan does not fit."""

    def __init__(self, job: Job, mesh: DeviceMesh, device: torch.device) -> None:
        factory = find_factory(job.model, dict(job.arguments))
        declared = [parse_input(text) for text in job.inputs]
        model = factory.build_within(job.microbatch, _CPU, declared, room_bytes(_CPU, job.ranks))
        self.is_bare = any(one.is_meta for one in model.module.parameters())
        self._job, self._replica = job, mesh.get_local_rank("dp")
        self._data = Data(factory, model, declared, job.microbatch)
        self.pipeline = Pipeline(job.model, PipelinePlan.of(job), model, model.inputs, mesh, device)

    def batch(self) -> list[PassInputs]:
        """This replica's microbatches of the next step, on its device."""
        whole = self._data.batch(self._job.microbatches)
        return [one.on(self.pipeline.device) for one in whole[self._replica :: self._job.replicas]]

    def run(self, batch: list[PassInputs]) -> list[torch.Tensor]:
        """See ``Pipeline.run``. The loss receives the microbatch's inputs."""
        return self.pipeline.run(batch, [one.inputs for one in batch])


@dataclass(frozen=True)
class _RankStep:
    """One rank's intervals in a step. losses: their sum and their number, on the last stage's rank."""

    stretches: list[Stretch]
    losses: tuple[float, int]

    @property
    def end_s(self) -> float:
        return max((stretch.end_s for stretch in self.stretches), default=0.0)


def train(job: Job, device: torch.device, progress: Progress) -> Run | None:
    """Trains by the job's plan. The process group must exist, and all its ranks call this; the first one gets the run.

    Random numbers, for dropout for example, are seeded by the rank's number: replicas differ in them, and runs do not.
    Raises InputError and UsageError for a model that does not fit the plan, PassFailed for an error in a pass.
    """
    if job.schedule.asynchronous:
        return _train_without_end(job, device, progress)
    mesh = init_device_mesh(device.type, (job.places, job.replicas), mesh_dim_names=("pp", "dp"))
    training = RankTraining(job, mesh, device)
    torch.manual_seed(dist.get_rank())
    parameters = training.pipeline.parameters()
    optimizer = optimizer_of(parameters) if parameters else None
    memory = peak_memory(device)
    with memory:
        for module in training.pipeline.modules.values():
            memory.held([*module.parameters(), *module.buffers()])
        steps = [_step(training, optimizer)]
        progress(1)
        memory.forget_peak()  # the first step began without the optimizer's state
        steps.append(_step(training, optimizer))
    for done in range(2, job.steps_before + job.steps):
        progress(done)
        steps.append(_step(training, optimizer))
    progress(job.steps_before + job.steps)
    found = _gathered(job, device, steps, memory.peak_bytes, border_bytes=training.pipeline.border_bytes)
    return found and replace(found, is_bare=training.is_bare)


def _train_without_end(job: Job, device: torch.device, progress: Progress) -> Run | None:
    """``train`` for asynchronous schedules. A step lasts from the end of a batch on the last rank to that of the
    next."""
    factory = find_factory(job.model, dict(job.arguments))
    declared = [parse_input(text) for text in job.inputs]
    model = factory.build(job.microbatch, _CPU, declared)
    stage = AsynchronousStage(job, model, Data(factory, model, declared, job.microbatch), optimizer_of)
    torch.manual_seed(dist.get_rank())
    ends: list[Callable[[], float]] = [stage.recorder.clock()]
    memory = peak_memory(device)
    with ExitStack() as followed:
        followed.enter_context(memory)
        memory.held([*stage.module.parameters(), *stage.module.buffers()])

        def batch_done(done: int) -> None:
            ends.append(stage.recorder.clock())
            progress(min(done, job.steps_before + job.steps))
            if done == 1:
                memory.forget_peak()
            if done == _FOLLOWED:
                followed.close()

        _together(device)
        stage.recorder.begin()
        ends[0] = stage.recorder.clock()
        stage.run(batch_done)
    done_s: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(done_s, [end() - ends[0]() for end in ends])
    steps = _batches(stage, [max(of_ranks) for of_ranks in zip(*done_s, strict=True)])
    told = steps[: job.steps_before + job.steps]
    return _gathered(job, device, told, memory.peak_bytes, versions=stage.weights.most)


def _batches(stage: AsynchronousStage, ends_s: list[float]) -> list[_RankStep]:
    """A rank's work from the end of each batch to that of the next. Intervals that cross an end count on both sides;
    microbatches count from the first of the batch."""
    found = []
    all_stretches = stage.recorder.stretches()
    for number, (start_s, end_s) in enumerate(pairwise(ends_s)):
        first = number * stage.stream.microbatches
        stretches = [
            replace(
                one,
                microbatch=None if one.microbatch is None else one.microbatch - first,
                start_s=max(one.start_s, start_s) - start_s,
                end_s=min(one.end_s, end_s) - start_s,
            )
            for one in all_stretches
            if one.start_s < end_s and one.end_s > start_s
        ]
        losses = [loss for k, loss in stage.losses.items() if k // stage.stream.microbatches == number]
        found.append(_RankStep(stretches, (sum(losses), len(losses))))
    return found


def _step(training: RankTraining, optimizer: torch.optim.Optimizer | None) -> _RankStep:
    batch = training.batch()
    recorder, device = training.pipeline.recorder, training.pipeline.device
    _together(device)
    recorder.begin()
    losses = training.run(batch)
    start = recorder.clock()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    recorder.add("optimizer", None, None, start)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _RankStep(recorder.stretches(), (sum(loss.item() for loss in losses), len(losses)))


def _together(device: torch.device) -> None:
    """Lets all ranks continue at the same time. They meet on the CPU, after their devices have finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1))


def _gathered(
    job: Job,
    device: torch.device,
    steps: list[_RankStep],
    peak_bytes: float,
    *,
    border_bytes: float = 0.0,
    versions: int = 1,
) -> Run | None:
    ranks = dist.get_world_size()
    found: list[tuple[list[float], list[tuple[float, int]]]] = [([], []) for _ in range(ranks)]
    dist.all_gather_object(found, ([step.end_s for step in steps], [step.losses for step in steps]))
    steps_s = [max(ends) for ends in zip(*(ends for ends, _ in found), strict=True)]
    losses = [
        sum(total for total, _ in of_ranks) / sum(count for _, count in of_ranks)
        for of_ranks in zip(*(of_rank for _, of_rank in found), strict=True)
    ]
    measured_s = steps_s[job.steps_before :]
    shown = measured_s.index(median_low(measured_s))
    rank = dist.get_rank()
    own = RankRun(
        name=job.name_of(rank),
        stages=job.stages_of(rank),
        replica=job.seat(rank)[1],
        stretches=tuple(steps[job.steps_before + shown].stretches),
        peak_memory_bytes=float(peak_bytes),
        border_bytes=border_bytes,
        versions=versions,
    )
    runs: list[RankRun | None] = [None] * ranks
    dist.gather_object(own, runs if rank == 0 else None)
    if rank:
        return None
    return Run(
        job=job,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        threads=torch.get_num_threads(),
        steps_s=tuple(measured_s),
        losses=tuple(losses),
        shown=shown,
        ranks=tuple(one for one in runs if one is not None),
    )


def work(job: Job | SchemeJob, progress: Progress) -> Any:
    """This process's part of the job, by the environment variables that torchrun sets (RANK, LOCAL_RANK, MASTER_ADDR
    and so on). Returns the run on rank 0. Raises errors that ``told`` turns into words."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks != job.ranks:
        raise UsageError(f"the plan is for {job.ranks} ranks, and {ranks} were started; expected {job.ranks}")
    device = _device(job, int(os.environ["LOCAL_RANK"]))
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(
        logging.CRITICAL
    )  # the launcher reports errors
    where = os.environ.get("PIPER_RAY_RENDEZVOUS")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method="env://" if where is None else Path(where).as_uri(),
        rank=rank,
        world_size=ranks,
        device_id=device if device.type == "cuda" else None,
    )
    run = follow(job, progress) if isinstance(job, SchemeJob) else train(job, device, progress)
    dist.barrier()
    dist.destroy_process_group()
    return run


def _device(job: Job | SchemeJob, local_rank: int) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"--device cuda: {torch.cuda.device_count()} GPUs are here, and a rank needs one of its own; expected "
            "--device cpu, or a plan for fewer devices"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def told(job: Job | SchemeJob, rank: int, error: Exception) -> Failure:
    """A rank's error, in words."""
    name = job.name_of(rank) if rank < job.ranks else f"rank {rank}"
    cause = _cause(error)
    if isinstance(cause, torch.OutOfMemoryError):
        what = f"{name}: the device's memory is not enough; expected a smaller --microbatch-size"
        return Failure(LimitError(what))
    if isinstance(cause, PiperRayError):
        return Failure(cause)
    is_late = _is_late(cause)
    if not isinstance(error, PassFailed) and not is_late:
        return Failure(ClusterError(f"{name}: {words_of(error)}"), own=False)
    where = place_of(cause)
    words = words_of(cause) + (f" ({where})" if where else "")
    if is_late:
        # A device reports a fault with delay, so the pass in which it appears is seldom the one that caused it.
        heard = f"{error}, made there" if isinstance(error, PassFailed) else "what comes after the passes, made there"
        of_rank = f"{name}: found in {heard} or in an earlier pass of this rank"
        return Failure(InputError(job.model, [Fault(of_rank, f"{words}; CUDA_LAUNCH_BLOCKING=1 shows where")]))
    return Failure(InputError(job.model, [Fault(f"{name}: {error}", words)]))


_LATE = ("CUDA error", "device-side assert", "CUBLAS_STATUS", "CUDNN_STATUS", "an illegal memory access")


def _is_late(error: BaseException) -> bool:
    """Whether it is a fault of a device, which runs behind the program and reports faults with delay."""
    is_devices = isinstance(error, RuntimeError) and any(word in str(error) for word in _LATE)
    return is_devices and "CUDA_LAUNCH_BLOCKING" not in os.environ


def _cause(error: BaseException) -> BaseException:
    """The error that made a pass fail, without torch's description of the stage's tensors around it."""
    while error.__cause__ is not None and (
        isinstance(error, PassFailed) or (isinstance(error, RuntimeError) and "ailed to run" in str(error))
    ):
        error = error.__cause__
    return error


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main(folder: Path) -> int:
    """The process of a rank."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    rank = int(os.environ["RANK"])
    job: Job | SchemeJob = pickle.loads((folder / "job.pickle").read_bytes())
    keep_freed_memory()

    def progress(done: int) -> None:
        if rank == 0:
            (folder / "progress").write_text(str(done))

    try:
        run = work(job, progress)
    except Exception as error:  # noqa: BLE001 - the launcher reports it
        traceback.print_exc()
        (folder / f"error-{rank}.pickle").write_bytes(pickle.dumps(told(job, rank, error)))
        return 1
    if run is not None:
        (folder / "run.pickle").write_bytes(pickle.dumps(run))
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
