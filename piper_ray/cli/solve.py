"""``piper-ray solve``: the fastest plan for a workload on a cluster, or that of a simpler planner to compare with."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import typer

import piper_ray
from piper_ray import (
    Instance,
    Plan,
    ScheduleName,
    SimulationOptions,
    Solution,
    SolveOptions,
    Status,
    StepTerms,
    Stop,
    StoppedBy,
)
from piper_ray.cli import for_runtime, outliving, shared
from piper_ray.cli.certificates import CertificateOutput, refuse_uncertifiable, write_own_certificate
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import flag, option, option_name
from piper_ray.cli.process import others_on_stderr
from piper_ray.cli.telling import Unwritten, note, refuse_unwritable, say, show_document, working, write_document
from piper_ray.cli.values import given
from piper_ray.evaluate import Evaluation, evaluate, evaluation_of
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import EXIT_INTERRUPTED, EXIT_SOLVED, InfeasibleError, InvalidPlan, LimitError, UsageError
from piper_ray.model.events import DegreesSearched, EvaluationFinished, Event, IncumbentFound, Listener
from piper_ray.model.options import EXACT
from piper_ray.model.schedule import FLUSHED, Schedule

if TYPE_CHECKING:
    from rich.console import Console

    from piper_ray.engine.evaluation.backend import Backend
    from piper_ray.simulate.result import Simulation


@dataclass(frozen=True)
class PlannerOption:
    """Who plans."""

    panel: ClassVar[str] = "Search"

    planner: str = option(
        "NAME",
        "piper, the exact one, or one to compare with: pipedream-2bw, megatron, gpipe, data-parallel, tensor-parallel, "
        "pipedream, piper-published; on devices of several kinds even-layers, layers-by-speed, one-kind. Some take "
        "settings, as NAME:KEY=VALUE (the documentation lists them).",
        default=EXACT,
    )


_EXACT_ALONE = (
    "gap", "time_limit_s", "contract", "memory_limit_bytes", "address", "checkpoint", "chunks", "sustained",
    "all_reduce", "all_reduce_overlap", "optimizer_s", "runtime", "plans", "certificate",
)  # fmt: skip


def refuse_search_options(planner: str, given: Collection[str]) -> None:
    """Raises UsageError for an unknown planner, and for options that only the exact one knows."""
    from piper_ray.planners import planner_of

    planner_of(planner)
    for name in _EXACT_ALONE:
        if name in given:
            raise UsageError(f"{option_name(name)} is for the exact planner; --planner {planner} does not take it")


def solve_by_baseline(
    instance: Instance, schedule: Schedule, restrictions: Restrictions, planner: str, out: Path | None, *, json: bool
) -> int:
    """Prints the planner's plan, writes it to ``out``, and returns the exit status."""
    from piper_ray.planners import plan
    from piper_ray.report.document import baseline_document, baseline_facts, plan_document
    from piper_ray.report.summary import cost_text, instance_lines, print_plan, schedule_line, speed_line
    from piper_ray.report.terminal import console, print_lines

    screen = console(stderr=json)
    print_lines(screen, [*instance_lines(instance), schedule_line(schedule)])
    with working(planner):
        result = current().run(lambda _: plan(instance, planner, restrictions=restrictions, schedule=schedule))
    screen.print()
    unwritten = Unwritten()
    if result.plan is None or result.evaluation is None:
        print_lines(screen, [f"{planner}: no plan: {result.note}"])
        if out is not None:
            say(f"there is no plan to write to {out}")
    else:
        if not json:
            print_plan(screen, instance, result.plan, result.evaluation)
            screen.print()
        cost = cost_text(instance, result.evaluation.time_per_sample_s, result.evaluation.devices)
        speed = speed_line(instance, result.evaluation.time_per_sample_s, result.schedule)
        tried = f"{result.note}; best of {result.tried:,}"
        print_lines(screen, [f"{planner}: {cost}; not proved to be the best", speed, tried])
        if out is not None:
            document = plan_document(instance, result.plan, result.evaluation, baseline_facts(result), result.schedule)
            with unwritten.noted():
                write_document(out, document)
    if json:
        show_document(baseline_document(instance, restrictions, result))
    unwritten.report()
    return EXIT_SOLVED if result.plan is not None else InfeasibleError.exit_code


