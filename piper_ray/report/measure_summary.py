"""What a profile is, in words: the header of the file it is written to, and the lines on the screen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piper_ray.model.cores import load_text
from piper_ray.model.figures import given_size_text, memory_text, plural, range_text, time_text
from piper_ray.report.document import workload_text
from piper_ray.report.templates import template
from piper_ray.report.terminal import Column, table_lines
from piper_ray.workloads.measure.build import Measured
from piper_ray.workloads.measure.session import Profile, device_name

_WIDE_SPREAD = 0.2

BARE = "drawn anew for each kind of layer, as the whole model takes more than half of the memory"


def kinds_of(layers: Sequence[Measured]) -> list[list[int]]:
    """Numbers of the layers of each signature, in the order in which they come first."""
    numbers: dict[str, list[int]] = {}
    for index, measured in enumerate(layers):
        numbers.setdefault(measured.signature, []).append(index)
    return list(numbers.values())


def file_text(result: Profile, command: str) -> str:
    """The workload as TOML under a header that says how to make it again and how to read it."""
    header = template(__package__, "measure_header.txt.jinja").render(
        result=result,
        batch=result.target.batch,
        torch_version=torch.__version__,
        device=device_text(result),
        command=command,
        parameters=_parameters_text(result),
        bare=BARE,
        table="\n".join(_table(result)),
    )
    return workload_text(result.instance, header.splitlines())


def device_text(result: Profile) -> str:
    """``x86_64 CPU, 2 threads; load 0.31 on 2 cores in the minute before``."""
    name = device_name(result.device)
    return name if result.load is None else f"{name}; {load_text(result.load)}"


def summary_lines(result: Profile) -> list[str]:
    """What was profiled."""
    instance, kinds = result.instance, kinds_of(result.layers)
    total_s = sum(measured.figures.plain.total_s for measured in result.layers)
    spread_s = sum(measured.figures.plain.spread_s for measured in result.layers)
    layers = f"{plural(len(instance.layers), 'layer')} of {plural(len(kinds), 'kind')}"
    memory, rate = memory_text(result.target.cluster.memory_bytes), given_size_text(instance.bandwidth_bytes_per_s)
    lines = [
        f"Model     {instance.name}: {_parameters_text(result)}, {layers}",
        f"Device    {device_text(result)}",
        f"Passes    {time_text(total_s, 4)} forward and backward of a microbatch, spread {time_text(spread_s, 3)}",
        f"Cluster   K = {instance.devices:,}, N = {instance.microbatches:,}, {memory} a device, {rate}/s",
    ]
    if result.is_bare:
        lines.append(f"Weights   {BARE}")
    first = [result.layers[numbers[0]] for numbers in kinds]
    wide = [x.layer.path for x in first if x.figures.plain.spread_s > _WIDE_SPREAD * x.figures.plain.total_s]
    if wide:
        named = ", ".join(wide[:3]) + (", ..." if len(wide) > 3 else "")
        lines.append(
            f"Note      the spread is over {_WIDE_SPREAD:.0%} of the time in {plural(len(wide), 'kind')} ({named}): "
            "a quiet machine or more --repeats give steadier figures"
        )
    return lines


def _parameters_text(result: Profile) -> str:
    unused = f" ({result.unused:,} of them in no layer)" if result.unused else ""
    return f"{result.parameters:,} parameters{unused}"


def _table(result: Profile) -> list[str]:
    columns = [Column("layers"), Column("first")]
    columns += [Column(head, right=True) for head in ("forward", "backward", "spread", "with recomputation", "spread")]
    rows = []
    for numbers in kinds_of(result.layers):
        first = result.layers[numbers[0]]
        plain, again = first.figures.plain, first.figures.recomputed
        times = [plain.forward_s, plain.backward_s, plain.spread_s]
        texts = [time_text(time_s, 4) for time_s in times]
        texts += ["-", "-"] if again is None else [time_text(again.total_s, 4), time_text(again.spread_s, 4)]
        rows.append([_numbers_text(numbers), first.layer.path, *texts])
    return table_lines(columns, rows)


def _numbers_text(numbers: Sequence[int]) -> str:
    """``0, 3-7``; where there are many such pieces, the first and how many."""
    texts = range_text(numbers).split(",")
    return ", ".join(texts) if len(texts) <= 4 else f"{', '.join(texts[:3])}, ... ({len(numbers)})"
