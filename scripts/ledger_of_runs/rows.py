"""The rows of the ledger: made of runs and kept in a CSV file, with workload, plan and certificate next to it."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from piper_ray.calibrate.layouts import Laid, laid_out
from piper_ray.calibrate.measurements import simulated
from piper_ray.calibrate.runs import PublishedRun, read_runs
from piper_ray.certificate.certificate import write_certificate
from piper_ray.model.errors import LimitError, PiperRayError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.report.comparison import ids_text, reasons, shape_text
from piper_ray.report.document import plan_document, proof_document, to_text
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.storage.files import write_atomically
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import priced
from piper_ray.workloads.formats.load import dump, load_plan
from scripts.ledger_of_runs.answer import (
    Answer,
    answer_to,
    certificate_of,
    laid_as,
    same_degrees_s,
    same_microbatch_s,
    same_recomputation_s,
    usual_room_s,
    with_own,
    workload_of,
)
from scripts.ledger_of_runs.errors import nearest_change
from scripts.ledger_of_runs.question import Question, granted, question_of
from scripts.validation.price import as_it_fits, memory_of

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "tests" / "data" / "runs"
DOCS = ROOT / "docs"
FOLDER = DOCS / "ledger"
TABLE = FOLDER / "ledger.csv"
_ROUNDS = 5
"""The most rounds in which a best plan that fits is sought."""

SURPRISING = 0.15
"""Values of x and errors above this are examined."""


@dataclass(frozen=True)
class Row:
    """A run. Layouts are p, v, d and t, and the configurations of layers; microbatches are in samples; steps in s.

    layout_step_s: its layout priced link by link, with transfers during passes if its software has them, as
    ``scripts/validate_estimates`` does. predicted_step_s: the same layout as one plan among all others. best_step_s:
    the fastest known plan. bound_step_s: no plan that the runtime runs takes less. certified_step_s: the certified
    bound for plans with the best plan's microbatches, chunks and mode; None: there is none, for the reason in
    ``certificate``. because: why the best plan is faster, by simulation.

    excess_bytes: memory of each GPU that plans may hold beyond the planner's estimate of what there is, since the run's
    own layout does; negative: memory that they may not use, so that the best plan fits by the finer estimate.
    best_layout_step_s, best_needed_bytes: the best plan priced link by link, and the memory that its GPUs then need;
    device_bytes: the memory that they have. None: this pricing does not know the plan.

    For rows that surprise: the best steps of plans that keep one thing of the layout, its recomputation, microbatches,
    or t and d, and of plans that leave as much memory free as ``plan`` does; None: not asked, or no such plan. change,
    changed_step_s: the one change of an unstated setting that brings the prediction nearest to the measurement.
    """

    run: str
    source: str
    model: str
    gpu: str
    gpus: int
    batch: int
    tokens: int
    precision: str
    software: str
    runtime: str
    layout: str
    microbatch: int
    published_step_s: float
    layout_step_s: float
    predicted_step_s: float
    best_layout: str
    best_microbatch: int
    best_step_s: float
    bound_step_s: float
    certified_step_s: float | None
    certificate: str
    excess_bytes: float
    because: str
    device_bytes: float
    best_layout_step_s: float | None = None
    best_needed_bytes: float | None = None
    same_recomputation_step_s: float | None = None
    same_microbatch_step_s: float | None = None
    same_degrees_step_s: float | None = None
    usual_room_step_s: float | None = None
    change: str = ""
    changed_step_s: float | None = None

    @property
    def behind(self) -> float:
        """x: how much longer its step is than the best plan's, by the model."""
        return self.predicted_step_s / self.best_step_s - 1.0

    @property
    def finely_behind(self) -> float | None:
        """x with both layouts priced link by link; None: that pricing does not know the best plan."""
        return None if self.best_layout_step_s is None else self.layout_step_s / self.best_layout_step_s - 1.0

    @property
    def gap(self) -> float:
        """The share by which a step could still be below the best plan's."""
        return 1.0 - self.bound_step_s / self.best_step_s

    @property
    def error(self) -> float:
        """y: the error of the prediction; above 0: too slow."""
        return self.predicted_step_s / self.published_step_s - 1.0

    @property
    def is_best(self) -> bool:
        """Whether no plan was found that is faster than the run's own layout."""
        return self.best_step_s == self.predicted_step_s

    @property
    def has_experts(self) -> bool:
        """Whether its experts are spread over ranks."""
        return re.search(r"\bep\d", self.layout) is not None


_READ: Mapping[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "float": float,
    "float | None": lambda text: float(text) if text else None,
}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, in its order; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: Mapping[str, str]) -> Row:
    read: dict[str, Any] = {one.name: _READ[str(one.type)](line[one.name]) for one in fields(Row)}
    return Row(**read)


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Writes the rows, ordered by model, GPU and run."""
    ordered = sorted(rows, key=lambda row: (row.model.lower(), row.gpu, row.gpus, row.run))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in ordered)


def runs_with_pipelines() -> Iterator[PublishedRun]:
    """The runs of papers, logs and vendors' tables whose step is published."""
    for name in ("published", "moe"):
        for run in read_runs(RUNS / f"{name}.json"):
            if (run.pp or 1) > 1 and run.measured_step_s is not None:
                yield run


