"""The plans of a sweep in words: the fastest and the cheapest of each GPU, ways compared, why there is none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from piper_ray.model.figures import rounded, time_text
from piper_ray.report.terminal import FindingsTable, csv_text
from piper_ray.sweep.plan_findings import PlanRecord, TrainedBatch, best_of_clusters, ways_of

Prices = Mapping[str, float]
"""Prices of an hour of one GPU, by its key, in any currency."""


@dataclass(frozen=True)
class Cost:
    """What a billion tokens cost: GPU hours, or, where the prices of all GPUs are known, money."""

    prices: Prices

    @property
    def words(self) -> str:
        """The words for an axis and for a column."""
        return "cost of 1e9 tokens" if self.prices else "GPU hours of 1e9 tokens"

    def of(self, record: PlanRecord) -> float | None:
        """The figure of a record; None without a plan or a price."""
        hours = record.gpu_hours_of
        if not hours or not self.prices:
            return record.gpu_hours
        if not hours.keys() <= self.prices.keys():
            return None
        return sum(of_gpu * self.prices[gpu] for gpu, of_gpu in hours.items())


def plan_tables(records: Sequence[PlanRecord], prices: Prices) -> list[FindingsTable]:
    """All tables that have rows."""
    cost = Cost(prices)
    fastest = _of_gpus(records, lambda one: one.step_s)
    cheapest = _of_gpus(records, cost.of)
    found = [
        _points(records),
        _clusters("Shortest step of each GPU", fastest, cost),
        _clusters(f"Least {cost.words}, of each GPU", cheapest, cost),
        _ways(records),
        _without(records),
    ]
    return [table for table in found if table.rows]


def _of_gpus(records: Sequence[PlanRecord], value: Callable[[PlanRecord], float | None]) -> list[PlanRecord]:
    """The best of each model, batch and GPU, or kinds of GPU together; the fewest devices among equals."""
    best: dict[tuple[TrainedBatch, str], tuple[float, int, PlanRecord]] = {}
    for record in best_of_clusters(records):
        key, worth = (record.training, record.gpus_text), value(record)
        if worth is not None and (key not in best or (worth, record.devices) < best[key][:2]):
            best[key] = worth, record.devices, record
    return [record for _, _, record in best.values()]


def _points(records: Sequence[PlanRecord]) -> FindingsTable:
    rows = []
    for model in dict.fromkeys(record.training.model for record in records):
        of_model = [record for record in records if record.training.model == model]
        counts = Counter(record.status for record in of_model)
        gaps = [record.gap for record in of_model if record.gap is not None]
        cpu_s = [record.cpu_s for record in of_model if record.cpu_s is not None]
        rows.append(
            (
                model,
                f"{len(of_model):,}",
                f"{len(gaps):,}",
                f"{counts['infeasible']:,}",
                f"{counts['refused']:,}",
                f"{counts['error']:,}",
                f"{100.0 * sum(gaps) / len(gaps):.3f} %" if gaps else "-",
                f"{100.0 * max(gaps):.3f} %" if gaps else "-",
                time_text(sum(cpu_s) / len(cpu_s), 3) if cpu_s else "-",
            )
        )
    figures = ("points", "plans", "infeasible", "refused", "failed", "gap, mean", "at most", "CPU of a point, mean")
    return FindingsTable("Plans", ("model", *figures), tuple(rows), 1)


def _clusters(title: str, records: Sequence[PlanRecord], cost: Cost) -> FindingsTable:
    rows = [
        (
            one.training.text,
            one.gpu,
            one.way.text,
            _layout(one),
            f"{one.devices:,}",
            time_text(one.step_s or 0.0, 3),
            f"{100.0 * (one.gap or 0.0):.2f} %",
            _number(one.tokens_per_s),
            f"{100.0 * (one.mfu or 0.0):.1f} %",
            _number(cost.of(one)),
        )
        for one in records
    ]
    figures = ("GPUs", "step", "gap", "tokens/s", "MFU", cost.words)
    return FindingsTable(title, ("training", "GPU", "way", "layout", *figures), tuple(rows), 4)


def _layout(record: PlanRecord) -> str:
    stages = "" if record.kinds_of_stages is None else f"; stages on {', '.join(json.loads(record.kinds_of_stages))}"
    return f"{record.layout or ''}{stages}"


def _ways(records: Sequence[PlanRecord]) -> FindingsTable:
    rows = [
        (
            one.model,
            one.way.text,
            f"{one.plans:,}",
            f"{one.without:,}",
            f"{one.wins:,}",
            "-" if one.mean_slower is None else f"{one.mean_slower:.3f} x",
        )
        for one in ways_of(records)
    ]
    figures = ("plans", "none", "fastest on", "step over the best way's, geometric mean")
    return FindingsTable("Runtimes and precisions", ("model", "way", *figures), tuple(rows), 2)


def _without(records: Sequence[PlanRecord]) -> FindingsTable:
    counts = Counter(
        (one.training.model, one.gpu, one.status, " ".join((one.note or one.error or "").split())[:100])
        for one in records
        if one.step_s is None
    )
    rows = [(*words, f"{count:,}") for words, count in counts.most_common()]
    return FindingsTable("Without a plan", ("model", "GPU", "status", "first words", "points"), tuple(rows), 4)


_CSV: Mapping[str, Callable[[PlanRecord], object]] = {
    "model": lambda r: r.training.model,
    "gpu": lambda r: r.gpu,
    "nodes": lambda r: r.nodes,
    "gpus": lambda r: r.devices,
    "batch": lambda r: r.training.batch,
    "tokens": lambda r: r.training.tokens,
    "precision": lambda r: r.way.precision,
    "runtime": lambda r: r.way.trained_by,
    "asked_schedule": lambda r: r.way.schedule,
    "status": lambda r: r.status,
    "step_s": lambda r: r.step_s,
    "step_lower_bound_s": lambda r: r.step_lower_bound_s,
    "gap": lambda r: r.gap,
    "tokens_per_s": lambda r: r.tokens_per_s,
    "tokens_per_s_per_gpu": lambda r: r.tokens_per_s_per_device,
    "mfu": lambda r: r.mfu,
    "gpu_hours_per_billion_tokens": lambda r: r.gpu_hours,
    "used_gpus": lambda r: r.devices_used,
    "peak_memory_bytes": lambda r: r.peak_memory_bytes,
    "layout": lambda r: r.layout,
    "devices_of_kinds": lambda r: r.devices_of_kinds,
    "kinds_of_stages": lambda r: r.kinds_of_stages,
    "gpu_hours_of_kinds": lambda r: r.devices_of_kinds and json.dumps(r.gpu_hours_of),
    "combinations": lambda r: r.combinations,
    "combinations_closed": lambda r: r.combinations_closed,
    "cpu_s": lambda r: r.cpu_s,
    "reason": lambda r: r.note or r.error,
}


def plans_csv(records: Sequence[PlanRecord]) -> str:
    """Every plan, in full figures."""
    return csv_text(_CSV, ([of(record) for of in _CSV.values()] for record in records))


def _number(value: float | None) -> str:
    return "-" if value is None else rounded(value)
