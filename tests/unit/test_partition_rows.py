"""Rows of some downsets and of guests: as on the lattice of all, whoever came before."""

from __future__ import annotations

import numpy as np
import pytest

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.types import Tables
from piper_ray.engine.lattice.downsets import build_lattice, downset_order
from piper_ray.engine.partition.rows import DownsetRows
from piper_ray.engine.partition.setting import PartitionSetting
from piper_ray.engine.preparation import Outline
from piper_ray.engine.search import wide
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from tests.instances import parallel_branches, random_instance, two_towers


def setting_of(instance: Instance) -> PartitionSetting:
    outline = Outline.of(instance, Restrictions())
    options = build_options(instance, outline.graph, outline.variants)
    degrees = tuple(Restrictions().data_parallel_degrees(instance))
    return PartitionSetting(instance, outline.graph, options, degrees, wide.CELLS)


def whole_problem(setting: PartitionSetting) -> Problem:
    lattice = build_lattice(setting.graph, 10**6)
    return build_problem(LatticeTables.build(lattice, setting.options), setting.instance, setting.degrees)


def assert_row_is(tables: Tables, row: int, whole: Tables, downset: int) -> None:
    assert np.array_equal(tables.lattice.bits[row], whole.lattice.bits[downset])
    for name, values in tables.costs._asdict().items():
        if name != "both_s" and values.shape[0]:
            assert np.array_equal(values[row], getattr(whole.costs, name)[downset]), name
    for start, values in (("crossing_start", "crossing"), ("cut_start", "cut")):
        runs = []
        for arrays, place in ((tables.lattice, row), (whole.lattice, downset)):
            offsets = getattr(arrays, start)
            runs.append(
                sorted(getattr(arrays, values)[offsets[place] : offsets[place + 1]]) if offsets.size > 1 else []
            )
        assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "instance",
    [
        two_towers(6, devices=8),
        parallel_branches(2, 3, devices=6),
        *(random_instance(seed, most_layers=7, density=0.3) for seed in range(500, 512)),
    ],
    ids=lambda instance: instance.name,
)
def test_rows_are_those_of_all_downsets(instance: Instance) -> None:
    setting = setting_of(instance)
    whole = whole_problem(setting).tables
    all_bits = whole.lattice.bits
    rng = np.random.default_rng(1)
    mine = np.sort(rng.permutation(np.arange(1, all_bits.shape[0]))[: all_bits.shape[0] // 2])
    mine = np.concatenate(([0], mine))
    rows = DownsetRows(setting, setting.chain(), all_bits[mine], guests=4)
    for _ in range(3):
        guests = np.sort(rng.integers(1, all_bits.shape[0], size=rng.integers(1, 5)))
        sums = rows.put_guests(all_bits[guests])
        tables = rows.tables
        for row, downset in enumerate(mine):
            assert_row_is(tables, row, whole, int(downset))
        for row, downset in enumerate(guests):
            assert_row_is(tables, rows.own + row, whole, int(downset))
        assert_row_is(tables, rows.own + 4, whole, all_bits.shape[0] - 1)
        everything = whole_problem(setting).workload.sums
        assert np.array_equal(sums.device_work_s, everything.device_work_s[guests])
        assert np.array_equal(sums.replica_work_s, everything.replica_work_s[guests])
    sizes = np.bitwise_count(all_bits[mine]).sum(axis=1)
    for size in range(setting.graph.size + 1):
        assert np.array_equal(rows.own_of(size), all_bits[mine][sizes == size])


def test_no_more_guests_than_there_is_room_for() -> None:
    setting = setting_of(two_towers(4, devices=8))
    bits = whole_problem(setting).lattice.bits
    rows = DownsetRows(setting, setting.chain(), bits[:1], guests=2)
    with pytest.raises(AssertionError, match="3 guests, and room for 2"):
        rows.put_guests(bits[1:4])


def test_downsets_come_in_the_order_of_the_lattice() -> None:
    bits = whole_problem(setting_of(parallel_branches(2, 4, devices=6))).lattice.bits
    shuffled = bits[np.random.default_rng(2).permutation(bits.shape[0])]
    assert np.array_equal(shuffled[downset_order(shuffled)], bits)


def test_what_is_known_of_stages_goes_with_the_numbers_of_downsets() -> None:
    """Else a guest would have the answer of who had its number before."""
    problem = whole_problem(setting_of(random_instance(3, most_layers=9, most_devices=12, most_tmpcs=3)))
    backend = LocalBackend(1)
    evaluate_threshold(problem, backend, 1e9)
    cache = backend._pool.submit(lambda: backend._scratch_of(problem.tables)).result()
    cache.fits.key[5] = 7
    assert backend._pool.submit(lambda: backend._scratch_of(problem.tables)).result().fits.key[5].any()
    backend.number_anew()
    kept = backend._pool.submit(lambda: backend._scratch_of(problem.tables)).result()
    assert kept is cache
    assert not kept.fits.key.any()
    backend.close()
