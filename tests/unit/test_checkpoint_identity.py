"""A checkpoint's identity: every figure of the input and every option counts, to the last bit, and nothing else."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from piper_ray.engine.checkpoint import Identity
from piper_ray.model.cluster import Link
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import CheckpointRefused, UsageError
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc, TrainedModel
from piper_ray.model.mode import Recomputation
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms

TMPC = Tmpc("vanilla", 1.5, 2.5, 3.5, 4.5, {0: 0.25}, {2: 0.5})
LAYERS = tuple(Layer(v, f"layer{v}", {1: (TMPC,), 2: (TMPC, TMPC)}) for v in range(2))
TENSORS = (Tensor((0, 1), 3.0, 5.0),)
INSTANCE = Instance(LAYERS, (Edge(0, 1, 8.0),), 2048, 512, 8.0 * 2**30, 25.0 * 2**30, "name", TENSORS, ("a note",))


def identity(instance: Instance = INSTANCE, **restrictions: Any) -> Identity:
    return Identity.of(instance, Restrictions(**restrictions))


def other_value(value: Any) -> Any:
    """As close to ``value`` as another one can be."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    if isinstance(value, str):
        return value + " "
    if isinstance(value, tuple):
        return value[:-1]
    return {k + 1: v for k, v in value.items()}


def variants(thing: Any, *others: str) -> list[Any]:
    """The dataclass with one field changed, for each field but these others."""
    names = [field.name for field in fields(thing) if field.name not in others]
    return [replace(thing, **{name: other_value(getattr(thing, name))}) for name in names]


DECIDES_NOTHING = ("path", "tied", "experts", "key_heads", "predictor")
"""Of a layer: what is told of its plans, or which of them a runtime takes, which is among the options."""


def with_layer(layer: Layer) -> Instance:
    return replace(INSTANCE, layers=(layer, INSTANCE.layers[1]))


TIMES = ("time_per_sample_s", "forward_s", "backward_s", "weight_s")


def test_every_figure_that_plans_depend_on_counts() -> None:
    figures = ("devices", "microbatches", "memory_bytes", "bandwidth_bytes_per_s")
    others = [INSTANCE.replace(**{name: other_value(getattr(INSTANCE, name))}) for name in figures]
    parts = ("layers", "edges", "tensors")
    others += [replace(INSTANCE, **{name: other_value(getattr(INSTANCE, name))}) for name in parts]
    told = {"name", "notes", "schedule", "model", "measured_threads", "schemes"}
    assert {field.name for field in fields(Instance)} == {*parts, "cluster", "batch", *told}
    others += [with_layer(layer) for layer in variants(LAYERS[0], *DECIDES_NOTHING)]
    times = [
        replace(TMPC, time_per_sample_s=other_value(TMPC.time_per_sample_s)),
        replace(TMPC, forward_s=0.25),
        replace(TMPC, forward_s=0.125),
        replace(TMPC, forward_s=0.25, weight_s=0.0),
        replace(TMPC, forward_s=0.25, weight_s=0.0625),
    ]
    mode = replace(TMPC, mode=replace(TMPC.mode, recomputation=Recomputation.FULL))  # which its id does not say
    for tmpc in [*times, mode, *variants(TMPC, *TIMES, "mode")]:
        others.append(with_layer(replace(LAYERS[0], tmpcs={1: (tmpc,), 2: (TMPC, TMPC)})))
    others += [replace(INSTANCE, edges=(edge,)) for edge in variants(INSTANCE.edges[0])]
    others += [replace(INSTANCE, tensors=(tensor,)) for tensor in variants(TENSORS[0])]
    found = [identity(), *map(identity, others)]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


def test_numbers_within_mappings_and_the_order_of_layers_count() -> None:
    figures = [replace(TMPC, forward_sync_bytes={0: 0.5}), replace(TMPC, backward_sync_bytes={2: 0.25})]
    others = [with_layer(replace(LAYERS[0], tmpcs={1: (tmpc,), 2: (TMPC, TMPC)})) for tmpc in figures]
    others.append(replace(INSTANCE, layers=LAYERS[::-1]))
    assert all(identity(other) != identity() for other in others)


def test_each_restriction_counts() -> None:
    found = [identity(), identity(tensor_parallelism=False), identity(data_parallelism=False)]
    found += [identity(recompute=recompute) for recompute in Recompute if recompute is not Recompute.AUTO]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


