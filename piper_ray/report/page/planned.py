"""What a page says first of a plan that ``piper-ray plan`` found: speed, layout, doubt, and the other plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from piper_ray.model.figures import held_text, plural, rounded, share_text, size_text, time_text
from piper_ray.proposal.demand import Figures
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.propose import FoundPlans
from piper_ray.report.page.tables import PageColumn, PageTable, TableCell
from piper_ray.report.proposal import OF_WORDS, all_gpus, gap_text, no_plan_text, other_plans, settling_lines


@dataclass(frozen=True)
class Tile:
    """name: what machines know it by. value: the figure itself; None of words. more: a sentence on it."""

    name: str
    head: str
    value: float | int | None
    text: str
    more: str = ""


@dataclass(frozen=True)
class PlannedPage:
    """title: of the page. others: the best plans of other cells, the plan itself first. settling: what tells them
    apart."""

    title: str
    tiles: tuple[Tile, ...]
    others: PageTable[list[str]]
    settling: tuple[str, ...]


def planned_of(found: FoundPlans, figures: Figures) -> PlannedPage:
    """What ``plan`` knows of its plan besides the plan itself."""
    heads, rows = other_plans(found)
    columns = [
        PageColumn(head.replace(" ", "-"), head, partial(_cell, place), numeric=head not in OF_WORDS)
        for place, head in enumerate(heads)
    ]
    return PlannedPage(
        title=f"{found.demand.model.name} on {found.best.instance.devices:,} {found.demand.gpu}",
        tiles=tuple(_tiles(found, figures)),
        others=PageTable.of(columns, rows),
        settling=tuple(settling_lines(found)),
    )


def _cell(place: int, row: list[str]) -> TableCell:
    return TableCell(row[place])


def _tiles(found: FoundPlans, figures: Figures) -> Iterator[Tile]:
    best, doubt = found.best, found.best.estimate.doubt
    run, words, devices = best.simulation, layout_words(best), best.instance.devices
    yield Tile("step_s", "Step", figures.step_s, time_text(figures.step_s, 3), doubt.range_text(figures.step_s))
    gap_more = f"no plan of {plural(found.cells.count, 'combination')} {no_plan_text(found)}"
    yield Tile("gap", "Gap", found.gap, gap_text(found.gap), gap_more)
    if figures.tokens_per_s_per_device is not None and figures.tokens_per_s is not None:
        per_device = figures.tokens_per_s_per_device
        yield Tile(
            "tokens_per_s_per_device", "Tokens/s/GPU", per_device, rounded(per_device),
            f"{rounded(figures.tokens_per_s)} tokens/s",
        )  # fmt: skip
    elif figures.samples_per_s is not None:
        yield Tile("samples_per_s", "Samples/s", figures.samples_per_s, rounded(figures.samples_per_s))
    yield Tile("mfu", "MFU", figures.mfu, share_text(figures.mfu), f"of {all_gpus(devices)}")
    used = "all of them" if run.devices == devices else f"{run.devices:,} of them used"
    yield Tile("devices", "GPUs", run.devices, f"{devices:,}", f"{found.demand.gpu}, {used}")
    degrees = {"TP": words.tensor, "CP": words.context, "PP": words.pipeline, "DP": words.data, "EP": words.expert or 1}
    kept = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one GPU"
    yield Tile("layout", "Layout", None, kept, f"mbs {words.microbatch}, {words.scheduled}, {words.sharing}")
    peak = run.peak_memory_bytes
    memory_more = f"on the fullest GPU, of {size_text(run.memory_limit_bytes, 3)} that the plan may take"
    yield Tile("peak_memory_bytes", "Memory", peak, held_text(peak), f"{memory_more}; {doubt.memory.range_text(peak)}")
    yield Tile("bubble_share", "Idle", run.bubble_share, share_text(run.bubble_share), "of the GPUs' time")
    if figures.days is not None:
        yield Tile("days", "Training", figures.days, f"{rounded(figures.days)} days")
    if figures.cost is not None:
        yield Tile("cost", "Cost", figures.cost, rounded(figures.cost), "of the training, at the price given")
