"""``piper_plan.py`` of a folder for torchtitan: the function that its command line calls for a config.

Where the workload says its model, ``planned`` builds it of torchtitan's own parts and compares their parameters; else
it takes the config function that PIPER_BASE names. Field names differ between torchtitan 0.3 and its main branch,
which counts tokens in place of samples (its TrainingConfig, August 2026); the file writes those that it finds.
"""

from __future__ import annotations

_HEAD = '''"""torchtitan's config of the plan: --module piper_plan --config planned, with this folder on PYTHONPATH.

{usage}
For torchtitan 0.3, and its main branch of August 2026.
"""

{imports}
FOLDER = Path(__file__).resolve().parent


def apply(config):
    """Sets in a torchtitan config what the plan decides; returns it. Raises ValueError for a model of other depth."""
    decided = json.loads((FOLDER / "torchtitan.json").read_text())
    planned, layers = decided["layers"], len(config.model_spec.model.layers)
    if layers != planned:  # of which torchtitan would train those that both have
        raise ValueError(f"the plan is of {{planned}} layers, the config of {{layers}}")
    for section, fields in _sections(decided, config).items():
        for name, value in fields.items():
            if not hasattr(getattr(config, section), name):
                raise ValueError(f"{{_unknown()}}: it has no {{section}}.{{name}}")
            if name == "pipeline_parallel_schedule_csv" and value:
                value = str(FOLDER / value)
            setattr(getattr(config, section), name, value)
    config.activation_checkpoint = _recomputation(decided["activation_checkpoint"])
    return config


def _sections(decided, config):
    """What is decided, by the names that this version of torchtitan has."""
    parallelism, training = dict(decided["parallelism"]), dict(decided["training"])
    if hasattr(config.training, "num_tokens_per_microbatch_per_dp_rank"):  # main: tokens in place of samples
        tokens = training.pop("seq_len", config.training.max_context_length)
        local, batch = training.pop("local_batch_size"), training.pop("global_batch_size")
        samples = parallelism.pop("pipeline_parallel_microbatch_size", local)
        if parallelism["pipeline_parallel_degree"] > 1:
            parallelism["num_pp_microbatches"] = local // samples
        training["max_context_length"] = tokens
        training["num_tokens_per_microbatch_per_dp_rank"] = samples * tokens
        training["num_tokens_per_train_step"] = batch * tokens
    return {{"parallelism": parallelism, "training": training, "compile": decided.get("compile", {{}})}}


def _recomputation(name):
    """torchtitan's policy of activation checkpointing."""
    if name == "none":
        return None
    try:
        from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    except ImportError:
        raise ValueError(f"{{_unknown()}}: it has no FullAC and SelectiveAC") from None
    return {{"selective": SelectiveAC, "full": FullAC}}[name].Config()


def _unknown():
    import torchtitan

    return f"torchtitan {{torchtitan.__version__}} is not the one that this file was written for"

'''

_OF_A_BASE = '''
def planned():
    """The model's own config with the plan."""
    module, _, function = os.environ["PIPER_BASE"].partition(":")
    return apply(getattr(importlib.import_module(module), function)())
'''

