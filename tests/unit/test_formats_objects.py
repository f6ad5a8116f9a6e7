"""Instances and plans built in Python: sync tables may be left out, and all other rules are those of files."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piper_ray
from piper_ray import InputError, Instance, InvalidPlan, Tmpc, UsageError
from piper_ray.engine.preview import forecast_solve, lattice_input
from piper_ray.model.instance import MovedRows, divisors, with_rows
from piper_ray.model.options import Contract
from piper_ray.planners.published.paper_table import paper_table
from piper_ray.workloads.formats import objects
from piper_ray.workloads.formats.load import instance_of, load, to_toml, to_upstream
from tests.brute_force import brute_force
from tests.instances import random_instance
from tests.lengths import long_after
from tests.report_cases import small_instance, small_plan
from tests.solver_support import ONE_THREAD

# As callers without a type checker see them.
Edge: Any = piper_ray.Edge
Layer: Any = piper_ray.Layer
Plan: Any = piper_ray.Plan
Stage: Any = piper_ray.Stage
Tensor: Any = piper_ray.Tensor


def tmpc(**figures: Any) -> Tmpc:
    """Without sync tables, which is how one starts."""
    return Tmpc(**{"id": "v", "time_per_sample_s": 1.0, "weights_bytes": 2.0, "activation_bytes": 3.0,
                   "fixed_bytes": 4.0, **figures})  # fmt: skip


def pair(**fields: Any) -> Instance:
    """0 -> 1, one TMPC each."""
    layers = (Layer(0, "a", {1: (tmpc(),)}), Layer(1, "b", {1: (tmpc(),)}))
    plain = {"layers": layers, "edges": (Edge(0, 1, 5.0),), "devices": 2, "microbatches": 2, "memory_bytes": 100.0,
             "bandwidth_bytes_per_s": 10.0}  # fmt: skip
    return Instance(**{**plain, **fields})


def with_tmpc(**figures: Any) -> Instance:
    """``pair`` with another TMPC in its second layer."""
    return pair(layers=(pair().layers[0], Layer(1, "b", {1: (tmpc(**figures),)})))


CYCLE: dict[str, Any] = {"edges": (Edge(0, 1, 5.0), Edge(1, 0, 5.0))}

FAULTS: list[tuple[Instance, str]] = [
    (pair(devices=0), "devices: zero (0); expected a whole number from 1 to 100000"),
    (pair(devices=2.5), "devices: not a whole number (2.5)"),
    (pair(devices=True), "devices: not a whole number (true)"),
    (pair(devices=100_001), "devices: too large (100001)"),
    (pair(microbatches=-1), "microbatches: negative (-1)"),
    (pair(microbatches="2"), 'microbatches: not a whole number ("2")'),
    (pair(memory_bytes=0.0), "memory_bytes: zero (0.0); expected a finite size > 0 in bytes"),
    (pair(memory_bytes=math.nan), "memory_bytes: not finite (nan)"),
    (pair(memory_bytes="8 apples"), 'memory_bytes: not a number ("8 apples")'),
    (pair(bandwidth_bytes_per_s=-1.0), "bandwidth_bytes_per_s: negative (-1.0)"),
    (pair(bandwidth_bytes_per_s=math.inf), "bandwidth_bytes_per_s: not finite (inf)"),
    (pair(bandwidth_bytes_per_s=None), "bandwidth_bytes_per_s: not a number (null)"),
    (pair(name=5), "name: not a text (5)"),
    (pair(layers=(), edges=()), "layers: no layers; expected at least one"),
    (pair(layers=None), "layers: not a tuple (null); expected a tuple of Layer objects"),
    (pair(layers="ab"), 'layers: not a tuple ("ab")'),
    (pair(layers=(*pair().layers, "c")), 'layers[2]: no Layer ("c"); expected Layer objects'),
    (pair(edges={0: 1}), "edges: not a tuple (an object); expected a tuple of Edge objects"),
    (pair(edges=((0, 1, 5.0),)), "edges[0]: no Edge (a list); expected Edge objects"),
    (pair(edges=(Edge(0, 7, 5.0),)), "edges[0]: unknown layer 7 in edge 0 -> 7; expected the id of a layer"),
    (pair(edges=(Edge(1, 1, 5.0),)), "edges[0]: self loop at layer 1"),
    (pair(edges=(Edge(0, 1, 5.0), Edge(0, 1, 6.0))), "edges[1]: duplicate edge 0 -> 1, first at edges[0]"),
    (pair(**CYCLE), "edges: cycle 0 -> 1 -> 0; expected a graph without cycles"),
    (pair(edges=(Edge(0, 1, -5.0),)), "edges[0].communication_bytes: negative (-5.0)"),
    (pair(edges=(Edge("0", 1, 5.0),)), 'edges[0].source: not a whole number ("0")'),
    (pair(edges=(Edge(0, None, 5.0),)), "edges[0].target: not a whole number (null)"),
    (pair(layers=(*pair().layers, Layer(1, "c", {1: (tmpc(),)}))), "layers[2].id: duplicate id 1, first at layers[1]"),
    (pair(layers=(Layer(0.5, "a", {1: (tmpc(),)}),)), "layers[0].id: not a whole number (0.5)"),
    (pair(layers=(Layer(2**60, "a", {1: (tmpc(),)}),)), "layers[0].id: too large"),
    (pair(layers=(Layer(0, None, {1: (tmpc(),)}),)), "layers[0].name: not a text (null)"),
    (pair(layers=(Layer(0, "\ud800", {1: (tmpc(),)}),)), 'layers[0].name: "\\ud800" holds half a surrogate pair'),
    (pair(layers=(Layer(0, "a", {}),)), "layers[0].tmpcs: no TMPC at all; expected at least one for some degree"),
    (pair(layers=(Layer(0, "a", {1: ()}),)), "layers[0].tmpcs: no TMPC at all"),
    (pair(layers=(Layer(0, "a", [tmpc()]),)), "layers[0].tmpcs: not a dict (a list)"),
    (pair(layers=(Layer(0, "a", {0: (tmpc(),)}),)), "layers[0].tmpcs[0]: zero (0); expected a whole number from 1 to"),
    (pair(layers=(Layer(0, "a", {"1": (tmpc(),)}),)), 'layers[0].tmpcs["1"]: not a whole number'),
    (pair(layers=(Layer(0, "a", {1: tmpc()}),)), "layers[0].tmpcs[1]: not a tuple (a Tmpc)"),
    (pair(layers=(Layer(0, "a", {1: ("v",)}),)), 'layers[0].tmpcs[1][0]: no Tmpc ("v")'),
    (pair(layers=(Layer(0, "a", {2: (tmpc(), tmpc())}),)), 'layers[0].tmpcs[2]: duplicate TMPC id "v"; expected'),
    (with_tmpc(id=7), "layers[1].tmpcs[1][0].id: not a text (7)"),
    (with_tmpc(time_per_sample_s=-1.0), "layers[1].tmpcs[1][0].time_per_sample_s: negative (-1.0); expected a finite"),
    (with_tmpc(time_per_sample_s=True), "layers[1].tmpcs[1][0].time_per_sample_s: not a number (true)"),
    (with_tmpc(weights_bytes=math.nan), "layers[1].tmpcs[1][0].weights_bytes: not finite (nan)"),
    (with_tmpc(activation_bytes="3"), 'layers[1].tmpcs[1][0].activation_bytes: not a number ("3")'),
    (with_tmpc(fixed_bytes=1e31), "layers[1].tmpcs[1][0].fixed_bytes: too large (1e+31)"),
    (with_tmpc(fixed_bytes=10**400), "layers[1].tmpcs[1][0].fixed_bytes: too large (a huge number)"),
    (with_tmpc(recompute="no"), 'layers[1].tmpcs[1][0].recompute: neither true nor false ("no"); expected True'),
    (
        with_tmpc(shared_bytes=-1.0),
        "layers[1].tmpcs[1][0].shared_bytes: negative (-1.0); expected a finite number >= 0",
    ),
    (with_tmpc(least_data_parallel_degree=0), "layers[1].tmpcs[1][0].least_data_parallel_degree: zero (0); expected a"),
    (with_tmpc(least_data_parallel_degree="2"), "layers[1].tmpcs[1][0].least_data_parallel_degree: not a whole number"),
    (pair(tensors=5), "tensors: not a tuple (5); expected a tuple of Tensor objects"),
    (pair(tensors=[(0, 1)]), "tensors[0]: no Tensor (a list); expected Tensor objects"),
    (pair(tensors=[Tensor((0,), 1.0, 1.0)]), "tensors[0].layers: 1 layers; expected at least two"),
    (pair(tensors=[Tensor((0, 0), 1.0, 1.0)]), "tensors[0].layers: layer 0 comes more than once; expected each"),
    (pair(tensors=[Tensor((0, 7), 1.0, 1.0)]), "tensors[0].layers: unknown layer 7; expected the ids of layers"),
    (pair(tensors=[Tensor((0, "1"), 1.0, 1.0)]), 'tensors[0].layers[1]: not a whole number ("1")'),
    (pair(tensors=[Tensor(None, 1.0, 1.0)]), "tensors[0].layers: not a tuple (null); expected the ids of layers"),
    (pair(tensors=[Tensor((0, 1), math.nan, 1.0)]), "tensors[0].forward_bytes: not finite (nan)"),
    (pair(tensors=[Tensor((0, 1), 1.0, -1.0)]), "tensors[0].backward_bytes: negative (-1.0)"),
    (pair(notes="note"), 'notes: not a tuple ("note")'),
    (pair(notes=[5]), "notes[0]: no str (5)"),
    (with_tmpc(forward_sync_bytes=None), "layers[1].tmpcs[1][0].forward_sync_bytes: not a dict (null)"),
    (with_tmpc(forward_sync_bytes={0: -1.0}), "layers[1].tmpcs[1][0].forward_sync_bytes[0]: negative (-1.0)"),
    (with_tmpc(forward_sync_bytes={5: 0.0}), "layers[1].tmpcs[1][0].forward_sync_bytes[5]: there is no edge 5 -> 1"),
    (with_tmpc(backward_sync_bytes={0: 1.0}), "layers[1].tmpcs[1][0].backward_sync_bytes[0]: there is no edge 1 -> 0"),
]


@pytest.mark.parametrize(("instance", "words"), FAULTS, ids=[words[:50] for _, words in FAULTS])
def test_what_is_wrong_is_said_with_its_path(instance: Instance, words: str) -> None:
    with pytest.raises(InputError) as caught:
        piper_ray.solve(instance)
    assert any(str(fault).startswith(words) for fault in caught.value.faults), str(caught.value)
    str(caught.value).encode()


def test_all_faults_come_at_once_and_name_the_instance() -> None:
    layers = (Layer(0, "a", {1: (tmpc(weights_bytes=-1.0), tmpc())}), Layer(1, "b", {}))
    with pytest.raises(InputError) as caught:
        piper_ray.solve(pair(layers=layers, edges=(*CYCLE["edges"], Edge(1, 9, -1.0)), devices=0, name="mine"))
    assert str(caught.value).startswith('Instance "mine": 7 faults found\n')
    assert [fault.path for fault in caught.value.faults] == [
        "devices",
        "edges[2].communication_bytes",
        "edges[2]",
        "edges",
        "layers[0].tmpcs[1]",
        "layers[0].tmpcs[1][0].weights_bytes",
        "layers[1].tmpcs",
    ]


def _everything(instance: Any, tmp_path: Path) -> list[Callable[[], object]]:
    """Every public function that takes an instance."""
    from piper_ray import baselines

    return [
        lambda: piper_ray.solve(instance, options=ONE_THREAD),
        lambda: piper_ray.frontier(instance, options=ONE_THREAD),
        lambda: piper_ray.evaluate(instance, small_plan()),
        lambda: piper_ray.dump(instance, tmp_path / "out.json"),
        lambda: piper_ray.load_plan(small_plan().to_dict(), instance),
        lambda: to_toml(instance),
        lambda: to_upstream(instance),
        lambda: forecast_solve(instance),
        lambda: lattice_input(instance),
        lambda: paper_table(instance),
        lambda: baselines.plan(instance, "gpipe"),
        lambda: baselines.PipeDream().partition(instance),
    ]


@pytest.mark.parametrize("index", range(12))
def test_every_function_looks_through_an_instance_and_takes_a_path(index: int, tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    piper_ray.dump(small_instance(), path)
    for given in (small_instance(), path, str(path)):
        assert _everything(given, tmp_path)[index]() is not False
    with pytest.raises(InputError, match="cycle 0 -> 1 -> 0"):
        _everything(pair(**CYCLE), tmp_path)[index]()
    with pytest.raises(InputError, match="No such file"):
        _everything("nowhere.toml", tmp_path)[index]()
    for wrong in (None, 5, [small_instance()]):
        with pytest.raises(UsageError, match="instance must be an Instance, or the path of an input, not "):
            _everything(wrong, tmp_path)[index]()


def _without_zeros(instance: Instance) -> Instance:
    def bare(of: Tmpc) -> Tmpc:
        tables: dict[str, Any] = {
            name: {key: size for key, size in getattr(of, name).items() if size}
            for name in ("forward_sync_bytes", "backward_sync_bytes")
        }
        return replace(of, **tables)

    layers = (
        replace(layer, tmpcs={t: tuple(map(bare, row)) for t, row in layer.tmpcs.items()}) for layer in instance.layers
    )
    return replace(instance, layers=tuple(layers))


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_a_sync_figure_that_is_missing_is_zero(seed: int, tmp_path: Path) -> None:
    from piper_ray import baselines

    full = random_instance(seed)
    bare = _without_zeros(full)
    assert bare == full
    assert bare.digest == full.digest
    solution = piper_ray.solve(bare, options=ONE_THREAD)
    best = brute_force(full)
    assert (solution.plan is None) == (best is None)
    assert solution.plan == piper_ray.solve(full, options=ONE_THREAD).plan
    if best is not None and solution.plan is not None:
        assert solution.time_per_sample_s == pytest.approx(float(best.time_per_sample_s), rel=1e-9)
        assert piper_ray.evaluate(bare, solution.plan) == piper_ray.evaluate(full, solution.plan)
    assert paper_table(bare).plan == paper_table(full).plan
    operators = replace(ONE_THREAD, contract=Contract.OPERATORS)
    assert piper_ray.solve(bare, options=operators).plan == piper_ray.solve(full, options=operators).plan
    for planner in ("pipedream-2bw", "pipedream"):
        assert baselines.plan(bare, planner) == baselines.plan(full, planner)
    assert to_toml(bare) == to_toml(full)
    assert to_upstream(bare) == to_upstream(full)
    piper_ray.dump(bare, tmp_path / "bare.toml")
    assert load(tmp_path / "bare.toml") == load(to_upstream(bare)) == replace(full, name="")


def test_a_choice_keeps_the_sync_figures_that_only_one_tmpc_names() -> None:
    """Merging operators once looked at the first TMPC's tables only."""
    heavy = tmpc(id="w", time_per_sample_s=0.5, forward_sync_bytes={0: 1000.0})
    layers = [Layer(0, "a", {1: [tmpc()]}), Layer(1, "b", {1: [tmpc(), heavy]}), Layer(2, "c", {1: [tmpc()]})]
    chain = pair(layers=layers, edges=[Edge(0, 1, 5.0), Edge(1, 2, 500.0)], devices=2)
    from piper_ray.engine.blocks.block_instance import combine

    found = combine((1, 2), {layer.id: layer.tmpcs[1] for layer in chain.layers}, {0: 0, 1: 1, 2: 1})
    assert [choice.forward_bytes for choice in found.choices] == [{0: 0.0}, {0: 1000.0}]


