"""A certificate as plain data. ``file`` keeps it, ``check`` judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper_ray.model.restrictions import Restrictions


@dataclass(frozen=True, eq=False)
class Tails:
    """What tails of the pipeline take at least, in plans on up to ``devices`` devices: one row for each pair.

    layers: the layers that downsets are told apart by, each after its successors: bit v % 8 of byte v // 8 stands for
    layers[v]. joined: each of the other layers, with the one of these whose stage it shares.
    members: uint8[rows, bytes], the tail's layers. used_devices, data_parallel_sum: int64[rows].
    """

    devices: int
    layers: tuple[int, ...]
    joined: Mapping[int, int]
    members: npt.NDArray[np.uint8]
    used_devices: npt.NDArray[np.int64]
    data_parallel_sum: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Certificate:
    """That no plan of a workload that keeps ``restrictions`` takes less than bound_s, seconds per sample, under "2bw".

    bound_s: inf where there is no plan at all. digest: the instance's. tails: for each size of group with a link of its
    own, the smallest first, and last for all devices.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1, schedule="2bw")
    >>> certificate = piper_ray.certify(bert, solution)
    >>> piper_ray.verify_certificate(bert, certificate).bound_s == certificate.bound_s
    True
    """

    digest: str
    name: str
    restrictions: Restrictions
    bound_s: float
    tails: tuple[Tails, ...]
