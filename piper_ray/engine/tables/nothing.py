"""Tables of a graph without layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from piper_ray.engine.kernels.types import ClusterArrays, CostArrays, LatticeArrays, OptionArrays, Tables, frozen


def tables_of_nothing() -> Tables:
    """The empty downset of a graph without layers: kernels are compiled for types, whatever the sizes."""
    lattice = LatticeArrays(
        bits=np.zeros((1, 1), np.uint64),
        level_start=np.array([0, 1]),
        crossing_start=_integers(2),
        crossing=_integers(0),
        edge_tail=_integers(0),
        edge_head=_integers(0),
        vertex_level=_integers(0),
        tensor_bits=np.zeros((0, 1), np.uint64),
        cut_start=_integers(1),
        cut=_integers(0),
    )
    sums = {name: np.zeros((1, 1)) for name in CostArrays._fields}
    costs = CostArrays(**sums | {"missing": np.zeros((1, 1), np.int64)})  # type: ignore[arg-type]
    of_options = ("option_p_s", "option_resync_s", "option_a", "option_b", "option_shared", "charge_s")
    of_choices = ("choice_p_s", "choice_a", "choice_b", "choice_shared")
    floats: dict[str, Any] = dict.fromkeys((*of_options, *of_choices), np.zeros(0))
    options = OptionArrays(
        degree=np.ones(1, np.int64),
        uniform=np.ones(1, np.int64),
        option_start=np.zeros((1, 1), np.int64),
        charge_start=_integers(0),
        in_start=_integers(1),
        in_edge=_integers(0),
        out_start=_integers(1),
        out_edge=_integers(0),
        class_start=_integers(2),
        class_of=np.zeros((1, 0), np.int64),
        choice_start=_integers(1),
        choices_share=_integers(1),
        price_s=np.zeros(1),
        **floats,
    )
    cluster = ClusterArrays(1, 1, 1.0, np.ones(1, np.int64), np.zeros(2, np.int64), _integers(1), np.ones(1, np.int64))
    return Tables(frozen(lattice), frozen(costs), frozen(options), frozen(cluster))


def _integers(size: int) -> np.ndarray:
    return np.zeros(size, np.int64)
