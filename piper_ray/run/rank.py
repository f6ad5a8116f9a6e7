"""A rank's process: joins the others, trains, and tells what came of it.

    python -m piper_ray.run.rank FOLDER

Started by ``launch``, with what torchrun gives its processes in the environment. FOLDER has job.pickle; written there
are run.pickle by rank 0, progress by rank 0, and error-RANK.pickle by whom something goes wrong. The process ends with
its launcher: its standard input then closes.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from piper_ray.model.errors import Fault, InputError, LimitError, PiperRayError, UsageError
from piper_ray.run.job import Job
from piper_ray.run.passes import PassFailed
from piper_ray.run.result import Failure, Run
from piper_ray.run.train import Progress, train
from piper_ray.workloads.measure.factory import place_of, words_of


def work(job: Job, progress: Progress) -> Run | None:
    """This process's part, as the environment says which (RANK, LOCAL_RANK, MASTER_ADDR and so on, as torchrun sets
    them): the run on rank 0. Raises what ``told`` makes words of."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks != job.ranks:
        raise UsageError(f"the plan is for {job.ranks} ranks, and {ranks} were started; expected {job.ranks}")
    device = _device(job, int(os.environ["LOCAL_RANK"]))
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)  # errors are told in words
    where = os.environ.get("PIPER_RAY_RENDEZVOUS")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method="env://" if where is None else Path(where).as_uri(),
        rank=rank,
        world_size=ranks,
        device_id=device if device.type == "cuda" else None,
    )
    run = train(job, device, progress)
    dist.barrier()
    dist.destroy_process_group()
    return run


def _device(job: Job, local_rank: int) -> torch.device:
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


def told(job: Job, rank: int, error: Exception) -> Failure:
    """What went wrong on a rank, in words."""
    name = job.name_of(rank) if rank < job.ranks else f"rank {rank}"
    cause = _cause(error)
    if isinstance(cause, torch.OutOfMemoryError):
        what = f"{name}: the device's memory is not enough; expected a smaller --microbatch-size"
        return Failure.of(LimitError(what))
    if isinstance(cause, PiperRayError):
        return Failure.of(cause)
    if not isinstance(error, PassFailed):
        return Failure.lost(f"{name}: {words_of(error)}")
    where = place_of(cause)
    words = words_of(cause) + (f" ({where})" if where else "")
    return Failure.of(InputError(job.model, [Fault(f"{name}: {error}", words)]))


def _cause(error: BaseException) -> BaseException:
    """What a pass failed of, without torch's description of the stage's tensors around it."""
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
    """The process."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    rank = int(os.environ["RANK"])
    job: Job = pickle.loads((folder / "job.pickle").read_bytes())

    def progress(done: int) -> None:
        if rank == 0:
            (folder / "progress").write_text(str(done))

    try:
        run = work(job, progress)
    except Exception as error:  # noqa: BLE001 - the launcher tells it
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
