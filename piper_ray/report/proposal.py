"""``piper-ray plan`` for people: which solve is under way; then speed, utilisation, memory, what would help."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from piper_ray.export.files import Target
from piper_ray.export.targets import exportable
from piper_ray.model.constraints import choices_made, odd_part
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
from piper_ray.model.figures import (
    held_text,
    percent_text,
    plural,
    range_text,
    rounded,
    rounded_down,
    share_text,
    size_text,
    time_text,
)
from piper_ray.model.mode import Recomputation
from piper_ray.model.plan import Stage
from piper_ray.model.schedule import ScheduleName
from piper_ray.planners.apart import KindsApart
from piper_ray.proposal.cells import FURTHER_GAP, CellBegun, Closing
from piper_ray.proposal.demand import Figures, PlanDemand, Proposed, figures_of
from piper_ray.proposal.layout_words import LayoutWords, differences, layout_words
from piper_ray.proposal.propose import FoundPlans, Help, Theirs
from piper_ray.report.comparison import ComparedPlan, print_difference, reasons
from piper_ray.report.folding import folded
from piper_ray.report.simulated import early_receives_text, overlapped_text
from piper_ray.report.summary import layers_text
from piper_ray.report.terminal import NO_BREAK, Column, LiveLog, left_texts, print_fitting, print_lines, print_table
from piper_ray.workloads.estimate.architectures.multimodal import TOWER_PATH, images_of
from piper_ray.workloads.estimate.doubt import step_text
from piper_ray.workloads.estimate.operators import LayerNode
from piper_ray.workloads.schemes.document import saved_text


class AnswerSize(NamedTuple):
    """How many ranks and how many plans of a proposal are shown."""

    ranks: int
    plans: int


ANSWER_SIZES = tuple(AnswerSize(*each) for each in ((12, 6), (8, 6), (4, 6), (4, 4), (2, 3), (1, 2)))
"""From the largest down: an answer has the first with which it fits a screen."""

SCREEN_COLUMNS = 100
"""Columns of the screen of ``plan``."""

_RUNS_AS_WRAP = 21

_SAME = 5e-4
"""Relative. A smaller change of a step is shown as none."""

_LITTLE_ROOM = 0.01
"""A share of a GPU's memory. A plan that leaves only this much more memory free is not listed for that reason."""

_NO_GAP = 5e-5
"""Smaller gaps are shown as 0."""


@dataclass(frozen=True)
class AskedOfPlan:
    """What was asked for besides a plan. tokens, price_per_hour: of the whole training, and of one GPU. others: plans
    in other precisions that were asked for, by their names; None where there is none. candidates: how many plans are
    written. apart: pipelines of one kind each, and apart_text: what is found
    of them."""

    tokens: float | None = None
    price_per_hour: float | None = None
    others: Mapping[str, Proposed | None] = field(default_factory=dict)
    candidates: int = 1
    apart: KindsApart | None = None
    apart_text: str = ""


def print_plan(
    console: Console,
    proposal: FoundPlans,
    helps: Iterable[Help],
    asked: AskedOfPlan,
    size: AnswerSize = ANSWER_SIZES[0],
) -> None:
    """The whole answer: the plan, what is proved, its stages, other plans, and what changes would bring."""
    figures = figures_of(proposal.best, asked.tokens, asked.price_per_hour)
    print_lines(console, answer_lines(proposal, figures, asked.apart_text))
    console.print()
    _print_stages(console, proposal, size.ranks)
    if len(proposal.found) > 1:
        console.print()
        _print_others(console, proposal, asked.candidates, size.plans)
    rows = [*precision_lines(proposal.best, asked.others), *help_lines(proposal.best, helps)]
    if rows:
        console.print()
        print_lines(console, rows)