def asked(run: PublishedRun, hardware: Hardware) -> Question:
    """The run with the least recomputation that its memory needs, if it does not state its recomputation."""
    return question_of(run, as_it_fits(run, laid_out(run, hardware), hardware), hardware)


def workload_file(run: str) -> Path:
    return FOLDER / f"{run}.toml"


def plan_file(run: str) -> Path:
    return FOLDER / f"{run}.plan.json"


def certificate_file(run: str) -> Path:
    return FOLDER / f"{run}.certificate"


def row_of(run: PublishedRun, hardware: Hardware) -> Row:
    """Searches a run and writes its files. Raises NotExpressible or PiperRayError if it has no row."""
    question, answer = _best_that_fits(asked(run, hardware), hardware)
    anew = _price(run, laid_as(question, answer), hardware)
    document = plan_document(answer.workload, answer.plan, None, proof_document(answer.solution), answer.schedule)
    dump(answer.workload, workload_file(run.id))
    write_atomically(plan_file(run.id), to_text(document))
    certified_s, text = _certified(question, answer)
    row = _plain_row(question, answer)
    row = replace(row, certified_step_s=certified_s, certificate=text)
    if anew is not None:
        row = replace(row, best_layout_step_s=anew[0], best_needed_bytes=anew[1])
    if row.behind > SURPRISING:
        row = replace(
            row,
            same_recomputation_step_s=same_recomputation_s(question, answer),
            same_microbatch_step_s=same_microbatch_s(question, answer),
            same_degrees_step_s=same_degrees_s(question, answer),
            usual_room_step_s=usual_room_s(question),
        )
    if abs(row.error) > SURPRISING:
        change, step_s = nearest_change(question, hardware)
        row = replace(row, change=change, changed_step_s=step_s)
    return row


def _best_that_fits(question: Question, hardware: Hardware) -> tuple[Question, Answer]:
    """The best plan that fits by the finer estimate too, found by changing the memory; the run's own layout, which did
    fit, if no such plan is faster."""
    first, there = answer_to(question), question.laid.stack.gpu.device_bytes
    asked_now, answer = question, first
    for _ in range(_ROUNDS):
        anew = _price(question.run, laid_as(asked_now, answer), hardware)
        if anew is None or anew[1] <= there:
            break
        asked_now = granted(asked_now, asked_now.excess_bytes - (anew[1] - there))
        answer = answer_to(asked_now)
    if not question.violations and question.step_s <= answer.step_s:
        return question, with_own(question, first)
    return asked_now, answer


def _price(run: PublishedRun, laid: Laid, hardware: Hardware) -> tuple[float, float] | None:
    """The step in s and the bytes that GPUs need, of a layout priced link by link."""
    try:
        layout = priced(laid.model, laid.stack, hardware.training, laid.layout)
        return simulated(layout).step_s, max(rank.device_bytes for rank in memory_of(layout, run, laid))
    except PiperRayError:
        return None


def _certified(question: Question, answer: Answer) -> tuple[float | None, str]:
    path = certificate_file(question.run.id)
    path.unlink(missing_ok=True)
    try:
        certificate = certificate_of(question, answer)
    except (UsageError, LimitError) as error:
        return None, " ".join(str(error).split())
    write_certificate(certificate, path)
    return certificate.bound_s * answer.workload.microbatches, path.name


def _plain_row(question: Question, answer: Answer) -> Row:
    run, layout = question.run, question.laid.layout
    options = SimulationOptions.of(question.demand.step)
    fastest = simulate(answer.workload, answer.plan, answer.schedule, options=options)
    assert run.gpu is not None
    assert run.measured_step_s is not None
    return Row(
        run=run.id,
        source=run.source,
        model=question.laid.model.name,
        gpu=run.gpu,
        gpus=layout.devices,
        batch=layout.batch,
        tokens=layout.tokens or 0,
        precision=question.laid.stack.precision.value,
        software=question.laid.stack.software.name,
        runtime=question.demand.runtime.title,
        layout=_text(question.instance, question),
        microbatch=layout.samples,
        published_step_s=run.measured_step_s,
        layout_step_s=simulated(question.layout).step_s,
        predicted_step_s=question.step_s,
        best_layout=_text(answer.workload, answer, question.instance),
        best_microbatch=answer.samples,
        best_step_s=answer.step_s,
        bound_step_s=answer.lower_s,
        certified_step_s=None,
        certificate="",
        excess_bytes=question.excess_bytes,
        because="; ".join(reasons(question.simulation, fastest)),
        device_bytes=question.laid.stack.gpu.device_bytes,
    )


def _text(instance: Instance, one: Question | Answer, of: Instance | None = None) -> str:
    """The degrees of a plan, and the configurations of layers that have a choice of recomputation."""
    return f"{shape_text(one.plan, one.schedule)}, {ids_text(of or instance, one.plan)}"


def workload_of_row(row: Row, run: PublishedRun, hardware: Hardware) -> Instance:
    """The workload of a row's files, made again by the estimator from the published run and the plan's microbatch."""
    question = granted(asked(run, hardware), row.excess_bytes)
    instance = question.demand.estimated(row.best_microbatch).instance
    return workload_of(question, row.best_microbatch, load_plan(plan_file(run.id), instance))
