"""Plans of several clusters, batches or rooms as a table and as a CSV, and those for a cluster that loses nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from piper_ray.model.figures import held_text, plural, rounded, time_text
from piper_ray.proposal.clusters import ClusterPlan, with_nodes_before
from piper_ray.proposal.demand import Figures, PlanDemand, Proposed, figures_of
from piper_ray.proposal.layout_words import layout_words
from piper_ray.report.proposal import SCREEN_COLUMNS, change_text, gap_text
from piper_ray.report.terminal import NO_BREAK, Column, csv_text, print_fitting, print_lines

_BILLION = 1e9
_S_PER_HOUR = 3600.0

CSV_COLUMNS = (
    "gpu", "nodes", "gpus", "used_gpus", "global_batch", "step_s", "lower_bound_s", "tokens_per_s",
    "tokens_per_s_per_gpu", "mfu", "memory_bytes", "price_per_gpu_hour", "cost_per_billion_tokens", "days", "cost",
    "layout", "reason", "left_free_bytes",
)  # fmt: skip
"""The columns of ``clusters.csv``. reason: why there is no plan. days, cost: of the whole training, if known."""


def cost_per_billion(one: ClusterPlan, figures: Figures, price_per_hour: float | None) -> float | None:
    """The cost of a billion tokens, in the currency of the price."""
    if price_per_hour is None or figures.tokens_per_s is None:
        return None
    return _BILLION / figures.tokens_per_s / _S_PER_HOUR * one.demand.devices * price_per_hour


def clusters_csv(plans: Sequence[ClusterPlan], prices: Sequence[float | None], tokens: float | None) -> str:
    """A line for each cluster."""
    rows: list[list[object]] = []
    for one, price in zip(plans, prices, strict=True):
        request = one.demand.request
        first = [one.demand.gpu, request.nodes, one.demand.devices]
        if one.found is None:
            rows.append([*first, *[None] * (len(CSV_COLUMNS) - 5), one.reason, None])
            continue
        best, figures = one.found.best, figures_of(one.found.best, tokens, price if tokens is not None else None)
        rows.append([
            *first, best.devices, best.batch, best.step_s, one.found.lower_s, figures.tokens_per_s,
            figures.tokens_per_s_per_device, figures.mfu, best.simulation.peak_memory_bytes, price,
            cost_per_billion(one, figures, price), figures.days, figures.cost, layout_words(best).text, None,
            one.demand.whole_bytes(best.instance.memory_bytes) - best.instance.memory_bytes,
        ])  # fmt: skip
    return csv_text(CSV_COLUMNS, rows)


def print_clusters(
    console: Console,
    plans: Sequence[ClusterPlan],
    prices: Sequence[float | None],
    tokens: float | None,
    along: str = "clusters",
) -> None:
    """A row for each cluster; what has no plan says why. along: what rows differ in: clusters, batches or rooms."""
    first = _first_columns(plans, along)
    heads = [*first, "step", "gap", "tokens/s", "per GPU", "MFU"]
    heads += [] if tokens is None else ["days"]
    priced = any(price is not None for price in prices)
    heads += ["cost"] if priced and tokens is not None else ["cost/1e9"] if priced else []
    columns = [Column(head, right=head != "GPU") for head in heads] + [Column("layout")]
    rows = []
    for number, (one, price) in enumerate(zip(plans, prices, strict=True)):
        own = [column[number] for column in first.values()]
        if one.found is None:
            rows.append([*own, *["-"] * (len(heads) - len(own)), one.reason])
            continue
        best, figures = one.found.best, figures_of(one.found.best, tokens, price if tokens is not None else None)
        row = [*own, time_text(best.step_s, 3), gap_text(one.found.gap), _number(figures.tokens_per_s)]
        row += [_number(figures.tokens_per_s_per_device), f"{100.0 * figures.mfu:.1f} %"]
        row += [] if tokens is None else [_number(figures.days)]
        cost = figures.cost if tokens is not None else cost_per_billion(one, figures, price)
        rows.append([*row, *([_number(cost)] if priced else []), _layout(best)])
    print_fitting(console, columns, rows, SCREEN_COLUMNS)


def _first_columns(plans: Sequence[ClusterPlan], along: str) -> dict[str, list[str]]:
    """What the rows differ in, by head; with batches the GPUs that are idle, with rooms what is held."""
    demands, found = [one.demand for one in plans], [None if one.found is None else one.found.best for one in plans]
    if along == "batches":
        return {
            "batch": [f"{one.request.batch:,}" for one in demands],
            "idle": ["-" if best is None else f"{best.idle_devices:,}" for best in found],
        }
    if along == "rooms":
        return {
            "left free": [_room_text(one) for one in demands],
            "memory": ["-" if best is None else held_text(best.simulation.peak_memory_bytes) for best in found],
        }
    return {
        "GPU": [one.gpu for one in demands],
        "nodes": [str(one.request.nodes) for one in demands],
        "GPUs": [f"{one.devices:,}" for one in demands],
    }


def _room_text(demand: PlanDemand) -> str:
    room = demand.headroom
    return f"{100.0 * room.share:.3g} %" if room.share or not room.size_bytes else held_text(room.size_bytes)


def all_used_text(plans: Sequence[ClusterPlan]) -> list[str]:
    """The batch with the most samples a second that leaves no GPU idle, where other batches leave some idle."""
    found = [one.found.best for one in plans if one.found is not None]
    idle, used = [one for one in found if one.idle_devices], [one for one in found if not one.idle_devices]
    if len({one.batch for one in found}) == 1 or not idle or not used:
        return []
    best, worst = (min(of, key=lambda one: one.step_s / one.batch) for of in (used, idle))
    change = change_text(worst.step_s / worst.batch * best.batch / best.step_s - 1.0)
    what = "tokens" if best.instance.batch.tokens_per_sample else "samples"
    return [
        f"a batch of {best.batch:,} uses all {best.devices:,} GPUs: {change} {what}/s on the best that leaves some idle"
    ]


def _layout(best: Proposed) -> str:
    """The layout in few words, with breaks only between them."""
    return layout_words(best).short.replace(" ", NO_BREAK).replace(f",{NO_BREAK}", ", ")


def _number(value: float | None) -> str:
    return "-" if value is None else rounded(value)


def print_spare(console: Console, plans: Sequence[ClusterPlan]) -> None:
    """A row for each number of nodes that is left, and what moving to its plan from the one before takes."""
    kinds = [*plans[0].nodes] if len(plans[0].nodes) > 1 else []
    heads = (*(kinds or ("nodes",)), "GPUs", "used", "step", "slower", "weights moved", "state moved")
    columns = [*(Column(head, right=True) for head in heads), Column("layout")]
    print_fitting(console, columns, list(_spare_rows(plans, kinds)), SCREEN_COLUMNS)
    lacking = [one for one in plans if one.found is None]
    print_lines(console, [f"{_nodes_text(one, kinds)}: {one.reason}" for one in lacking])
    if kinds:
        print_lines(
            console,
            [f"{', '.join(kinds)}: nodes that are left. What moves is from the last plan above with as many or more"],
        )


def _nodes_text(one: ClusterPlan, kinds: Sequence[str]) -> str:
    of_kinds = (plural(one.nodes.get(kind, 0), f"{kind} node") for kind in kinds)
    return " and ".join(of_kinds) or plural(one.demand.request.nodes, "node")


def _spare_rows(plans: Sequence[ClusterPlan], kinds: Sequence[str]) -> Iterator[list[str]]:
    for one, before in with_nodes_before(plans):
        if one.found is None:
            continue
        best = one.found.best
        row = [str(one.nodes.get(kind, 0)) for kind in kinds] or [str(one.demand.request.nodes)]
        row += [f"{one.demand.devices:,}", f"{best.devices:,}", time_text(best.step_s, 3)]
        if before is None or before.found is None:
            row += ["", "", ""]
        else:
            first, moved = plans[0].found or before.found, one.moved_from(before)
            row.append(change_text(best.step_s / first.best.step_s - 1.0))
            row += [held_text(moved.weights_bytes), held_text(moved.state_bytes)]
        yield [*row, _layout(best)]


def spare_document(plans: Sequence[ClusterPlan]) -> list[dict[str, object]]:
    """The same as a document, in s and bytes."""
    found: list[dict[str, object]] = []
    for one, before in with_nodes_before(plans):
        document: dict[str, object] = {"nodes": sum(one.nodes.values()), "gpus": one.demand.devices}
        if one.demand.further:
            document["nodes_of"] = dict.fromkeys(plans[0].nodes, 0) | one.nodes
        if one.found is None:
            found.append(document | {"step_s": None, "reason": one.reason})
            continue
        document |= {"step_s": one.found.best.step_s, "layout": layout_words(one.found.best).text}
        if before is not None:
            document |= vars(one.moved_from(before))
        found.append(document)
    return found
