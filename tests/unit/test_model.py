"""What the model holds in addition to the paper's figures: passes, paths, links, samples and tokens."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.blocks.block_instance import build_instance
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tmpc
from piper_ray.model.passes import passes_of, with_passes
from piper_ray.report.document import speed_document
from piper_ray.report.summary import batch_text, speed_text
from piper_ray.workloads.formats.load import dump, instance_of, load, to_toml, to_upstream
from tests.instances import build, equal_chain, tmpc


def faults_of(instance: Instance) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        instance_of(instance)
    return {fault.path: fault.message for fault in caught.value.faults}


def of_one(one: Tmpc) -> Instance:
    return Instance((Layer(0, "a", {1: (one,)}),), (), 1, 1, 1e9, 1e9)


def test_two_of_p_and_both_passes_give_the_third() -> None:
    assert Tmpc("x", forward_s=0.1, backward_s=0.2).time_per_sample_s == 0.1 + 0.2
    assert Tmpc("x", None, forward_s=1, backward_s=2).time_per_sample_s == 3.0  # type: ignore[arg-type]
    assert Tmpc("x", 3.0, forward_s=1).backward_s == 2.0
    assert Tmpc("x", 3.0, backward_s=1).forward_s == 2.0
    known = Tmpc("x", 3.0, forward_s=1, weight_s=0.5)
    assert instance_of(of_one(known)).layers[0].tmpcs[1][0] == known
    alone = Tmpc("x", 0.1)
    assert (alone.time_per_sample_s, alone.forward_s, alone.backward_s, alone.weight_s) == (0.1, None, None, None)


@pytest.mark.parametrize(
    ("one", "name", "words"),
    [
        (Tmpc("x"), "time_per_sample_s", "expected a finite number"),
        (Tmpc("x", forward_s=1.0), "time_per_sample_s", "expected a finite number"),
        (Tmpc("x", 3.0, forward_s=4.0), "backward_s", "negative (-1.0)"),
        (Tmpc("x", 3.0, forward_s=1.0, backward_s=1.0), "time_per_sample_s", "the passes take 1.0 and 1.0"),
        (Tmpc("x", 3.0, forward_s=1.0, weight_s=2.5), "weight_s", "more than the backward pass (2.0)"),
        (Tmpc("x", 3.0, weight_s=1.0), "weight_s", "a backward pass that is not given"),
        (Tmpc("x", 3.0, forward_s="1"), "forward_s", "not a number"),  # type: ignore[arg-type]
        (Tmpc("x", 3.0, forward_s=float("nan")), "forward_s", "not finite"),
        (Tmpc("x", 3.0, forward_s=1.0, weight_s=-1.0), "weight_s", "negative"),
    ],
)
def test_passes_that_do_not_fit_are_told(one: Tmpc, name: str, words: str) -> None:
    assert words in faults_of(of_one(one))[f"layers[0].tmpcs[1][0].{name}"]


def test_passes_are_known_or_assumed_in_one_place() -> None:
    known = passes_of(Tmpc("x", 3.0, forward_s=0.5, weight_s=1.0))
    assert (known.forward_s, known.backward_s, known.weight_s, known.assumed) == (0.5, 2.5, 1.0, False)
    for one, forward_s in [
        (Tmpc("x", 12.0), 4.0),
        (Tmpc("x", 12.0, recompute=True), 3.0),
        (Tmpc("activation recomp", 12.0), 3.0),
    ]:
        found = passes_of(one)
        assert (found.forward_s, found.backward_s, found.weight_s, found.assumed) == (
            forward_s,
            12 - forward_s,
            None,
            True,
        )


def test_what_is_assumed_is_on_record() -> None:
    known = Layer(1, "b", {1: (Tmpc("x", 3.0, forward_s=0.5),)})
    instance = Instance((Layer(0, "a", {1: (Tmpc("x", 3.0), Tmpc("y", 4.0, recompute=True))}), known), (), 1, 1, 9, 9)
    instance = replace(instance, notes=("before",))
    filled = with_passes(instance_of(instance))
    assert [(x.forward_s, x.backward_s) for x in filled.layers[0].tmpcs[1]] == [(1.0, 2.0), (1.0, 3.0)]
    assert filled.layers[1] is known
    assert [x.time_per_sample_s for layer in filled.layers for x in layer.tmpcs[1]] == [3.0, 4.0, 3.0]
    assert filled.notes[0] == "before"
    assert "of 1 of 2 layers is not known" in filled.notes[1]
    assert with_passes(filled) is filled
    assert filled.checked


def test_the_digest_tells_passes_apart_and_keeps_those_on_record() -> None:
    plain, parted = of_one(Tmpc("x", 3.0)), of_one(Tmpc("x", 3.0, forward_s=1.0))
    assert plain.digest != parted.digest
    # As before TMPCs had passes.
    assert plain.digest == "e9427c017cb51467be38e4458a28521baa84ac21e015ac8f9c41137fac36e7d9"
    more = replace(plain, batch=Batch(1, 16, 8), layers=(replace(plain.layers[0], path="model.a"),))
    assert more.digest == plain.digest


def test_flat_names_and_objects_make_the_same_instance() -> None:
    flat = equal_chain(2, devices=8, microbatches=16, memory_bytes=100.0, bandwidth_bytes_per_s=4.0)
    objects = Instance(
        flat.layers,
        flat.edges,
        name=flat.name,
        cluster=Cluster(8, 100.0, (Link(4.0),)),
        batch=Batch(16),
    )
    assert flat == objects
    assert (flat.devices, flat.microbatches, flat.memory_bytes, flat.bandwidth_bytes_per_s) == (8, 16, 100.0, 4.0)
    assert pickle.loads(pickle.dumps(flat)) == flat
    assert dataclasses.replace(flat, name="other").cluster is flat.cluster


def test_replace_keeps_what_it_does_not_name() -> None:
    links = (Link(90.0, 4), Link(9.0))
    base = Instance((Layer(0, "a", {1: (tmpc(1),)}),), (), cluster=Cluster(8, 50.0, links), batch=Batch(4, 16, 1024))
    other = instance_of(base).replace(devices=16, microbatches=8, memory_bytes=60.0)
    assert other.cluster == Cluster(16, 60.0, links)
    assert other.batch == Batch(8, 16, 1024)
    assert other.checked
    assert base.replace(bandwidth_bytes_per_s=9.0).cluster.links == links
    assert base.replace(bandwidth_bytes_per_s=7.0).cluster.links == (Link(7.0),)
    with pytest.raises(UsageError, match="devices 0 is out of range"):
        base.replace(devices=0)


def test_transfers_are_charged_at_the_link_that_joins_all() -> None:
    cluster = Cluster(8, 50.0, (Link(90.0, 4), Link(10.0)))
    assert cluster.bandwidth_bytes_per_s == 10.0
    assert cluster.transfer_s(5.0) == 0.5
    assert cluster.links[-1].resync_s(5.0, 4) == 0.5
    assert cluster.links[0].transfer_s(9.0) == 0.1


@pytest.mark.parametrize(
    ("cluster", "path"),
    [
        (Cluster(0, 1.0, (Link(1.0),)), "devices"),
        (Cluster(1, -1.0, (Link(1.0),)), "memory_bytes"),
        (Cluster(1, 1.0, (Link(0.0),)), "bandwidth_bytes_per_s"),
        (Cluster(1, 1.0, ()), "cluster.links"),
        (Cluster(1, 1.0, (Link(1.0), Link(1.0))), "cluster.links[0].devices"),
        (Cluster(1, 1.0, (Link(1.0, 4), Link(1.0, 6), Link(1.0))), "cluster.links[1].devices"),
        (Cluster(1, 1.0, (Link(1.0, 4),)), "cluster.links[0].devices"),
        (Cluster(1, 1.0, (Link(-1.0, 4), Link(1.0))), "cluster.links[0].bandwidth_bytes_per_s"),
        (Cluster(1, 1.0, (1.0,)), "cluster.links[0]"),  # type: ignore[arg-type]
        ("cluster", "cluster"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_told(cluster: Cluster, path: str) -> None:
    instance = equal_chain(1)
    object.__setattr__(instance, "cluster", cluster)
    assert path in faults_of(instance)


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (Batch(0), "microbatches"),
        (Batch(1, 0), "batch.samples_per_microbatch"),
        (Batch(1, None, 1.5), "batch.tokens_per_sample"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_with_a_batch_is_told(batch: Batch, path: str) -> None:
    assert path in faults_of(replace(equal_chain(1), batch=batch))


def test_figures_that_are_missing_are_told() -> None:
    found = faults_of(Instance(equal_chain(1).layers, ()))
    assert {"devices", "microbatches", "memory_bytes", "bandwidth_bytes_per_s"} <= found.keys()


def test_speeds_are_said_in_what_is_known() -> None:
    assert speed_text(Batch(8), 0.5) == "2 microbatches/s, 4.00 s/step"
    assert speed_text(Batch(8, 16), 0.5) == "32 samples/s, 4.00 s/step"
    assert speed_text(Batch(8, 16, 1000), 0.5) == "32 samples/s, 32,000 tokens/s, 4.00 s/step"
    assert speed_document(Batch(8, 16), 0.5) == {
        "step_s": 4.0,
        "microbatches_per_s": 2.0,
        "samples_per_s": 32.0,
        "tokens_per_s": None,
    }
    assert speed_document(Batch(8, 16, 1), 0.0)["tokens_per_s"] is None
    assert batch_text(Batch(2048, 16, 1)) == "2,048 microbatches of 16 samples of 1 token"
    assert (Batch(8, 16).samples, Batch(8).samples) == (128, None)


def test_rates_have_no_exponent() -> None:
    assert speed_text(Batch(1000, 3, 1000), 1e-3) == "3,000 samples/s, 3,000,000 tokens/s, 1.00 s/step"
    assert speed_text(Batch(8, 1), 17.0).startswith("0.0588 samples/s")


def rich_instance() -> Instance:
    """A chain with all that files may leave out."""

    def layer(number: int) -> Layer:
        fw = {number - 1: 1.0} if number else {}
        bw = {number + 1: 1.0} if number < 5 else {}
        one = Tmpc("x", 0.3, 1.0, 2.0, 3.0, fw, bw, forward_s=0.1, weight_s=0.05)
        two = Tmpc("y", 0.7, 1.0, 2.0, 3.0, fw, bw, recompute=True, forward_s=0.1, backward_s=0.6000000000000001)
        return Layer(number, "block", {1: (one, two)}, f"model.layers.{number + 3}.block")

    return Instance(
        tuple(map(layer, range(6))),
        tuple(Edge(u, u + 1, 4.0) for u in range(5)),
        name="rich",
        cluster=Cluster(64, 1e6, (Link(900.0, 8), Link(40.0))),
        batch=Batch(32, 4, 1024),
    )


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_files_keep_passes_paths_links_and_counts(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"in{suffix}"
    dump(rich_instance(), path)
    assert load(path) == rich_instance()
    assert load(path).digest == rich_instance().digest
    assert load(path, bandwidth_bytes_per_s=7.0).cluster.links == (Link(7.0),)
    assert load(path, devices=8).cluster.links == rich_instance().cluster.links


def test_a_chain_of_paths_is_one_text() -> None:
    text = to_toml(rich_instance())
    assert 'path = "model.layers.{5}.block"' in text
    assert "forward_s = 0.1" in text
    paths = ["a.{1}", "model.0", "model.1", "x", "", "model.layers.08"]
    odd = rich_instance()
    odd = replace(odd, layers=tuple(replace(x, path=p) for x, p in zip(odd.layers, paths, strict=True)))
    import tomllib

    assert [layer.path for layer in load(tomllib.loads(to_toml(odd))).layers] == paths
    assert [layer.path for layer in load(to_upstream(odd)).layers] == paths


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        ("forward_s = 0.1,", "forward_s = 0.4,", "types.block.tmpcs[0].forward_s", "more than both passes together"),
        ("time_s = 0.3, ", "", "types.block.tmpcs[0].time_s", "missing; expected a finite number >= 0"),
        ("weight_s = 0.05", "weight_s = 0.25", "types.block.tmpcs[0].weight_s", "more than the backward pass"),
        ("backward_s = 0.6", "backward_s = 0.5", "types.block.tmpcs[1].time_s", "expected their sum"),
        ('"model.layers.{5}.block"', '["a", "b"]', 'layers["2-4"].path', "2 paths for 3 layers"),
        ('"model.layers.{5}.block"', "7", 'layers["2-4"].path', "not a text"),
        ("samples_per_microbatch = 4", "samples_per_microbatch = 0", "batch.samples_per_microbatch", "zero"),
        ("samples_per_microbatch = 4", "samples = 4", "batch.samples", "unknown key"),
        ("links = [{ devices = 8", "links = [{ devices = 0", "cluster.links[0].devices", "zero"),
        ("links = [", "links = [3, ", "cluster.links[0]", "not an object"),
    ],
)
def test_a_workload_s_faults_name_their_place(old: str, new: str, path: str, words: str, tmp_path: Path) -> None:
    text = to_toml(rich_instance())
    assert old in text
    target = tmp_path / "in.toml"
    target.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(InputError) as caught:
        load(target)
    assert [x for x in caught.value.faults if x.path == path and words in x.message], str(caught.value)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0].update(forwardTimePerSample=0.4), "forwardTimePerSample"),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0].update(weightTimePerSample=0.4), "weightTimePerSample"),
        (lambda d: d["nodes"][0].update(path=3), "path"),
        (lambda d: d.update(samplesPerMicrobatch=-1), "samplesPerMicrobatch"),
        (lambda d: d.update(innerLinks=[{"devices": 3, "bandwidth": 1}, {"devices": 4, "bandwidth": 1}]), "devices"),
        (lambda d: d.update(innerLinks={}), "innerLinks"),
    ],
)
def test_piper_s_json_tells_its_faults(change: object, path: str) -> None:
    document = to_upstream(rich_instance())
    change(document)  # type: ignore[operator]
    with pytest.raises(InputError) as caught:
        load(document)
    assert any(fault.path.endswith(path) for fault in caught.value.faults), str(caught.value)


def test_both_passes_may_stand_for_p() -> None:
    document = {
        "cluster": {"devices": 1, "microbatches": 1, "memory": 9, "bandwidth": 9},
        "types": {"a": {"tmpcs": [{"t": 1, "id": "x", "forward_s": [0.1, 0.2], "backward_s": 0.2}]}},
        "layers": {"first": {"type": "a"}, "rest": {"continues": "first", "length": 2}},
    }
    times = [layer.tmpcs[1][0].time_per_sample_s for layer in load(document).layers]
    assert times == [0.1 + 0.2, 0.2 + 0.2]


@pytest.mark.parametrize("form", ["pipedream", "dnn-partitioning"])
def test_other_forms_keep_passes_and_refuse_what_they_cannot_hold(form: str, tmp_path: Path) -> None:
    def chain(*passes: tuple[float, float | None]) -> Instance:
        """Milliseconds of p and of the forward pass, or None."""
        rows = {
            v: {1: [replace(Tmpc("vanilla", p / 1000.0), forward_s=None if f is None else f / 1000.0)]}
            for v, (p, f) in enumerate(passes)
        }
        return build(rows, {})

    path = tmp_path / ("x.txt" if form == "pipedream" else "x.json")
    cluster = {"devices": 4, "microbatches": 4, "memory_bytes": 1e6, "bandwidth_bytes_per_s": 4.0}
    for instance in (chain((3.0, 1.0), (1.0, 0.25)), chain((3.0, None), (0.5, None))):
        dump(instance, path, form)
        back = load(path, **cluster)  # type: ignore[arg-type]
        for one, other in zip(instance.layers, back.layers, strict=True):
            before, after = one.tmpcs[1][0], other.tmpcs[1][0]
            assert after.time_per_sample_s == pytest.approx(before.time_per_sample_s, rel=1e-12)
            assert (after.forward_s is None) == (before.forward_s is None)
            if before.forward_s is not None:
                assert after.forward_s == pytest.approx(before.forward_s, rel=1e-12)
    with pytest.raises(UsageError, match="how the time of some layers parts"):
        dump(chain((3.0, 1.0), (1.0, None)), path, form)
    plain = chain((3.0, 1.0))
    for instance, words in [
        (replace(plain, layers=(replace(plain.layers[0], path="a.b"),)), "the paths of layers"),
        (replace(plain, layers=(replace(plain.layers[0], tied="table"),)), "which layers have weights in common"),
        (replace(plain, layers=(replace(plain.layers[0], experts=8),)), "the experts of layers"),
        (replace(plain, batch=Batch(4, 2)), "samples of a microbatch"),
        (replace(plain, cluster=Cluster(4, 1e6, (Link(9.0, 2), Link(4.0)))), "links of smaller groups"),
    ]:
        with pytest.raises(UsageError, match=words):
            dump(instance, path, form)


def test_blocks_add_up_passes_and_keep_paths() -> None:
    instance = rich_instance()
    variants = stage_variants(instance, Restrictions())
    merged = build_instance(instance, variants, [(0, 1), (2, 3, 4), (5,)]).instance
    paths = [f"model.layers.{number}.block" for number in range(3, 9)]
    assert [layer.path for layer in merged.layers] == [", ".join(paths[:2]), ", ".join(paths[2:5]), paths[5]]
    for block, count in zip(merged.layers, (2, 3, 1), strict=True):
        plain = min(block.tmpcs[1], key=lambda tmpc: tmpc.time_per_sample_s)
        assert plain.time_per_sample_s == pytest.approx(0.3 * count)
        assert plain.forward_s == pytest.approx(0.1 * count)
        assert plain.weight_s == pytest.approx(0.05 * count)
    instance_of(merged)
    first = replace(instance.layers[0], tmpcs={1: (Tmpc("x", 0.3),)})
    unknown = replace(instance, layers=(first, *instance.layers[1:]))
    (block, *_) = build_instance(
        unknown, stage_variants(unknown, Restrictions()), [(0, 1), (2, 3, 4, 5)]
    ).instance.layers
    assert {tmpc.forward_s for tmpc in block.tmpcs[1]} == {None}
