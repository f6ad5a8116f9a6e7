"""Optima for numbers of devices of two kinds: each number of the one kind with each of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from piper_ray.engine.frontier.result import parse_numbers, settled
from piper_ray.engine.solve import solve
from piper_ray.model.apart import on_kind
from piper_ray.model.cluster import Cluster
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan_rules import lies_in_groups
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop

Counts = tuple[int, int]
"""The numbers of devices of the first and of the second kind."""


@dataclass(frozen=True)
class KindPoint:
    """What is known for a number of devices of each kind. solved: whether it was solved, and not derived from more
    devices."""

    devices: Counts
    solution: Solution
    solved: bool


def numbers_of(instance: Instance, text: str | None) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of devices of each of two kinds, from a text such as ``A100-80=8,16 H100-SXM=8..64:8``. A
    kind that the text does not name gets whole nodes; 0: the other kind alone. Raises UsageError."""
    kinds = {kind.name: kind.cluster for kind in instance.cluster.kinds}
    if len(kinds) != 2:
        raise UsageError(f"a table is of two kinds of devices, and {len(kinds)} are there")
    found = {name: _whole_nodes(own) for name, own in kinds.items()}
    for part in () if text is None else text.split():
        name, equals, numbers = part.rpartition("=")
        if not equals or name not in kinds:
            example = " ".join(f"{kind}={own[-1]}" for kind, own in found.items())
            raise UsageError(f"--devices {text}: {part!r}; expected numbers of each kind, as '{example}'")
        found[name] = parse_numbers(numbers, f"--devices {name}", least=0)
        if found[name][-1] > kinds[name].devices:
            raise UsageError(f"--devices {part}: there are {kinds[name].devices:,} {name}; expected no more")
    if not any(map(any, found.values())):
        raise UsageError(f"--devices {text}: no devices at all; expected some of one kind")
    return found


def _whole_nodes(own: Cluster) -> tuple[int, ...]:
    node = own.node_devices or own.links[0].devices or 1
    return tuple(range(min(node, own.devices), own.devices + 1, node))


def kind_table(
    instance: Instance,
    numbers: Mapping[str, Sequence[int]],
    restrictions: Restrictions = Restrictions(),
    schedule: Schedule | ScheduleName | str | None = None,
    options: SolveOptions = SolveOptions(),
    stop: Stop[Any] | None = None,
    tell: Callable[[KindPoint], None] = lambda _: None,
) -> tuple[KindPoint, ...]:
    """Solves each pair of numbers, in rising order, except no devices at all. ``tell`` is called with each point once
    it is closed, the most devices first.

    If the best plan for more devices fits on fewer, it is the best there too. If a solve ended early, its bound also
    holds for fewer devices, and a plan for fewer devices is also one for more. Raises UsageError.
    """
    found: dict[Counts, Solution] = {}
    solved: set[Counts] = set()
    first, second = numbers.values()
    after_first, after_second = dict(pairwise(first)), dict(pairwise(second))

    def next_of(counts: Counts) -> list[Counts]:
        """Returns the next number of the one kind, and of the other. If plans must use all devices, more may be
        worse."""
        if restrictions.all_devices:
            return []
        one, other = counts
        more = [(after_first[one], other)] if one in after_first else []
        return [*more, (one, after_second[other])] if other in after_second else more

    def on(counts: Counts) -> Cluster:
        return with_devices(instance.cluster, dict(zip(numbers, counts, strict=True)))

    for counts in sorted(filter(any, product(first, second)), reverse=True):
        more = [(found[other], other) for other in next_of(counts)]
        same = [
            one
            for one, there in more
            if one.status is Status.OPTIMAL and _is_as_fast(one, on(there), dict(zip(numbers, counts, strict=True)))
        ]
        same += [one for one, _ in more if one.status is Status.INFEASIBLE]
        if same:
            found[counts] = same[0]
        else:
            kind = None if all(counts) else next(name for name, n in zip(numbers, counts, strict=True) if n)
            some = instance.replace(cluster=on(counts))
            if kind is not None:
                alone = on_kind(some, kind)
                assert alone is not None, "each layer can run on each kind"
                some = replace(alone, cluster=some.cluster.of_kind(kind))
            part = None if stop is None else stop.part()
            best = solve(some, restrictions=restrictions, options=options, schedule=schedule, stop=part)
            if kind is not None and best.plan is not None:
                stages = tuple(replace(stage, kind=kind) for stage in best.plan.stages)
                best = replace(best, plan=replace(best.plan, stages=stages))
            found[counts] = best
            solved.add(counts)
        tell(KindPoint(counts, found[counts], counts in solved))
        if stop is not None and stop.requested:
            break
    known = settled(dict(sorted(found.items())), next_of)
    return tuple(KindPoint(counts, one, counts in solved) for counts, one in known.items())


def _is_as_fast(found: Solution, cluster: Cluster, fewer: Mapping[str, int]) -> bool:
    """Whether the best plan for a cluster has the same links on fewer devices of each kind."""
    assert found.plan is not None
    in_groups = lies_in_groups(cluster, found.plan, found.schedule)
    for kind in cluster.kinds:
        stages = [stage for stage in found.plan.stages if stage.kind == kind.name]
        needed = sum(stage.devices for stage in stages)
        if in_groups and stages:
            d, t = stages[0].data_parallel_degree, stages[0].tensor_parallel_degree
            needed = kind.cluster.needed_devices(d, t, len(stages))
        if needed > fewer[kind.name]:
            return False
    return True


def with_devices(cluster: Cluster, devices: Mapping[str, int]) -> Cluster:
    """Returns the cluster with these numbers of devices of each kind; in place of none with one, as each kind has
    some."""
    assert cluster.between_bytes_per_s is not None
    kinds = [replace(one, cluster=replace(one.cluster, devices=max(1, devices[one.name]))) for one in cluster.kinds]
    return Cluster.of_kinds(kinds, cluster.between_bytes_per_s)