def answer_lines(proposal: FoundPlans, figures: Figures, apart: str = "") -> Iterator[str]:
    """What is planned, step, speed, layout, memory, the whole training where that is known, and the proof."""
    best, request = proposal.best, proposal.demand.request
    simulation, instance = best.simulation, best.instance
    tokens = "" if not instance.batch.tokens_per_sample else f" of {plural(instance.batch.tokens_per_sample, 'token')}"
    yield (
        f"{proposal.demand.model.name} on {proposal.demand.gpus_text}, "
        f"{proposal.demand.runtime.title}, {request.precision}, batches of {plural(best.batch, 'sample')}{tokens}"
    )
    doubt = best.estimate.doubt
    yield f"step      {step_text(figures.step_s, doubt)}"
    rates = []
    if figures.tokens_per_s is not None and figures.tokens_per_s_per_device is not None:
        rates += [
            f"{rounded(figures.tokens_per_s)} tokens/s",
            f"{rounded(figures.tokens_per_s_per_device)} tokens/s/GPU",
        ]
    elif figures.samples_per_s is not None:
        rates.append(f"{rounded(figures.samples_per_s)} samples/s")
    hfu = "" if figures.hfu - figures.mfu < _SAME else f", HFU {share_text(figures.hfu)} with recomputation"
    yield from _wrapped(
        "speed", f"{', '.join(rates)}, MFU {share_text(figures.mfu)} of {all_gpus(instance.devices)}{hfu}"
    )
    if figures.days is not None:
        cost = "" if figures.cost is None else f", which cost {rounded(figures.cost)} at that price"
        yield f"training  {rounded(figures.days)} days{cost}"
    yield from _wrapped("layout", layout_words(best).text)
    images, (height, width), each = images_of(proposal.demand.model.config)
    if images:
        seen = f"{plural(images, 'image')} of {height} x {width} a sample, {each:,} of its tokens"
        yield from _wrapped("vision", f"{seen}{' each' if images > 1 else ''}; {_tower_text(best)}")
    if best.idle_devices:
        yield from _wrapped("idle", f"{best.idle_devices:,} of {instance.devices:,} GPUs: {_why_idle(best)}")
    fullest = max(simulation.ranks, key=lambda rank: rank.peak_memory_bytes / rank.memory_limit_bytes)
    limit_bytes = proposal.demand.whole_bytes(fullest.memory_limit_bytes)
    peak_bytes = fullest.peak_memory_bytes
    left_bytes, held_bytes = limit_bytes - peak_bytes, proposal.demand.set_aside_bytes
    held = f", {held_text(held_bytes)} of it for {proposal.demand.runtime.title}" if held_bytes else ""
    yield from _wrapped(
        "memory",
        f"{held_text(peak_bytes)} of {held_text(limit_bytes)} on the fullest GPU "
        f"({doubt.memory.range_text(peak_bytes)}), {held_text(left_bytes)} "
        f"({100.0 * left_bytes / limit_bytes:.0f} %) free{held}{_outside_text(best, limit_bytes)}",
    )
    if best.on_host:
        yield from _wrapped("host", _host_text(proposal.demand, best))
    if proposal.demand.headroom.is_usual:
        share = proposal.demand.headroom.share
        over = f"{100.0 * share / (1.0 - share):.1f} %"
        yield from _wrapped(
            "room",
            f"{held_text(_free_bytes(proposal))} ({share_text(share)}) of each GPU stay free, because 1 in 10 "
            f"published peaks exceeded the estimate by {over} or more; --headroom 0 plans with all of it",
        )
    receives = early_receives_text(instance, best.plan, simulation) if proposal.demand.runtime.one_stream else ""
    if receives:
        yield from _wrapped("receives", receives)
    elif not proposal.demand.runtime.one_stream and simulation.schedule.name is ScheduleName.INTERLEAVED:
        yield from _wrapped("overlap", overlapped_text(instance, best.plan, simulation))
    if doubt.few:
        yield from _wrapped("doubt", doubt.few_text)
    yield from _wrapped("proof", proof_line(proposal))
    if apart:
        yield from _wrapped(
            "apart",
            f"{apart}; no runtime here launches these, and piper-ray solve --apart shows them for the workload.toml "
            "that -o writes",
        )
    if proposal.schemes_save is not None:
        yield from _wrapped("schemes", saved_text(proposal.schemes_save))


def all_gpus(devices: int) -> str:
    """``all 64 GPUs``, of a cluster."""
    return f"all {devices:,} GPUs" if devices > 1 else "the one GPU"


