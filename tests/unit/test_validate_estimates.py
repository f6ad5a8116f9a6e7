"""Published runs are priced in their own layouts; what cannot be is listed with its reason."""

from __future__ import annotations

import itertools
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from piper_ray.calibrate.layouts import laid_out
from piper_ray.calibrate.runs import PublishedRun, read_runs
from piper_ray.model.mode import Sharding
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.layout import priced
from scripts.validation.doubt import alike, coverage
from scripts.validation.errors import Errors, errors_by_group, groups_of, in_fitted_half
from scripts.validation.order import Layouts, layouts_by_source, order_figures
from scripts.validation.page import made_texts, with_blocks
from scripts.validation.price import PricedRun, outcome_of
from scripts.validation.proof import Proof, proofs
from scripts.validation.sources import errors_by_source, interval_of
from tests.data import DATA, goldens

HARDWARE = load_hardware()
ROOT = Path(__file__).resolve().parents[2]

PUBLISHED: dict[str, Any] = {
    "id": "gpt", "source": "Megatron-LM", "gpu": "A100-80", "gpus": 16, "tp": 4, "pp": 2, "dp": 2, "microbatch": 1,
    "global_batch": 16, "seq": 1024, "precision": "bf16", "recompute": "none", "step_s": 1.0, "fused_attention": True,
    "model": {
        "name": "GPT", "layers": 8, "hidden": 2048, "heads": 16, "vocab": 51200,
        "config": {"model_type": "gpt2", "n_embd": 2048, "n_layer": 8, "n_head": 16, "vocab_size": 51200},
    },
}  # fmt: skip


def outcome(**changes: object) -> PricedRun:
    return outcome_of(PublishedRun.model_validate({**PUBLISHED, **changes}), HARDWARE)


def step_s(**changes: object) -> float:
    found = outcome(**changes)
    assert found.predicted_step_s is not None, found.reason
    return found.predicted_step_s


@pytest.fixture(scope="module")
def by_file() -> dict[str, list[PricedRun]]:
    names = ("published", "measured", "moe", "further", "memory")
    return {name: [outcome_of(run, HARDWARE) for run in read_runs(DATA / "runs" / f"{name}.json")] for name in names}


@pytest.fixture(scope="module")
def all_outcomes(by_file: dict[str, list[PricedRun]]) -> list[PricedRun]:
    """But of those that count for memory alone."""
    return [outcome for name, outcomes in by_file.items() if name != "memory" for outcome in outcomes]


@pytest.fixture(scope="module")
def all_proofs(all_outcomes: list[PricedRun]) -> list[Proof]:
    return proofs(all_outcomes, HARDWARE)


@pytest.mark.long
def test_no_group_is_worse_than_the_expected_figures_say(all_outcomes: list[PricedRun]) -> None:
    """A mean that grows by more than 0.3 points has to be written down: tests/data/goldens/estimate_errors.jsonl."""
    expected = {row["group"]: row for row in goldens("estimate_errors")}
    found = errors_by_group(all_outcomes)
    assert found.keys() == expected.keys()
    for group, errors in found.items():
        assert len(errors.values) == expected[group]["runs"], group
        assert errors.mean <= expected[group]["mean_error"] + 0.003, group


@pytest.mark.long
def test_runs_kept_back_are_as_near_and_in_the_order_that_the_page_says() -> None:
    outcomes = [outcome_of(run, HARDWARE) for run in read_runs(DATA / "runs" / "kept.json")]
    found = {(one.source, one.group): one.errors.mean for one in errors_by_source(outcomes)}
    assert found["Hagemann 2023", "3D since 2023"] <= 0.056
    assert [x.run.id for x in outcomes if not x.fits and x.run.source == "NeMo AutoModel"] == []
    assert found["NeMo AutoModel", "experts"] <= 0.13
    bridge = Errors(tuple(x.error for x in outcomes if "Megatron-Bridge 26" in x.run.source and x.error is not None))
    assert len(bridge.values) == 42
    assert bridge.mean <= 0.1
    assert found["NVIDIA DGXC Grok-1", "experts"] <= 0.06
    assert found["Megatron-Bridge, Kimi K2", "experts"] <= 0.045
    assert found["Megatron-Bridge, Nemotron 3", "experts"] <= 0.025
    assert found["Megatron-Bridge, Nemotron 3, 26.04 and 26.04.01", "experts"] <= 0.08
    assert found["NVIDIA DGXC GB200, 2025-06", "3D since 2023"] <= 0.03
    assert found["NVIDIA DGXC GB200, 2025-06", "FP8"] <= 0.05
    assert found["nanotron", "3D since 2023"] <= 0.125
    orders = layouts_by_source(outcomes)
    assert order_figures(orders["Hagemann 2023"]).regret_of_five <= 0.02
    assert all(order_figures(orders[source]).tau >= 0.5 for source in ("Hagemann 2023", "nanotron"))


