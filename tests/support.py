"""Where the shared data lies, and its golden records as instances with the values they must have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from piper_ray.formats import load
from piper_ray.model import Instance

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared"
GIB = 2**30


@dataclass(frozen=True)
class RandomGolden:
    """A random instance. time_per_sample: its exact optimum, None if infeasible.

    reference: what the published implementation makes of it, None where that cannot run or finds nothing.
    """

    number: int
    instance: Instance
    time_per_sample: float | None
    reference: float | None


@dataclass(frozen=True)
class PublishedGolden:
    """The published implementation on a published workload: its value (None: infeasible) and what it took.

    Its TMPC choice is greedy: an exact value is at most this one.
    """

    name: str
    input: str
    instance: Instance
    time_per_sample: float | None
    stages: int
    downsets: int
    pairs: int
    cpu_s: float


def random_goldens() -> Iterator[RandomGolden]:
    with (SHARED / "goldens" / "random.jsonl").open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            record = json.loads(line)
            instance = load(record["instance"])
            yield RandomGolden(number, instance, record["time_per_sample"], record.get("reference"))


def published_goldens() -> list[PublishedGolden]:
    text = (SHARED / "goldens" / "published.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    return [
        PublishedGolden(
            name="{} K={K} N={N} M={M_GiB}GiB".format(record["input"].removesuffix(".json"), **record),
            input=record["input"],
            instance=load(
                SHARED / "piper" / record["input"],
                devices=record["K"],
                microbatches=record["N"] or None,  # 0: the file's own
                memory_bytes=record["M_GiB"] * GIB,
                bandwidth_bytes_per_s=record["B_GiB"] * GIB,
            ),
            time_per_sample=record["tps"],
            stages=record["stages"],
            downsets=record["downsets"],
            pairs=record["pairs"],
            cpu_s=record["cpu_s"],
        )
        for record in records
    ]


def assert_same_time(found_s: float | None, expected_s: float | None, what: object, relative: float = 1e-9) -> None:
    """Both infeasible (None), or equal to 1e-9. ``what``: the record, for the message."""
    if found_s is None or expected_s is None:
        assert found_s is expected_s, what
    else:
        assert math.isclose(found_s, expected_s, rel_tol=relative), (found_s, expected_s, what)
