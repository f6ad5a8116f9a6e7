"""``piper-ray plan``: from a model's config to the files that launch its training."""

from __future__ import annotations

import typer

from piper_ray.cli.plan_options import PlanAsked
from piper_ray.cli.telling import note
from piper_ray.cli.values import command_text


def plan(context: typer.Context, asked: PlanAsked) -> None:
    """Plan the training of MODEL on a cluster, and write its launch files.

    One search over microbatch sizes, schedules, parallelism, sharding and recomputation, with one bound: no plan is
    faster by more than the gap.
    """
    asked.refuse_mistakes()
    model, hardware = asked.modelled.read()
    for chosen in filter(None, (hardware.choice_note(gpu) for gpu in dict(asked.modelled.clusters))):
        note(chosen)

    from piper_ray.cli.planning import plan_clusters, plan_one

    command = command_text(context, hidden=("json", "out", "verbose"))
    if asked.is_table:
        plan_clusters(asked, model, hardware)
    else:
        demand = asked.demand(model, hardware, *asked.modelled.clusters[0])
        plan_one(asked, asked.calibrated([demand])[0], command)
