"""Makes docs/ledger.md and its picture from the rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from piper_ray.model.figures import plural
from piper_ray.report.plots import style
from scripts.ledger_of_runs.rows import DOCS, SURPRISING, Row

_ROUNDING_BYTES = 5e7
"""Differences below this are rounding: half of 0.1 GB."""

GROUPS: dict[str, Callable[[Row], bool]] = {
    "before 2023": lambda row: "2021" in row.software or "2022" in row.software,
    "since 2023, dense": lambda row: not row.has_experts and not GROUPS["before 2023"](row),
    "with experts": lambda row: row.has_experts,
}
"""Groups of similar rows, by their names."""

_ABOUT = """\
# A ledger of published runs

`scripts/ledger` makes this page. It has every run of `published.json` and `moe.json` in `tests/data/runs` with a
pipeline and a step time, and for each run the best plan for the same model, batch and GPUs. Each run has two
figures. x is how much longer a step of its layout takes than one of the best plan, both by our estimate. y is the error
of that estimate for the run's own step.

- **Its layout** is valued like any other plan: its stages, degrees, microbatches, recomputation and sharding. y is
  (predicted - published) / published.
- **The best plan** is that of `plan` under the rules of the runtime that ran it. Schedule, precision, batch and
  sequence are those of the run. The search chooses any microbatch, d, t, p, number of chunks and recomputation that
  the software supports. It shards the optimizer state over replicas if the run did, and takes the run's degrees of
  context and expert parallelism, or none. The same share of the gradients' reduction is hidden, and the optimizer
  takes as long.
- **x, finer**: x with both layouts priced link by link, as `scripts/validate_estimates` prices published runs. There
  chunks transfer their tensors while passes run; the planner adds the transfers to the passes. So layouts of many
  chunks are faster by the finer price.
- **Gap**: no such plan is faster than the best one by more than this share. The search proves it.
- **Certified**: the share of the best plan's step that a certificate proves without the solver, for all plans with its
  microbatches and mode. Under a schedule with chunks it is for plans with as many chunks; there only prices prove it,
  so it is less.
- **Memory**: plans may use all of it. The search uses the planner's estimate. If the run's own layout exceeds the
  memory by that estimate, all plans may exceed it as much. A finer estimate charges each moment separately; it is the
  one that published peaks are [compared with](estimates.md). If the best plan does not fit by it, plans get less
  memory until one does.

`docs/ledger` has the workload, plan and certificate of each row. To check a row:

    piper-ray verify docs/ledger/RUN.toml docs/ledger/RUN.plan.json --certificate docs/ledger/RUN.certificate

A test checks all rows. For every fourth it also makes the workload and the layout's step again from the published
figures. {download}`One table <ledger/ledger.csv>` has all figures: `layout_step_s` and `best_layout_step_s` by the
finer price, `predicted_step_s` and `best_step_s` by the planner's. `same_..._step_s` are of best plans that share one
setting with the layout."""

_SURPRISING = f"{100.0 * SURPRISING:.0f} %"

NOTES = {
    "bridge2602-h100-q30-fp8": "NVIDIA's release 26.04 publishes 29.3 s for the same model, GPUs, batch and precision, "
    "with no pipeline and d = 16; this layout took 51.3 s in release 26.02, 75 % longer.",
}
"""Further published facts about a run, by its id."""

_HEAD = (
    "| model | run | GPUs | its layout | y | best plan | x | x, finer | gap | certified |",
    "|---|---|---|---|---:|---|---:|---:|---:|---:|",
)


def write_pages(rows: Sequence[Row]) -> None:
    """The page, and its picture."""
    (DOCS / "ledger.md").write_text(page(rows), encoding="utf-8")
    draw(rows, DOCS / "ledger.svg")


def page(rows: Sequence[Row]) -> str:
    """The page in Markdown."""
    table = "\n".join([*_HEAD, *map(_table_row, rows)])
    picture = "![x and y of all rows](ledger.svg)"
    parts = [_ABOUT, *_summary(rows), picture, table, *_surprises(rows)]
    return "\n\n".join(parts) + "\n"


def _share(value: float, signed: bool = False) -> str:
    text = f"{100.0 * value:+.1f} %" if signed else f"{100.0 * value:.1f} %"
    return text.replace("-0.0 ", "0.0 ").replace("+0.0 ", "0.0 ")


def _table_row(row: Row) -> str:
    certified = "none" if row.certified_step_s is None else _share(min(1.0, row.certified_step_s / row.best_step_s))
    best = "its own" if row.is_best else f"{row.best_layout}, microbatches of {row.best_microbatch}"
    cells = (
        row.model,
        row.run,
        f"{row.gpus:,} {row.gpu}",
        f"{row.layout}, microbatches of {row.microbatch}",
        _share(row.error, signed=True),
        best,
        _share(row.behind),
        _finer(row),
        _share(max(0.0, row.gap)),
        certified,
    )
    return f"| {' | '.join(cells)} |"


def _finer(row: Row) -> str:
    return "-" if row.finely_behind is None else _share(row.finely_behind)


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    yield "\n".join(
        [
            f"{plural(len(rows), 'row')}; {sum(row.certified_step_s is not None for row in rows)} have a certificate.",
            "",
            "| runs | rows | median x | largest x | x to 5 % | mean y | median gap | median certified |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *(_summary_row(name, of_group) for name, of_group in _grouped(rows).items()),
        ]
    )


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found = {name: [row for row in rows if belongs(row)] for name, belongs in GROUPS.items()}
    return {name: of_group for name, of_group in found.items() if of_group}


def _summary_row(name: str, rows: Sequence[Row]) -> str:
    near = sum(row.behind <= 0.05 for row in rows)
    certified = [min(1.0, row.certified_step_s / row.best_step_s) for row in rows if row.certified_step_s is not None]
    cells = (
        name,
        str(len(rows)),
        _share(median(row.behind for row in rows)),
        _share(max(row.behind for row in rows)),
        str(near),
        _share(mean(abs(row.error) for row in rows)),
        _share(median(max(0.0, row.gap) for row in rows)),
        _share(median(certified)) if certified else "-",
    )
    return f"| {' | '.join(cells)} |"


_SLOW = f"""\
## Layouts that the model finds far from the best