_MOST_ROWS = 12
"""The most rows of a table without --verbose, so that the answer fits a screen of 60 lines."""

_MOST_PLACES = 4
"""The most lines on where ranks are, without --verbose: the exported ranks.csv has all."""

TIME_TOLERANCE = 1e-9
"""Relative difference allowed between the solver's figure for its plan and the independent one."""


@dataclass(frozen=True)
class PlanOutput:
    """Where the plan goes."""

    panel: ClassVar[str] = "Answer"

    out: Path | None = option("FILE", "Write the plan to FILE: Piper's JSON and our figures.", "-o", "--out")
    apart: bool = flag(
        "On devices of several kinds, also find the best pipelines of one kind each, with the microbatches shared out "
        "among these. The faster plan is the answer; with --runtime, which launches no such plan, it is only shown."
    )
    verbose: bool = flag("Show each step of the search as it comes, and all stages and ranks of the plan.")


@dataclass(frozen=True)
class ClusterOptions:
    """Where a solve runs, and where its state is kept."""

    panel: ClassVar[str] = "Ray cluster"

    address: str | None = option(
        "ADDR",
        "Solve on the Ray cluster at ADDR: host:port, auto, or local, which starts Ray on this machine.",
        envvar="RAY_ADDRESS",
    )
    workers: int | None = option("W", "Ray workers, spread over the machines; one on each machine if not given.")
    cpus_per_worker: int | None = option(
        "C", "Cores, and so threads, of each Ray worker; all of its machine's, or its share of them, if not given."
    )
    without_workers: Literal["continue", "wait"] = option(
        "RULE",
        "When the last Ray worker is lost: continue in the driver, or wait for a new one.",
        default="continue",
    )
    checkpoint: str | None = option(
        "DIR-or-URI",
        "Keep the state of the solve there (a folder, or a file://, s3:// or gs:// URI), and continue from it.",
    )
    supervise: bool = flag("Start the solve again when it dies, from where it was. Needs --checkpoint.")

    @contextmanager
    def backend(self, threads: int | None) -> Iterator[Backend | None]:
        """The cluster; None without an address. Raises UsageError for options that do not go together."""
        if not self.address:
            if self.workers is not None:
                raise UsageError("--workers needs --address: the Ray cluster whose workers they are, or local")
            yield None
            return
        from piper_ray.engine.backends import ray
        from piper_ray.engine.backends.ray import session

        if outliving.has_parent():
            session.observe(outliving.tell_of_services)
        backend = ray.RayBackend(
            self.address,
            workers=self.workers,
            cpus_per_worker=self.cpus_per_worker,
            threads=threads,
            without_workers=ray.WithoutWorkers(self.without_workers),
        )
        with closing(backend):
            yield backend


def told(listener: Listener, stop: Stop[Solution]) -> Listener:
    """The listener, which tells the parent of each better answer too. stop: knows the answer so far."""
    if not outliving.has_parent():
        return listener

    def tell(event: Event) -> None:
        listener(event)
        if isinstance(event, (IncumbentFound, EvaluationFinished, DegreesSearched)):
            so_far = stop.answer()
            if so_far is not None:
                tell_of(so_far)

    return tell


def tell_of(solution: Solution) -> None:
    """Tells the parent of the solution, without what takes long to count."""
    if outliving.has_parent():
        outliving.tell(replace(solution, stats=replace(solution.stats, pairs=None)))


def left_solution(heritage: outliving.Left, asked: SolveCommand) -> Solution:
    """The last of a process that was ended. Ends this one with what happened if there is none."""
    found: Solution | None = heritage.answer
    if found is None:
        say(f"{heritage.cause}; nothing had been found yet{asked.going_on()}")
        raise typer.Exit(heritage.exit_code)
    is_final = found.status in (Status.OPTIMAL, Status.INFEASIBLE)
    return found if is_final else replace(found, stopped_by=StoppedBy.PROCESS_LOST)


