"""What files may say of a cluster and a batch besides K, N, M and B: links of smaller groups, samples and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, TypeAdapter

from piper_ray.model import arguments
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Batch
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.formats.faults import Faults, shown
from piper_ray.workloads.formats.fields import (
    COUNT_WORDS,
    DEGREE_WORDS,
    Closed,
    Count,
    Degree,
    PositiveRate,
    Quantities,
)

_COUNT: TypeAdapter[int] = TypeAdapter(Count)
_LINKS_WORDS = "a list of objects with devices and bandwidth, the smallest groups first"


class InnerLink(Closed):
    """A link that joins groups of ``devices`` devices; B is the one that joins all."""

    devices: Degree = Field(description=DEGREE_WORDS)
    bandwidth: PositiveRate = Field(description="a finite rate > 0 in bytes per second, such as 900GB/s")


def read_surroundings(
    quantities: Quantities,
    overrides: Quantities,
    inner_links: tuple[str, object],
    counts: tuple[int | None, ...],
    faults: Faults,
) -> dict[str, Any]:
    """``cluster`` and ``batch`` for an Instance, once there are no faults.

    inner_links: where a file has them, and what (None: nothing). counts: samples of a microbatch, tokens of a sample.
    A bandwidth in place of the file's own takes the place of all links.
    """
    links = () if overrides.bandwidth_bytes_per_s is not None else _read_links(*inner_links, faults)
    figures: Any = quantities  # all are there, or there are faults
    return {
        "cluster": Cluster(figures.devices, figures.memory_bytes, (*links, Link(figures.bandwidth_bytes_per_s))),
        "batch": Batch(figures.microbatches, *counts),
    }


def read_count(document: Mapping[str, object], key: str, faults: Faults) -> int | None:
    """None where the document does not say."""
    return None if document.get(key) is None else faults.value(_COUNT, document[key], key, COUNT_WORDS)


def read_schedule(name: object, chunks: object, group: object, path: str, faults: Faults) -> Schedule | None:
    """That which plans are to run under. path: where its name stands."""
    if name is None and chunks is None and group is None:
        return None
    try:
        arguments.of_kind("schedule", name, str, f"one of {', '.join(x.value for x in ScheduleName)}")
        return Schedule(name, chunks, group)  # type: ignore[arg-type]  # it looks at all three
    except UsageError as error:
        faults.at(path, str(error))
        return None


def _read_links(path: str, value: object, faults: Faults) -> Sequence[Link]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        faults.at(path, f"not a list ({shown(value)}); expected {_LINKS_WORDS}")
        return ()
    links: list[Link] = []
    for index, item in enumerate(value):
        link = faults.model(InnerLink, item, f"{path}[{index}]")
        if link is None:
            continue
        before = links[-1].devices if links and links[-1].devices is not None else 1
        if link.devices % before:
            faults.at(f"{path}[{index}].devices", f"{link.devices}; expected a multiple of {before}, the group before")
        links.append(Link(link.bandwidth, link.devices))
    return links
