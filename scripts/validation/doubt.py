"""Makes ``doubt.toml`` from measured steps and peaks: ranges by likeness, and numbers of runs by GPU and software."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from piper_ray.calibrate.layouts import Laid
from piper_ray.model.mode import Sharding
from piper_ray.workloads.estimate.doubt import constants_in_use, likeness, memory_likeness
from scripts.validation.errors import peak_errors
from scripts.validation.price import PricedRun
from scripts.validation.sources import interval_of

NAMES = {
    "today": "software since 2023, half precision",
    "older": "software before 2023",
    "sharded": "sharded weights, half precision",
    "fp8": "products of 8 bits",
    "experts": "mixtures of experts",
}

MEMORY_NAMES = {"whole": "software that keeps weights whole", "sharded": "all software"}

_FEW_PEAKS = 30
"""If fewer peaks are alike, 9 in 10 of them mean little, so all peaks count."""


def peaks_alike(outcomes: Iterable[PricedRun]) -> dict[str, list[float]]:
    """Measured over estimated peaks by likeness, the least first."""
    found: dict[str, list[float]] = {key: [] for key in MEMORY_NAMES}
    for outcome in outcomes:
        if outcome.laid is not None and outcome.predicted_memory_bytes and outcome.measured_memory_bytes:
            ratio = outcome.measured_memory_bytes / outcome.predicted_memory_bytes
            found[memory_likeness(outcome.laid.stack.software.family)].append(ratio)
    every = sorted(ratio for ratios in found.values() for ratio in ratios)
    return {key: sorted(ratios) if len(ratios) >= _FEW_PEAKS else every for key, ratios in found.items()}


def peaks_told(peaks: Iterable[PricedRun]) -> list[str]:
    """The peaks of runs that count for memory alone, by source."""
    sources: dict[str, list[PricedRun]] = defaultdict(list)
    for outcome in peaks:
        sources[outcome.run.source.partition(",")[0]].append(outcome)
    told = {source: peak_errors(of) for source, of in sources.items()}
    words = [f"{source}'s {len(of.values)} are {of.mean:.1%} off" for source, of in told.items()]
    total = sum(len(of.values) for of in told.values())
    return [f"Of {total} further peaks, to which nothing was fitted, {', '.join(words)}."]


def covering(ratios: Sequence[float], share: float) -> float:
    """The least of the ordered ratios that this share of them does not exceed."""
    return ratios[max(0, math.ceil(share * len(ratios)) - 1)]


def alike(outcomes: Iterable[PricedRun]) -> dict[str, dict[str, list[float]]]:
    """Errors by likeness and source."""
    found: dict[str, dict[str, list[float]]] = {key: defaultdict(list) for key in NAMES}
    for outcome in outcomes:
        if outcome.laid is not None and outcome.error is not None:
            stack = outcome.laid.stack
            key = likeness(stack.software, stack.precision, outcome.laid.has_experts)
            found[key][outcome.run.source].append(outcome.error)
    return found


def coverage(errors: dict[str, dict[str, list[float]]]) -> float:
    """The share of runs, with each source counting once, within the range of the other sources like it."""
    shares = []
    for of in errors.values():
        for source, own in of.items():
            others = [errors for name, errors in of.items() if name != source]
            if len(others) > 1:
                least, most = interval_of(others)
                shares.append(sum(least <= 1.0 / (1.0 + error) <= most for error in own) / len(own))
    return sum(shares) / len(shares)


def _constants(laid: Laid) -> list[str]:
    """The constants on which a run's step depends."""
    layout = laid.layout
    return constants_in_use(
        laid.stack,
        experts=laid.has_experts,
        scans=any(kind.scans for kind in laid.kinds),
        tensor=layout.tensor > 1,
        sharded=layout.mode.sharding >= Sharding.GRADIENTS,
    )


def doubt_lines(outcomes: Sequence[PricedRun]) -> Iterator[str]:
    """The lines of the file."""
    priced = [x for x in outcomes if x.laid is not None and x.error is not None]
    errors = alike(priced)
    yield "# How far estimates were off, made by scripts/validate_estimates --doubt; not to be edited."
    yield "#"
    yield "#   least, most   of measured over estimated steps: 9 of 10 runs of a source that is not here"
    yield "#   headroom      the share of a GPU's memory left free, with which 9 in 10 published peaks keep within it"
    yield f"# Leaving each source out, {coverage(errors):.0%} of its runs lie within what the others like it say."
    yield ""
    laid = [x.laid for x in priced if x.laid is not None]
    over = [x for x in laid if (x.layout.expert or 1) > x.stack.domain]
    yield f"over_nodes = {len(over)}"
    for key, of in errors.items():
        least, most = interval_of(list(of.values()))
        yield ""
        yield f"[alike.{key}]"
        yield f'name = "{NAMES[key]}"'
        yield f"least = {least:.2f}"
        yield f"most = {most:.2f}"
        yield f"runs = {sum(map(len, of.values()))}"
        yield f"sources = {len(of)}"
    for key, ratios in peaks_alike(outcomes).items():
        yield ""
        yield f"[memory.{key}]"
        yield f'name = "{MEMORY_NAMES[key]}"'
        yield f"least = {covering(ratios, 0.05):.2f}"
        yield f"most = {covering(ratios, 0.95):.2f}"
        yield f"headroom = {math.ceil(1000.0 * (1.0 - 1.0 / covering(ratios, 0.9))) / 1000.0:.3f}"
        yield f"peaks = {len(ratios)}"
    for table, names in (
        ("gpus", [x.stack.gpu.name for x in laid]),
        ("software", [x.stack.software.base for x in laid]),
        ("constants", [one for x in laid for one in _constants(x)]),
    ):
        yield ""
        yield f"[{table}]"
        for name, count in sorted(Counter(names).items()):
            yield f'"{name}" = {count}'
