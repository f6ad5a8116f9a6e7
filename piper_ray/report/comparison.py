"""Plans of one workload side by side: what a step of each takes, and what makes the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from piper_ray.export.megatron_layout import plan_layout
from piper_ray.model.figures import NEAR_DIGITS, held_text, printable, share_text, time_scale, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.report.terminal import Column, print_fitting, print_lines, print_table
from piper_ray.runtimes.runtime import RUNTIMES
from piper_ray.simulate.result import Simulation

_MATTERS = 0.1
"""A share of the whole difference: a part that makes less of it is left out."""

_NAME_WRAP = 20

_EQUAL = 1e-6
"""Relative. Steps that differ by no more take the same."""


@dataclass(frozen=True)
class StepParts:
    """The parts of a step's time, which add up to it. Each is in s, of a rank.

    compute_s, communication_s: on average over all devices. uneven_s: what the busiest rank is busy beyond the average.
    drain_s: what is left when the busiest rank has nothing to do.
    """

    compute_s: float
    communication_s: float
    uneven_s: float
    drain_s: float


def parts_of(simulation: Simulation) -> StepParts:
    """The parts of a simulated step; of an asynchronous one in the long run."""
    length_s = simulation.length_s
    scale = simulation.step_s / length_s if length_s > 0 else 0.0
    devices = sum(rank.devices for rank in simulation.ranks)
    compute_s = scale * sum(rank.compute_s * rank.devices for rank in simulation.ranks) / devices
    communication_s = scale * sum(rank.communication_s * rank.devices for rank in simulation.ranks) / devices
    busiest_s = scale * max(rank.compute_s + rank.communication_s for rank in simulation.ranks)
    return StepParts(compute_s, communication_s, busiest_s - compute_s - communication_s, simulation.step_s - busiest_s)


_WORDS = {
    "compute_s": ("less work for each device", "more work for each device"),
    "communication_s": ("fewer transfers and sums of gradients", "more transfers and sums of gradients"),
    "uneven_s": ("ranks that are more even", "ranks that are less even"),
    "drain_s": ("less filling and draining", "more filling and draining"),
}


@dataclass(frozen=True)
class ComparedPlan:
    """name: its name for people."""

    name: str
    plan: Plan
    simulation: Simulation

    @property
    def fits(self) -> bool:
        """Whether it keeps within the devices' memory."""
        return not self.simulation.memory_violations


