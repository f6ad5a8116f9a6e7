"""What is solved: yardsticks, hard families, goldens and random instances, under every schedule that is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from piper_ray.model.instance import Instance
from piper_ray.model.schedule import ScheduleName
from piper_ray.workloads.formats.load import instance_of
from scripts.benchmarks.cases import CASES, select
from scripts.benchmarks.subjects import FAMILIES, of_rows
from tests.data import INPUTS, goldens
from tests.flush_instances import uneven_layers
from tests.instances import random_instance

_DRAINED = tuple(name.value for name in ScheduleName if name not in (ScheduleName.TWO_BW, ScheduleName.PIPEDREAM))
_QUICK_SEEDS, _SEEDS = 12, 60
_QUICK_GOLDENS = 40


@dataclass(frozen=True)
class Case:
    """schedules: by their names, each a solve. devices: the first and last number of a frontier under them."""

    id: str
    make: Callable[[], Instance]
    schedules: tuple[str, ...]
    devices: tuple[int, int] | None = None


def cases(*, quick: bool) -> Iterator[Case]:
    """All of them, or those that take a minute together."""
    seeds = range(_QUICK_SEEDS if quick else _SEEDS)
    for seed in seeds:
        yield Case(f"random {seed}", partial(random_instance, seed), ("2bw", *_DRAINED), (1, 4))
        yield Case(f"uneven {seed}", partial(uneven_layers, seed), ("2bw", *_DRAINED))
    for name in ("random", "schedules"):
        for number, record in enumerate(islice(goldens(name), _QUICK_GOLDENS if quick else None)):
            document = record["instance"]
            yield Case(f"golden {name} {number}", partial(instance_of, document), ("2bw", "1f1b", "gpipe"))
    for subject in (*of_rows(select([*CASES], quick=quick)[0]), *FAMILIES):
        if subject.devices is None and (subject.quick or not quick):
            yield Case(subject.id, subject.make, ("2bw",))
    if not quick:
        for name in ("bert32-a100", "llama3-70b", "vit-22b"):
            make = partial(instance_of, INPUTS / f"{name}.toml")
            yield Case(name, make, ("2bw", "1f1b", "gpipe", "interleaved"))