@dataclass(frozen=True)
class SolveCommand:
    """All options of one call."""

    workload: shared.WorkloadOptions
    written: PlanOutput
    told_as: shared.JsonOption
    kept: shared.RestrictionOptions
    scheduled: shared.ScheduleOptions
    charged: shared.StepOptions
    contracted: shared.ContractOption
    ends: shared.SearchOptions
    planned_by: PlannerOption
    cluster: ClusterOptions
    wanted: for_runtime.RuntimeOptions
    proved: CertificateOutput

    def most(self, rows: int) -> int | None:
        """So many rows of a table; with --verbose all."""
        return None if self.written.verbose else rows

    def going_on(self) -> str:
        """Words that say how to go on after the process was ended."""
        return "" if self.cluster.checkpoint is None else "; the same command goes on from the checkpoint"


def solve(context: typer.Context, asked: SolveCommand) -> None:
    """Find the fastest plan for INPUT, and prove it.

    Ctrl-C stops the search and prints the best plan so far with its gap.
    """
    checkpoint, planner, out = asked.cluster.checkpoint, asked.planned_by.planner, asked.written.out
    if asked.cluster.supervise:
        if checkpoint is None:
            raise UsageError("--supervise needs --checkpoint, which keeps the state from which a new start goes on")
        from piper_ray.cli.supervise import supervise, without_supervise

        raise typer.Exit(supervise(without_supervise(sys.argv[1:]), checkpoint))
    options, restrictions = asked.ends.options(asked.contracted.contract, checkpoint), asked.kept.restrictions()
    step = asked.charged.terms()
    if out is not None:
        refuse_unwritable("--out", out)
    if planner != EXACT:
        refuse_search_options(planner, given(context))
        instance = asked.workload.load()
        schedule = Schedule.first_of(asked.scheduled.schedule, instance.schedule)
        raise typer.Exit(solve_by_baseline(instance, schedule, restrictions, planner, out, json=asked.told_as.json))
    problem = _SolveProblem.of(asked, asked.workload.load(), restrictions, options, step)

    from piper_ray.report.terminal import console

    screen, heritage = console(stderr=asked.told_as.json), outliving.left()
    if heritage is None:
        solution = problem.search(screen)
        outliving.end()
    else:
        solution = left_solution(heritage, asked)
    unwritten = Unwritten()
    problem.answer(screen, solution, unwritten)
    unwritten.report()
    code = exit_code(solution)
    if heritage is not None and solution.stopped_by is StoppedBy.PROCESS_LOST:
        say(heritage.cause + asked.going_on())
        code = heritage.exit_code
    if code != EXIT_SOLVED:
        raise typer.Exit(code)