def _host_text(demand: PlanDemand, best: Proposed) -> str:
    """What the optimizer's state in host memory takes there, and of a step."""
    nodes, gpu, stages = best.estimate.architecture.nodes, best.estimate.setting.gpu, best.plan.stages
    held = [
        sum(nodes[layer].kind.parameters for place in rank.stages for layer in stages[place].layers)
        for rank in best.simulation.ranks
    ]
    each, rate = stages[0].data_parallel_degree * stages[0].tensor_parallel_degree, gpu.host_updates_per_s
    node_bytes = best.host_bytes(demand.request.node_of(gpu))
    return (
        f"the optimizer's state takes {held_text(node_bytes)} of the {held_text(demand.host_bytes)} of host memory of "
        "the fullest node (--host-memory changes that size), and its update "
        f"{time_text(max(held) / each / rate, 3)} of the step, at {rounded(rate / 1e6)} M parameters/s for each GPU: "
        "published rates differ by a factor of five (host_updates of --hardware sets yours; --no-optimizer-on-host "
        "keeps the state on the GPUs)"
    )


def _tower_text(best: Proposed) -> str:
    """Where a vision tower and its projector are, and their share of the work and of the memory there."""
    nodes, ranks, tower_s, all_s = best.estimate.architecture.nodes, [], 0.0, 0.0
    held_bytes: list[float] = []
    for rank, held in enumerate(best.simulation.ranks):
        seeing_s = seeing_bytes = whole_s = 0.0
        for place, in_flight in zip(held.stages, held.in_flight, strict=True):
            stage = best.plan.stages[place]
            for layer, _, tmpc in choices_made(best.instance, stage):
                whole_s += tmpc.time_per_sample_s
                if _seeing(nodes[layer]):
                    seeing_s += tmpc.time_per_sample_s
                    shared_bytes = tmpc.shared_bytes / stage.data_parallel_degree
                    seeing_bytes += tmpc.fixed_bytes + shared_bytes + in_flight * tmpc.activation_bytes
        if seeing_s > 0.0:
            ranks.append(rank)
            held_bytes.append(seeing_bytes)
            tower_s, all_s = tower_s + seeing_s, all_s + whole_s
    parameters = sum(node.kind.parameters for node in nodes if _seeing(node))
    where = f"pipeline rank{'s' if len(ranks) > 1 else ''} {range_text(ranks)}"
    return (
        f"tower and projector ({rounded(parameters / 1e6)} M parameters, trained with the rest) are on {where}: "
        f"{share_text(tower_s / all_s)} of the work there and {held_text(max(held_bytes))} of a GPU's memory"
        f"{_undivided_text(nodes)}"
    )


def _undivided_text(nodes: Sequence[LayerNode]) -> str:
    """A sentence on a tower that tensor parallelism does not divide. The decoder behind it is not divided either,
    because all stages have one degree."""
    heads = {count for node in nodes if _seeing(node) for count in node.kind.heads if count % 2}
    return "".join(f"; its {count} heads are not divided, so TP is 1" for count in sorted(heads))


def _seeing(node: LayerNode) -> bool:
    return node.path.startswith(TOWER_PATH)


def _outside_text(best: Proposed, limit_bytes: float) -> str:
    """What a GPU has beyond the memory of which plans may use some, and for what."""
    if best.estimate.kinds:
        return ""
    device_bytes = best.estimate.setting.gpu.device_bytes
    return (
        f"; the other {held_text(device_bytes - limit_bytes)} of a GPU's {held_text(device_bytes)} are for CUDA, NCCL, "
        "fragments of the allocator and the backward pass of a layer"
    )


def _wrapped(head: str, text: str) -> list[str]:
    return folded(f"{head:<10}{text}", SCREEN_COLUMNS)


def proof_line(proposal: FoundPlans) -> str:
    """What is proved, of all plans together."""
    demand = proposal.demand
    left = ""
    if demand.headroom:
        left = f", {held_text(_free_bytes(proposal))} of each GPU kept free"
    elif demand.set_aside_bytes:
        left = f", {size_text(demand.set_aside_bytes)} kept free for {demand.runtime.title}"
    combinations = plural(proposal.cells.count, "combination")
    return (
        f"{combinations} of microbatch size, schedule, sharding and recomputation compared{demand.layouts_text}{left}: "
        f"by these estimates no plan {no_plan_text(proposal)}, gap {gap_text(proposal.gap)}{_open_text(proposal)}"
    )


def _free_bytes(proposal: FoundPlans) -> float:
    """The bytes of each GPU that all plans leave free."""
    memory_bytes = proposal.best.instance.memory_bytes
    return proposal.demand.whole_bytes(memory_bytes) - memory_bytes


