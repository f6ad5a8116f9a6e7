"""What a profile is, in words: the header of the file it is written to, and the lines on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piper_ray.model.cores import load_text
from piper_ray.model.figures import given_size_text, memory_text, plural, range_text, size_text, time_text
from piper_ray.report.document import workload_text
from piper_ray.report.terminal import Column, table_lines
from piper_ray.workloads.measure.measure import Measured
from piper_ray.workloads.measure.session import Profile, device_name

_WIDE_SPREAD = 0.2


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one signature."""

    first: Measured
    numbers: Sequence[int]


def kinds_of(layers: Sequence[Measured]) -> list[LayerGroup]:
    """In the order in which they come first."""
    numbers: dict[str, list[int]] = {}
    for index, measured in enumerate(layers):
        numbers.setdefault(measured.signature, []).append(index)
    return [LayerGroup(layers[of[0]], of) for of in numbers.values()]


def file_text(result: Profile, command: str) -> str:
    """The workload as TOML under a header that says how to make it again and how to read it."""
    return workload_text(result.instance, header_lines(result, command))


def header_lines(result: Profile, command: str) -> list[str]:
    """How the workload was made and what its figures are."""
    cluster, batch = result.target.cluster, result.target.batch
    memory = f"{memory_text(cluster.memory_bytes)} less {size_text(result.workspace_bytes, 3)}"
    parameters = f"{result.parameters:,} parameters{_unused_text(result)}"
    samples = plural(batch.samples_per_microbatch or 1, "sample")
    return [
        f"{result.instance.name}, measured with torch {torch.__version__} on {device_text(result)}:",
        f"  {command}",
        "",
        f"{parameters}. A microbatch: {samples}; {batch.microbatches:,} microbatches are a batch.",
        "",
        "TMPCs: plain; full: the backward pass recomputes the layer. Measured at t = 1.",
        *_degree_lines(result),
        "time_s         forward and backward pass of a microbatch, median, recomputation included",
        "forward_s      the forward pass of it",
        "weights        what data parallelism synchronises: gradients",
        "activation     what a microbatch in flight keeps",
        "fixed          weights, gradients and optimizer state",
        *_input_lines(result),
        f"memory         {memory} for one layer while it is recomputed",
        "",
        *_table(result),
    ]


def device_text(result: Profile) -> str:
    """``x86_64 CPU, 2 threads; load 0.31 on 2 cores in the minute before``."""
    name = device_name(result.device)
    return name if result.load is None else f"{name}; {load_text(result.load)}"


def summary_lines(result: Profile) -> list[str]:
    """What was profiled."""
    instance, kinds = result.instance, kinds_of(result.layers)
    total_s = sum(measured.figures.plain.total_s for measured in result.layers)
    spread_s = sum(measured.figures.plain.spread_s for measured in result.layers)
    parameters = f"{result.parameters:,} parameters{_unused_text(result)}"
    layers = f"{plural(len(instance.layers), 'layer')} of {plural(len(kinds), 'kind')}"
    memory, rate = memory_text(result.target.cluster.memory_bytes), given_size_text(instance.bandwidth_bytes_per_s)
    lines = [
        f"Model     {instance.name}: {parameters}, {layers}",
        f"Device    {device_text(result)}",
        f"Passes    {time_text(total_s, 4)} forward and backward of a microbatch, spread {time_text(spread_s, 3)}",
        f"Cluster   K = {instance.devices:,}, N = {instance.microbatches:,}, {memory} a device, {rate}/s",
    ]
    wide = [kind.first.layer.path for kind in kinds if _is_wide(kind.first)]
    if wide:
        named = ", ".join(wide[:3]) + (", ..." if len(wide) > 3 else "")
        lines.append(
            f"Note      the spread is over {_WIDE_SPREAD:.0%} of the time in {plural(len(wide), 'kind')} ({named}): "
            "a quiet machine or more --repeats give steadier figures"
        )
    return lines


def _is_wide(measured: Measured) -> bool:
    return measured.figures.plain.spread_s > _WIDE_SPREAD * measured.figures.plain.total_s


def _unused_text(result: Profile) -> str:
    return f" ({result.unused:,} of them in no layer)" if result.unused else ""


def _degree_lines(result: Profile) -> list[str]:
    gpu = result.target.gpu
    if not result.shards or gpu is None:
        return []
    if any(layers is None for layers in result.shards.values()):
        return [
            "plain-estimated, full-estimated: NOT measured. Time at t = 1 divided by t where a matrix can be divided,",
            f"and all-reduces on {gpu.link} ({gpu.name}).",
        ]
    return [
        "plain-shard, full-shard: measured on one of t shards; all-reduces between them are not measured but estimated",
        f"on {gpu.link} ({gpu.name}).",
    ]


def _input_lines(result: Profile) -> list[str]:
    if not result.shards:
        return ["inputs         tensors from other layers"]
    return [
        f"inputs         a device's share of a tensor over t = {max(result.shards)}",
        "forward_sync, backward_sync: its larger share at a smaller t, and gathering the shares within the node",
    ]


def _table(result: Profile) -> list[str]:
    columns = [Column("layers"), Column("first")]
    columns += [Column(head, right=True) for head in ("forward", "backward", "spread", "with recomputation", "spread")]
    rows = []
    for kind in kinds_of(result.layers):
        plain, again = kind.first.figures.plain, kind.first.figures.recomputed
        times = [plain.forward_s, plain.backward_s, plain.spread_s]
        texts = [time_text(time_s, 4) for time_s in times]
        texts += ["-", "-"] if again is None else [time_text(again.total_s, 4), time_text(again.spread_s, 4)]
        rows.append([_numbers_text(kind.numbers), kind.first.layer.path, *texts])
    return table_lines(columns, rows)


def _numbers_text(numbers: Sequence[int]) -> str:
    """``0, 3-7``; where there are many such pieces, the first and how many."""
    texts = range_text(numbers).split(",")
    return ", ".join(texts) if len(texts) <= 4 else f"{', '.join(texts[:3])}, ... ({len(numbers)})"