@pytest.mark.long
def test_at_most_half_of_the_runs_were_fitted(all_outcomes: list[PricedRun]) -> None:
    fitted = [in_fitted_half(outcome.run.id) for outcome in all_outcomes]
    assert 0.4 < sum(fitted) / len(fitted) <= 0.5


@pytest.mark.long
def test_what_has_no_layout_has_a_reason_and_no_figure(all_outcomes: list[PricedRun]) -> None:
    unpriced = [outcome.to_dict() for outcome in all_outcomes if outcome.predicted_step_s is None]
    assert [row["id"] for row in unpriced] == ["llama-65b", "llama2-70b"]
    assert all("layout" in str(row["reason"]) and "predicted_step_s" not in row for row in unpriced)


@pytest.mark.long
@pytest.mark.parametrize("name", ["memory", "published", "measured", "further"])
def test_what_ran_fits(by_file: dict[str, list[PricedRun]], name: str) -> None:
    """As each run says that it ran: nothing is recomputed for its sake."""
    priced = [(one, one.laid.assumed) for one in by_file[name] if one.laid is not None]
    assert len(priced) > 20
    assert [one.run.id for one, assumed in priced if not one.fits or "to fit" in " ".join(assumed)] == []


@pytest.mark.long
def test_pages_and_doubt_are_what_runs_say(
    by_file: dict[str, list[PricedRun]], all_outcomes: list[PricedRun], all_proofs: list[Proof]
) -> None:
    """Made anew by scripts/validate_estimates --update."""
    made = made_texts(ROOT, all_outcomes, by_file["memory"], all_proofs)
    stale = [path for path, text in made if path.read_text(encoding="utf-8") != text]
    assert stale == []
    assert coverage(alike(all_outcomes)) >= 0.85


@pytest.mark.long
def test_calibrating_on_some_runs_of_a_machine_tells_more_of_the_others(all_proofs: list[Proof]) -> None:
    for proof in all_proofs:
        assert proof.after.mean <= proof.before.mean
        if "data sheets" in proof.machine:
            assert proof.after.mean < 0.3 * proof.before.mean


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": None}, "gpu: not said"),
        ({"ep": 16}, "takes whole groups of 16 GPUs"),
        ({"gpu": "abacus"}, "abacus"),
        ({"tp": None, "pp": None, "dp": None}, "layout: not said"),
        ({"microbatch": None}, "microbatch: not said"),
        ({"global_batch": 15}, "do not divide 15"),
        ({"gpus": 17}, "not 17 gpus"),
        ({"gpus": None, "dp": None}, "neither gpus nor dp"),
        ({"seq": None}, "seq: not said"),
        ({"precision": "int4"}, "int4"),
        ({"precision": "fp8"}, "no products of 8 bits"),
        ({"recompute": "sometimes"}, "sometimes"),
        ({"software": "nemi"}, "did you mean nemo"),
        ({"optimizer_sharding": "zero4"}, "expected one of none, zero1, zero2, fsdp, distributed optimizer"),
        ({"schedule": "2f2b"}, "2f2b"),
        ({"context_exchange": "post"}, "post"),
        ({"tp": 3, "gpus": 12}, "16 heads cannot be divided over 3"),
        ({"stages": [5, 4]}, "9 layers in all; the model has 8"),
        ({"stages": [3, 3, 2]}, "3 stages given for 2 ranks"),
        ({"stages": [4, 0, 0, 4], "pp": 4, "gpus": 32}, "stage 2 has no layer"),
        ({"pp": 16, "gpus": 128}, "8 layers do not make 16 stages"),
        ({"model": {}}, "no config"),
        ({"model": {"config": "no-such-model"}}, "no-such-model"),
        ({"model": {"config": {"model_type": "gpt2", "n_embd": -1}}}, "n_embd"),
    ],
)
def test_what_cannot_be_priced_is_said_with_the_reason(changes: dict[str, object], words: str) -> None:
    found = outcome(**changes)
    assert found.predicted_step_s is None
    assert words in str(found.reason)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_embedding_and_the_projection_may_be_stages_of_their_own() -> None:
    ends = outcome(stages=[0, 4, 4, 0], pp=4, gpus=32)
    first, *middle, last = (rank.allocated_bytes for rank in ends.ranks)
    assert ends.predicted_step_s is not None
    assert max(first, last) < min(middle)


