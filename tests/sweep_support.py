"""A small sweep as files, and what a dataset holds in addition to the figures of its run."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from piper_ray import dump
from piper_ray.model.instance import Instance
from piper_ray.sweep.columns import ORDER
from piper_ray.sweep.dataset import read_dataset
from piper_ray.sweep.read import read_sweep
from tests.instances import equal_chain, two_towers

SMALL = """
[workloads]
chain = "chain.json"
towers = "towers.json"

[grid]
devices = "1..8*2"
microbatches = [4, 6]
memory = [20, "40B"]
bandwidth = 4
recompute = ["auto", "never"]
planners = ["piper", "gpipe"]

[[points]]
workload = "chain"
devices = 20000
microbatches = 20000
planner = "piper-published"
"""
"""129 points: some infeasible, and one whose table is over the limit."""

SMALL_POINTS = 129

RUN_COLUMNS = (
    "seconds",
    "cpu_s",
    "lattice_s",
    "stage_costs_s",
    "search_s",
    "evaluations",
    "attempts",
    "spread",
    "host",
    "runtime",
    "finished_at",
)
"""What tells of the run: all other columns are the same whenever and wherever a point is solved."""


def write_small(folder: Path, text: str = SMALL) -> Path:
    """The sweep's file, with its workloads next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    dump(equal_chain(5, devices=4, microbatches=4), folder / "chain.json")
    dump(two_towers(2, devices=4, microbatches=4), folder / "towers.json")
    path = folder / "small.toml"
    path.write_text(text)
    return path


def graphs_of(source: Path) -> dict[str, Instance]:
    """The graphs of a sweep's workloads, by label."""
    return {label: one for label, one in read_sweep(source).subjects.items() if isinstance(one, Instance)}


def content(location: Path | str) -> list[dict[str, Any]]:
    """Every row in order, without what tells of the run: the same for every way to make the dataset."""
    table = read_dataset(location).drop_columns(list(RUN_COLUMNS))
    rows: list[dict[str, Any]] = table.sort_by([(name, "ascending") for name in ("workload", *ORDER)]).to_pylist()
    return rows


def dataset_row(number: int, workload: str = "a") -> dict[str, object]:
    """Values for what may not be null, and a few others."""
    return {
        "workload": workload,
        "input_hash": f"{workload} {number}",
        "graph_hash": "graph",
        "planner": "piper",
        "devices": number + 1,
        "microbatches": 2,
        "memory_bytes": 1.0,
        "bandwidth_bytes_per_s": 1.0,
        "tensor_parallelism": True,
        "data_parallelism": True,
        "recompute": "auto",
        "gap_limit": 0.0,
        "status": "optimal",
        "time_per_sample_s": 1.0 / (number + 3),
        "version": "1",
        "kernels": "k",
        "seconds": 0.1,
        "attempts": 1,
        "spread": False,
        "host": "h",
        "runtime": "r",
        "finished_at": datetime(2026, 1, 1, tzinfo=timezone.utc),
        "schedule": "2bw",
        "chunks": 1,
    }


PLANS = """
[models]
ours = "ours.json"

[[plan]]
models = "ours"
gpus = ["H100-SXM", "A100-80"]
batches = 32
precisions = ["bf16", "fp8"]

[[plan]]
models = "llama3-405b"
gpus = "H100-SXM"
batches = 64
"""
"""5 plans: one refused, one infeasible."""


def write_plans(folder: Path, text: str = PLANS) -> Path:
    """The sweep's file, with a small model's config next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    words = {"intermediate_size": 1376, "vocab_size": 32000, "max_position_embeddings": 512}
    (folder / "ours.json").write_text(json.dumps(config | words))
    path = folder / "plans.toml"
    path.write_text(text)
    return path