For each row with x above {_SURPRISING}, a second search looked for the best plan that shares one setting with the
layout: its recomputation, its microbatches, or its t and d. The columns have x against that plan. If a figure is small,
this setting causes most of x. "Usual room" is x against the best plan that leaves as much memory free as `plan` does by
default (`--headroom`)."""

_SLOW_HEAD = (
    "| run | x | x, finer | same recomputation | same microbatches | same t and d | usual room | what costs it |",
    "|---|---:|---:|---:|---:|---:|---:|---|",
)

_WRONG = f"""\
## Runs that the model does not predict

Each layout with y above {_SURPRISING} was priced again with one assumption changed: which communication overlaps with
passes, how tokens reach experts, how experts are placed, what CUDA graphs capture, or the precision of matrix products.
If more than half of y is left, no single change explains it."""

_ODD = """\
## Other rows to read with care"""


def _surprises(rows: Sequence[Row]) -> Iterator[str]:
    slow = [_why_slow(row) for row in rows if row.behind > SURPRISING]
    for about, sentences in (
        (_SLOW, [*_SLOW_HEAD, *slow] if slow else []),
        (_WRONG, [_why_wrong(row) for row in rows if row.change]),
        (_ODD, [text for row in rows for text in _odd(row)]),
    ):
        if sentences:
            yield about
            yield "\n".join(sentences)


def _why_slow(row: Row) -> str:
    kept = {
        "recomputation": row.same_recomputation_step_s,
        "microbatches": row.same_microbatch_step_s,
        "t and d": row.same_degrees_step_s,
    }
    left = {name: row.predicted_step_s / step_s - 1.0 for name, step_s in kept.items() if step_s is not None}
    least = min(left, key=lambda name: left[name])
    room_s = row.usual_room_step_s
    cells = (
        f"`{row.run}`",
        _share(row.behind),
        _finer(row),
        *(_share(max(0.0, left[name])) if name in left else "-" for name in kept),
        "no plan" if room_s is None else _share(row.predicted_step_s / room_s - 1.0),
        f"{least}; the best plan has {row.because}",
    )
    return f"| {' | '.join(cells)} |"


def _why_wrong(row: Row) -> str:
    assert row.changed_step_s is not None
    after = row.changed_step_s / row.published_step_s - 1.0
    text = f"- `{row.run}`, {_share(row.error, signed=True)}: nearest with {row.change}, {_share(after, signed=True)}"
    return f"{text}." if abs(after) <= abs(row.error) / 2.0 else f"{text}: no single change explains it."


def _odd(row: Row) -> Iterator[str]:
    if row.run in NOTES:
        yield f"- `{row.run}`: {NOTES[row.run]}"
    tried = (row.same_recomputation_step_s, row.same_microbatch_step_s, row.same_degrees_step_s, row.usual_room_step_s)
    fastest_s = min((step_s for step_s in tried if step_s is not None), default=row.best_step_s)
    if fastest_s < row.best_step_s * (1.0 - 1e-6):
        yield (
            f"- `{row.run}`: a search of fewer plans found one of {fastest_s:.4g} s, within the gap of the best plan's "
            f"{row.best_step_s:.4g} s."
        )
    if row.excess_bytes > _ROUNDING_BYTES:
        yield (
            f"- `{row.run}`: plans may hold {_gb(row.excess_bytes)} more than the planner's estimate says there is, "
            "as its layout does."
        )
    if row.excess_bytes < -_ROUNDING_BYTES:
        yield (
            f"- `{row.run}`: plans are left {_gb(-row.excess_bytes)} less, as those that take more do not fit by the "
            "finer estimate."
        )
    if row.best_needed_bytes is not None and row.best_needed_bytes > row.device_bytes:
        needed, there = _gb(row.best_needed_bytes), _gb(row.device_bytes)
        yield f"- `{row.run}`: by the finer estimate the best plan needs {needed} of {there} that there are."
    if row.certified_step_s is None:
        yield f"- `{row.run}`: bound {row.bound_step_s:.4g} s, no certificate: {row.certificate}"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def draw(rows: Sequence[Row], path: Path) -> None:
    """x against y, a mark for each row."""
    figure, (axes,) = style.panels("Published layouts against the best plans", [""])
    most = 100.0 * max(abs(row.error) for row in rows)
    axes.plot([0.0, most], [0.0, most], color="#999999", linewidth=1.0, label="x = y")
    for number, (name, of_group) in enumerate(_grouped(rows).items()):
        axes.plot(
            [100.0 * abs(row.error) for row in of_group],
            [100.0 * row.behind for row in of_group],
            style.MARKERS[number],
            color=style.COLOURS[number],
            label=name,
        )
    axes.set(xlabel="y: error of the prediction (%)", ylabel="x: longer than the best plan's step (%)")
    style.legend(figure, axes)
    style.save(figure, path)