@dataclass(frozen=True)
class _SolveProblem:
    """What is to be solved. restrictions: also those of the runtime, if there is one."""

    asked: SolveCommand
    instance: Instance
    schedule: Schedule | ScheduleName
    restrictions: Restrictions
    options: SolveOptions
    step: StepTerms
    runtime: for_runtime.RuntimeSolve | None

    @classmethod
    def of(
        cls, asked: SolveCommand, instance: Instance, kept: Restrictions, options: SolveOptions, step: StepTerms
    ) -> _SolveProblem:
        """Raises UsageError for options that do not go together. kept: the user's own restrictions."""
        wanted, certificate = asked.wanted, asked.proved.certificate
        runtime = None
        if wanted.runtime is None:
            schedule, restrictions = asked.scheduled.asked(instance.schedule), kept
        else:
            runtime = for_runtime.RuntimeSolve.of(wanted, instance, asked.scheduled, kept)
            schedule, restrictions = runtime.schedule, runtime.restrictions
        for_runtime.refuse_alternatives(wanted, schedule)
        if asked.written.apart and not (instance.cluster.kinds and Schedule.of(schedule).name in FLUSHED):
            raise UsageError("--apart is for devices of several kinds, under 1f1b and gpipe")
        if certificate is not None:
            refuse_uncertifiable(certificate, instance, Schedule.of(schedule), restrictions, options)
        return cls(asked, instance, schedule, restrictions, options, step, runtime)

    def search(self, screen: Console) -> Solution:
        """Solves it, and shows how the search goes."""
        from piper_ray.cost.schedules import most_chunks
        from piper_ray.report.log import SolverLog
        from piper_ray.report.summary import schedule_line

        with SolverLog(screen, self.options.time_limit_s, verbose=self.asked.written.verbose) as log:
            log.begin(self.instance)
            log.line(schedule_line(Schedule.of(self.schedule), most_chunks(self.schedule)))
            with others_on_stderr(self.asked.told_as.json):
                return current().run(lambda stop: self._solved(log, stop))

    def _solved(self, listener: Listener, stop: Stop[Solution]) -> Solution:
        with self.asked.cluster.backend(self.asked.ends.threads) as backend:

            def solve_one(one: Instance) -> Solution:
                is_first = one is self.instance
                return piper_ray.solve(
                    one,
                    restrictions=self.restrictions,
                    options=self.options if is_first else replace(self.options, resume=None),
                    backend=backend,
                    listener=told(listener, stop),
                    stop=stop if is_first else stop.part(),
                    schedule=self.schedule,
                    step=self.step,
                )

            if self.runtime is None:
                found = solve_one(self.instance)
            else:
                found = self.runtime.with_room(self.instance, solve_one, stop)
            stop.conclude(found)  # a cluster may be slow to let go
            tell_of(found)
        return found

    def answer(self, screen: Console, alone: Solution, unwritten: Unwritten) -> None:
        """Writes the plan, and prints the answer with all else that was asked for. alone: what the search found."""
        from piper_ray.report.apart import apart_document, apart_lines
        from piper_ray.report.summary import print_outcome, print_simulated
        from piper_ray.report.terminal import print_lines

        asked, instance, out = self.asked, self.instance, self.asked.written.out
        in_haste = alone.stopped_by is not None and alone.stopped_by.in_haste
        solution, apart = alone, None
        if asked.written.apart and not in_haste:
            apart = for_runtime.find_apart(
                instance, asked.kept.restrictions(), Schedule.of(self.schedule), self.step, self.options
            )
            if apart is not None and self.runtime is None:  # no runtime launches such plans
                solution = apart.instead_of(solution, instance.microbatches)
        with working("simulating the plan"):
            simulation = simulate_own_plan(instance, solution)
        evaluation = check_own_plan(instance, solution, self.restrictions, simulation)
        if out is not None:  # first: stdout may be a pipe that nobody reads at the moment
            with unwritten.noted():
                _write_plan(out, instance, solution, evaluation)
        screen.print()
        print_outcome(screen, instance, solution)
        if simulation is not None:
            print_simulated(screen, instance, solution, simulation)
        if not asked.told_as.json and solution.plan is not None:
            screen.print()
            self._print_plan(screen, solution.plan, solution.schedule, evaluation, simulation)
        more: dict[str, object] = {}
        if self.runtime is not None and not in_haste:
            more["runtime"] = self._of_runtime(screen, self.runtime, solution, simulation)
        if asked.wanted.plans > 1 and not in_haste:
            screen.print()
            more["alternatives"] = self._alternatives(screen, alone, unwritten)
        if asked.written.apart and not in_haste:
            print_lines(screen, apart_lines(instance, apart, alone))
            more["apart"] = apart_document(apart)
        if (certificate := asked.proved.certificate) is not None:
            own = write_own_certificate(certificate, instance, alone, self.restrictions, self.options, unwritten)
            print_lines(screen, own)
        if asked.told_as.json:
            from piper_ray.report.document import solution_document

            # Last, and in one piece: a solve that dies and is started again prints one document.
            document = solution_document(instance, self.restrictions, self.options, solution, evaluation, simulation)
            show_document(document | more)

    def _print_plan(
        self,
        screen: Console,
        plan: Plan,
        schedule: Schedule,
        evaluation: Evaluation | None,
        simulation: Simulation | None,
    ) -> None:
        from piper_ray.report.simulated import print_simulation
        from piper_ray.report.summary import print_layers, print_plan

        most = self.asked.most(_MOST_ROWS)
        flushed = simulation is not None and not simulation.schedule.asynchronous
        if evaluation is not None and (most is None or not flushed):
            print_plan(screen, self.instance, plan, evaluation, most)
        else:
            print_layers(screen, self.instance, plan, schedule, most)
        if simulation is not None and flushed:
            screen.print()
            print_simulation(screen, self.instance, simulation, most, headed=False)

    def _of_runtime(
        self, screen: Console, runtime: for_runtime.RuntimeSolve, solution: Solution, simulation: Simulation | None
    ) -> dict[str, object]:
        """Prints what the runtime's rules cost and where ranks are. Returns the document's part on it."""
        from piper_ray.report.terminal import print_lines

        free = runtime.without_rules(self.instance, solution, self.options)
        print_lines(screen, runtime.receives_lines(self.instance, solution, simulation))
        places = runtime.rank_lines(self.instance, solution, self.asked.most(_MOST_PLACES))
        print_lines(screen, [runtime.cost_text(solution, free), *places])
        return runtime.document(solution, free)

    def _alternatives(self, screen: Console, alone: Solution, unwritten: Unwritten) -> list[dict[str, object]]:
        """Finds, prints and writes the next best plans. Returns the document's part on them."""
        asked, instance = self.asked, self.instance
        others = for_runtime.find_alternatives(
            instance, self.restrictions, self.schedule, asked.wanted, self.options, alone
        )
        has_letters = self.runtime is None or self.runtime.runtime.letters
        layouts = asked.most(1) if has_letters else 0
        for_runtime.print_alternatives(screen, instance, others, asked.wanted.tolerance, layouts)
        if asked.written.out is not None:
            for_runtime.write_alternatives(asked.written.out, instance, others, unwritten)
        return for_runtime.alternatives_document(instance, others)