def no_plan_text(proposal: FoundPlans) -> str:
    """What no plan does. A bound that is rounded down would look as if it were below the step of a proved plan."""
    if proposal.gap < _NO_GAP:
        return "is faster"
    return f"takes less than {time_text(rounded_down(proposal.lower_s), 3)}"


def _open_text(proposal: FoundPlans) -> str:
    """What leaves a gap: of a large one, which combinations."""
    large = proposal.gap > _SMALL_GAP
    near_s = proposal.best.step_s * (1.0 - (_SMALL_GAP if large else _LEAST_GAP))
    held = [cell for cell in proposal.cells.cells if cell.lower_s < near_s]
    if not held:
        return "" if proposal.gap < _NO_GAP else f": a search stops once its gap is below {gap_text(_LEAST_GAP)}"
    schedules = " and ".join(dict.fromkeys(cell.schedule.value for cell in held))
    unsearched = sum(cell.closing is Closing.LEFT_OPEN for cell in held)
    if not large and not unsearched:
        return f": a search under {schedules} stops once its gap is below {gap_text(_SMALL_GAP)}"
    ends = "whose search ends" if len(held) == 1 else "whose searches end"
    why = f"of which {unsearched:,} were not searched" if unsearched else f"{ends} after a fixed amount of work"
    if proposal.gap < FURTHER_GAP and not unsearched and not any(cell.has_kinds for cell in held):
        why = f"{ends} once it is below {gap_text(FURTHER_GAP)}"
    return f", left by {plural(len(held), 'combination')} under {schedules}, {why}"


def unfinished_text(known: FoundPlans) -> str:
    """What is known where a search ended before the first plan."""
    cells = known.cells.cells
    if not cells:
        return "no plan yet: the combinations were still being priced"
    looked = sum(cell.closing in (Closing.SEARCHED, Closing.NO_PLAN) for cell in cells)
    at_least = f", and none takes less than {time_text(rounded_down(known.lower_s), 3)} a step" if known.lower_s else ""
    return f"no plan yet: {looked:,} of {plural(len(cells), 'combination')} were looked at{at_least}"


def gap_text(gap: float) -> str:
    """``0.41 %``; a gap that rounds to nothing is ``0 %``."""
    return "0 %" if gap < _NO_GAP else f"{100.0 * gap:.2g} %"


_LEAST_GAP, _SMALL_GAP = 1e-4, 0.005
"""The gaps that searches leave open, without chunks and with chunks."""

_NONE_FASTER = "no plan that was found on more of them is faster"


_PRODUCT = "DP x TP x CP x PP"


def _why_idle(best: Proposed) -> str:
    """What divides what: of plans with d t p devices, d divides the microbatches of a batch."""
    odd, microbatches = odd_part(best.instance.devices), best.instance.microbatches
    if best.instance.cluster.kinds:
        where = "at one site" if best.instance.kind_word == "site" else "of one kind"
        return f"stages take whole groups of d t GPUs {where}, and {_NONE_FASTER}"
    divided = f"the {microbatches:,} microbatches" if microbatches > 1 else "the one microbatch"
    if microbatches % odd:
        return f"a plan uses {_PRODUCT} of them; DP divides {divided}, so it is no multiple of {odd}; {_NONE_FASTER}"
    return f"a plan uses {_PRODUCT} of them, DP divides {divided}, and {_NONE_FASTER}"


