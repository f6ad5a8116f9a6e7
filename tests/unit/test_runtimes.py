"""Runtimes: their rules, the pieces of a model, the order of ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

import piper_ray
from piper_ray.export.files import Target
from piper_ray.export.targets import export_plan
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.constraints import (
    FilledPipeline,
    Recompute,
    RecomputeRule,
    Restrictions,
    StageCount,
    TensorParallelDegrees,
    WholePieces,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.mode import Mode, Recomputation
from piper_ray.model.one_mode import OneMode, tmpcs_under
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.meshes import domain_of, gpus_per_node_of, meshes_of
from piper_ray.runtimes.pieces import pieces_of
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName, rank_lines, rank_places
from piper_ray.workloads.formats.upstream import to_upstream
from piper_ray.workloads.formats.workload_writer import to_toml
from tests.export_support import llama, mixture, plan_of

INPUTS = Path(__file__).resolve().parents[2] / "inputs"


def model(*layers: tuple[str, str], edges: tuple[tuple[int, int], ...] | None = None) -> Instance:
    """Layers by name and path, in a chain."""
    chain = tuple((v, v + 1) for v in range(len(layers) - 1)) if edges is None else edges
    return Instance(
        tuple(Layer(v, name, {1: (Tmpc("plain", 1.0),)}, path) for v, (name, path) in enumerate(layers)),
        tuple(Edge(u, v, 1.0) for u, v in chain),
        4,
        4,
        1e6,
        1.0,
        name="toy",
    )


def test_every_runtime_is_there() -> None:
    assert set(RUNTIMES) == set(RuntimeName)
    assert all(runtime.name is name for name, runtime in RUNTIMES.items())


@pytest.mark.parametrize(
    ("tmpc_id", "recompute", "expected"),
    [
        ("plain", False, Mode()),
        ("vanilla", False, Mode()),
        ("activation recomp", True, Mode(Recomputation.FULL)),
        ("sp+selective", True, Mode(Recomputation.SELECTIVE, True)),
        ("sp+selective-moe_act-layernorm+cp2", True, Mode(Recomputation(("layernorm", "moe_act")), True, context=2)),
        ("sp+full+zero8+offload", True, Mode(Recomputation.FULL, True, 8, True)),
        ("full-estimated", True, Mode(Recomputation.FULL)),
        ("plain-shard", False, Mode()),
        ("zeroes", False, Mode()),
    ],
)
def test_settings_are_read_off_ids(tmpc_id: str, recompute: bool, expected: Mode) -> None:
    assert Tmpc(tmpc_id, 1.0, recompute=recompute).mode == expected


def test_settings_that_an_estimate_has() -> None:
    every = OneMode().modes(llama(zero_shards=2))
    assert len(every) == 12
    assert len(set(every)) == 12
    assert every[0] == Mode()
    small = OneMode((), sequence_parallel=False, optimizer_sharding=False)
    assert small.modes(llama(zero_shards=2)) == (Mode(),)


def test_pieces_by_path_and_by_name() -> None:
    by_path = pieces_of(llama())
    assert (by_path.blocks, by_path.members[0], by_path.members[1], by_path.members[-1]) == (12, (0,), (1,), (13,))
    bert = pieces_of(piper_ray.load(INPUTS / "bert32-a100.toml"))
    assert (bert.blocks, len(bert.members[0]), len(bert.members[-1])) == (32, 4, 1)
    ends = pieces_of(model(("a", "h.0"), ("b", "h.1")))
    assert ends.members == ((), (0,), (1,), ())
    halves = [(part, f"net.{v}.{part}") for v in range(2) for part in ("attention", "mlp")]
    assert pieces_of(model(("e", "emb"), *halves, ("o", "out"))).members == ((0,), (1, 2), (3, 4), (5,))


@pytest.mark.parametrize(
    ("instance", "told"),
    [
        (model(("conv", ""), ("pool", "")), "no row of equal blocks"),
        (model(("a", "enc.0"), ("b", "dec.0")), "several rows of blocks, enc and dec"),
        (model(("a", "h.0"), ("norm", "norm"), ("b", "h.1")), 'layer 1 \\("norm"\\) stands between'),
        (model(("a", "h.0"), ("b", "h.2")), "of block 2 where 0 or 1 is due"),
        (model(("a", "h.0.x"), ("b", "h.0.y"), ("a", "h.1.x")), "block 1 of toy is not made of the same layers"),
        (model(("a", "h.0"), ("b", "h.1"), edges=()), "does not read what"),
    ],
)
def test_other_models_are_refused_by_name(instance: Instance, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        pieces_of(instance)


def test_schedules_of_a_runtime() -> None:
    megatron = RUNTIMES[RuntimeName.MEGATRON]
    assert megatron.schedule(None, None) is ScheduleName.ONE_F_ONE_B
    assert megatron.schedule(None, Schedule(ScheduleName.INTERLEAVED, 4)) == Schedule(ScheduleName.INTERLEAVED, 4)
    assert megatron.schedule(None, Schedule(ScheduleName.GPIPE)) is ScheduleName.ONE_F_ONE_B
    with pytest.raises(UsageError, match="Megatron has no schedule zb-v; it has 1f1b, interleaved"):
        megatron.schedule(ScheduleName.ZB_V, None)


def test_rules_beside_the_users_own() -> None:
    instance = llama()
    megatron, flagscale = RUNTIMES[RuntimeName.MEGATRON], RUNTIMES[RuntimeName.FLAGSCALE]
    kept = megatron.restricted(Restrictions(), instance, ScheduleName.INTERLEAVED, 4)
    assert [x.degrees for x in kept.constraints if isinstance(x, TensorParallelDegrees)] == [(1, 2, 4)]
    assert kept.has(FilledPipeline)
    assert not megatron.restricted(Restrictions(), instance, ScheduleName.ONE_F_ONE_B, 4).has(FilledPipeline)
    own = Restrictions(constraints=[TensorParallelDegrees((4, 8))])
    kept = megatron.restricted(own, instance, ScheduleName.ONE_F_ONE_B, 4)
    assert [x.degrees for x in kept.constraints if isinstance(x, TensorParallelDegrees)] == [(4,)]
    with pytest.raises(UsageError, match="tensor-parallel degrees 1, 2 here, and none is asked for"):
        megatron.restricted(own, instance, ScheduleName.ONE_F_ONE_B, 2)
    first_k = flagscale.restricted(Restrictions(), instance, ScheduleName.ONE_F_ONE_B, 8)
    assert first_k.recompute is Recompute.FIRST_K
    never = flagscale.restricted(Restrictions(recompute="never"), instance, ScheduleName.ONE_F_ONE_B, 8)
    assert never.recompute is Recompute.NEVER
    assert RecomputeRule(Recompute.FIRST_K) not in never.constraints
    bert = piper_ray.load(INPUTS / "bert32-a100.toml")
    (pieces,) = [x for x in megatron.constraints(bert, ScheduleName.ONE_F_ONE_B, 8) if isinstance(x, WholePieces)]
    assert len(pieces.pieces) == 1


def test_gpus_of_a_node() -> None:
    instance = llama()
    assert gpus_per_node_of(instance) == 8
    assert gpus_per_node_of(instance, 4) == 4
    assert gpus_per_node_of(instance.replace(devices=2)) == 2
    alone = Instance(instance.layers, instance.edges, cluster=Cluster(64, 1e9, (Link(1e9),)), batch=instance.batch)
    assert gpus_per_node_of(alone) == 8


def test_places_of_ranks() -> None:
    """By hand: 2 ranks of a pipeline, d = 2, t = 2, two chunks on each, nodes of 4."""
    instance = llama()
    plan = plan_of(instance, [4, 4, 3, 3], d=2, t=2)
    under = Schedule(ScheduleName.INTERLEAVED, 2)
    places = list(rank_places(meshes_of(plan, under, {"": 4}, instance.cluster), under))
    assert [(x.rank, x.node, x.local_rank) for x in places] == [(r, r // 4, r % 4) for r in range(8)]
    assert [(x.pipeline_rank, x.replica, x.shard) for x in places[:5]] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0),
    ]  # fmt: skip
    assert [x.stages for x in places] == [(0, 2)] * 4 + [(1, 3)] * 4
    lines = rank_lines(meshes_of(plan, under, {"": 4}, instance.cluster), under)
    assert lines[1] == "pipeline rank 1: stages 2, 4; ranks 4-7 on node 1; rank = 4 + 2 x replica + shard"
    v = Schedule(ScheduleName.ZB_V)
    assert [x.stages for x in rank_places(meshes_of(plan, v, {"": 4}, instance.cluster), v)] == [(0, 3)] * 4 + [
        (1, 2)
    ] * 4


@pytest.mark.parametrize("name", list(RuntimeName))
def test_plans_for_a_runtime_keep_its_rules(name: RuntimeName) -> None:
    instance, runtime = llama(4), RUNTIMES[name]
    kept = runtime.restricted(Restrictions(), instance, ScheduleName.ONE_F_ONE_B, 8)
    solution = piper_ray.solve(instance, restrictions=kept, schedule="1f1b")
    assert isinstance(solution.plan, Plan)
    assert solution.status.value == "optimal"
    piper_ray.evaluate(instance, solution.plan, restrictions=kept, schedule="1f1b")
    free = piper_ray.solve(instance, schedule="1f1b")
    assert free.time_per_sample_s is not None
    assert solution.time_per_sample_s is not None
    assert free.time_per_sample_s <= solution.time_per_sample_s * (1 + 1e-9)


def test_a_tied_model_is_on_one_rank_where_the_runtime_asks_for_it() -> None:
    tied = llama(tied=True)
    assert tied.tied_layers == {"token embedding": (0, 13)}
    assert llama().tied_layers == {}
    titan, megatron = RUNTIMES[RuntimeName.TORCHTITAN], RUNTIMES[RuntimeName.MEGATRON]
    kept = titan.restricted(Restrictions(), tied, ScheduleName.ONE_F_ONE_B, 8)
    assert kept.stage_count == 1
    solution = piper_ray.solve(tied, restrictions=kept, schedule="1f1b")
    assert solution.plan is not None
    assert len(solution.plan.stages) == 1
    assert megatron.restricted(Restrictions(), tied, ScheduleName.ONE_F_ONE_B, 8).stage_count is None
    assert titan.restricted(Restrictions(), llama(), ScheduleName.ONE_F_ONE_B, 8).stage_count is None
    with pytest.raises(UsageError, match="weight in common, and 2 are asked for"):
        titan.restricted(Restrictions(constraints=[StageCount(2)]), tied, ScheduleName.ONE_F_ONE_B, 8)
    with pytest.raises(UsageError, match="weight in common, and interleaved is for several"):
        titan.restricted(Restrictions(), tied, ScheduleName.INTERLEAVED, 8)


def test_experts_ask_for_sequence_parallelism_in_megatron() -> None:
    """Its MoELayer refuses to train without, where t > 1."""
    for name, expected in ((RuntimeName.MEGATRON, {True}), (RuntimeName.TORCHTITAN, {False, True})):
        rule = RUNTIMES[name].setting
        assert {setting.sequence_parallel for setting in rule.modes(mixture())} == expected
        assert {setting.sequence_parallel for setting in rule.modes(llama())} == {False, True}


def test_heads_of_keys_and_values_are_not_shared_where_the_runtime_asks_for_them() -> None:
    """Megatron gives several devices copies of one; torchtitan, and the Megatron in FlagScale, refuse that."""
    few = llama(key_heads=2)
    assert few.key_heads == 2
    assert [layer.key_heads for layer in few.layers] == [0, *[2] * 12, 0]
    for name, expected in (("megatron", (1, 2, 4, 8)), ("torchtitan", (1, 2)), ("flagscale", (1, 2))):
        runtime = RUNTIMES[RuntimeName(name)]
        kept = runtime.restricted(Restrictions(), few, ScheduleName.ONE_F_ONE_B, 8)
        assert [x.degrees for x in kept.constraints if isinstance(x, TensorParallelDegrees)] == [expected]
    titan = RUNTIMES[RuntimeName.TORCHTITAN]
    over = plan_of(few, [7, 7], t=4)
    (told,) = titan.setting.violations(few, over)
    assert told == "tensor-parallel degree 4 does not divide the model's 2 heads of keys and values"
    assert list(RUNTIMES[RuntimeName.MEGATRON].setting.violations(few, over)) == []
    asked = Restrictions(constraints=[TensorParallelDegrees((4,))])
    with pytest.raises(UsageError, match="torchtitan runs tensor-parallel degrees 1, 2 here"):
        titan.restricted(asked, few, ScheduleName.ONE_F_ONE_B, 8)


def test_groups_that_share_a_sequence_have_the_heads_that_each_needs() -> None:
    """Eight devices are two groups of four, or one of eight: four heads are enough for the former alone."""
    shared = replace(mixture(), layers=tuple(replace(x, key_heads=4 if x.key_heads else 0) for x in mixture().layers))
    rule = RUNTIMES[RuntimeName.TORCHTITAN].setting
    for context in (1, 2):
        setting = Mode(sequence_parallel=True, context=context)
        degrees = {t for layer in next(rule.under_each(shared, [setting])).layers for t in layer.tmpcs}
        assert degrees == ({1, 2, 4} if context == 1 else {2, 4, 8})


def test_sequence_parallelism_needs_tokens_that_the_devices_divide() -> None:
    rule, odd = RUNTIMES[RuntimeName.MEGATRON].setting, llama(tokens=1026)
    left = {
        sequence: {
            t for layer in next(rule.under_each(odd, [Mode(sequence_parallel=sequence)])).layers for t in layer.tmpcs
        }
        for sequence in (False, True)
    }
    assert left == {False: {1, 2, 4, 8}, True: {1, 2}}
    plan = plan_of(odd, [7, 7], t=4, setting=Mode(sequence_parallel=True))
    (told,) = rule.violations(odd, plan)
    assert told == "sequence parallelism: 4 devices of a replica do not divide 1026 tokens of a sample"


def test_what_is_not_one_for_all_is_said() -> None:
    instance, rule = llama(zero_shards=2), OneMode()
    plain, sequence = (plan_of(instance, [7, 7], d=2, t=2, setting=Mode(sequence_parallel=x)) for x in (False, True))
    mixed = Plan((plain.stages[0], sequence.stages[1]), keeps_order=True)
    (told,) = rule.violations(instance, mixed)
    assert told.startswith("sequence parallelism is not one for all layers: layer ")
    (told,) = OneMode(sequence_parallel=False).violations(instance, sequence)
    assert told == "sequence parallelism is not possible; layer 0 runs as 'sp'"
    assert list(rule.violations(instance, sequence)) == []


def test_predictors_are_a_piece_before_the_head() -> None:
    """Of two layers behind two blocks; a model's last block index goes on in their paths."""
    named = (("e", "embed"), ("b", "h.0"), ("b", "h.1"), ("p", "h.2"), ("p", "h.3"), ("o", "out"))
    instance = model(*named)
    instance = replace(
        instance, layers=tuple(replace(layer, predictor=layer.id in (3, 4)) for layer in instance.layers)
    )
    pieces = pieces_of(instance)
    assert (pieces.members, pieces.predictors) == (((0,), (1,), (2,), (3, 4), (5,)), 2)
    assert (pieces.blocks, pieces.head, pieces.is_predictor(3), pieces.is_block(3)) == (2, 4, True, False)
    assert (pieces.name(3), pieces.name(4)) == ("the predictors", "the head")
    last = replace(instance, layers=tuple(replace(layer, predictor=layer.id == 5) for layer in instance.layers))
    assert pieces_of(replace(last, layers=(*last.layers[:3], last.layers[5]), edges=last.edges[:2])).predictors == 1


