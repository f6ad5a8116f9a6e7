"""Runs every plan, writes correlation.md, .svg and .png: ``scripts/correlation [--quick] [-o FOLDER] [WORD ...]``.

``scripts/correlation models`` makes the table of five models in some ten minutes, ``scripts/correlation models NAME``
shows one model's row; parts that are not made anew stay.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

import piper_ray
from piper_ray.model.constraints import Restrictions, StageCount
from piper_ray.model.instance import Instance
from piper_ray.model.passes import passes_of
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import AllReduce, Schedule, ScheduleName
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions
from scripts.run_correlation.machine import Machine, measured
from scripts.run_correlation.models import SUBJECTS, Subject
from scripts.run_correlation.plans import ASYNCHRONOUS, LAYERS, LEARNING, TRIALS, Trial
from scripts.run_correlation.report import (
    ASYNCHRONOUS_HEAD,
    HEAD,
    Point,
    agreement,
    asynchronous_page,
    asynchronous_row,
    draw,
    learnt_rows,
    models_page,
    page,
    row,
)

GPT = "inputs/pytorch/small_gpt.py:small_gpt"
GPT_ARGUMENTS: dict[str, object] = {"layers": LAYERS, "width": 256, "heads": 8, "tokens": 128, "words": 2048}
SLEEPERS = "scripts.run_correlation.sleeping:sleepers"
MICROBATCH = 4
COUNTING = "scripts.run_correlation.counting:counting"
_MODELS, _ROUNDS = "models", 5
BLOCK_S = 0.05
"""Seconds that a block sleeps in both passes together, long compared with torch's own work."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/correlation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps: to see that it runs")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs"), help="where the files go")
    parser.add_argument("plans", nargs="*", metavar="WORD", help="only plans whose names have one of these")
    given = parser.parse_args()
    trials, asynchronous = (
        [one for one in trials if not given.plans or any(word in one.name for word in given.plans)]
        for trials in (TRIALS, ASYNCHRONOUS)
    )
    steps, repeats = (4, 5) if given.quick else (20, 30)
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = measured(dict(os.environ))
    given.out.mkdir(parents=True, exist_ok=True)
    if given.plans[:1] == [_MODELS]:
        wanted = [one for one in SUBJECTS if not given.plans[1:] or one.name in given.plans[1:]]
        rounds = 2 if given.quick else _ROUNDS
        subjects = [point_of_model(subject, rounds, steps // rounds, repeats // rounds) for subject in wanted]
        if len(wanted) == len(SUBJECTS):
            write(given.out, [models_page(subjects, len(os.sched_getaffinity(0)), steps)])
        return
    gpt = profiled(GPT, {name: repr(value) for name, value in GPT_ARGUMENTS.items()}, repeats, at_once=2)
    passes_s = sleeping_passes_s(gpt)
    sleeping = profiled(SLEEPERS, {"passes_s": repr(passes_s)}, repeats, at_once=1)
    parts = []
    if trials:
        points = points_of(trials, gpt, sleeping, passes_s, machine, steps, HEAD, row)
        print(f"\n{agreement(points)}\n")
        parts.append(page(points, facts(machine, gpt, steps)))
        draw(points, given.out)
    if asynchronous:
        points = points_of(asynchronous, gpt, sleeping, passes_s, machine, steps, ASYNCHRONOUS_HEAD, asynchronous_row)
        learnt = losses(100 if given.quick else 300)
        parts.append(asynchronous_page(points, learnt))
        print("\n".join(learnt_rows(learnt)))
    write(given.out, parts)


def write(folder: Path, parts: Sequence[str]) -> None:
    """correlation.md, with the parts that are made now in place of those of the same heads."""
    path = folder / "correlation.md"
    known = re.split(r"(?m)^(?=#{1,2} )", path.read_text()) if path.exists() else []
    found = {one.partition("\n")[0]: one.strip() for one in [*known, *parts] if one.strip()}
    path.write_text("\n\n".join(found.values()) + "\n")


def points_of(
    trials: Sequence[Trial],
    gpt: Instance,
    sleeping: Instance,
    passes_s: tuple[tuple[float, float], ...],
    machine: Machine,
    steps: int,
    head: Sequence[str],
    row_of: Callable[[Point], str],
) -> list[Point]:
    """All trials, each printed when it is done."""
    print("\n".join(head))
    points = []
    for trial in trials:
        points.append(point_of(trial, sleeping if trial.sleeping else gpt, passes_s, machine, steps))
        print(row_of(points[-1]), flush=True)
    return points


def losses(steps: int) -> dict[str, tuple[float, ...]]:
    """The loss of each step of a GPT that learns to count, by schedule: two stages, batches of 8 microbatches."""
    instance = profiled(COUNTING, {}, 5, at_once=1).replace(microbatches=8, bandwidth_bytes_per_s=1e9)
    found = {}
    for trial in LEARNING:
        run = piper_ray.run(
            COUNTING,
            trial.plan(instance),
            instance,
            schedule=trial.schedule,
            steps=steps,
            warm_up=0,
            vertical_sync=trial.vertical_sync,
        )
        found[trial.name] = run.losses
    return found


def profiled(model: str, arguments: dict[str, str], repeats: int, *, at_once: int) -> Instance:
    """Profiles with as many processes at once as a run has, since they share caches and memory; returns the first one's
    figures."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.toml" for number in range(at_once)]
        given = [text for name, value in arguments.items() for text in ("--arg", f"{name}={value}")]
        settings = ["--microbatch-size", str(MICROBATCH), "--repeats", str(repeats), "--devices", "8", *given]
        command = [sys.executable, "-m", "piper_ray", "profile", model, *settings]
        processes = [subprocess.Popen([*command, "-o", str(file)], stdout=subprocess.DEVNULL) for file in files]
        if any(process.wait() for process in processes):
            raise SystemExit(f"{model} could not be profiled")
        return piper_ray.load(files[0])


def sleeping_passes_s(gpt: Instance) -> tuple[tuple[float, float], ...]:
    """The seconds of passes of the GPT's layers, scaled so that a block takes ``BLOCK_S``."""
    found = [passes_of(layer.tmpcs[1][0]) for layer in gpt.layers]
    block = next(passes_of(layer.tmpcs[1][0]) for layer in gpt.layers if layer.name == "Block")
    factor = BLOCK_S / (block.forward_s + block.backward_s)
    return tuple((round(factor * one.forward_s, 6), round(factor * one.backward_s, 6)) for one in found)


def point_of(
    trial: Trial, profile: Instance, passes_s: tuple[tuple[float, float], ...], machine: Machine, steps: int
) -> Point:
    subject = Subject("", SLEEPERS, {"passes_s": passes_s}) if trial.sleeping else Subject("", GPT, GPT_ARGUMENTS)
    instance = _as_run(profile, trial, machine)
    return _compared(trial, subject, instance, trial.plan(instance), machine, steps)


def point_of_model(subject: Subject, rounds: int, steps: int, repeats: int) -> Point:
    """The best plan of two stages, as ``piper-ray solve --stages 2`` finds it by the first profile. Profiles and runs
    take turns, so that what else slows the machine for a while slows both; the figures are medians over all rounds."""
    trial = Trial(subject.name, Schedule(ScheduleName.ONE_F_ONE_B), (), 8)
    arguments = {name: repr(value) for name, value in subject.arguments.items()}
    plan, predicted_s, steps_s = None, [], list[float]()
    for _ in range(rounds):
        machine = measured(dict(os.environ))
        instance = _as_run(profiled(subject.spec, arguments, repeats, at_once=2), trial, machine).replace(devices=2)
        plan = plan or piper_ray.solve(instance, restrictions=Restrictions(constraints=[StageCount(2)])).plan
        assert plan is not None
        predicted_s.append(_predicted(trial, instance, plan, machine).step_s)
        steps_s += _run(trial, subject, instance, plan, steps).steps_s
        errors = f"{100.0 * (predicted_s[-1] / median(steps_s[-steps:]) - 1.0):+.1f} %"
        print(f"  {subject.name}: {1e3 * predicted_s[-1]:.1f} ms promised, {errors}", file=sys.stderr, flush=True)
    first_s, _, third_s = quantiles(steps_s, n=4, method="inclusive")
    point = Point(trial, median(predicted_s), median(steps_s), third_s - first_s)
    print(row(point), flush=True)
    return point


def _as_run(profile: Instance, trial: Trial, machine: Machine) -> Instance:
    bytes_per_s = machine.bandwidth_bytes_per_s
    return profile.replace(microbatches=trial.microbatches, bandwidth_bytes_per_s=bytes_per_s, schedule=trial.schedule)


def _compared(trial: Trial, subject: Subject, instance: Instance, plan: Plan, machine: Machine, steps: int) -> Point:
    predicted = _predicted(trial, instance, plan, machine)
    run = _run(trial, subject, instance, plan, steps)
    first_s, _, third_s = quantiles(run.steps_s, n=4, method="inclusive")
    return Point(trial, predicted.step_s, run.step_s, third_s - first_s, predicted.promised_s)


def _predicted(trial: Trial, instance: Instance, plan: Plan, machine: Machine) -> Simulation:
    held_bytes = [
        sum(instance.layer_by_id[layer].tmpcs[1][0].weights_bytes for layer in stage.layers)
        for stage in plan.by_rank(trial.schedule).stages
    ]
    options = SimulationOptions(all_reduce=AllReduce.RING, optimizer_s=max(held_bytes) * machine.optimizer_s_per_byte)
    return piper_ray.simulate(instance, plan, trial.schedule, options=options)


def _run(trial: Trial, subject: Subject, instance: Instance, plan: Plan, steps: int) -> piper_ray.Run:
    return piper_ray.run(
        subject.spec,
        plan,
        instance,
        schedule=trial.schedule,
        steps=steps,
        warm_up=2,
        vertical_sync=trial.vertical_sync,
        arguments_of_model=subject.arguments,
    )


def facts(machine: Machine, gpt: Instance, steps: int) -> list[str]:
    block = next(passes_of(layer.tmpcs[1][0]) for layer in gpt.layers if layer.name == "Block")
    software = f"torch {version('torch')}, Python {platform.python_version()}"
    size = f"{LAYERS} blocks of width {GPT_ARGUMENTS['width']}, {GPT_ARGUMENTS['tokens']} tokens"
    passes = f"{1e3 * block.forward_s:.2f} ms forwards and {1e3 * block.backward_s:.2f} ms backwards"
    sums = f"{machine.bandwidth_bytes_per_s / 1e9:.2f} GB/s"
    updates = f"{1e-9 / machine.optimizer_s_per_byte:.2f} GB of weights a second"
    return [
        f"{software}, {os.cpu_count()} cores ({platform.machine()}); {steps} measured steps a plan.",
        f"The GPT: {size}, microbatches of {MICROBATCH}; a block takes {passes}.",
        f"Gradients are summed at {sums}, AdamW does {updates}.",
    ]


main()
