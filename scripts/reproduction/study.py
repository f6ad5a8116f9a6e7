"""What a study is: rows that were computed, pictures of them, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

Value = str | int | float | None
Row = dict[str, Value]
Tell = Callable[[str], None]

PIPER = "README"
PIPEDREAM = "pipedream"
PAGES = {PIPER: "The paper's evaluation, with B = 25 GiB/s unless said", PIPEDREAM: "PipeDream's evaluation"}
"""The pages' names, and their headings."""

TOLERANCE = 1e-9
"""Relative: an optimum is proved to this."""


@dataclass(frozen=True)
class Findings:
    """rows: all alike. shown: those of the report's table, as text. words: paragraphs. faults: what must not be."""

    rows: Sequence[Row]
    words: Sequence[str]
    pictures: Mapping[str, Figure] = field(default_factory=dict)
    shown: Sequence[Row] = ()
    faults: Sequence[str] = ()


@dataclass(frozen=True)
class Study:
    """name: of its files. title: its heading. page: where it stands."""

    name: str
    title: str
    run: Callable[[Tell], Findings]
    page: str = PIPER


def slower_than(optimum_s: float | None, other_s: float | None) -> float | None:
    """How many times as long the other plan takes as the optimum; None without both."""
    return other_s / optimum_s if optimum_s is not None and other_s is not None else None


def faults_of(what: str, optimum_s: float | None, others_s: Mapping[str, float | None]) -> list[str]:
    """Faults: other plans that are below the optimum."""
    found = []
    for name, other_s in others_s.items():
        if other_s is not None and (optimum_s is None or other_s < optimum_s * (1.0 - TOLERANCE)):
            found.append(f"{what}: {name} takes {other_s:.10g} s per sample, the optimum {optimum_s}")
    return found


def milliseconds(seconds: float | None) -> str:
    """Milliseconds for a table."""
    return "-" if seconds is None else f"{seconds * 1e3:.5g}"