def test_one_list_of_parts_for_layers_that_differ() -> None:
    """Against the definition: each layer has a TMPC for just its share of the list, with or without another."""
    rng, seen = Random(5), 0
    parts = ("a", "b", "c")
    every = [frozenset(x) for size in range(4) for x in combinations(parts, size)]
    for _ in range(200):
        rows: list[set[frozenset[str]]] = [
            {*rng.sample(every, rng.randint(1, 4)), frozenset()} for _ in range(rng.randint(1, 3))
        ]
        layers = [(f"{v}", f"h.{v}") for v in range(len(rows))]
        instance = model(*layers)
        instance = replace(
            instance,
            layers=tuple(
                replace(layer, tmpcs={1: tuple(tmpc_of(one) for one in sorted(row, key=sorted))})
                for layer, row in zip(instance.layers, rows, strict=True)
            ),
        )
        found = {one.recomputation for one in OneMode().modes(instance)}
        known = [set().union(*row) for row in rows]
        able = {
            union
            for union in every
            if union <= set().union(*known) and all(union & own in row for own, row in zip(known, rows, strict=True))
        }
        assert found == {Recomputation.of_parts(union) for union in able}
        seen += len(able) > 2
        for union in able:
            for layer, row, own in zip(instance.layers, rows, known, strict=True):
                (left,) = tmpcs_under(layer.tmpcs[1], Mode(Recomputation.of_parts(union)))
                assert left == tmpc_of(union & own)
                assert union & own in row
    assert seen > 50


