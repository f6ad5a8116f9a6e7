"""Makes the tables of docs/estimates.md and README.md, doubt.toml and the expected errors from the runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from piper_ray.workloads.estimate.doubt import likeness
from scripts.validation.doubt import NAMES, alike, doubt_lines, peaks_told
from scripts.validation.errors import Errors, errors_by_group, memory_lines
from scripts.validation.order import layouts_by_source, order_lines
from scripts.validation.price import PricedRun
from scripts.validation.proof import Proof, proof_lines
from scripts.validation.sources import interval_of

_GENERATIONS = {"A100": "A100", "H100": "Hopper", "H200": "Hopper", "H800": "Hopper", "B200": "Blackwell",
                "B300": "Blackwell", "GB200": "Blackwell", "GB300": "Blackwell"}  # fmt: skip

_SUMMED = {
    "dense models in half precision, since 2023": "3D since 2023",
    "mixtures of experts": "experts",
    "dense models with sharded weights": "FSDP",
    "dense models in FP8": "FP8",
    "dense models, before 2023": "3D, before 2023",
}
"""README's names of the groups."""


def family_lines(outcomes: Sequence[PricedRun]) -> Iterator[str]:
    """A table in Markdown of errors by family and generation of GPU."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.laid is not None and outcome.error is not None:
            stack = outcome.laid.stack
            model = stack.gpu.name.split()[1]
            like = likeness(stack.software, stack.precision, outcome.laid.has_experts)
            found[like, _GENERATIONS[model]].append(outcome.error)
    sources = alike(outcomes)
    yield "| runs | GPUs | number | mean error | bias | worst | 9 in 10 of another source |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for key, name in NAMES.items():
        least, most = interval_of(list(sources[key].values()))
        for generation in dict.fromkeys(_GENERATIONS.values()):
            if values := found.get((key, generation)):
                errors = Errors(tuple(values))
                yield (
                    f"| {name} | {generation} | {len(values)} | {errors.mean:.1%} | {errors.signed:+.1%} | "
                    f"{errors.worst:+.1%} | x{least:.2f} to x{most:.2f} |"
                )


README_HEAD = "| runs | number | mean error | worst |"


def summary_lines(errors: Mapping[str, Errors]) -> Iterator[str]:
    """README's table."""
    yield README_HEAD
    yield "|---|---:|---:|---:|"
    for name, group in _SUMMED.items():
        of = errors[group]
        yield f"| {name} | {len(of.values)} | {of.mean:.1%} | {of.worst:+.1%} |"


def golden_lines(errors: Mapping[str, Errors]) -> Iterator[str]:
    """Errors that may not grow, by group."""
    for group, of in errors.items():
        figures = {"mean_error": of.mean, "signed_error": of.signed, "worst_error": of.worst}
        shown = {name: round(value, 3) for name, value in figures.items()}
        yield json.dumps({"group": group, "runs": len(of.values), **shown})


def with_blocks(text: str, blocks: Mapping[str, Iterable[str]]) -> str:
    """A page with new text between ``<!-- made: NAME -->`` and ``<!-- end -->``."""
    for name, lines in blocks.items():
        before, begin, rest = text.partition(f"<!-- made: {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        assert end, name
        text = before + begin + "\n".join(lines) + end + after
    return text


def made_texts(
    root: Path, outcomes: Sequence[PricedRun], peaks: Sequence[PricedRun], proved: Sequence[Proof]
) -> Iterator[tuple[Path, str]]:
    """Each file, as the runs make it. peaks: runs that count for memory alone."""
    errors = errors_by_group(outcomes)
    blocks = {
        "families": family_lines(outcomes),
        "memory": [*memory_lines(outcomes), "", *peaks_told(peaks)],
        "order": order_lines(layouts_by_source(outcomes)),
        "calibrated": proof_lines(proved),
    }
    page, readme = root / "docs" / "estimates.md", root / "README.md"
    yield page, with_blocks(page.read_text(encoding="utf-8"), blocks)
    before, _, rest = readme.read_text(encoding="utf-8").partition(README_HEAD)
    yield readme, before + "\n".join(summary_lines(errors)) + "\n\n" + rest.partition("\n\n")[2]
    doubt = "\n".join(doubt_lines([*outcomes, *peaks])) + "\n"
    yield root / "piper_ray" / "workloads" / "estimate" / "doubt.toml", doubt
    yield root / "tests" / "data" / "goldens" / "estimate_errors.jsonl", "\n".join(golden_lines(errors)) + "\n"
