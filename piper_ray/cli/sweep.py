"""``piper-ray sweep`` and ``piper-ray sweep-report``: many points, and what they show."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from piper_ray.cli import outliving
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import REQUIRED, argument, flag, option
from piper_ray.cli.process import others_on_stderr
from piper_ray.cli.telling import note, say, working
from piper_ray.model import arguments
from piper_ray.model.errors import EXIT_INTERRUPTED, ClusterError, DatasetDamaged, UsageError
from piper_ray.model.stop import Stop
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray.report.terminal import FindingsTable
    from piper_ray.sweep.findings import Record
    from piper_ray.sweep.plan_findings import PlanRecord


@dataclass(frozen=True)
class SweepCommand:
    """What is solved, where, and where the dataset is kept."""

    source: Path = argument("SWEEP", "The sweep: a TOML file of workloads and points.")
    storage: str = option(
        "DIR-or-URI",
        "Where the dataset is kept: a folder, or a file://, s3:// or gs:// URI.",
        default=REQUIRED,
    )
    resume: bool = flag("Go on with the dataset that is there; finished points are not repeated.")
    address: str | None = option(
        "ADDR",
        "Solve on the Ray cluster at ADDR (host:port, or auto). Without it: a Ray started on this machine (local), or "
        "this process where that is quicker.",
        envvar="RAY_ADDRESS",
    )
    dry_run: bool = flag("Show what SWEEP holds and what it will take; solve nothing.")


@dataclass(frozen=True)
class SweepReportOptions:
    """What a sweep has left, and where its report goes."""

    storage: str = argument("STORAGE", "The dataset of a sweep, finished or not: its URI.")
    out: Path | None = option(
        "DIR",
        "Write tables.md, points.csv, plans.csv and the plots (PNG) to the folder DIR, made if it is not there.",
        "-o",
        "--out",
    )
    price_per_hour: str | None = option(
        "GPU=PRICE,...",
        "The price of an hour of one GPU, by the names of the plans' GPUs, in any currency: costs are in it, else in "
        "GPU hours.",
    )

    @property
    def prices(self) -> dict[str, float]:
        """The prices by GPU. Raises UsageError."""
        found = {}
        for part in filter(None, (self.price_per_hour or "").split(",")):
            gpu, _, price = part.partition("=")
            try:
                found[gpu.strip()] = arguments.number_from("--price-per-hour", float(price), 0.0, "a number >= 0")
            except ValueError:
                expected = "expected GPUs with their prices, such as H100-SXM=2.5,A100-80=1.4"
                raise UsageError(f"--price-per-hour {part}: {expected}") from None
        return found


def sweep(asked: SweepCommand) -> None:
    """Solve every point of SWEEP, each once, and keep plans, bounds and errors in a Parquet dataset.

    Points are on record within a second. A sweep that ends early, whatever ends it, goes on with --resume.
    """
    from piper_ray.report.sweep import SweepLog, outcome_lines
    from piper_ray.report.terminal import console, print_lines
    from piper_ray.sweep.point import Progress

    screen = console()
    if asked.dry_run:
        from piper_ray.report.sweep import print_forecast
        from piper_ray.sweep.demand import Demand
        from piper_ray.sweep.read import read_sweep

        wanted = read_sweep(asked.source, note)
        with working("looking into the points"):
            demand = Demand.of(wanted)
        print_forecast(screen, wanted, demand)
        return
    from piper_ray.engine.backends.ray import session
    from piper_ray.sweep.run import run_sweep

    latest = Progress(points=0, recorded=0)

    def listen(progress: Progress) -> None:
        nonlocal latest
        latest = progress
        outliving.tell(progress)
        log(progress)

    def work(stop: Stop[Progress]) -> Progress:
        stop.offer(lambda: latest)
        if outliving.has_parent():
            session.observe(outliving.tell_of_services)
        return run_sweep(
            asked.source,
            asked.storage,
            resume=asked.resume,
            address=asked.address,
            listener=listen,
            on_warning=log.note,
            stop=stop,
        )

    heritage = outliving.left()
    if heritage is not None:
        print_lines(screen, outcome_lines(heritage.answer or latest))
        say(f"{heritage.cause}; to go on: {_resuming(sys.argv[1:])}")
        raise typer.Exit(heritage.exit_code)
    interrupted = False
    lost: ClusterError | None = None
    try:
        with SweepLog(console(stderr=True)) as log, others_on_stderr(True):
            latest = current().run(work)
            interrupted = latest.left > 0 or latest.points == 0
        outliving.end()
    except KeyboardInterrupt:
        interrupted = True
    except ClusterError as error:
        if latest.points == 0:
            raise
        lost = error
    print_lines(screen, outcome_lines(latest))
    if lost is not None:
        raise ClusterError(f"{lost}; to go on: {_resuming(sys.argv[1:])}") from lost
    if interrupted:
        current().tell(f"to go on: {_resuming(sys.argv[1:])}")
        raise typer.Exit(EXIT_INTERRUPTED)


def _resuming(arguments: list[str]) -> str:
    given = arguments if "--resume" in arguments else [*arguments, "--resume"]
    return shlex.join(["piper-ray", *given])


def sweep_report(dataset: SweepReportOptions) -> None:
    """Show what a sweep found: planners compared, best plans, throughput by devices, errors.

    Of plans: the fastest and the cheapest on each GPU, and which runtime and precision win.
    """
    from piper_ray.report.sweep import tables
    from piper_ray.report.sweep_plans import plan_tables
    from piper_ray.report.terminal import console, print_table
    from piper_ray.sweep import plan_findings
    from piper_ray.sweep.dataset import read_whole_parts
    from piper_ray.sweep.findings import COLUMNS, records_of

    storage, out, prices = dataset.storage, dataset.out, dataset.prices
    with working("reading the dataset"):
        rows, damage = read_whole_parts(storage, list(dict.fromkeys([*COLUMNS, *plan_findings.COLUMNS])))
        records, plans = records_of(rows), plan_findings.plan_records_of(rows)
    if prices and (unpriced := {gpu for plan in plans for gpu in plan.gpu_names} - prices.keys()):
        raise UsageError(f"--price-per-hour: no price of {', '.join(sorted(unpriced))}; expected one of each GPU")
    if not records and not plans:
        _end_with(storage, damage)
        say("the dataset holds no points yet")
        return
    screen = console()
    found = [*tables(records), *plan_tables(plans, prices)]
    for index, table in enumerate(found):
        if index:
            screen.print()
        screen.print(table.title, style="bold", soft_wrap=True)
        print_table(screen, table.columns, table.rows)
    if out is not None:
        _write_report(out, records, plans, prices, found)
    _end_with(storage, damage)


def _write_report(
    out: Path, records: list[Record], plans: list[PlanRecord], prices: dict[str, float], found: list[FindingsTable]
) -> None:
    from piper_ray.model.figures import plural
    from piper_ray.report.plots.curves import figures, plan_figures
    from piper_ray.report.plots.style import save
    from piper_ray.report.sweep import points_csv
    from piper_ray.report.sweep_plans import plans_csv

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be made: {error.strerror or error}") from error
    write_atomically(out / "tables.md", "\n".join(table.markdown() for table in found))
    tabled = {"points.csv": points_csv(records)} if records else {}
    tabled |= {"plans.csv": plans_csv(plans)} if plans else {}
    for name, text in tabled.items():
        write_atomically(out / name, text)
    plots = 0
    with working("drawing") as line:
        for name, figure in (*figures(records), *plan_figures(plans, prices)):
            line(plots, 0, f"{name}.png")
            save(figure, out / f"{name}.png")
            plots += 1
    typer.echo(f"\n{out}: {', '.join(['tables.md', *tabled, plural(plots, 'plot')])}")


def _end_with(storage: str, damage: list[str]) -> None:
    """What is shown is of the parts that are whole: an error unless these are all."""
    from piper_ray.storage.folder import shown

    if damage:
        raise DatasetDamaged(shown(storage), damage)