def test_the_default_tables_can_be_copied_and_sent() -> None:
    assert pickle.loads(pickle.dumps(pair())) == copy.deepcopy(pair()) == pair()


def test_tmpcs_with_other_sync_figures_differ() -> None:
    assert tmpc(forward_sync_bytes={0: 0.0}) == tmpc()
    assert hash(tmpc(forward_sync_bytes={0: 0.0})) == hash(tmpc())
    assert tmpc(forward_sync_bytes={0: 1.0}) != tmpc()
    assert tmpc(recompute=True) != tmpc()
    assert tmpc() != "v"


def test_numbers_of_other_libraries_and_lists_become_plain() -> None:
    one = tmpc(
        time_per_sample_s=np.float32(1), weights_bytes=np.int64(2), activation_bytes=np.array(3.0), fixed_bytes=4,
        forward_sync_bytes={np.int64(0): np.float64(6)}, recompute=np.bool_(False), shared_bytes=np.float64(7),
        least_data_parallel_degree=np.int64(1),
    )  # fmt: skip
    layers = [Layer(np.int64(0), "a", {np.int64(1): [tmpc()]}), Layer(1.0, "b", {1: [one], 2: []})]
    edges = (Edge(np.int32(u), v, 5) for u, v in [(0, 1)])
    tensors = [Tensor([np.int64(0), 1.0], np.float32(1), 2)]
    found = pair(
        layers=layers, edges=edges, tensors=tensors, devices=np.int64(2), microbatches=2.0, memory_bytes=np.float32(100)
    )
    plain = replace(with_tmpc(forward_sync_bytes={0: 6.0}, shared_bytes=7.0), tensors=(Tensor((0, 1), 1.0, 2.0),))
    assert found == plain
    assert found.digest == plain.digest
    assert type(found.devices) is type(found.microbatches) is type(found.layers[1].id) is int
    assert all(type(edge.source) is int and type(edge.communication_bytes) is float for edge in found.edges)
    assert type(found.layers[1].tmpcs[1][0].weights_bytes) is float
    solution = piper_ray.solve(found, options=ONE_THREAD)
    assert solution.plan is not None
    assert solution.plan == piper_ray.solve(plain, options=ONE_THREAD).plan