def _print_stages(console: Console, proposal: FoundPlans, most: int) -> None:
    """The layers of each rank of a pipeline, and its memory; of more than ``most`` ranks the fullest."""
    best = proposal.best
    simulation, stages, kinds = best.simulation, best.plan.stages, bool(best.instance.cluster.kinds)
    count, schedule = len(simulation.ranks), simulation.schedule
    ranks = sorted(range(count), key=lambda rank: -simulation.ranks[rank].peak_memory_bytes)
    shown = sorted(ranks[:most])
    recomputed = [_recomputed(best, stage) for stage in stages]
    differ = _recomputes_some(best)
    columns = [Column("rank", right=True), Column("layers", wrap=56 if differ else 76), Column("memory", right=True)]
    columns += [Column("recomputed", right=True)] if differ else []
    if kinds:
        columns.insert(1, Column("GPUs"))
    rows = []
    for rank in shown:
        own = schedule.stages_of_rank(rank, count)
        layers = " | ".join(layers_text(best.instance, stages[place].layers, 60) for place in own)
        if schedule.v > 1:
            layers = " | ".join(range_text(stages[place].layers) for place in own)
        peak_bytes = simulation.ranks[rank].peak_memory_bytes
        whole_bytes = proposal.demand.whole_bytes(simulation.ranks[rank].memory_limit_bytes)
        row = [str(rank), layers, f"{held_text(peak_bytes)}, {100.0 * peak_bytes / whole_bytes:.0f} %"]
        if kinds:
            row.insert(1, f"{stages[rank].devices:,} {stages[rank].kind}")
        rows.append([*row, str(sum(recomputed[place] for place in own))] if differ else row)
    print_table(console, columns, rows)
    if len(shown) < count:
        others = count - len(shown)
        print_lines(console, [f"      {plural(others, 'other rank')} hold{'s' if others == 1 else ''} less"])
    if schedule.v > 1:
        print_lines(console, [f"|: between the {schedule.v} chunks of a rank (virtual pipeline stages)"])


def _recomputed(best: Proposed, stage: Stage) -> int:
    """The layers of a stage that compute anything again."""
    chosen = choices_made(best.instance, stage)
    return sum(tmpc.mode.recomputation != Recomputation.NONE for _, _, tmpc in chosen)


def _recomputes_some(best: Proposed) -> bool:
    """Whether of layers of one kind some compute something again and others do not."""
    found: dict[str, set[bool]] = {}
    for stage in best.plan.stages:
        for layer, _, tmpc in choices_made(best.instance, stage):
            kind = best.estimate.architecture.nodes[layer].kind.key
            found.setdefault(kind, set()).add(tmpc.mode.recomputation != Recomputation.NONE)
    return any(len(both) > 1 for both in found.values())


OF_WORDS = ("schedule", "runs as", "simpler in")
"""Columns of other plans that are no numbers."""


def other_plans(proposal: FoundPlans) -> tuple[list[str], list[list[str]]]:
    """The plan and the best ones of other cells, by how much they lose and what each is simpler in: heads, and rows."""
    heads = ["step", "slower", "mbs", "TP", "CP", "PP", "DP", "EP", "schedule", "runs as", "memory", "simpler in"]
    rows = [row for row, _ in listed_plans(proposal, proposal.listed)]
    kept = [place for place, head in enumerate(heads) if head != "EP" or any(row[place] != "-" for row in rows)]
    return [heads[place] for place in kept], [[row[place] for place in kept] for row in rows]


def listed_plans(proposal: FoundPlans, plans: Sequence[Proposed]) -> list[tuple[list[str], Proposed]]:
    """Plans of the proposal with their rows. Of plans that differ in nothing but what is recomputed, each leaves more
    memory free than the faster ones. plans: the fastest first."""
    best, found = layout_words(proposal.best), list[tuple[list[str], Proposed]]()
    least_bytes: dict[LayoutWords, float] = {}
    for one in plans:
        own, peak_bytes = best if one is proposal.best else layout_words(one), one.simulation.peak_memory_bytes
        layout = replace(own, recomputation=None)
        if peak_bytes + _LITTLE_ROOM * one.simulation.memory_limit_bytes < least_bytes.get(layout, math.inf):
            least_bytes[layout] = peak_bytes
            found.append((_other_row(one, own, proposal.best, best), one))
    return found


def _print_others(console: Console, proposal: FoundPlans, candidates: int, most: int) -> None:
    heads, rows = other_plans(proposal)
    wraps = {"runs as": _RUNS_AS_WRAP}
    columns = [Column(head, right=head not in OF_WORDS, wrap=wraps.get(head)) for head in heads]
    print_fitting(console, columns, rows[:most], SCREEN_COLUMNS)
    if len(rows) > most:
        print_lines(console, [f"{plural(len(rows) - most, 'further plan')} in report.html (-o DIR)"])
    print_lines(console, settling_lines(proposal, candidates))


_MEASURED = 3
"""Where intervals cover several plans, measuring this many of them leaves 0 to 1.2 % to gain."""


