"""The machine that plans are charged for: groups of devices with their links, stage borders, and rings of replicas."""

from __future__ import annotations

from typing import Any

from piper_ray.model.cluster import Cluster, DeviceKind
from piper_ray.model.figures import given_size_text, printable, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import FLUSHED, Schedule
from piper_ray.report.terminal import Column

_Facts = dict[str, Any]
_SIZE_BYTES = 1e9


def machine_document(instance: Instance) -> list[_Facts]:
    """Of each kind of devices, or of all: its groups, the smallest first, and the seconds that a device takes for a
    gigabyte: to hand it to the next stage, and to sum it over replicas of one device each, of a plan of one stage."""
    cluster = instance.cluster
    stages = 1 if Schedule.first_of(instance.schedule).name in FLUSHED else None
    found: list[_Facts] = []
    for kind in cluster.kinds or (DeviceKind("", cluster),):
        own = cluster.of_kind(kind.name) if cluster.kinds else cluster.levels()[-1]
        found.append(
            {
                "kind": kind.name,
                "devices": own.devices,
                "groups": [
                    {"devices": min(link.devices or own.devices, own.devices), "bandwidth_bytes_per_s": rate}
                    for link, rate in zip(own.links, _rates(own), strict=True)
                ],
                "border_s_per_gb": own.transfer_s(_SIZE_BYTES),
                "ring_s_per_gb": {
                    str(d): own.replicas_link(d, 1, stages).resync_s(_SIZE_BYTES, 1) * (d - 1) / d for d in _rings(own)
                },
            }
        )
    return found


def machine_table(instance: Instance) -> tuple[list[Column], list[list[str]]]:
    """The same, a column for each kind."""
    found, between_bytes_per_s = machine_document(instance), instance.cluster.between_bytes_per_s
    rows = [
        ["groups", *(", ".join(map(_group_text, one["groups"])) for one in found)],
        ["to the next stage", *(time_text(one["border_s_per_gb"]) for one in found)],
    ]
    if between_bytes_per_s is None:
        rows[1:1] = [
            [f"to the next stage, within {x['devices']:,}", time_text(_SIZE_BYTES / x["bandwidth_bytes_per_s"])]
            for x in found[0]["groups"][:-1]
        ]
    else:
        rows.append(["to another kind", *[time_text(_SIZE_BYTES / between_bytes_per_s)] * len(found)])
    for d in sorted({int(d) for one in found for d in one["ring_s_per_gb"]}):
        times_s = [one["ring_s_per_gb"].get(str(d)) for one in found]
        rows.append([f"summed over {d:,} replicas", *("" if x is None else time_text(x) for x in times_s)])
    columns = [Column("A GB of a device"), *(Column(printable(one["kind"]) or "time", right=True) for one in found)]
    return columns, rows


def _group_text(group: _Facts) -> str:
    return f"{group['devices']:,} at {given_size_text(group['bandwidth_bytes_per_s'])}/s"


def _rates(cluster: Cluster) -> list[float]:
    """Of each link, or of one further out that is faster."""
    rates = [link.bandwidth_bytes_per_s for link in cluster.links]
    return [max(rates[level:]) for level in range(len(rates))]


def _rings(cluster: Cluster) -> list[int]:
    """Powers of two, full groups, and all devices."""
    sizes = {link.devices for link in cluster.links if link.devices is not None and link.devices <= cluster.devices}
    sizes |= {2**k for k in range(1, cluster.devices.bit_length())} | {cluster.devices}
    return sorted(sizes - {1})
