"""What the ranks of a layout will hold: a table for people, a document for programs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console

from piper_ray.calibrate.memory import LayoutMemory
from piper_ray.model.fields import plain_fields
from piper_ray.model.figures import Scale, share_text, size_scale, size_text
from piper_ray.report.terminal import Column, print_lines, print_table
from piper_ray.version import __version__
from piper_ray.workloads.estimate.doubt import memory_doubt
from piper_ray.workloads.estimate.ranks import RankMemory
from piper_ray.workloads.estimate.software import software_named

_HEADS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer state": "optim",
    "activations": "acts",
    "logits and loss": "loss",
    "backward pass": "bwd",
    "buffers": "buffers",
}
"""The heads of the columns of terms: a row fits 100 columns."""


def memory_document(found: LayoutMemory) -> dict[str, object]:
    """All figures in bytes; of each rank of one pipeline the terms, and the items that they are made of."""
    return {
        "format": "piper-ray/memory",
        "version": 1,
        "piper_ray": __version__,
        **plain_fields(found, ("model", "parameters", "layout", "software", "precision")),
        **plain_fields(found, ("gpu", "device_bytes", "needed_bytes", "likely_bytes", "fits")),
        "ranks": [_rank_document(number, rank) for number, rank in enumerate(found.ranks)],
        **plain_fields(found, ("assumed", "notes")),
    }


def _rank_document(number: int, rank: RankMemory) -> dict[str, object]:
    return {
        "rank": number,
        **plain_fields(rank, ("layers", "in_flight", "parameters", "moment")),
        "terms_bytes": rank.terms,
        "items_bytes": dict(rank.items),
        **plain_fields(rank, ("allocated_bytes", "context_bytes", "communicators_bytes", "stuck_bytes")),
        **plain_fields(rank, ("reserved_bytes", "shown_bytes")),
        "needed_bytes": rank.device_bytes,
    }


def print_memory(console: Console, found: LayoutMemory) -> None:
    """Prints it at the console's width."""
    used = [term for term in _HEADS if any(rank.terms[term] for rank in found.ranks)]
    heads = ["layers", "in flight", *(_HEADS[term] for term in used), "sum", "outside", "needed"]
    print_lines(console, _head_lines(found))
    console.print()
    scale = size_scale(found.needed_bytes)
    print_lines(console, [f"{scale.unit} at the fullest moment of each rank:"])
    print_table(
        console, [Column("rank"), *(Column(head, right=True) for head in heads)], list(_rows(found, used, scale))
    )
    console.print()
    print_lines(console, _summary_lines(found))


def _head_lines(found: LayoutMemory) -> Iterator[str]:
    said = found.layout
    degrees = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "dp": "data"}
    words = [f"{word} {said[name]}" for word, name in degrees.items() if said[name] != 1 or word == "dp"]
    chunks = "" if said["chunks"] == 1 else f", {said['chunks']} chunks a rank"
    tokens = "" if said["tokens"] is None else f" of {said['tokens']:,} tokens"
    yield f"Model     {found.model}: {found.parameters:,} parameters"
    yield (
        f"Layout    {', '.join(words)}: {said['devices']:,} GPUs; {said['schedule']}{chunks}; batches of "
        f"{said['global_batch']:,} samples{tokens}, {said['microbatch']} a microbatch"
    )
    yield (
        f"Training  {found.software}, {found.precision}; {said['recomputation']}; replicas share "
        f"{said['shared_by_replicas']}"
    )
    if found.assumed:
        yield f"Assumed   {'; '.join(found.assumed)}"


def _rows(found: LayoutMemory, used: list[str], scale: Scale) -> Iterator[list[str]]:
    """Neighbouring ranks whose figures read alike share a line."""
    cells = [
        [
            "+".join(map(str, rank.layers)),
            "+".join(map(str, rank.in_flight)),
            *(scale.text(rank.terms[term]) for term in used),
            *(scale.text(size) for size in (rank.allocated_bytes, rank.outside_bytes, rank.device_bytes)),
        ]
        for rank in found.ranks
    ]
    for _, group in groupby(range(len(cells)), key=lambda number: cells[number]):
        numbers = list(group)
        yield [
            str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}",
            *cells[numbers[0]],
        ]


def _summary_lines(found: LayoutMemory) -> Iterator[str]:
    number = max(range(len(found.ranks)), key=lambda rank: found.ranks[rank].device_bytes)
    fullest = found.ranks[number]
    yield (
        f"needed: {size_text(found.needed_bytes)} of each GPU, by rank {number}, which is fullest in "
        f"{_moment_text(fullest.moment)}"
    )
    counted_bytes = fullest.allocated_bytes - fullest.terms["backward pass"] - fullest.terms["buffers"]
    yield (
        f"plan and solve count {size_text(counted_bytes, 3)} of it, and set aside what backward, buffers and outside "
        "need"
    )
    yield f"measured: {memory_doubt(software_named(found.software)).range_text(found.needed_bytes)}"
    yield (
        f"outside the sum: CUDA's context {size_text(fullest.context_bytes, 3)}, communicators "
        f"{size_text(fullest.communicators_bytes, 3)}, fragments of the allocator {size_text(fullest.stuck_bytes, 3)}; "
        f"nvidia-smi shows {size_text(_shown_bytes(found, fullest))}"
    )
    if found.device_bytes is not None:
        left = found.device_bytes - found.needed_bytes
        share = share_text(abs(left) / found.device_bytes)
        words = (
            f"fits, {size_text(left)} ({share}) to spare" if left >= 0 else f"too much by {size_text(-left)} ({share})"
        )
        yield f"{found.gpu}, {size_text(found.device_bytes)} found: {words}"
    yield from (f"note: {text}" for text in found.notes)


def _shown_bytes(found: LayoutMemory, rank: RankMemory) -> float:
    """The allocator keeps fragments while there is room."""
    room = rank.shown_bytes if found.device_bytes is None else min(rank.shown_bytes, found.device_bytes)
    return max(rank.device_bytes, room)


def _moment_text(moment: str) -> str:
    return moment if moment.startswith("the ") else f"a backward pass ({moment})"
