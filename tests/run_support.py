"""Jobs for tests of runs."""

from __future__ import annotations

from itertools import pairwise

from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.run.job import Job, LayerJob, Replicas

GPT_PATHS = ("word_embedding", "position_embedding", *(f"blocks.{i}" for i in range(4)), "norm", "head")


def job(
    schedule: ScheduleName,
    borders: tuple[int, ...],
    *,
    model: str = "gpt",
    paths: tuple[str, ...] = GPT_PATHS,
    replicas: int = 1,
    microbatches: int = 4,
    recompute: tuple[int, ...] = (),
    sharing: Replicas = Replicas.DDP,
    chunks: int | None = None,
) -> Job:
    """borders: numbers of the layers that stages begin with, the first apart. recompute: of layers that do."""
    layers = [LayerJob(path, paths[:number].count(path), number in recompute) for number, path in enumerate(paths)]
    return Job(
        model=f"tests.run_models:{model}",
        arguments={},
        inputs=(),
        stages=tuple(tuple(layers[first:end]) for first, end in pairwise((0, *borders, len(paths)))),
        schedule=Schedule(schedule, chunks),
        replicas=replicas,
        microbatches=microbatches,
        microbatch=2,
        device="cpu",
        sharing=sharing,
        steps=1,
        warm_up=0,
        threads=1,
    )