def shape_text(plan: Plan, schedule: Schedule) -> str:
    """``p=8 v=5 d=2 t=4``."""
    ranks = len(plan.stages) // schedule.v
    chunks = f" v={schedule.v}" if schedule.v > 1 else ""
    degrees = {(stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in plan.stages}
    if len(degrees) > 1:
        return f"p={ranks}{chunks} d x t: {plan.degrees_text}"
    d, t = degrees.pop()
    return f"p={ranks}{chunks} d={d} t={t}"


def ids_text(instance: Instance, plan: Plan) -> str:
    """Configurations of the layers that have a choice of recomputation; of all, where none has."""
    every, free = set(), set()
    for stage in plan.stages:
        for layer in stage.layers:
            row = instance.layer_by_id[layer].tmpcs[stage.tensor_parallel_degree]
            every.add(stage.tmpc_ids[layer])
            if len({tmpc.mode.recomputation for tmpc in row}) > 1:
                free.add(stage.tmpc_ids[layer])
    return ", ".join(printable(tmpc_id) for tmpc_id in sorted(free or every))


def reasons(slower: Simulation, faster: Simulation) -> list[str]:
    """Why the one is faster, as phrases with seconds, the largest part first."""
    one, other = parts_of(slower), parts_of(faster)
    gain_s = slower.step_s - faster.step_s
    if gain_s <= _EQUAL * slower.step_s:
        return []
    parts = sorted(((getattr(one, name) - getattr(other, name), name) for name in _WORDS), reverse=True)
    found = [f"{_WORDS[name][0]} ({time_text(part_s)})" for part_s, name in parts if part_s >= _MATTERS * gain_s]
    lost = [f"{_WORDS[name][1]} ({time_text(-part_s)})" for part_s, name in parts if part_s <= -_MATTERS * gain_s]
    return [*found, *(f"despite {text}" for text in reversed(lost))]


def verdict(plans: Sequence[ComparedPlan]) -> str:
    """``yours 10.2 s a step, best 9.4 s (theirs, 7.8 % less)``: the first plan against the fastest one that fits."""
    yours = plans[0]
    fitting = [one for one in plans if one.fits]
    if not fitting:
        return "none of these plans fits into the devices' memory"
    best = min(fitting, key=lambda one: one.simulation.step_s)
    step, least = (time_text(one.simulation.step_s) for one in (yours, best))
    if not yours.fits:
        return f"{yours.name} does not fit into memory; best of the others {best.name}: {least}"
    if best is yours or yours.simulation.step_s <= best.simulation.step_s * (1.0 + _EQUAL):
        return f"{yours.name} is the best of these: {step} a step"
    less = 100.0 * (1.0 - best.simulation.step_s / yours.simulation.step_s)
    return f"{yours.name} {step} a step, best {least} ({best.name}, {less:.2g} % less)"


_PARTS = {
    "compute_s": "work, average of all devices",
    "communication_s": "transfers and sums of gradients, average",
    "uneven_s": "uneven: the busiest rank, beyond the average",
    "drain_s": "filling, draining and waiting",
}


def print_difference(console: Console, plans: Sequence[ComparedPlan]) -> None:
    """The parts of a step of the first plan and of the fastest other one that fits, which add up to both steps."""
    yours, *others = plans
    fitting = [one for one in others if one.fits]
    if not fitting:
        return
    best = min(fitting, key=lambda one: one.simulation.step_s)
    mine, theirs = parts_of(yours.simulation), parts_of(best.simulation)
    pairs = [(words, getattr(mine, name), getattr(theirs, name)) for name, words in _PARTS.items()]
    pairs.append(("step", yours.simulation.step_s, best.simulation.step_s))
    scale = time_scale(yours.simulation.step_s, NEAR_DIGITS)  # one more, as parts are small
    columns = [Column(f"{scale.unit} of a step"), *(Column(x.name, right=True) for x in (yours, best))]
    rows = [[words, scale.text(a), scale.text(b), scale.change_text(b - a)] for words, a, b in pairs]
    print_table(console, [*columns, Column("difference", right=True)], rows)


_HEADS = {"compute_s": "work", "communication_s": "transfers", "uneven_s": "uneven", "drain_s": "draining"}


def print_against_first(console: Console, plans: Sequence[ComparedPlan], spare_bytes: Sequence[float]) -> None:
    """What a step of each plan takes beyond one of the first plan, by its parts. spare_bytes: each plan's least."""
    first, *others = plans
    own, scale = parts_of(first.simulation), time_scale(first.simulation.step_s, NEAR_DIGITS)
    columns = [
        Column(f"{scale.unit}, against {first.name}", right=True),
        *(Column(head, right=True) for head in ("step", *_HEADS.values(), "memory left")),
    ]
    rows = []
    for one, left_bytes in zip(others, spare_bytes[1:], strict=True):
        parts = parts_of(one.simulation)
        more_s = [
            one.simulation.step_s - first.simulation.step_s,
            *(getattr(parts, name) - getattr(own, name) for name in _HEADS),
        ]
        rows.append([one.name, *map(scale.change_text, more_s), held_text(left_bytes)])
    print_table(console, columns, rows)


def print_comparison(console: Console, instance: Instance, plans: Sequence[ComparedPlan]) -> None:
    """What a step of each plan takes, in a table."""
    columns = [Column("plan", wrap=_NAME_WRAP), *map(Column, ("step", "schedule")), Column("shape", wrap=_NAME_WRAP)]
    columns += [Column(head, right=True) for head in ("devices", "bubble", "uneven", "memory")]
    rows = []
    for one in plans:
        parts, step_s = parts_of(one.simulation), one.simulation.step_s
        rows.append([
            one.name,
            time_text(step_s),
            one.simulation.schedule.name.value,
            shape_text(one.plan, one.simulation.schedule),
            f"{one.simulation.devices:,}",
            share_text(one.simulation.bubble_share),
            share_text(parts.uneven_s / step_s),
            held_text(one.simulation.peak_memory_bytes) + ("" if one.fits else ": too much"),
            ids_text(instance, one.plan),
        ])  # fmt: skip
    print_fitting(console, [*columns, Column("layers run as")], rows)


def print_layouts(console: Console, instance: Instance, plans: Sequence[ComparedPlan]) -> None:
    """Layouts of several stages in Megatron's letters, if Megatron trains."""
    others = {runtime.software for runtime in RUNTIMES.values() if not runtime.letters}
    is_megatron = instance.model is not None and instance.model.software not in others
    for one in plans if is_megatron else ():
        layout = plan_layout(instance, one.plan) if len(one.plan.stages) > 1 else None
        if layout is not None:
            print_lines(console, [f"Megatron's layout of {one.name}: {layout}"])


def comparison_document(instance: Instance, plans: Sequence[ComparedPlan]) -> list[dict[str, object]]:
    """For each plan its figures, in s and bytes."""
    return [
        {
            "name": one.name,
            "step_s": one.simulation.step_s,
            **one.simulation.schedule.to_dict(),
            "devices": one.simulation.devices,
            "fits": one.fits,
            "peak_memory_bytes": one.simulation.peak_memory_bytes,
            "bubble_share": one.simulation.bubble_share,
            "parts": vars(parts_of(one.simulation)),
            "layout": plan_layout(instance, one.plan),
        }
        for one in plans
    ]
