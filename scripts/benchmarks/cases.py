"""What is measured: the workloads of the yardstick table, and smaller ones on which the paper's table can run too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from piper_ray.model.errors import UsageError
from tests.data import INCEPTION, INPUTS, WORKLOADS

ROOT = Path(__file__).resolve().parents[2]

BANDWIDTH = "25GiB/s"
"""What the published tables call 25 GB/s."""

_BERT32 = WORKLOADS["bert32a100"]
_BERT96 = INPUTS / "bert96-a100.toml"
_RESNET = WORKLOADS["resnet"]
_GNMT = WORKLOADS["gnmt"]

MB = 10**6
GB = 10**9


@dataclass(frozen=True)
class Case:
    """One instance. memory: M with its unit. The bandwidth is always ``BANDWIDTH``."""

    id: str
    workload: str
    input: Path
    devices: int
    microbatches: int
    memory: str

    @property
    def title(self) -> str:
        return f"{self.workload} K={self.devices} N={self.microbatches} M={self.memory}"


@dataclass(frozen=True)
class Published:
    """A figure measured elsewhere, on another machine. text: as it is printed; seconds: None when it is words only."""

    text: str
    seconds: float | None = None


_NONE = Published("-")


@dataclass(frozen=True)
class Row:
    """A case with its yardsticks.

    known_s: time per sample that another solver found, in s; ours must not be above it. known_is_bound: it is only
    known as "at most". has_plan: no, and that is the answer to find. goal_s: for lattice, stage costs and search
    together, on 2 cores. process_goal_s, memory_goal_bytes: wall time and peak memory of the whole command, caches
    warm. prototype, reference: of the prototype of this search, and CPU time of the published C++. compare_threads:
    measured with one thread too. slow: left out by --quick.
    """

    case: Case
    known_s: float | None
    goal_s: float
    prototype: Published = _NONE
    reference: Published = _NONE
    known_is_bound: bool = False
    has_plan: bool = True
    process_goal_s: float | None = None
    memory_goal_bytes: float | None = None
    compare_threads: bool = False
    slow: bool = False


ROWS: tuple[Row, ...] = (
    Row(
        Case("bert32", "BERT-32", _BERT32, 2048, 1920, "8GiB"),
        known_s=0.0007035911844432354,
        goal_s=0.01,
        prototype=Published("0.01 s", 0.01),
        reference=Published("44.7 s", 44.7),
    ),
    Row(
        Case("bert32-n512", "BERT-32", _BERT32, 2048, 512, "8GiB"),
        known_s=0.001221279945321381,
        goal_s=0.01,
        reference=Published("8.5 s", 8.5),
    ),
    Row(
        Case("bert96", "BERT-96", _BERT96, 2048, 1920, "8GiB"),
        known_s=None,
        goal_s=0.05,
        prototype=Published("0.11 s", 0.11),
        reference=Published("234 s", 234.0),
        process_goal_s=1.0,
        memory_goal_bytes=250 * MB,
        compare_threads=True,
    ),
    Row(
        Case("resnet50", "ResNet-50", _RESNET, 64, 7680, "4GiB"),
        known_s=8.666772848487811,
        goal_s=0.1,
        prototype=Published("0.23 s", 0.23),
        reference=Published("7.2 s", 7.2),
    ),
    Row(
        Case("gnmt-k8", "GNMT", _GNMT, 8, 256, "2.4GiB"),
        known_s=65.83886745345592,
        goal_s=1.0,
        prototype=Published("4.1 s", 4.1),
        reference=Published("283 s", 283.0),
        memory_goal_bytes=GB,
    ),
    Row(
        Case("gnmt-k16", "GNMT", _GNMT, 16, 256, "1.2GiB"),
        known_s=34.26281805,
        known_is_bound=True,
        goal_s=3.0,
        prototype=Published("21.8 s", 21.8),
        memory_goal_bytes=GB,
        compare_threads=True,
    ),
    Row(
        Case("gnmt-k512", "GNMT", _GNMT, 512, 1920, "2.4GiB"),
        known_s=1.017588447,
        known_is_bound=True,
        goal_s=1.5,
        prototype=Published("5.6 s", 5.6),
        reference=Published("a table of 33 GiB"),
        memory_goal_bytes=GB,
        compare_threads=True,
    ),
    Row(
        Case("inception-k64", "Inception-v3", INCEPTION, 64, 256, "16GiB"),
        known_s=0.010828475,
        known_is_bound=True,
        goal_s=4.0,
        prototype=Published("24 s", 24.0),
        reference=Published("refuses"),
        memory_goal_bytes=2 * GB,
        compare_threads=True,
    ),
    Row(
        Case("inception-k128", "Inception-v3", INCEPTION, 128, 256, "16GiB"),
        known_s=0.005447664,
        known_is_bound=True,
        goal_s=60.0,
        prototype=Published("about 5 min", 300.0),
        reference=Published("refuses"),
        memory_goal_bytes=4 * GB,
        compare_threads=True,
    ),
    # Without a plan: the layers' activations are 15.4 GiB for each microbatch, a stage with y in flight holds at most
    # M/y of them, and however 48 devices are shared out the sum of 1/y over the stages is at most 4.46.
    Row(
        Case("inception-k48", "Inception-v3", INCEPTION, 48, 64, "2GiB"),
        known_s=None,
        has_plan=False,
        goal_s=1200.0,
        prototype=Published("hours"),
        reference=Published("refuses"),
        slow=True,
    ),
    # The same with memory enough, tight on every stage: the hardest row. The goal is the one set for 2 GiB.
    Row(
        Case("inception-tight", "Inception-v3", INCEPTION, 48, 64, "4GiB"),
        known_s=None,
        goal_s=1200.0,
        reference=Published("refuses"),
        slow=True,
    ),
)

_BY_ID: dict[str, Case] = {row.case.id: row.case for row in ROWS}


@dataclass(frozen=True)
class Twin:
    """A case on which the paper's table is filled in the same run. runs: how often. slow: left out by --quick."""

    case: Case
    runs: int = 1
    slow: bool = False


