"""``piper-ray plan`` for people: which solve is under way; then speed, utilisation, memory, what would help."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from piper_ray.model.events import (
    Bounds,
    DegreesAdvanced,
    DegreesSearched,
    EvaluationAdvanced,
    EvaluationFinished,
    Event,
    IncumbentFound,
    PartBegun,
)
from piper_ray.model.figures import memory_text, percent_text, plural, share_text, size_text, time_text
from piper_ray.model.restrictions import odd_part
from piper_ray.proposal.cells import CellBegun
from piper_ray.proposal.demand import Proposed
from piper_ray.proposal.plan import Figures
from piper_ray.proposal.propose import FoundPlans, Help
from piper_ray.report.comparison import ComparedPlan, print_comparison, reasons, shape_text
from piper_ray.report.terminal import LiveLog, left_texts, print_lines

_MOST_SHOWN = 5
_MOST_RANKS = 16


def figure_lines(proposal: FoundPlans, figures: Figures) -> Iterator[str]:
    """Step, speed, utilisation, and what the whole training takes where that is known."""
    best = proposal.best
    runtime, simulation = proposal.demand.runtime, best.simulation
    yield (
        f"{runtime.title}, {simulation.schedule.text}: microbatches of {best.samples}, "
        f"{shape_text(best.plan, simulation.schedule)}, {figures.devices:,} of {best.instance.devices:,} GPUs"
    )
    if idle := best.idle_devices:
        yield f"{idle:,} of {best.instance.devices:,} GPUs are idle: {_why_idle(best)}"
    doubt = best.estimate.doubt
    least_s, most_s = doubt.range_s(figures.step_s)
    rates = [f"step {time_text(figures.step_s, 3)} ({time_text(least_s, 3)} to {time_text(most_s, 3)})"]
    if figures.samples_per_s is not None:
        rates.append(f"{figures.samples_per_s:,.1f} samples/s")
    if figures.tokens_per_s is not None:
        rates += [f"{figures.tokens_per_s:,.0f} tokens/s", f"{figures.tokens_per_s_per_device:,.0f} tokens/s/GPU"]
    yield ", ".join([*rates, f"MFU {share_text(figures.mfu)}", f"HFU {share_text(figures.hfu)}"])
    yield from doubt.lines
    yield proof_line(proposal)
    if figures.days is not None:
        cost = "" if figures.cost is None else f", {figures.cost:,.0f} at that price"
        yield f"the training takes {figures.days:,.1f} days{cost}"


def proof_line(proposal: FoundPlans) -> str:
    """What is proved, of all plans together."""
    set_aside_bytes = proposal.demand.set_aside_bytes
    left = f" that leaves {size_text(set_aside_bytes)} for {proposal.demand.runtime.title}" if set_aside_bytes else ""
    combinations = plural(proposal.cells.count, "combination")
    return (
        f"no plan{left} with any of these {combinations} of microbatch size, schedule and modes of layers takes less "
        f"than {time_text(proposal.lower_s, 4)} under this model: gap {percent_text(max(0.0, proposal.gap))}"
    )


def _why_idle(best: Proposed) -> str:
    """What divides what: of plans with d t p devices, d divides the microbatches of a batch."""
    odd, microbatches = odd_part(best.instance.devices), best.instance.microbatches
    if microbatches % odd:
        return (
            f"a plan uses d t p of them, and no d that divides the {microbatches:,} microbatches is a multiple of {odd}"
        )
    return f"a plan uses d t p of them, d divides the {microbatches:,} microbatches, and none on more of them is faster"


def memory_lines(best: Proposed) -> Iterator[str]:
    """The peak of each rank of a pipeline; the fullest ones alone where there are many."""
    simulation = best.simulation
    yield f"memory, of {memory_text(simulation.memory_limit_bytes)} on each GPU:"
    ranks = list(enumerate(simulation.ranks))
    shown = ranks if len(ranks) <= _MOST_RANKS else sorted(ranks, key=lambda x: -x[1].peak_memory_bytes)[:_MOST_RANKS]
    for number, rank in sorted(shown):
        share = rank.peak_memory_bytes / simulation.memory_limit_bytes
        yield f"  rank {number}: {size_text(rank.peak_memory_bytes)}, {100.0 * share:.0f} %"
    if len(shown) < len(ranks):
        yield f"  {plural(len(ranks) - len(shown), 'other rank')} hold less"


def print_others(console: Console, proposal: FoundPlans) -> None:
    """The best plans of other cells, and by how much they lose."""
    plans = [
        ComparedPlan(f"{number}: mbs {one.samples}, {one.simulation.schedule.name.value}", one.plan, one.simulation)
        for number, one in enumerate(proposal.found[:_MOST_SHOWN], start=1)
    ]
    print_comparison(console, proposal.best.instance, plans, letters=proposal.demand.runtime.letters)
    first = plans[0]
    for one in plans[1:]:
        slower = share_text(one.simulation.step_s / first.simulation.step_s - 1.0)
        because = ", ".join(reasons(one.simulation, first.simulation)) or "nothing in particular"
        print_lines(console, [f"{one.name}: {slower} slower; the best plan has {because}"])


def help_lines(best: Proposed, found: Iterable[Help]) -> Iterator[str]:
    """What other clusters would bring."""
    for one in found:
        if one.step_s is None:
            yield f"with {one.what}: no plan was found"
            continue
        gain = 1.0 - one.step_s * best.batch / (one.samples * best.step_s)
        words = f"{percent_text(gain)} less time a sample" if gain > 1e-4 else "no faster"
        yield f"with {one.what}: {words.replace('sample', 'step') if one.samples == best.batch else words}"


_WITH_BOUNDS = (DegreesAdvanced, DegreesSearched, EvaluationAdvanced, EvaluationFinished, IncumbentFound)


class ProposalLog(LiveLog):
    """Watches ``propose``, and then, after ``begin``, ``what_would_help``."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.begin("planning")

    def begin(self, what: str) -> None:
        """A phase of which nothing is known yet. what: is done in it, in words."""
        self._what = what
        self._began_s = time.perf_counter()
        self._solve: CellBegun | None = None
        self._part: PartBegun | None = None
        self._bounds: Bounds | None = None

    def __call__(self, event: CellBegun | Event) -> None:
        if self._ended:
            return
        if isinstance(event, CellBegun):
            self._solve, self._part, self._bounds = event, None, None
        elif isinstance(event, PartBegun):
            self._part, self._bounds = event, None
        elif isinstance(event, _WITH_BOUNDS):
            self._bounds = event.bounds

    def live_line(self) -> Text:
        solve, elapsed_s = self._solve, time.perf_counter() - self._began_s
        if solve is None:
            return Text(f"{self._what}, {elapsed_s:.1f} s", style="dim")
        parts = [f"{solve.number} of {solve.total}: {solve.what}, {elapsed_s:.1f} s"]
        parts += left_texts(elapsed_s, (solve.number - 1) / solve.total)
        if solve.best_s is not None:
            parts.append(f"best {time_text(solve.best_s, 4)}")
        if self._bounds is not None and self._bounds.lower_s > 0.0:
            parts.append(_bounds_text(self._bounds, solve.microbatches))
        if self._part is not None:
            parts.append(self._part.what)
        return Text(", ".join(parts), style="dim")


def _bounds_text(bounds: Bounds, microbatches: int) -> str:
    """The bounds on a step of the solve under way."""
    if bounds.upper_s is None or bounds.gap is None:
        return f"here at least {time_text(microbatches * bounds.lower_s, 4)}"
    return f"here {time_text(microbatches * bounds.upper_s, 4)}, gap {percent_text(bounds.gap)}"
