"""What the estimator reads: configs, names, the table of hardware; and what it says of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.estimate.architectures import FAMILIES
from piper_ray.workloads.estimate.build import EstimateRequest, estimate
from piper_ray.workloads.estimate.config import model_names, read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from tests.lengths import long_after

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
CLIP = {"model_type": "clip", "text_config": {}, "vision_config": {}}
TOWERS = {
    "model_type": "towers", "projection_dim": 8,
    "towers": [
        {"name": name, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "tokens": 5,
         "patch_numbers": 7} for name in ("one", "two")
    ],
}  # fmt: skip


def written(folder: Path, document: object, name: str = "tiny.json") -> str:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_a_config_of_hugging_face_with_keys_that_do_not_matter(tmp_path: Path) -> None:
    model = read_model(written(tmp_path, {**LLAMA, "torch_dtype": "bfloat16", "rope_scaling": {"factor": 8.0}}))
    assert (model.name, model.tokens, model.samples) == ("tiny", 4096, 1)


def test_a_config_json_is_called_as_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    assert read_model(written(folder, LLAMA, "config.json")).name == "Tiny-Llama"


def test_names_are_known_in_any_case() -> None:
    assert read_model("GPT3-175B").name == "gpt3-175b"
    assert read_model("Llama_3-70b").name == "llama3-70b"
    assert {read_model(name).name for name in model_names()} == set(model_names())


@pytest.mark.parametrize("name", long_after(6, model_names()))
def test_every_known_model_can_be_estimated(name: str) -> None:
    result = estimate(read_model(name), load_hardware(), "H100-SXM", EstimateRequest(nodes=4))
    assert result.instance.devices == 32
    assert result.architecture.legend.keys() >= {
        symbol
        for kind in result.architecture.kinds
        for symbol, value in kind.symbols.items()
        if value and any(symbol in operator.parameters.split() for operator in kind.operators)
    }


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"model_type": "x", "hidden_size": 0}, "model_type", 'unknown ("x"); expected one of gpt2, gpt_bigcode'),
        ({"model_type": None, "hidden_size": None}, "model_type", "missing; expected one of"),
        ({"model_type": "x", "num_hidden_layers": None}, "num_hidden_layers", "missing; expected a whole number"),
        ({"hidden_size": None}, "hidden_size", "missing; expected a whole number from 1 to"),
        ({"hidden_size": "256"}, "hidden_size", 'not a whole number ("256")'),
        ({"hidden_size": 0}, "hidden_size", "zero (0); expected a whole number from 1 to"),
        ({"hidden_size": 2**30}, "hidden_size", "too large"),
        ({"hidden_size": 257}, "hidden_size", "257 is no multiple of num_attention_heads = 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3 does not divide num_attention_heads = 8"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers", "too large"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "neither true nor false"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok", "more than num_local_experts"),
        ({"model_type": "vit", "image_size": 225}, "image_size", "no multiple of patch_size"),
        ({"model_type": "bert", "hidden_dropout_prob": 2.0}, "hidden_dropout_prob", "a share from 0 to 1"),
        ({"model_type": "resnet", "depths": [1]}, "depths", "4 hidden_sizes; expected as many"),
        ({"model_type": "resnet", "layer_type": "odd"}, "layer_type", 'expected "bottleneck" or "basic"'),
    ],
)
def test_a_fault_of_a_config_is_reported_at_its_key(
    tmp_path: Path, change: dict[str, object], path: str, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_model(written(tmp_path, {**LLAMA, **change}))
    assert [fault for fault in caught.value.faults if fault.path == path and words in fault.message], str(caught.value)


def test_all_faults_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_model(written(tmp_path, {"model_type": "llama", "hidden_size": -1, "vocab_size": 2.5}))
    assert {fault.path for fault in caught.value.faults} == {
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("document", "path", "words"),
    [
        ({**CLIP, "text_config": {"hidden_size": "x"}}, "text_config.hidden_size", "not a whole number"),
        ({**CLIP, "text_config": {"hidden_size": 9}}, "text_config.hidden_size", "no multiple"),
        ({**CLIP, "vision_config": 3}, "vision_config", "not an object (3)"),
        ({**CLIP, "vision_config": {"patch_size": 13}}, "vision_config.image_size", "no multiple of patch_size"),
        ({**TOWERS, "towers": TOWERS["towers"][:1]}, "towers", "expected a list of 2 to 20 towers"),  # type: ignore[index]
        ({**TOWERS, "towers": [TOWERS["towers"][0]] * 2}, "towers[1].name", "another tower"),  # type: ignore[index]
        ({**TOWERS, "towers": [{**tower, "vocab_size": 9} for tower in TOWERS["towers"]]}, "towers[0]", "either"),  # type: ignore[attr-defined]
    ],
)
def test_faults_of_towers(tmp_path: Path, document: dict[str, object], path: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read_model(written(tmp_path, document))
    assert [fault for fault in caught.value.faults if fault.path == path and words in fault.message], str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": "llama", "model_type": "gpt2"}'])
def test_what_is_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError):
        read_model(str(path))


def test_neither_file_nor_name() -> None:
    with pytest.raises(
        UsageError, match=r"no such file, and no model of that name; expected .*llama3-405b.*; did you mean llama3-"
    ):
        read_model("llama3-80b")
    with pytest.raises(InputError, match="cannot be read"):
        read_model("nowhere/config.json")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (EstimateRequest(nodes=1, batch=7, samples=2), "--global-batch 7 is no multiple"),
        (EstimateRequest(nodes=1, tokens=10**6), "has positions for 4096"),
        (EstimateRequest(nodes=10**6), "expected at most 100,000"),
        (EstimateRequest(nodes=1, samples=2**20, batch=2**20), "more than a GPU has"),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, request_: EstimateRequest, words: str) -> None:
    model = read_model(written(tmp_path, LLAMA))
    with pytest.raises(UsageError, match=words):
        estimate(model, load_hardware(), "H100-SXM", request_)


def test_samples_of_one_length_take_no_other() -> None:
    with pytest.raises(UsageError, match="samples of one length"):
        estimate(read_model("resnet50"), load_hardware(), "H100-SXM", EstimateRequest(nodes=1, tokens=8))


def test_an_unknown_gpu_names_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="K80: unknown; expected one of A100-40, A100-80, H100-SXM, H200-SXM"):
        load_hardware().gpu("K80")
    assert load_hardware().gpu("h100-sxm").memory_bytes == 80e9


def test_a_file_adds_a_gpu_and_changes_a_constant(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[gpus.SLOW]\nbase = "H100-SXM"\nname = "slow"\nmatrix = 1e12\n[gpus.L40S]\nmemory = "40GB"\n'
        "[training]\ngradient_bytes = 2\n"
    )
    ours, theirs = load_hardware(), load_hardware(path)
    assert theirs.gpu("slow").matrix_flop_per_s == 1e12
    assert theirs.gpu("slow").link_bytes_per_s == ours.gpu("H100-SXM").link_bytes_per_s
    assert theirs.gpu("L40S").memory_bytes == 40e9
    assert theirs.gpu("A100-80") == ours.gpu("A100-80")
    assert theirs.training.gradient_bytes == 2
    assert theirs.training.optimizer_bytes == ours.training.optimizer_bytes == 12


def test_sizes_of_a_hardware_file_that_most_likely_lack_their_unit_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "hardware.toml"
    file.write_text('[gpus.X]\nbase = "H100-SXM"\nmemory = 80\nlink_bandwidth = "450"\n')
    heard: list[str] = []
    load_hardware(file, heard.append)
    assert heard == [
        f"{file}: gpus.X.memory: 80 bytes, less than 1 MB; was 80GB meant?",
        f"{file}: gpus.X.link_bandwidth: 450 bytes per second, less than 1 MB/s; was 450GB/s meant?",
    ]


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("gpus = 3", "gpus", "not a table"),
        ("[gpu.X]", "gpu", "unknown key; expected gpus or training"),
        ("[gpus.H100-SXM]\nmatrix = -1", "gpus.H100-SXM.matrix", "negative (-1)"),
        ("[gpus.H100-SXM]\nmatrix_fraction = 1.5", "gpus.H100-SXM.matrix_fraction", "a share > 0 and at most 1"),
        ('[gpus.H100-SXM]\nmemory = "80 furlongs"', "gpus.H100-SXM.memory", "unknown unit"),
        ("[gpus.H100-SXM]\nspeed = 1", "gpus.H100-SXM.speed", "unknown key"),
        ('[gpus.X]\nname = "x"', "gpus.X.memory", "missing"),
        ('[gpus.X]\nbase = "Y"', "gpus.X.base", "expected another GPU of the table"),
        ('[gpus.X]\nbase = "X"', "gpus.X.base", "expected another GPU of the table"),
        ("[training]\nweight_bytes = -1", "training.weight_bytes", "negative"),
    ],
)
def test_faults_of_a_hardware_file(tmp_path: Path, text: str, path: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        load_hardware(file)
    assert [fault for fault in caught.value.faults if fault.path == path and words in fault.message], str(caught.value)
    assert "gpus.H200-SXM" not in str(caught.value), "a GPU of the same base repeats its fault"


def test_families_are_those_that_the_requirement_names() -> None:
    assert set(FAMILIES) >= {
        "gpt2", "llama", "bert", "t5", "mixtral", "deepseek_v3", "clip", "towers", "vit", "resnet", "inception_v3",
    }  # fmt: skip