_OF_THE_MODEL = '''
def planned():
    """The planned model with the plan; what neither says (data, learning rate, steps) is torchtitan's for such a model.

    Raises ValueError where torchtitan makes another model of it.
    """
    from torchtitan.trainer import Trainer

    said = json.loads((FOLDER / "torchtitan.json").read_text())["model"]
    module = importlib.import_module(f"torchtitan.models.{said['module']}")
    registry = importlib.import_module(f"torchtitan.models.{said['module']}.config_registry")
    usual = getattr(registry, said["usual"])()
    model = _built(module, usual.model_spec.model, said)
    _require("parameters", _parameters(model), said["parameters"])
    for converter in _converters(said):
        model = converter.build().convert(model)
    if "lora_rank" in said:
        _require("trained parameters", _parameters(model, trained=True), said["trained"])
    cross_entropy = replace(usual.loss.loss_fn, global_vocab_size=said["vocab_size"])
    return apply(
        Trainer.Config(
            model_spec=replace(usual.model_spec, flavor="planned", model=model),
            dataloader=usual.dataloader,
            optimizer=replace(usual.optimizer, implementation=said["optimizer"]),
            lr_scheduler=usual.lr_scheduler,
            training=usual.training,
            loss=replace(usual.loss, loss_fn=cross_entropy),
        )
    )


def _built(module, usual, said):
    """The model's config of torchtitan's own parts. usual: such a model's, of which it has what is not of its size."""
    from torchtitan.models import common
    from torchtitan.models.common.param_init import skip_param_init

    dim, words = said["dim"], said["vocab_size"]
    kind = getattr(common, said["rope_class"]).Config
    length = next(x.name for x in fields(kind) if x.name in ("max_seq_len", "max_context_length"))
    rope = kind(**said["rope"], **{length: said["positions"]})
    layers = getattr(module, said["builder"])(rope=rope, **said["layers"])
    for layer in layers:
        attention, moe = layer.attention, layer.moe
        if not said["query_norm"] and hasattr(attention, "qk_norm"):
            attention.qk_norm = None
        if said["query_bias"] and said["module"] in ("llama3", "qwen3"):
            projections = attention.qkv_linear
            for name in ("wqkv", "wq", "wkv"):
                if hasattr(projections, name):
                    getattr(projections, name).bias = True
        if moe is not None and "route_norm" in said:
            moe.router.route_norm = said["route_norm"]
        if moe is not None and said.get("shared_experts") is False:
            moe.shared_experts = None
    embedding, head = usual.tok_embeddings, usual.lm_head
    if said["tied"]:
        embedding = replace(embedding, param_init={"weight": skip_param_init})
    if hasattr(module, "_output_linear_init"):  # whose spread goes by the width
        head = replace(head, param_init=module._output_linear_init(dim))
    model = type(usual)(
        dim=dim,
        vocab_size=words,
        tok_embeddings=replace(embedding, num_embeddings=words, embedding_dim=dim),
        norm=replace(usual.norm, normalized_shape=dim),
        lm_head=replace(head, in_features=dim, out_features=words),
        layers=layers,
        enable_weight_tying=said["tied"],
    )
    for _, norm, _, _ in model.traverse(common.RMSNorm.Config):
        norm.eps = said["norm_eps"]
    return model


def _converters(said):
    """Of products in 8 bits, but for the head and routers, and of adapters."""
    from torchtitan.components import quantization as eights
    from torchtitan.components.lora import LoRAConverter

    compiled, found, experts = {"model_compile_enabled": True}, [], "num_experts" in said["layers"]
    if said["precision"] == "fp8":
        kept = ["lm_head", "router.gate", *(["attention.wo"] if said["module"] == "gpt_oss" else [])]
        found.append(eights.Float8LinearConverter.Config(filter_fqns=kept, **compiled))
        found += [eights.Float8GroupedExpertsConverter.Config(**compiled)] if experts else []
    elif said["precision"] == "mxfp8":
        parts = ["qkv_linear" if said["module"] == "gpt_oss" else "attention", "feed_forward", "shared_experts"]
        found.append(eights.MXFP8LinearConverter.Config(fqns=parts, **compiled))
        found += [eights.MXFP8GroupedExpertsConverter.Config(pad_multiple=128, **compiled)] if experts else []
    if "lora_rank" in said:
        rank = said["lora_rank"]
        found.append(LoRAConverter.Config(rank=rank, alpha=2.0 * rank, target_modules=said["adapted"]))
    return found


def _parameters(model, trained=False):
    """Of the model, made without memory."""
    import torch

    with torch.device("meta"):
        made = model.build()
    return sum(x.numel() for x in made.parameters() if x.requires_grad or not trained)


def _require(what, found, planned):
    if found != planned:
        raise ValueError(f"torchtitan makes a model of {found:,} {what}, and the plan is of {planned:,}")
'''

_BASE_IMPORTS = "import importlib\nimport json\nimport os\nfrom pathlib import Path\n"
_MODEL_IMPORTS = "import importlib\nimport json\nfrom dataclasses import fields, replace\nfrom pathlib import Path\n"

_BASE_USAGE = (
    "PIPER_BASE names the model's own config function, such as torchtitan.models.llama3.config_registry:llama3_70b."
)
_MODEL_USAGE = "The model is built as torchtitan.json says, and must have the parameters that the plan counts on."


def plan_module(knows_model: bool) -> str:
    """The text of ``piper_plan.py``."""
    usage, imports, planned = (
        (_MODEL_USAGE, _MODEL_IMPORTS, _OF_THE_MODEL) if knows_model else (_BASE_USAGE, _BASE_IMPORTS, _OF_A_BASE)
    )
    return _HEAD.format(usage=usage, imports=imports) + planned