def test_files_and_objects_keep_the_same_rules() -> None:
    """The same fault in a document and in an object has the same words, after the path."""
    changes: list[tuple[Callable[[Any], None], Instance]] = [
        (lambda d: d.update(maxDevices=0), pair(devices=0)),
        (lambda d: d.update(mbsInBatch=1.5), pair(microbatches=1.5)),
        (lambda d: d.update(maxMemoryPerDevice=-1.0), pair(memory_bytes=-1.0)),
        (lambda d: d["nodes"][1].update(id=0), pair(layers=(pair().layers[0], replace(pair().layers[1], id=0)))),
        (lambda d: d["edges"][0].update(destId=7), pair(edges=(Edge(0, 7, 5.0),))),
        (lambda d: d["edges"][0].update(communicationCost=math.nan), pair(edges=(Edge(0, 1, math.nan),))),
        (lambda d: d["nodes"][1]["TMPCs"]["1"][0].update(timePerSample=-1), with_tmpc(time_per_sample_s=-1.0)),
        (lambda d: d["nodes"][1]["TMPCs"]["1"][0].update(memoryUsageA=1e31), with_tmpc(activation_bytes=1e31)),
        (lambda d: d["nodes"][1].update(TMPCs={}), pair(layers=(pair().layers[0], Layer(1, "b", {})))),
    ]
    for change, instance in changes:
        document = copy.deepcopy(to_upstream(pair()))
        change(document)
        with pytest.raises(InputError) as of_file:
            load(document)
        with pytest.raises(InputError) as of_object:
            instance_of(instance)
        said = {fault.message.replace("nodes", "layers") for fault in of_file.value.faults}
        wanted = {fault.message for fault in of_object.value.faults}
        assert {text.replace("-1.0", "-1") for text in wanted} <= {text.replace("-1.0", "-1") for text in said}


