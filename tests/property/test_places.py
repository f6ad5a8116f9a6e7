"""Plans under 2bw whose stages lie in order on nodes: the search, and all who value them, against all places."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

import piper_ray
from piper_ray.cost.plan import cost_of
from piper_ray.model.borders import stage_borders
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import CertificateRefused, InvalidPlan
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import Status
from tests.instances import equal_chain
from tests.lengths import long_after
from tests.link_rates import groups
from tests.places_brute_force import border_rate, faster_with_places, lies_whole
from tests.property.test_links import assert_valued_alike, levelled
from tests.solver_support import ONE_THREAD

NODES = Cluster(16, 1e6, (Link(8.0, 4), Link(1.0)))


def small(seed: int) -> Instance:
    """Three layers or fewer on at most 6 devices, in groups."""
    instance = levelled(seed, most_layers=3)
    return instance.replace(devices=min(instance.devices, 6))


@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 12) for start in range(0, 48, 12)]), ids=str)
def test_no_plan_at_any_places_is_faster(seeds: range) -> None:
    for seed in seeds:
        instance = small(seed)
        found = piper_ray.solve(instance, options=ONE_THREAD, schedule="2bw")
        time_s = found.time_per_sample_s
        assert found.status in (Status.OPTIMAL, Status.INFEASIBLE)
        assert faster_with_places(instance, None if time_s is None else time_s * (1.0 - 1e-8)) is None
        assert_valued_alike(instance, found, "2bw")
