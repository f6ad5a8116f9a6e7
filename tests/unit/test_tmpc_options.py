"""TMPCs as arrays, against loops over vertices."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from piper_ray.cost.variants import Variant, stage_variants
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.engine.tables.tmpc_options import TmpcOptions, build_options
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance, Layer
from tests.instances import random_instance
from tests.lengths import long_after
from tests.options_by_loops import options_by_loops


def assert_same(found: TmpcOptions, expected: TmpcOptions) -> None:
    assert (found.variants, found.tmpcs, found.shares) == (expected.variants, expected.tmpcs, expected.shares)
    assert_same_arrays(found.arrays, expected.arrays)
    assert_same_arrays(found.least, expected.least)
    assert_same_array("tensor_bytes", found.tensor_bytes, expected.tensor_bytes)


def assert_same_arrays(found: NamedTuple, expected: NamedTuple) -> None:
    for name, one, other in zip(found._fields, found, expected, strict=True):
        assert_same_array(name, one, other)


def assert_same_array(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    assert found.flags.c_contiguous, f"{name}: kernels are compiled for these alone"
    assert np.array_equal(found, expected), name


def with_figures(instance: Instance, rng: Random) -> Instance:
    """Options that share bytes or differ in weights, and layers that are equal but for their ids."""

    def changed(layer: Layer) -> Layer:
        like = rng.choice(instance.layers)
        return replace(
            layer,
            tmpcs={
                t: tuple(
                    replace(
                        tmpc,
                        weights_bytes=rng.choice([tmpc.weights_bytes, 1.0]),
                        shared_bytes=rng.choice([0.0, 0.0, 3.0]),
                        forward_sync_bytes={},
                        backward_sync_bytes={},
                    )
                    for tmpc in row
                )
                for t, row in like.tmpcs.items()
            },
        )

    return replace(instance, layers=tuple(map(changed, instance.layers)))


def parts(instance: Instance) -> tuple[LayerGraph, tuple[Variant, ...]]:
    return build_graph(instance, without_contraction()), stage_variants(instance, Restrictions())


@pytest.mark.parametrize("seed", long_after(6, range(24)))
def test_options_are_those_found_one_by_one(seed: int) -> None:
    instance = random_instance(seed, most_layers=7, most_tmpcs=4, most_devices=8)
    for one in (instance, with_figures(instance, Random(seed))):
        graph, variants = parts(one)
        assert_same(build_options(one, graph, variants), options_by_loops(one, graph, variants))
        # One in which some layers have nothing to run, and none at all.
        bare = tuple(replace(variant, tmpcs={**variant.tmpcs, one.layers[0].id: ()}) for variant in variants)
        assert_same(build_options(one, graph, bare), options_by_loops(one, graph, bare))
        assert_same(build_options(one, graph, ()), options_by_loops(one, graph, ()))