def settling_lines(proposal: FoundPlans, candidates: int = 1) -> list[str]:
    """What settles which plan is the fastest, where others lie within what a step of it may take. candidates: how many
    plans are written as jobs to measure, which is not advised where no launch file is."""
    best = proposal.best
    _, most_s = best.estimate.doubt.range_s(best.step_s)
    close = sum(one.step_s <= most_s for _, one in listed_plans(proposal, proposal.listed))
    if close < 2 or proposal.demand.further:  # of which no candidates are written
        return []
    count = min(close, _MEASURED)
    model, target = best.instance.model, Target(proposal.demand.runtime.name.value)
    is_launched = model is None or exportable(model, target) is None
    asked = f"; to measure the first {count}: --candidates {count} -o DIR" if candidates < count and is_launched else ""
    return [f"{close} plans lie within the range of the first{asked}"]


def _other_row(one: Proposed, own: LayoutWords, best: Proposed, words: LayoutWords) -> list[str]:
    simpler = own.simpler_in(words)
    spare_bytes = best.simulation.peak_memory_bytes - one.simulation.peak_memory_bytes
    if spare_bytes > _LITTLE_ROOM * one.simulation.memory_limit_bytes:
        simpler.append(f"less{NO_BREAK}memory")
    schedule = own.schedule if own.chunks == 1 else f"{own.schedule} x{own.chunks}"
    return [
        time_text(one.step_s, 3),
        "" if one is best else change_text(one.step_s / best.step_s - 1.0),
        str(own.microbatch),
        "/".join(str(degree) for _, degree in own.tensor_of) or str(own.tensor),
        *(str(number) for number in (own.context, own.pipeline, own.data)),
        "-" if own.expert is None else str(own.expert),
        schedule.replace(" ", NO_BREAK),
        ", ".join(
            [
                own.sharing.replace(" ", NO_BREAK),
                *["SP"] * own.sequence_parallel,
                *["at each site"] * own.each_site,
                *_recomputes(own),
            ]
        ),
        held_text(one.simulation.peak_memory_bytes),
        "the plan" if one is best else ", ".join(simpler),
    ]


_RECOMPUTES = "recomputes"


def _recomputes(words: LayoutWords) -> list[str]:
    """What a table's cell says of recomputation."""
    if words.recomputation == Recomputation.NONE:
        return []
    if words.recomputation is None:
        return [f"{_RECOMPUTES} by stage"]
    return [f"{_RECOMPUTES} {', '.join(words.recomputation.parts)}"]


def change_text(change: float) -> str:
    """``+1.3 %``, ``-0.7 %``, ``+74 %``, ``the same``."""
    if abs(change) < _SAME:
        return "the same"
    digits = 0 if abs(change) >= 0.0995 else 1
    return f"{100.0 * change:+.{digits}f} %"


def precision_lines(best: Proposed, others: Mapping[str, Proposed | None]) -> Iterator[str]:
    """A row for each further precision that was asked for."""
    for precision, one in others.items():
        if one is None:
            yield f"in {precision}: no plan fits"
        else:
            change = change_text(one.step_s / best.step_s - 1.0)
            text = f"in {precision}: {time_text(one.step_s, 3)} a step, {change}: {layout_words(one).text}"
            yield from folded(text, SCREEN_COLUMNS)


def help_lines(best: Proposed, found: Iterable[Help]) -> Iterator[str]:
    """What other clusters, batches and precisions would bring."""
    for one in found:
        if one.found is None:
            yield f"with {one.what}: no plan fits" if one.precision is None else f"in {one.precision}: no plan fits"
        elif one.precision is not None:
            step = f"in {one.precision} {time_text(one.found.step_s, 3)} a step"
            if one.found.step_s >= best.step_s * (1.0 - _SAME):
                yield f"{step}, no faster"
            else:
                change = change_text(one.found.step_s / best.step_s - 1.0)
                yield f"{step}, {change}: not chosen, because it changes the training (--precision {one.precision})"
        elif one.found.batch != best.batch:
            uses = f" uses {'all ' if not one.found.idle_devices else ''}{one.found.devices:,} GPUs"
            gain = one.samples_per_s * best.step_s / best.batch - 1.0
            what = "tokens" if best.instance.batch.tokens_per_sample else "samples"
            said = f"{one.what}{uses}" if best.idle_devices else f"with {one.what}"
            yield f"{said}: {change_text(gain)} {what}/s"
        else:
            yield f"with {one.what}: step {change_text(one.found.step_s / best.step_s - 1.0)}"


