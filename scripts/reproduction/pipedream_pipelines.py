"""Section 5 of the PipeDream paper, simulated: what pipelining and replication add, GPipe, memory with
stashed weights, bytes that are sent, and how many minibatches to keep in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

import piper_ray
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.planners import Level, PipeDream
from piper_ray.report.plots import style
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import InFlightRule, SimulationOptions, Transfers
from scripts.reproduction.pipedream_profiles import CLUSTERS, STATES, TITLES, plan_of, profile, states_of, words
from scripts.reproduction.study import PIPEDREAM, Findings, Row, Study, Tell

_DEVICES = 4
_MINIBATCHES = 48
_GIB = 2.0**30
_V100_BYTES = 16e9
_PUBLISHED_OVER_MODEL_PARALLEL = {"vgg16": 14.9, "alexnet": 6.5, "gnmt_large": 2.6, "gnmt": 2.6}
"""Section 5.3: PipeDream's configuration over model parallelism without pipelining, on 4 GPUs of cluster A."""
_PUBLISHED_GPIPE = {"A": (0.55, 0.35), "B": (0.71, 0.42)}
"""Section 5.4: by how much GPipe is slower on 16 GPUs with as many minibatches as PipeDream, and with the most that
fit."""


def _planned(model: str, link: Level, microbatches: int, *, straight: bool = False) -> tuple[Instance, Plan]:
    instance = profile(model, link.machines, microbatches, link.bandwidth_bytes_per_s)
    found = PipeDream((link,), STATES, straight=straight).partition(instance)
    return instance, plan_of(instance, found.stages, found.replication)


def _simulated(
    instance: Instance,
    plan: Plan,
    in_flight: InFlightRule | tuple[int, ...] = InFlightRule.RULE,
    *,
    vertical_sync: bool = False,
    schedule: str = "pipedream",
) -> Simulation:
    """Simulates with transfers during passes, as in PipeDream's runtime."""
    options = SimulationOptions(transfers=Transfers.OVERLAPPED, in_flight=in_flight, vertical_sync=vertical_sync)
    return piper_ray.simulate(instance, plan, schedule, options=options)


def _replication(plan: Plan) -> str:
    return words(tuple(stage.data_parallel_degree for stage in plan.stages))


def _pipelining(tell: Tell) -> Findings:
    link = Level(_DEVICES, CLUSTERS["A"].within_bytes_per_s)
    rows: list[Row] = []
    for model, title in TITLES.items():
        tell(title)
        row: Row = {"model": title}
        for name, straight in (("straight", True), ("best", False)):
            instance, plan = _planned(model, link, _MINIBATCHES, straight=straight)
            alone = _simulated(instance, plan, (1,) * len(plan.stages))
            pipelined = _simulated(instance, plan)
            row |= {
                name: _replication(plan),
                f"{name}_one_minibatch_ms": alone.time_per_sample_s * 1e3,
                f"{name}_pipelined_ms": pipelined.time_per_sample_s * 1e3,
            }
        row["published_over_model_parallel"] = _PUBLISHED_OVER_MODEL_PARALLEL.get(model)
        rows.append(row)
    shown: list[Row] = []
    for row in rows:
        alone_ms, pipelined_ms, hybrid_ms, best_ms = (
            float(str(row[f"{name}_{how}_ms"]))
            for name in ("straight", "best")
            for how in ("one_minibatch", "pipelined")
        )
        published = row["published_over_model_parallel"]
        shown.append(
            {
                "model": row["model"],
                "model parallel (ms)": f"{alone_ms:.4g}",
                "+ pipelining": f"{alone_ms / pipelined_ms:.2f}",
                "hybrid": f"{row['best']}",
                "hybrid (ms)": f"{hybrid_ms:.4g}",
                "hybrid + pipelining": f"{hybrid_ms / best_ms:.2f}",
                "all over model parallel": f"{alone_ms / best_ms:.2f}",
                "measured": "-" if published is None else f"{published:g}",
            }
        )
    about = [
        (
            "On 4 GPUs of one server of cluster A (fig. 14). `model parallel` is the best straight pipeline with one "
            "minibatch in it at a time, `hybrid` is PipeDream's configuration with one. Each `pipelining` column says "
            "how many times as fast it is with as many minibatches in flight as PipeDream keeps."
        ),
        (
            "The paper measured a factor of 2 or more for pipelining with model parallelism, up to 1.8 for hybrids, "
            "and 14.9 (VGG-16), 6.5 (AlexNet) and 2.6 (GNMT) in all. Simulated pipelines gain more for GNMT, since "
            "they have no stalls. They gain less for VGG-16 and AlexNet: no plan on 4 GPUs takes less than a quarter "
            "of the passes' time, which for VGG-16 is 166 ms, 4.9 times as fast. Measured model parallelism must have "
            "lost the rest elsewhere, in transfers for instance."
        ),
    ]
    return Findings(rows, about, {}, shown)


