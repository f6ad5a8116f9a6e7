"""Real asynchronous pipelines: each rank a process that runs every job, and says what it used and has at the end.

What ``results_of_ranks`` runs.

JOBS.json: as for ``run_ranks``. Writes RESULTS/RANK.json: for each of its jobs the version that each pass used, by kind
and microbatch; the losses by microbatch, where the last stage is; the newest weights by their names in the model; and
the most versions that were there at a time.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper_ray.run.asynchronous import AsynchronousStage
from piper_ray.run.data import Data
from piper_ray.run.job import Job, pass_stream
from piper_ray.workloads.measure.factory import find_factory
from tests.run_support import loopback
from tests.stream_twin import optimizer


def main(job_file: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    read: dict[str, Any] = json.loads(Path(job_file).read_text())
    jobs: dict[str, Job] = pickle.loads(Path(read["jobs"]).read_bytes())
    found = {}
    for number, (name, job) in enumerate(jobs.items()):
        if rank < job.ranks:
            where = Path(f"{read['rendezvous']}-{number}").as_uri()
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=job.ranks)
            found[name] = told(job)
            dist.barrier()
            dist.destroy_process_group()
    Path(read["results"], f"{rank}.json").write_text(json.dumps(found))


def told(job: Job) -> dict[str, object]:
    factory = find_factory(job.model, dict(job.arguments))
    model = factory.build(job.microbatch, torch.device("cpu"), ())
    stage = AsynchronousStage(job, model, Data(factory, model, (), job.microbatch), optimizer)
    stage.recorder.begin()
    batches: list[int] = []
    stage.run(batches.append)
    assert batches == list(range(1, pass_stream(job).batches + 1))
    stage.weights.use(stage.weights.updates)
    weights = {".".join(name.split(".")[2:]): one for name, one in stage.module.named_parameters()}
    passes = [one for one in stage.recorder.stretches() if one.what in ("F", "B")]
    return {
        "versions": [[one.what, one.microbatch, one.version] for one in passes],
        "losses": sorted(stage.losses.items()),
        "weights": {name: one.tolist() for name, one in weights.items()},
        "most": stage.weights.most,
    }