def against_lines(proposal: FoundPlans, theirs: Theirs) -> Iterator[str]:
    """Their plan compared with the best one: time, memory, what differs, and why it is not the plan."""
    best, own = proposal.best, theirs.plan
    step_s = own.step_s * best.batch / own.batch  # whose pipelines may run empty several times in a batch
    step = f"{time_text(step_s, 3)} a step, {change_text(_per_sample(own) / _per_sample(best) - 1.0)}"
    if own.devices != best.devices:
        step = f"on {own.devices:,} GPUs, where the plan uses {best.devices:,}: {step}"
    held = f"{held_text(own.simulation.peak_memory_bytes)} on the fullest GPU"
    yield from _indented(f"{theirs.name}: {step}, {held}: {layout_words(own).text}")
    if _runs_as(own, best):
        yield "it is the plan"
    else:
        yield from _indented(f"it has {differences(layout_words(own), layout_words(best))}")
        yield from _indented(f"why it is not the plan: {why_not(proposal, theirs)}")
    yield from (line for text in theirs.notes for line in _indented(f"note: {text}"))


def print_against(console: Console, proposal: FoundPlans, theirs: Theirs) -> None:
    """``against_lines``, and the parts of both steps where they are of one batch."""
    print_lines(console, ["", *against_lines(proposal, theirs)])
    best, own = proposal.best, theirs.plan
    if own.batch == best.batch and not _runs_as(own, best):
        console.print()
        print_difference(
            console,
            [
                ComparedPlan("yours", own.plan, own.simulation),
                ComparedPlan("plan", best.plan, best.simulation),
            ],
        )


def _runs_as(one: Proposed, other: Proposed) -> bool:
    """Whether the two have the same microbatches, stages, schedule, place of the optimizer's state and dispatcher."""
    mine, theirs = (
        (x.samples, x.on_host, x.plan.stages, x.simulation.schedule, layout_words(x).dispatcher) for x in (one, other)
    )
    return mine == theirs


def why_not(proposal: FoundPlans, theirs: Theirs) -> str:
    """Why theirs is not the plan, in words."""
    best, own = proposal.best, theirs.plan
    if violations := own.simulation.memory_violations:
        return f"it does not fit: {violations[0]}"
    if not theirs.hosts_hold:
        node_bytes = own.host_bytes(proposal.demand.request.node_of(own.estimate.setting.gpu))
        there = held_text(proposal.demand.host_bytes)
        return (
            f"it does not fit: the optimizer's state takes {held_text(node_bytes)} of a node's {there} of host memory"
        )
    if _per_sample(own) < _per_sample(best) * (1.0 - 1e-9):
        return (
            "it is faster: it leaves less memory free (--headroom), or was not tried (--expert-parallel, --dispatcher)"
        )
    if _per_sample(own) <= _per_sample(best) * (1.0 + _SAME):
        return "it takes the same"
    if own.devices < best.devices and proposal.demand.further:
        return f"it uses {own.devices:,} of {own.instance.devices:,} GPUs"
    if own.devices < best.devices:
        nodes = -(-own.devices // proposal.demand.request.node_of(own.estimate.setting.gpu))
        return f"it uses {own.devices:,} of {own.instance.devices:,} GPUs; --nodes {nodes} plans for as many"
    if own.batch != best.batch:
        return f"its pipelines run empty after every {own.batch:,} samples"
    return f"the plan has {', '.join(reasons(own.simulation, best.simulation)) or 'nothing in particular'}"


def _per_sample(one: Proposed) -> float:
    return one.step_s / one.batch


def _indented(text: str) -> list[str]:
    return folded(text, SCREEN_COLUMNS)


def verbose_lines(proposal: FoundPlans) -> Iterator[str]:
    """What was tried: each cell, the least bound first, and how it was closed; and what was not tried."""
    yield from proposal.refused
    for cell in sorted(proposal.cells.cells, key=lambda cell: cell.lower_s):
        best = "" if cell.found is None else f", best {time_text(cell.found.step_s, 4)}"
        bound = "" if cell.closing is Closing.NO_PLAN else f", at least {time_text(cell.lower_s, 4)}"
        yield f"{cell.text}: {cell.closing.value}{bound}{best}"


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
