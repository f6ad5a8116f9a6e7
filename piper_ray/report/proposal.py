"""What ``piper-ray plan`` found, for people: speed, utilisation, memory, what comes next, what would help."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from piper_ray.model.divided import odd_part
from piper_ray.model.figures import memory_text, percent_text, plural, size_text, time_text
from piper_ray.proposal.figures import Figures
from piper_ray.proposal.propose import Help, Proposal, Proposed, idle_devices
from piper_ray.report.comparison import ComparedPlan, print_comparison, reasons

_MOST_SHOWN = 5
_MOST_RANKS = 16


def print_figures(console: Console, proposal: Proposal, figures: Figures) -> None:
    """Step, speed, utilisation, and what the whole training takes where that is known."""
    best = proposal.best
    runtime = proposal.demand.runtime
    console.print(
        f"{runtime.title}, {best.simulation.schedule.text}: microbatches of {best.samples}, "
        f"{_shape(best)}, {figures.devices:,} of {best.instance.devices:,} GPUs",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    if idle := idle_devices(best):
        _line(console, f"{idle:,} of {best.instance.devices:,} GPUs are idle: {_why_idle(best)}")
    rates = [f"step {time_text(figures.step_s, 4)}"]
    if figures.samples_per_s is not None:
        rates.append(f"{figures.samples_per_s:,.1f} samples/s")
    if figures.tokens_per_s is not None:
        rates += [f"{figures.tokens_per_s:,.0f} tokens/s", f"{figures.tokens_per_s_per_device:,.0f} tokens/s/GPU"]
    rates += [f"MFU {100.0 * figures.mfu:.1f} %", f"HFU {100.0 * figures.hfu:.1f} %"]
    _line(console, ", ".join(rates))
    proved_s = best.solution.lower_bound_s * best.instance.microbatches
    set_aside_bytes = proposal.demand.set_aside_bytes
    left = f" that leaves {size_text(set_aside_bytes)} for {runtime.title}" if set_aside_bytes else ""
    _line(console, f"with these microbatches and this schedule no plan{left} takes less than {time_text(proved_s, 4)}")
    if figures.days is not None:
        cost = "" if figures.cost is None else f", {figures.cost:,.0f} at that price"
        _line(console, f"the training takes {figures.days:,.1f} days{cost}")


def _why_idle(best: Proposed) -> str:
    """What divides what: of plans with d t p devices, d divides the microbatches of a batch."""
    odd, microbatches = odd_part(best.instance.devices), best.instance.microbatches
    if microbatches % odd:
        return (
            f"a plan uses d t p of them, and no d that divides the {microbatches:,} microbatches is a multiple of {odd}"
        )
    return f"a plan uses d t p of them, d divides the {microbatches:,} microbatches, and none on more of them is faster"


def print_memory(console: Console, best: Proposed) -> None:
    """Of each rank of a pipeline, its peak; the fullest ones alone where there are many."""
    simulation = best.simulation
    _line(console, f"memory, of {memory_text(simulation.memory_limit_bytes)} on each GPU:")
    ranks = list(enumerate(simulation.ranks))
    shown = ranks if len(ranks) <= _MOST_RANKS else sorted(ranks, key=lambda x: -x[1].peak_memory_bytes)[:_MOST_RANKS]
    for number, rank in sorted(shown):
        share = rank.peak_memory_bytes / simulation.memory_limit_bytes
        _line(console, f"  rank {number}: {size_text(rank.peak_memory_bytes)}, {100.0 * share:.0f} %")
    if len(shown) < len(ranks):
        _line(console, f"  {plural(len(ranks) - len(shown), 'other rank')} hold less")


def print_others(console: Console, proposal: Proposal) -> None:
    """The best plans of other microbatch sizes and schedules, and by how much they lose."""
    plans = [
        ComparedPlan(f"{one.samples} x {one.simulation.schedule.name.value}", one.plan, one.simulation)
        for one in proposal.found[:_MOST_SHOWN]
    ]
    print_comparison(console, proposal.best.instance, plans, letters=proposal.demand.runtime.letters)
    first = plans[0]
    for one in plans[1:]:
        slower = one.simulation.step_s / first.simulation.step_s - 1.0
        because = ", ".join(reasons(one.simulation, first.simulation)) or "nothing in particular"
        _line(console, f"{one.name}: {100.0 * slower:.1f} % slower; the best plan has {because}")


def print_help(console: Console, best: Proposed, found: Iterable[Help]) -> None:
    """What other clusters would bring."""
    for one in found:
        if one.step_s is None:
            _line(console, f"with {one.what}: no plan was found in time")
            continue
        gain = 1.0 - one.step_s * best.batch / (one.samples * best.step_s)
        words = f"{percent_text(gain)} less time a sample" if gain > 1e-4 else "no faster"
        if one.samples == best.batch:
            words = words.replace("sample", "step")
        _line(console, f"with {one.what}: {words}")


def _shape(one: Proposed) -> str:
    return ComparedPlan("", one.plan, one.simulation).shape_text


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
