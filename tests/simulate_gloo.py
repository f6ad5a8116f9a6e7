"""Real pipelines: each rank a process that works through its list, sleeps for work, and sends over gloo on loopback.

What ``results_of_ranks`` runs.

JOB.json: {"rendezvous": path, "results": folder, "runs": [{"lists": [[[kind, stage, microbatch], ...], ...],
"rank_of_stage": [...], "sleep_s": [[F, B, I, W] of each stage]}, ...]}. Writes RESULTS/RANK.json: for each run
[start, end, next, waited] of each pass, seconds of one clock that all processes share: when what it needed was there,
when its work was done, when the rank turned to its next pass, and how long it waited for a message that was sent.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.run_support import loopback

F, B, I, W = range(4)  # noqa: E741 - the field's names
START, END, NEXT, WAITED = range(4)


def main(job_file: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    ranks = len(job["runs"][0]["lists"])
    dist.init_process_group("gloo", init_method=f"file://{job['rendezvous']}", rank=rank, world_size=ranks)
    results = []
    for run in job["runs"]:
        dist.barrier()
        results.append(_work_through(dist, torch, run, rank))
    dist.barrier()
    dist.destroy_process_group()
    Path(job["results"], f"{rank}.json").write_text(json.dumps(results))


def _work_through(dist: Any, torch: Any, run: dict[str, Any], rank: int) -> list[tuple[float, ...]]:
    rank_of_stage, sleep_s = run["rank_of_stage"], run["sleep_s"]
    stages = len(rank_of_stage)
    sending = []
    times: list[tuple[float, ...]] = []
    for kind, stage, k in run["lists"][rank]:
        asked_s = time.perf_counter()
        source = stage - 1 if kind == F else stage + 1
        sent_s = 0.0
        if kind != W and 0 <= source < stages and rank_of_stage[source] != rank:
            message = torch.zeros(1, dtype=torch.float64)
            dist.recv(message, rank_of_stage[source], tag=_tag(kind, stage, k))
            sent_s = float(message)
        start_s = time.perf_counter()
        waited_s = start_s - max(asked_s, sent_s) if sent_s else 0.0
        time.sleep(sleep_s[stage][kind])
        target = stage + 1 if kind == F else stage - 1
        done_s = time.perf_counter()
        if kind != W and 0 <= target < stages and rank_of_stage[target] != rank:
            message = torch.tensor([done_s], dtype=torch.float64)
            sending.append((dist.isend(message, rank_of_stage[target], tag=_tag(kind, target, k)), message))
        times.append((start_s, done_s, time.perf_counter(), waited_s))
    for work, _ in sending:
        work.wait()
    return times


def _tag(kind: int, stage: int, microbatch: int) -> int:
    return (microbatch * 64 + stage) * 2 + (kind != F)