def _against_gpipe(tell: Tell) -> Findings:
    rows: list[Row] = []
    for cluster, published in _PUBLISHED_GPIPE.items():
        tell(f"GNMT-16, 16 GPUs, cluster {cluster}")
        link = Level(16, CLUSTERS[cluster].between_bytes_per_s)
        instance, plan = _planned("gnmt_large", link, _MINIBATCHES, straight=True)
        pipedream_s = _simulated(instance, plan).time_per_sample_s
        most = _most_that_fit(instance, plan)
        for minibatches, measured in zip((len(plan.stages), most), published, strict=True):
            gpipe = _simulated(instance.replace(microbatches=minibatches), plan, schedule="gpipe")
            rows.append(
                {
                    "cluster": cluster,
                    "stages": len(plan.stages),
                    "minibatches": minibatches,
                    "pipedream_ms": pipedream_s * 1e3,
                    "gpipe_ms": gpipe.time_per_sample_s * 1e3,
                    "slowdown": 1.0 - pipedream_s / gpipe.time_per_sample_s,
                    "measured": measured,
                }
            )
    shown: list[Row] = [
        {
            "cluster": row["cluster"],
            "minibatches between flushes": row["minibatches"],
            "PipeDream (ms)": f"{row['pipedream_ms']:.4g}",
            "GPipe (ms)": f"{row['gpipe_ms']:.4g}",
            "slower by": f"{100 * float(str(row['slowdown'])):.0f} %",
            "measured": f"{100 * float(str(row['measured'])):.0f} %",
        }
        for row in rows
    ]
    about = [
        (
            "GNMT-16 on 16 GPUs, both on the best straight pipeline (section 5.4). GPipe runs as many minibatches "
            "between two flushes as there are stages, and as many as fit into 16 GB. `slower by` is the loss of "
            "throughput."
        ),
        (
            "With m minibatches and p equal stages GPipe is idle for (p - 1) / (m + p - 1) of the time, which is 48 % "
            "at m = p = 16. The paper measured more. It does not say how many minibatches fit."
        ),
    ]
    return Findings(rows, about, {}, shown)


def _most_that_fit(instance: Instance, plan: Plan) -> int:
    """The most minibatches between flushes whose activations fit at once, with two versions of the weights."""
    found = 1
    while (
        _simulated(instance.replace(microbatches=found + 1), plan, schedule="gpipe").peak_memory_bytes <= _V100_BYTES
        and found < 256
    ):
        found += 1
    return found


def _memory_and_bytes(tell: Tell) -> Findings:
    link = Level(_DEVICES, CLUSTERS["A"].within_bytes_per_s)
    rows: list[Row] = []
    for model, title in TITLES.items():
        tell(title)
        instance, plan = _planned(model, link, _MINIBATCHES)
        everywhere = plan_of(instance, (tuple(x.id for x in instance.layers),), (_DEVICES,))
        stashed, synced = (_simulated(instance, plan, vertical_sync=synced) for synced in (False, True))
        rows.append(
            {
                "model": title,
                "configuration": _replication(plan),
                "data_parallel_gib": _simulated(instance, everywhere).peak_memory_bytes / _GIB,
                "stashing_gib": stashed.peak_memory_bytes / _GIB,
                "vertical_sync_gib": synced.peak_memory_bytes / _GIB,
                "least_gib": min(rank.peak_memory_bytes for rank in stashed.ranks) / _GIB,
                "data_parallel_sent_mb": _sent_bytes(instance, everywhere) / 1e6,
                "pipeline_sent_mb": _sent_bytes(instance, plan) / 1e6,
            }
        )
    shown: list[Row] = [
        {
            "model": row["model"],
            "configuration": row["configuration"],
            "data parallel (GiB)": f"{row['data_parallel_gib']:.2f}",
            "fullest GPU, stashing (GiB)": f"{row['stashing_gib']:.2f}",
            "emptiest": f"{row['least_gib']:.2f}",
            "fullest GPU, vertical sync (GiB)": f"{row['vertical_sync_gib']:.2f}",
            "data parallel sends (MB)": f"{row['data_parallel_sent_mb']:.0f}",
            "pipeline sends (MB)": f"{row['pipeline_sent_mb']:.0f}",
        }
        for row in rows
    ]
    about = [
        (
            "On 4 GPUs of one server of cluster A (figs. 16 and 17). Memory: the peak of a GPU, with the activations "
            "in flight and a version of the weights for each minibatch in flight. Sent: what all GPUs send for a "
            "minibatch, activations and gradients over borders, and gradients of weights in a ring."
        ),
        (
            "As in the paper, the fullest GPU of a pipeline holds about as much as a GPU under data parallelism for "
            "the translation models. For VGG-16 and ResNet-50 it holds more here: their activations are large, and the "
            "profile keeps the output of every operator. As in the paper, pipelines of AlexNet and GNMT send a "
            "fraction of what data parallelism sends, and that of ResNet-50 sends more. That of VGG-16 sends less in "
            "the paper and as much here: on a link of 11 GB/s no border is expensive, so the planner cuts where the "
            "stages are even."
        ),
    ]
    return Findings(rows, about, {}, shown)