def test_a_layout_s_steps_take_longer_with_more_to_do() -> None:
    usual = step_s()
    assert step_s(recompute="full") > step_s(recompute="selective") > usual
    assert step_s(global_batch=32) > 1.5 * usual
    assert step_s(gpu="H100") < usual
    assert step_s(tensor_overlap=0.0, overlapped=False) > usual
    assert step_s(optimizer_sharding="none") > step_s(optimizer_sharding="zero1")


def test_interleaving_shortens_the_flush() -> None:
    assert step_s(vpp=2, global_batch=8) < step_s(global_batch=8)


def test_a_network_s_rate_that_is_told_counts() -> None:
    assert step_s(node_gbit_per_s=80, overlapped=False) > 1.05 * step_s(overlapped=False)


@pytest.mark.parametrize(
    ("changes", "sharding", "schedule", "software"),
    [
        ({}, Sharding.NONE, Schedule(ScheduleName.ONE_F_ONE_B), "megatron-core"),
        ({"optimizer_sharding": "zero1", "vpp": 2}, Sharding.OPTIMIZER, Schedule("interleaved", 2), "megatron-core"),  # type: ignore[arg-type]
        ({"optimizer_sharding": "fsdp"}, Sharding.WEIGHTS, Schedule(ScheduleName.ONE_F_ONE_B), "fsdp"),
        (
            {"schedule": "gpipe", "software": "deepspeed-2021"},
            Sharding.NONE,
            Schedule(ScheduleName.GPIPE),
            "deepspeed-2021",
        ),
        ({"fused_attention": False}, Sharding.NONE, Schedule(ScheduleName.ONE_F_ONE_B), "megatron-2021"),
        ({"software": "nemo"}, Sharding.NONE, Schedule(ScheduleName.ONE_F_ONE_B), "nemo"),
    ],
)
def test_schedule_sharding_and_software_are_as_said_or_as_is_usual(
    changes: dict[str, object], sharding: Sharding, schedule: Schedule, software: str
) -> None:
    laid = laid_out(PublishedRun.model_validate({**PUBLISHED, **changes}), HARDWARE)
    assert (laid.layout.sharding, laid.layout.schedule, laid.software) == (sharding, schedule, software)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"pp": 2}, [4, 4]),
        ({"pp": 5, "gpus": 40}, [1, 2, 2, 2, 1]),  # embedding and projection as layers of their own
        ({"pp": 3, "gpus": 24}, [2, 3, 3]),
        ({"pp": 2, "stages": [5, 3]}, [5, 3]),
        ({"pp": 2, "vpp": 2, "stages": [4, 4]}, [2, 2, 2, 2]),
        ({"pp": 2, "vpp": 2, "stages": [3, 5]}, [1, 3, 2, 2]),
    ],
)
def test_stages_are_as_the_run_says_or_as_even_as_can_be(changes: dict[str, object], sizes: list[int]) -> None:
    laid = laid_out(PublishedRun.model_validate({**PUBLISHED, **changes}), HARDWARE)
    plan = priced(laid.model, laid.stack, HARDWARE.training, laid.layout).plan
    held = [sum(1 <= layer <= 8 for layer in stage.layers) for stage in plan.stages]
    assert held == sizes
    assert [layer for stage in plan.stages for layer in stage.layers] == list(range(10))


def test_errors_are_signed_and_the_worst_is_shown() -> None:
    errors = Errors((0.1, -0.3, 0.05, 0.15))
    assert errors.mean == pytest.approx(0.15)
    assert errors.signed == pytest.approx(0.0)
    assert errors.worst == -0.3
    assert errors.percentile_95 == 0.3
    assert Errors(tuple(0.01 * i for i in range(1, 101))).percentile_95 == pytest.approx(0.95)


def test_order_is_that_of_layouts_of_one_model_and_cluster() -> None:
    first, second = outcome(id="a", step_s=1.0), outcome(id="b", step_s=2.0, recompute="full")
    other = outcome(id="c", step_s=3.0, gpus=32, dp=4)
    (found,) = layouts_by_source([first, second, other])["Megatron-LM"]
    assert found.pairs == (1, 1)
    assert (found.regret, found.regret_of_five) == (0.0, 0.0)
    turned = outcome(id="b", step_s=0.5, recompute="full")
    (found,) = layouts_by_source([first, turned])["Megatron-LM"]
    assert found.pairs == (-1, 1)
    assert found.regret == pytest.approx(1.0)
    assert layouts_by_source([first, other]) == {}


