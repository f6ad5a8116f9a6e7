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
    gigabyte: to hand it to the next stage, and to sum it over replicas of one device each, of a plan of one stage. With
    several sites groups are those of one, and rings go through all."""
    cluster = instance.cluster
    stages = 1 if Schedule.first_of(instance.schedule).name in FLUSHED else None
    found: list[_Facts] = []
    for kind in cluster.kinds or (DeviceKind("", cluster),):
        own = cluster.of_kind(kind.name) if cluster.kinds else cluster.levels()[-1]
        found.append(
            {
                "kind": kind.name,
                "devices": own.devices,
                "groups": [_group(own, level) for level in range(len(own.links))],
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
    rows = [["groups", *(", ".join(map(_group_text, one["groups"])) for one in found)]]
    uplinks = [_uplinks_text(one["groups"]) for one in found]
    rows += [["shared uplinks", *uplinks]] if any(uplinks) else []
    where = "" if between_bytes_per_s is None else " (1f1b, gpipe)"
    rows += [
        [f"to the next stage, within {devices:,}{where}", *(_within_text(one, devices) for one in found)]
        for devices in sorted({group["devices"] for one in found for group in one["groups"][:-1]})
    ]
    rows.append(["to the next stage", *(_time(one["border_s_per_gb"]) for one in found)])
    if any(uplinks):
        alone_s = [one["groups"][-1]["lone_border_s_per_gb"] for one in found]
        rows.append(["the same, if one of a group sends (1f1b, gpipe)", *map(_time, alone_s)])
    if between_bytes_per_s is not None:
        rows.append([f"to another {instance.kind_word}", *[_time(_SIZE_BYTES / between_bytes_per_s)] * len(found)])
    for d in sorted({int(d) for one in found for d in one["ring_s_per_gb"]}):
        times_s = [one["ring_s_per_gb"].get(str(d)) for one in found]
        rows.append([f"summed over {d:,} replicas", *("" if x is None else _time(x) for x in times_s)])
    columns = [Column("A GB of a device"), *(Column(printable(one["kind"]) or "time", right=True) for one in found)]
    return columns, rows


def _time(seconds: float) -> str:
    return time_text(seconds, 4)


def _group(own: Cluster, level: int) -> _Facts:
    """border_s_per_gb: between devices that no smaller group holds, where all devices of smaller groups send at once.
    lone_border_s_per_gb: where one of each does."""
    link, alone_bytes_per_s = own.links[level], own.level_bytes_per_s(level, 1)
    return {
        "devices": min(link.devices or own.at_site.devices, own.at_site.devices),
        "bandwidth_bytes_per_s": alone_bytes_per_s,
        "uplink_bytes_per_s": link.uplink_bytes_per_s,
        "border_s_per_gb": _SIZE_BYTES / own.level_bytes_per_s(level),
        "lone_border_s_per_gb": _SIZE_BYTES / alone_bytes_per_s,
    }


def _within_text(one: _Facts, devices: int) -> str:
    return next((_time(x["border_s_per_gb"]) for x in one["groups"][:-1] if x["devices"] == devices), "")


def _group_text(group: _Facts) -> str:
    return f"{group['devices']:,} at {given_size_text(group['bandwidth_bytes_per_s'])}/s"


def _uplinks_text(groups: list[_Facts]) -> str:
    shared = ((group["uplink_bytes_per_s"], group["devices"]) for group in groups)
    return ", ".join(f"{given_size_text(rate)}/s of {devices:,}" for rate, devices in shared if rate is not None)


def _rings(cluster: Cluster) -> list[int]:
    """Powers of two, full groups, and all devices."""
    sizes = {link.devices for link in cluster.links if link.devices is not None and link.devices <= cluster.devices}
    sizes |= {2**k for k in range(1, cluster.devices.bit_length())} | {cluster.devices}
    return sorted(size for size in sizes - {1} if size % (len(cluster.sites) or 1) == 0)