def simulate_own_plan(instance: Instance, solution: Solution) -> Simulation | None:
    """The plan, run under the schedule that it is for; None where nobody waits for it: as after an interrupt."""
    if solution.plan is None or (solution.stopped_by is not None and solution.stopped_by.in_haste):
        return None
    if solution.plan.shares:
        return None
    try:
        return piper_ray.simulate(
            instance, solution.plan, solution.schedule, options=SimulationOptions.of(solution.step)
        )
    except LimitError as error:
        note(f"not simulated: {error}")
        return None


def check_own_plan(
    instance: Instance,
    solution: Solution,
    restrictions: Restrictions = Restrictions(),
    simulation: Simulation | None = None,
) -> Evaluation | None:
    """The plan's cost, re-derived by ``evaluate``; None where a plan under a flush was not simulated.

    Raises InvalidPlan if it breaks a rule or costs something else.
    """
    if solution.plan is None:
        return None
    if solution.schedule.asynchronous or solution.plan.shares:
        plan, under = solution.plan, solution.schedule
        evaluation = evaluate(instance, plan, restrictions=restrictions, schedule=under, step=solution.step)
    elif simulation is not None:
        evaluation = evaluation_of(instance, solution.plan, simulation, restrictions)
    else:
        if broken := [*restrictions.violations(instance, solution.plan, solution.schedule)]:
            raise InvalidPlan(broken)
        return None
    _check_time(solution, evaluation.time_per_sample_s)
    return evaluation


def _check_time(solution: Solution, found: float) -> None:
    claimed = solution.time_per_sample_s
    if claimed is None or abs(claimed - found) > TIME_TOLERANCE * found:
        raise InvalidPlan(
            [f"the solver says {claimed} s per microbatch, its plan takes {found} s: a fault of piper-ray"]
        )


def exit_code(solution: Solution) -> int:
    """What a solve's outcome means to a script: a plan within the limits asked for is a success."""
    if solution.stopped_by is StoppedBy.INTERRUPT:
        return EXIT_INTERRUPTED
    if solution.status is Status.INFEASIBLE:
        return InfeasibleError.exit_code
    return EXIT_SOLVED if solution.plan is not None else LimitError.exit_code


def _write_plan(out: Path, instance: Instance, solution: Solution, evaluation: Evaluation | None) -> None:
    if solution.plan is None:
        say(f"there is no plan to write to {out}")
        return

    from piper_ray.report.document import plan_document, proof_document

    document = plan_document(instance, solution.plan, evaluation, proof_document(solution), solution.schedule)
    write_document(out, document)