def tmpc_of(parts: frozenset[str]) -> Tmpc:
    return Tmpc(f"selective-{'-'.join(sorted(parts))}" if parts else "plain", 1.0, recompute=bool(parts))


def test_nodes_within_a_domain(tmp_path: Path) -> None:
    """GB200 as sold: processes of 4 GPUs a node, tensor parallelism and rings within 72."""
    rack = piper_ray.estimate("llama3-8b", "GB200", nodes=18, global_batch=64)
    assert (rack.devices, rack.cluster.node_devices, rack.cluster.links[0].devices) == (72, 4, 72)
    assert gpus_per_node_of(rack) == 4
    assert domain_of(rack, 4) == 72
    path = tmp_path / "rack.toml"
    path.write_text(to_toml(rack), encoding="utf-8")
    assert piper_ray.load(path).cluster == piper_ray.load(to_upstream(rack)).cluster == rack.cluster
    under = ScheduleName.ONE_F_ONE_B
    megatron = RUNTIMES[RuntimeName.MEGATRON].restricted(Restrictions(), rack, under, domain_of(rack, 4))
    plan = piper_ray.solve(rack, schedule=under, restrictions=megatron).plan
    assert plan is not None
    export = export_plan(rack, plan, Schedule(under), Target.MEGATRON, gpus_per_node_of(rack))
    launch = next(text for name, text in export.files.items() if name.endswith(".sh"))
    assert f"--nnodes {plan.devices // 4} --nproc-per-node 4" in launch


def test_domains_are_whole_nodes() -> None:
    def cluster(domain: int | None) -> Cluster:
        return piper_ray.estimate(
            "llama3-8b", "H100-SXM", nodes=8, gpus_per_node=4, domain=domain, global_batch=64
        ).cluster

    assert cluster(16).links[0].devices == 16
    assert cluster(None).node_devices is None
    with pytest.raises(UsageError, match="domain 6: expected whole nodes of 4 GPUs"):
        cluster(6)
