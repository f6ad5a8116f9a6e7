"""A simulation as a JSON document."""

from __future__ import annotations

from collections import defaultdict

from piper_ray.model.instance import Instance
from piper_ray.report.simulation.findings import findings
from piper_ray.simulate.options import InFlightRule
from piper_ray.simulate.result import RankSimulation, Simulation
from piper_ray.workloads.formats.plan_writer import Document, header


def simulation_document(instance: Instance, simulation: Simulation) -> Document:
    """Everything but the events: ``Simulation.trace`` has those. Times in s, sizes in bytes."""
    options = simulation.options
    return {
        **header("simulation", instance),
        **simulation.schedule.to_dict(),
        "options": {
            "latency_s": options.latency_s,
            "overlap_transfers": options.overlap_transfers,
            "all_reduce": options.all_reduce.value,
            "all_reduce_overlap": options.all_reduce_overlap,
            "optimizer_s": options.optimizer_s,
            "in_flight": options.in_flight.value
            if isinstance(options.in_flight, InFlightRule)
            else list(options.in_flight),
            "samples_per_microbatch": simulation.batch.samples_per_microbatch,
            "tokens_per_sample": simulation.batch.tokens_per_sample,
        },
        "step_s": simulation.step_s,
        "time_per_sample_s": simulation.time_per_sample_s,
        "samples_per_s": simulation.samples_per_s if simulation.step_s > 0 else None,
        "tokens_per_s": simulation.tokens_per_s if simulation.step_s > 0 else None,
        "promised_s": simulation.promised_s,
        "keeps_promise": simulation.keeps_promise,
        "steady": simulation.steady,
        "pipelines": simulation.pipelines,
        "window_s": list(simulation.window_s),
        "bubble_share": simulation.bubble_share,
        "in_flight": None if simulation.in_flight is None else list(simulation.in_flight),
        "sustaining_in_flight": None if simulation.sustaining is None else list(simulation.sustaining),
        "ranks": [_rank_document(rank) for rank in simulation.ranks],
        "critical_path": _critical_path_document(simulation),
        "findings": list(findings(simulation)),
        "notes": list(simulation.notes),
    }


def _rank_document(rank: RankSimulation) -> Document:
    return {
        "stages": [stage + 1 for stage in rank.stages],
        "replica": rank.replica,
        "devices": rank.devices,
        "compute_s": rank.compute_s,
        "communication_s": rank.communication_s,
        "waiting_s": rank.waiting_s,
        "bubble_s": rank.bubble_s,
        "in_flight": list(rank.in_flight),
        "peak_memory_bytes": rank.peak_memory_bytes,
        "weight_versions": None
        if rank.versions is None
        else {"stashed": rank.versions.stashed, "vertical_sync": rank.versions.vertical_sync},
    }


def _critical_path_document(simulation: Simulation) -> list[Document]:
    """How long the path stays on each rank, and with what; ranks in the order of their numbers."""
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in simulation.critical_path:
        seconds[part.rank][part.what] += part.duration_s
    return [{"rank": rank, "seconds": dict(seconds[rank])} for rank in sorted(seconds)]