def test_nothing_else_counts() -> None:
    reordered = replace(LAYERS[0], tmpcs=dict(sorted(LAYERS[0].tmpcs.items(), reverse=True)))
    assert identity(replace(INSTANCE, name="other")) == identity()
    assert identity(replace(INSTANCE, notes=("other",))) == identity()
    assert identity(replace(INSTANCE, schedule=Schedule(ScheduleName.GPIPE))) == identity(), (
        "a checkpoint is of a solve under Piper's own"
    )
    assert identity(replace(INSTANCE, model=TrainedModel({"model_type": "llama"}), measured_threads=3)) == identity()
    assert identity(replace(INSTANCE, schemes={"found-1": {"t": 2}})) == identity()
    assert identity(with_layer(replace(LAYERS[0], path="model.other"))) == identity()
    assert identity(replace(INSTANCE, batch=replace(INSTANCE.batch, samples_per_microbatch=16))) == identity()
    assert identity(with_layer(reordered)) == identity()
    assert identity(INSTANCE.replace(memory_bytes=8 * 2**30, bandwidth_bytes_per_s=25 * 2**30)) == identity()


def within_nodes(bandwidth_bytes_per_s: float) -> Instance:
    links = (Link(bandwidth_bytes_per_s, 8), *INSTANCE.cluster.links)
    return INSTANCE.replace(cluster=replace(INSTANCE.cluster, links=links))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            identity(within_nodes(9e10)),
            "another input: links 90000000000 bytes/s within 8 there, none within groups here.",
        ),
        (identity(INSTANCE.replace(devices=1024)), "another input: devices 1024 there, 2048 here."),
        (identity(INSTANCE.replace(microbatches=5)), "another input: microbatches 5 there, 512 here."),
        (identity(INSTANCE.replace(memory_bytes=2.5)), "another input: memory 2.5 bytes there, 8589934592 bytes here."),
        (
            identity(INSTANCE.replace(bandwidth_bytes_per_s=1.0)),
            "another input: bandwidth 1 bytes/s there, 26843545600 bytes/s here.",
        ),
        (identity(replace(INSTANCE, layers=LAYERS[:1], edges=())), "layers 1 there, 2 here; edges 0 there, 1 here."),
        (
            identity(replace(INSTANCE, layers=LAYERS[::-1])),
            "another input: as many layers and edges, but not the same.",
        ),
        (identity(data_parallelism=False), "other options: data parallelism forbidden there, allowed here."),
        (
            identity(INSTANCE.replace(devices=1), recompute=Recompute.NEVER),
            "another input and of other options: devices 1 there, 2048 here; recompute never there, auto here.",
        ),
    ],
)
def test_a_refusal_says_what_differs(other: Identity, words: str) -> None:
    with pytest.raises(CheckpointRefused) as refused:
        identity().require(other.facts, "DIR")
    assert str(refused.value).startswith("the checkpoint at DIR is of ")
    assert words in str(refused.value)
    assert refused.value.exit_code == UsageError.exit_code


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = identity()
    with monkeypatch.context() as patched:
        patched.setattr("piper_ray.engine.checkpoint.identity.__version__", "99.0")
        there = identity()
    with pytest.raises(CheckpointRefused, match=r"of another version: piper_ray 99\.0 there"):
        here.require(there.facts, "DIR")


def test_facts_of_an_unknown_shape_are_refused() -> None:
    with pytest.raises(CheckpointRefused, match="format unknown there, 6 here"):
        identity().require({**identity().facts, "version": {}}, "DIR")


def test_terms_of_a_step_are_told() -> None:
    flushed = Schedule(ScheduleName.ONE_F_ONE_B)
    usual = Identity.of(INSTANCE, Restrictions(), [flushed])
    others = [
        Identity.of(INSTANCE, Restrictions(), [flushed], step)
        for step in (StepTerms("ring"), StepTerms(all_reduce_overlap=0.5), StepTerms(optimizer_s=1e-300))  # type: ignore[arg-type]
    ]
    assert len({repr(one.facts) for one in (usual, *others)}) == 4
    with pytest.raises(CheckpointRefused, match="terms of a step as usual there, ring, overlap 0, optimizer 0 s here"):
        others[0].require(usual.facts, "somewhere")
