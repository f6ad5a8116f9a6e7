"""What runs against another version measure: one solve or frontier each, of the hard families or of the yardsticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from piper_ray import estimate, on_several_kinds
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.units import parse_bytes, parse_bytes_per_s
from piper_ray.workloads.formats.load import load
from scripts.benchmarks.bench_solve import load_case
from scripts.benchmarks.cases import Case, Row, fits
from scripts.benchmarks.families import cells, chain, mixture, operators, towers
from tests.data import INCEPTION, INPUTS

BANDWIDTH = "40GiB/s"
"""The bandwidth for generated graphs: a tensor crosses in a tenth of a layer's time."""
LIMIT_S = 100.0
_GOALS_TO_LIMIT = 4.0
"""Solves are stopped after this many times their goal, so that busy machines show what is proved, too."""

TOWERS, MIXTURES, CELLS, CHAINS = "towers", "mixtures", "NAS cells", "chains"
OPERATORS, INCEPTION_V3, IMAGEBIND, YARDSTICKS = "operators", "Inception-v3", "ImageBind", "yardsticks"
KINDS, ONE_KIND = "several kinds", "kinds-one"


@dataclass(frozen=True)
class Goal:
    """seconds: of the wall clock where all threads work, else of the CPU. before_s: what it took when it was set."""

    seconds: float
    before_s: float | None = None


@dataclass(frozen=True)
class Subject:
    """One thing that is measured.

    title: the graph and its cluster. make: the instance. threads: 1, or None for all of the machine's. devices: the
    first and last number of devices of a frontier, None for a solve. limit_s: after which it is stopped. quick: one
    of those that take a few seconds at the most.
    """

    id: str
    family: str
    title: str
    make: Callable[[], Instance]
    threads: int | None = 1
    goal: Goal | None = None
    devices: tuple[int, int] | None = None
    limit_s: float = LIMIT_S
    quick: bool = False


def _on(make: Callable[[], Instance], devices: int, microbatches: int, memory: str) -> Instance:
    return make().replace(
        devices=devices,
        microbatches=microbatches,
        memory_bytes=parse_bytes(memory),
        bandwidth_bytes_per_s=parse_bytes_per_s(BANDWIDTH),
    )


def _generated(
    family: str,
    subject_id: str,
    words: str,
    make: Callable[[], Instance],
    cluster: tuple[int, int, str],
    goal: Goal | None = None,
    *,
    quick: bool = False,
) -> Subject:
    devices, microbatches, memory = cluster
    title = f"{words} K={devices} N={microbatches} M={memory}"
    return Subject(
        subject_id, family, title, partial(_on, make, *cluster), goal=goal, limit_s=_limit_s(goal), quick=quick
    )


def _limit_s(goal: Goal | None) -> float:
    return LIMIT_S if goal is None else max(LIMIT_S, _GOALS_TO_LIMIT * goal.seconds)


def _inception(
    devices: int, microbatches: int, memory: str, goal: Goal | None, *, quick: bool = False, frontier: bool = False
) -> Subject:
    case = Case("", "Inception-v3", INCEPTION, devices, microbatches, memory)
    number = f"8-{devices}" if frontier else str(devices)
    return Subject(
        id="inception-frontier" if frontier else f"inception-{devices}x{microbatches}",
        family=INCEPTION_V3,
        title=f"Inception-v3 K={number} N={microbatches} M={memory}",
        make=partial(load_case, case),
        threads=None,
        goal=goal,
        devices=(8, devices) if frontier else None,
        limit_s=goal.seconds if goal is not None and frontier else _limit_s(goal),
        quick=quick,
    )


def _imagebind() -> Instance:
    return load(INPUTS / "imagebind-huge.toml").replace(schedule=PAPERS_SCHEDULE)


def _on_kinds(model: str, nodes: int, batch: int, gpus: Sequence[str]) -> Instance:
    of_kind = {gpu: estimate(model, gpu, nodes=nodes, global_batch=batch, microbatch_size=1) for gpu in gpus}
    made = on_several_kinds(of_kind) if len(gpus) > 1 else of_kind[gpus[0]]
    return made.replace(schedule="1f1b")


def _kinds() -> Iterable[Subject]:
    """Subjects with several kinds of devices under 1f1b, and one kind to compare with. nodes: nodes of each kind, with
    8 GPUs each."""
    two = ("A100-80", "H100-SXM")
    for name, model, nodes, batch, gpus, goal in (
        (ONE_KIND, "llama3-70b", 64, 1024, two[1:], None),
        ("kinds-64", "llama3-70b", 8, 512, two, Goal(3)),
        ("kinds-256", "llama3-70b", 32, 1024, two, Goal(10)),
        ("kinds-3x128", "llama3-70b", 16, 1024, (*two, "H200"), Goal(60)),
        ("kinds-t5", "t5-11b", 8, 512, two, Goal(60)),
        ("kinds-clip", "clip-vit-l-14", 2, 1024, two, Goal(60)),
    ):
        words = f"{model} {' + '.join(f'{8 * nodes} {gpu}' for gpu in gpus)} N={batch}"
        make = partial(_on_kinds, model, nodes, batch, gpus)
        quick = goal is None or goal.seconds <= 10
        yield Subject(name, KINDS, words, make, goal=goal, limit_s=_limit_s(goal), quick=quick)