def _sent_bytes(instance: Instance, plan: Plan) -> float:
    """The bytes that all devices send for a minibatch."""
    weights_bytes = {x.id: x.tmpcs[1][0].weights_bytes for x in instance.layers}
    sent = 0.0
    for stage in plan.stages:
        d = stage.data_parallel_degree
        sent += 2.0 * (d - 1) / d * sum(weights_bytes[layer] for layer in stage.layers)
    states = states_of(instance)
    entering = {
        frozenset(states.layers_between(tail, 0)): float(states.entering_bytes[tail]) for tail in range(states.size)
    }
    for number in range(1, len(plan.stages)):
        sent += 2.0 * entering[frozenset(layer for stage in plan.stages[number:] for layer in stage.layers)]
    return sent


def _depth(tell: Tell) -> Findings:
    tell("GNMT-8")
    link = Level(_DEVICES, CLUSTERS["A"].within_bytes_per_s)
    instance, plan = _planned("gnmt", link, _MINIBATCHES, straight=True)
    rows: list[Row] = []
    for depth in range(1, 8):
        in_flight = tuple(max(1, depth - number) for number in range(len(plan.stages)))
        found = _simulated(instance, plan, in_flight)
        rows.append(
            {
                "in_flight": depth,
                "minibatches_per_s": 1.0 / found.time_per_sample_s,
                "peak_gib": found.peak_memory_bytes / _GIB,
                "first_gpu_gib": found.ranks[0].peak_memory_bytes / _GIB,
            }
        )
    shown: list[Row] = [
        {
            "in flight": row["in_flight"],
            "minibatches / s": f"{row['minibatches_per_s']:.2f}",
            "fullest GPU (GiB)": f"{row['peak_gib']:.2f}",
        }
        for row in rows
    ]
    about = [
        (
            "GNMT-8 on 4 GPUs of cluster A: a straight pipeline with a growing number of minibatches in flight on its "
            "first stage, and one fewer on each further stage (fig. 18). PipeDream keeps 4. Up to 4 the throughput "
            "rises; beyond 4 only the memory does. In the paper 7 still gain a little, since passes vary in time there."
        )
    ]
    return Findings(rows, about, {"pipedream-depth": _picture(rows)}, shown)


def _picture(rows: Sequence[Mapping[str, object]]) -> Figure:
    figure, axes = style.panels("GNMT-8 on 4 GPUs: minibatches in flight", ["throughput", "memory of the fullest GPU"])
    depths = [int(str(row["in_flight"])) for row in rows]
    for panel, name, label in zip(axes, ("minibatches_per_s", "peak_gib"), ("minibatches / s", "GiB"), strict=True):
        panel.plot(depths, [float(str(row[name])) for row in rows], marker="o", color=style.COLOURS[0])
        panel.set_xlabel("minibatches in flight on the first stage")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    return figure


STUDIES = (
    Study(
        "pipedream-pipelining",
        "Fig. 14: model and hybrid parallelism, with and without pipelining",
        _pipelining,
        PIPEDREAM,
    ),
    Study("pipedream-gpipe", "Section 5.4: GPipe", _against_gpipe, PIPEDREAM),
    Study("pipedream-memory", "Figs. 16 and 17: memory, and bytes that are sent", _memory_and_bytes, PIPEDREAM),
    Study("pipedream-depth", "Fig. 18: the effect of pipeline depth", _depth, PIPEDREAM),
)