TWINS: tuple[Twin, ...] = (
    Twin(Case("bert32-k256", "BERT-32", _BERT32, 256, 1920, "8GiB"), runs=3),
    Twin(_BY_ID["bert32-n512"]),
    Twin(_BY_ID["bert32"], slow=True),
    Twin(Case("resnet50-k8", "ResNet-50", _RESNET, 8, 7680, "4GiB"), runs=3),
    Twin(_BY_ID["resnet50"]),
)

SMALL = Case("small", "BERT-32", _BERT32, 64, 512, "8GiB")
"""Goes through every kernel: solved before the clock starts, so that compilation and imports stay apart."""

CASES: dict[str, Case] = _BY_ID | {twin.case.id: twin.case for twin in TWINS}


def select(wanted: Sequence[str], *, quick: bool) -> tuple[tuple[Row, ...], tuple[Twin, ...]]:
    """Rows and twins by name: an id, or its beginning up to a "-" ("gnmt" is all three). Without names all of them.

    quick: leaves out the slow ones. Raises UsageError for a name that fits no id.
    """
    unknown = [name for name in wanted if not any(fits(name, case_id) for case_id in CASES)]
    if unknown:
        raise UsageError(f"--rows: there is no {', '.join(unknown)}; expected some of {', '.join(CASES)}")
    names = wanted or list(CASES)

    def chosen(measured: Row | Twin) -> bool:
        return any(fits(name, measured.case.id) for name in names) and not (quick and measured.slow)

    return tuple(filter(chosen, ROWS)), tuple(filter(chosen, TWINS))


def fits(name: str, case_id: str) -> bool:
    """Whether a name on the command line means the case: its id, or the beginning up to a "-"."""
    return case_id == name or case_id.startswith(f"{name}-")
