"""Runs every plan, writes correlation.md, .svg and .png: ``scripts/correlation [--quick] [-o FOLDER] [WORD ...]``."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles

import piper_ray
from piper_ray.model.instance import Instance
from piper_ray.model.passes import passes_of
from piper_ray.model.schedule import AllReduce
from piper_ray.simulate.run import SimulationOptions
from scripts.run_correlation.machine import Machine, measured
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
    page,
    row,
)

GPT = "inputs/pytorch/small_gpt.py:small_gpt"
GPT_ARGUMENTS = {"layers": LAYERS, "width": 256, "heads": 8, "tokens": 128, "words": 2048}
SLEEPERS = "scripts.run_correlation.sleeping:sleepers"
MICROBATCH = 4
COUNTING = "scripts.run_correlation.counting:counting"
BLOCK_S = 0.05
"""What a block sleeps in both passes together: long beside what torch does around it."""


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
    gpt = profiled(GPT, {name: repr(value) for name, value in GPT_ARGUMENTS.items()}, repeats, at_once=2)
    passes_s = sleeping_passes_s(gpt)
    sleeping = profiled(SLEEPERS, {"passes_s": repr(passes_s)}, repeats, at_once=1)
    given.out.mkdir(parents=True, exist_ok=True)
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
    (given.out / "correlation.md").write_text("\n".join(parts))


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
    """All trials, told as they are made."""
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
    """By as many processes at once as a run has, since they share caches and memory: the figures of the first."""
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
    """Those of the GPT's layers, all as many times longer as makes a block ``BLOCK_S``."""
    found = [passes_of(layer.tmpcs[1][0]) for layer in gpt.layers]
    block = next(passes_of(layer.tmpcs[1][0]) for layer in gpt.layers if layer.name == "Block")
    factor = BLOCK_S / (block.forward_s + block.backward_s)
    return tuple((round(factor * one.forward_s, 6), round(factor * one.backward_s, 6)) for one in found)


def point_of(
    trial: Trial, profile: Instance, passes_s: tuple[tuple[float, float], ...], machine: Machine, steps: int
) -> Point:
    instance = profile.replace(
        microbatches=trial.microbatches, bandwidth_bytes_per_s=machine.bandwidth_bytes_per_s, schedule=trial.schedule
    )
    plan = trial.plan(instance)
    held_bytes = [
        sum(instance.layer_by_id[layer].tmpcs[1][0].weights_bytes for layer in stage.layers)
        for stage in plan.by_rank(trial.schedule).stages
    ]
    options = SimulationOptions(all_reduce=AllReduce.RING, optimizer_s=max(held_bytes) * machine.optimizer_s_per_byte)
    predicted = piper_ray.simulate(instance, plan, trial.schedule, options=options)
    run = piper_ray.run(
        SLEEPERS if trial.sleeping else GPT,
        plan,
        instance,
        schedule=trial.schedule,
        steps=steps,
        warm_up=2,
        vertical_sync=trial.vertical_sync,
        arguments_of_model={"passes_s": passes_s} if trial.sleeping else GPT_ARGUMENTS,
    )
    first_s, _, third_s = quantiles(run.steps_s, n=4, method="inclusive")
    return Point(trial, predicted.step_s, run.step_s, third_s - first_s, predicted.promised_s)


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