def test_an_instance_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Instance] = []
    check_instance = objects.check_instance

    def counted(instance: Instance) -> None:
        looked.append(instance)
        check_instance(instance)

    monkeypatch.setattr(objects, "check_instance", counted)
    mine = pair()
    piper_ray.solve(mine, options=ONE_THREAD)
    assert len(looked) == 1
    for devices in divisors(6):
        piper_ray.solve(mine.replace(devices=devices), options=ONE_THREAD)
    piper_ray.frontier(pickle.loads(pickle.dumps(mine)), options=ONE_THREAD).plan(1)
    assert len(looked) == 1
    with pytest.raises(InputError, match="edges: cycle"):
        piper_ray.solve(replace(mine, **CYCLE))
    assert len(looked) == 2


def test_what_was_replaced_before_it_was_looked_through_is_looked_through() -> None:
    with pytest.raises(InputError, match="edges: cycle"):
        piper_ray.solve(pair(**CYCLE).replace(devices=1))


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"devices": 0}, "devices 0 is out of range; expected a whole number from 1 to 100000"),
        ({"devices": 2.5}, "devices must be a whole number from 1 to 100000, not 2.5"),
        ({"devices": "8"}, "devices must be a whole number from 1 to 100000, not '8'"),
        ({"microbatches": True}, "microbatches must be a whole number"),
        ({"memory_bytes": "8 apples"}, "memory_bytes: '8 apples' has an unknown unit"),
        ({"bandwidth_bytes_per_s": math.nan}, "bandwidth_bytes_per_s nan is out of range; expected a finite"),
        ({"devices": 0, "memory_bytes": -1}, "devices 0 .*; memory_bytes -1 "),
    ],
)
def test_replacing_by_what_makes_no_sense(figures: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pair().replace(**figures)


def test_replacing_by_numbers_of_numpy() -> None:
    figures: dict[str, Any] = {"devices": np.int64(4), "memory_bytes": np.float32(8)}
    found = pair().replace(**figures)
    assert found == pair(devices=4, memory_bytes=8.0)
    assert type(found.devices) is int


STAGE = Stage((0, 1), 1, 1, {0: "v", 1: "v"})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(None), "stages: not a tuple (null); expected a tuple of Stage objects"),
        (Plan(({},)), "stages[0]: no Stage (an object); expected Stage objects"),
        (Plan((replace(STAGE, layers=5),)), "stages[0].layers: not a tuple (5)"),
        (Plan((replace(STAGE, layers=([0], 1)),)), "stages[0].layers[0]: not a whole number (a list)"),
        (Plan((replace(STAGE, data_parallel_degree="2"),)), 'stages[0].data_parallel_degree: not a whole number ("2")'),
        (
            Plan((replace(STAGE, data_parallel_degree=10**400),)),
            "stages[0].data_parallel_degree: too large (a huge number)",
        ),
        (Plan((replace(STAGE, tensor_parallel_degree=None),)), "stages[0].tensor_parallel_degree: not a whole number"),
        (Plan((replace(STAGE, tmpc_ids=["v", "v"]),)), "stages[0].tmpc_ids: not a dict (a list)"),
        (Plan((replace(STAGE, tmpc_ids={0: [], 1: "v"}),)), "stages[0].tmpc_ids[0]: not a text (a list)"),
    ],
)
def test_a_plan_of_wrong_parts(plan: Plan, words: str) -> None:
    with pytest.raises(InputError) as caught:
        piper_ray.evaluate(pair(), plan)
    assert f"\n  {words}" in str(caught.value)