def test_regret_of_five_is_the_mean_over_all_choices_of_five() -> None:
    steps = tuple((float(place * 5 % 7), float(1 + place)) for place in range(7))
    regrets = []
    for chosen in itertools.combinations(steps, 5):
        fastest = min(chosen, key=lambda step: step[0])
        regrets.append(fastest[1] / min(step[1] for step in chosen) - 1.0)
    assert Layouts(steps).regret_of_five == pytest.approx(sum(regrets) / len(regrets))
    figures = order_figures([Layouts(steps), Layouts(steps[:2])])
    assert (figures.groups, figures.pairs) == (2, 22)


def test_an_interval_counts_each_source_once_and_widens_where_there_are_few() -> None:
    few, many = interval_of([[0.1], [-0.1]]), interval_of([[0.1], [-0.1]] * 5)
    assert few[0] < many[0] < 1.0 < many[1] < few[1]
    assert interval_of([[0.1] * 50, [-0.1]]) == pytest.approx(few)


def test_settings_come_from_fields_and_never_from_words() -> None:
    usual = step_s()
    assert step_s(id="megascale", source="MegaScale", citation="async-tp.md", notes="fused cross entropy") == usual
    assert step_s(overlaps=[]) == usual
    assert step_s(overlaps=["tensor"]) < usual
    odd = outcome(overlaps=["everything"])
    assert "expected one of tensor, experts, context" in str(odd.reason)
    assert outcome(gradients="bf16").predicted_memory_bytes < outcome().predicted_memory_bytes  # type: ignore[operator]


def test_what_a_run_recomputes_without_a_word_is_what_its_memory_asks_for() -> None:
    large = {"microbatch": 16, "seq": 2048, "global_batch": 128}
    model = {"config": {"model_type": "gpt2", "n_embd": 4096, "n_layer": 32, "n_head": 32, "vocab_size": 51200}}
    model["config"]["n_positions"] = 2048
    silent, sworn = outcome(**large, model=model, recompute=""), outcome(**large, model=model)
    assert (silent.fits, sworn.fits) == (True, False)
    assert silent.predicted_step_s > sworn.predicted_step_s  # type: ignore[operator]
    assert any("to fit" in text for text in silent.to_dict()["assumed"])  # type: ignore[attr-defined]


def test_groups() -> None:
    assert groups_of(outcome()) == ("3D since 2023",)
    assert groups_of(outcome(gpu="H100")) == ("3D since 2023", "3D since 2023, H100 bf16")
    assert groups_of(outcome(gpu="H100", precision="fp8")) == ("FP8",)
    assert groups_of(outcome(optimizer_sharding="fsdp")) == ("FSDP",)
    assert groups_of(outcome(software="megatron-2021")) == ("3D, before 2023",)
    assert groups_of(outcome(gpu=None)) == ()


@pytest.mark.long
def test_the_script_prints_a_list_for_programs_and_a_table_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([PUBLISHED, {**PUBLISHED, "id": "silent", "gpu": None}]))

    def run(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["validate_estimates", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("scripts.validation", run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    _, output, _ = run("--runs", path, "--json")
    listed = json.loads(output)
    assert [row["id"] for row in listed] == ["gpt", "silent"]
    assert set(listed[0]) >= {
        "predicted_step_s", "measured_step_s", "error", "predicted_memory_bytes", "fits",
    }  # fmt: skip
    assert listed[0]["error"] == pytest.approx(listed[0]["predicted_step_s"] / 1.0 - 1.0)
    assert listed[1]["reason"] == "gpu: not said"
    _, printed, _ = run("--runs", path)
    assert "Not priced:\n  silent: " in printed
    assert "| 3D since 2023 | 1 |" in printed
    path.write_text(json.dumps([{"id": "odd", "model": 3}]))
    code, printed, errors = run("--runs", path)
    assert (code, printed) == (3, "")
    assert "not an object" in errors
    code, printed, errors = run("--runs", tmp_path / "none.json")
    assert (code, printed) == (3, "")
    assert "none.json" in errors


def test_only_what_is_made_of_a_page_is_put_anew() -> None:
    page = "a\n<!-- made: x -->\nold\n<!-- end -->\nb\n<!-- made: y -->\nkept\n<!-- end -->\n"
    assert with_blocks(page, {"x": ["new", "lines"]}) == page.replace("old", "new\nlines")
    with pytest.raises(AssertionError, match="z"):
        with_blocks(page, {"z": []})