def _grown() -> Iterable[Subject]:
    """Each family from small to large; what differs in memory alone is tight and roomy."""
    for height, devices, goal, quick in ((25, 16, None, True), (50, 32, None, True), (100, 64, Goal(5, 83), False)):
        make = partial(towers, 2, height, seed=11)
        words = f"2 towers of {height}"
        yield _generated(TOWERS, f"towers-2x{height}", words, make, (devices, 64, "4GiB"), goal, quick=quick)
    roomy = partial(towers, 2, 100, seed=11)
    yield _generated(TOWERS, "towers-2x100-roomy", "2 towers of 100", roomy, (64, 64, "40GiB"), quick=True)
    for height, devices, goal, quick in ((8, 16, None, True), (16, 24, None, False), (24, 32, Goal(5, 68), False)):
        make = partial(towers, 3, height, seed=12)
        words = f"3 towers of {height}"
        yield _generated(TOWERS, f"towers-3x{height}", words, make, (devices, 64, "1.4GiB"), goal, quick=quick)
    for height, devices, goal, quick in ((6, 16, None, True), (12, 32, Goal(5, 67), False)):
        make = partial(towers, 4, height, seed=13)
        words = f"4 towers of {height}"
        yield _generated(TOWERS, f"towers-4x{height}", words, make, (devices, 64, "3GiB"), goal, quick=quick)
    for experts, goal, quick in ((4, None, True), (8, None, True), (10, None, False), (12, Goal(10, 135), False)):
        make = partial(mixture, 24, experts, seed=14)
        words = f"24 layers of {experts} experts"
        yield _generated(MIXTURES, f"mixture-24x{experts}", words, make, (64, 64, "3GiB"), goal, quick=quick)
    for count, devices, goal, quick in ((2, 16, None, True), (4, 32, None, True), (16, 64, Goal(10, 95), False)):
        make = partial(cells, count, 5, seed=15)
        words = f"{count} cells of 5 nodes"
        yield _generated(CELLS, f"cells-{count}x5", words, make, (devices, 64, "3GiB"), goal, quick=quick)
    for length, devices, memory, goal, quick in (
        (250, 64, "1GiB", None, True),
        (1000, 256, "1GiB", Goal(5, 114), False),
        (5000, 256, "5GiB", Goal(60), False),
    ):
        make = partial(chain, length, seed=16)
        words = f"chain of {length:,}"
        yield _generated(CHAINS, f"chain-{length}", words, make, (devices, 256, memory), goal, quick=quick)
    for blocks, goal, quick in ((40, None, True), (297, Goal(20, 99), False)):
        make = partial(operators, blocks, 1, seed=17)
        words = f"{16 * blocks + 4:,} operators"
        yield _generated(OPERATORS, f"operators-{blocks}", words, make, (64, 512, "40GiB"), goal, quick=quick)


FAMILIES: tuple[Subject, ...] = (
    *_grown(),
    _inception(64, 256, "16GiB", None, quick=True),
    *(_inception(devices, 256, "16GiB", Goal(60)) for devices in (48, 96, 127)),
    _inception(48, 64, "4GiB", Goal(10, 30)),
    Subject(
        "imagebind",
        IMAGEBIND,
        "ImageBind K=64 N=512 M=74.4GiB",
        _imagebind,
        threads=None,
        goal=Goal(60),
        limit_s=_limit_s(Goal(60)),
    ),
    _inception(128, 256, "16GiB", Goal(600), frontier=True),
    *_kinds(),
)


def of_rows(rows: Sequence[Row]) -> tuple[Subject, ...]:
    """The yardsticks' instances, on one thread: so a difference of a few per cent can be seen."""
    return tuple(
        Subject(row.case.id, YARDSTICKS, row.case.title, partial(load_case, row.case), quick=not row.slow)
        for row in rows
    )


def select_families(wanted: Sequence[str], *, quick: bool) -> tuple[Subject, ...]:
    """By id, or its beginning up to a "-"; without names all. quick: the quick ones of them alone.

    Raises UsageError for a name that fits no id.
    """
    ids = [subject.id for subject in FAMILIES]
    unknown = [name for name in wanted if not any(fits(name, subject_id) for subject_id in ids)]
    if unknown:
        raise UsageError(f"--rows: there is no {', '.join(unknown)} in --families; expected some of {', '.join(ids)}")
    return tuple(
        subject
        for subject in FAMILIES
        if any(fits(name, subject.id) for name in wanted or ids) and (subject.quick or not quick)
    )