def test_a_plan_of_lists_and_of_numbers_of_numpy_is_one() -> None:
    stage = Stage([np.int64(0), 1], np.int64(1), 1.0, {0: "v", 1: "v"})
    plan = Plan([stage])
    assert plan == Plan((STAGE,))
    assert piper_ray.evaluate(pair(), plan).devices == 1


def test_what_breaks_the_rules_of_the_problem_is_still_an_invalid_plan() -> None:
    with pytest.raises(InvalidPlan, match="data-parallel degree 0 is less than 1"):
        piper_ray.evaluate(pair(), Plan((replace(STAGE, data_parallel_degree=0),)))


def test_rows_of_a_layer_elsewhere_are_those_with_the_neighbours_of_here() -> None:
    rows = {1: (Tmpc("a", 1.0, forward_sync_bytes={0: 3.0}, backward_sync_bytes={2: 5.0}), Tmpc("b", 2.0))}
    first = Layer(1, "block", rows)
    moved = Layer(4, "block", MovedRows(first, 3))
    there = {1: (Tmpc("a", 1.0, forward_sync_bytes={3: 3.0}, backward_sync_bytes={5: 5.0}), Tmpc("b", 2.0))}
    assert moved.tmpcs == there
    assert (moved, first.priced, moved.priced) == (Layer(4, "block", there), first, first)
    assert pickle.loads(pickle.dumps(moved)) == moved
    doubled = with_rows([first, moved], lambda one: {2: one.tmpcs[1][:1]})
    assert [one.tmpcs for one in doubled] == [{2: rows[1][:1]}, {2: there[1][:1]}]


@pytest.mark.parametrize("before", [1, 0])
def test_moved_rows_that_name_no_neighbour_are_told(before: int) -> None:
    """Those of layer 2 expect layer 1 in front of it."""
    first = Layer(1, "block", {1: (Tmpc("a", 1.0, forward_sync_bytes={0: 3.0}),)})
    ends = [Layer(number, "end", {1: (Tmpc("a", 1.0),)}) for number in (0, 3)]
    layers = [ends[0], first, Layer(2, "block", MovedRows(first, 1)), ends[1]]
    edges = [Edge(0, 1, 1.0), Edge(1, 3, 1.0), Edge(before, 2, 1.0), Edge(2, 3, 1.0)]
    instance = Instance(layers, edges, 1, 1, 1.0, 1.0)
    if before == 1:
        objects.check_instance(instance)
    else:
        with pytest.raises(InputError, match=r"layers\[2\].tmpcs\[1\]\[0\].forward_sync_bytes"):
            objects.check_instance(instance)
