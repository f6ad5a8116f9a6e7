"""Megatron's settings in users' launches: the stages, by a layout or by older flags, and all degrees.

The same settings are fields of a Megatron-Bridge, Primus or FlagScale config, and options of Megatron-DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeGuard

from piper_ray.export.flags import DISPATCHERS, MEGATRON, READ_FLAGS, RENAMED_FIELDS, PlanFlag, flag_of
from piper_ray.export.left_aside import notes_of_model, notes_of_the_rest
from piper_ray.export.megatron_layout import BLOCK, EMBEDDING, LOSS, MTP, pieces_of_letters, read_string, with_ends
from piper_ray.export.megatron_model import model_settings, require_megatron_model
from piper_ray.export.run_as import ReadLayout, RunAs, RunMesh, positive
from piper_ray.launches.launch import Dialect, Launch, causes, readable
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Recomputation
from piper_ray.runtimes.pieces import ModelPieces
from piper_ray.simulate.run import Transfers
from piper_ray.workloads.estimate.software import TokenDispatcher, load_software

_SOURCE = "Megatron arguments"

_OF_THE_MODEL = {name: PlanFlag(name=name) for name in MEGATRON.model} | {
    name: PlanFlag(name=name, kind="switch") for name in MEGATRON.model_switches
}
_SHARDING = {
    flag.name: flag
    for flag in (
        PlanFlag(name="fp8_format", kind="text"),
        PlanFlag(name="use_megatron_fsdp", kind="switch"),
        PlanFlag(name="use_custom_fsdp", kind="switch"),
        PlanFlag(name="use_torch_fsdp2", kind="switch"),
        PlanFlag(name="data_parallel_sharding_strategy", kind="text"),
    )
}
_KNOWN = READ_FLAGS | _OF_THE_MODEL | _SHARDING
_DEFAULT_MODULE = "core_attn"
"""What Megatron recomputes if selective recomputation names no modules."""

_TRUE, _FALSE = (True, "true", "True"), (False, "false", "False")


def named_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings by Megatron-LM's names, without those that are not set."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        known = RENAMED_FIELDS.get(name, name)
        if value is not None and value != "null" and not (known != name and known in settings):
            found[known] = value
    layout = found.get("pipeline_model_parallel_layout")
    if isinstance(layout, list):
        found["pipeline_model_parallel_layout"] = _layout_text(layout)
    if layout is not None and any(name in settings for name in RENAMED_FIELDS):
        found.pop("num_virtual_stages_per_pipeline_rank", None)  # follows from the layout
    if found.get("swiglu") is None and found.get("gated_linear_unit") is True:
        found["swiglu"] = True
    return found


def figures_of(settings: Mapping[str, object]) -> dict[str, object]:
    """The figures of a workload and its model in the settings, by their names in Python.

    Raises UsageError for a figure of another type, or with an unknown value.
    """
    named = named_settings(settings)
    found = {name: _typed(_KNOWN[name], named[name]) for name in named if name in _KNOWN}
    if "seq_length" in found and named.get(_OF_DECODER) is not None:
        found["seq_length"] = _typed(_KNOWN["seq_length"], named[_OF_DECODER])  # seq_length is then an image's
    return found


def read_settings(launch: Launch, pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """The layout of a launch. Settings that a plan does not hold are noted if they are costly. Raises UsageError."""
    named = named_settings(launch.settings)
    try:
        read = (_of_meshes if isinstance(named.get(_MESHES), list) else _read)(named, pieces, instance)
    except UsageError as error:
        unread = [note for note in launch.notes if "is not read" in note]
        raise UsageError("; ".join([str(error), *unread])) from None
    rest = notes_of_the_rest(named, read_names(named) | launch.usual)
    dispatcher = dispatcher_of_settings(launch)
    if dispatcher is TokenDispatcher.ALL_GATHER and (read.run_as.expert_parallel or 1) > 1:
        usual = "" if "moe_token_dispatcher_type" in named else ", as no --moe-token-dispatcher-type is said"
        read = replace(read, notes=(*read.notes, f"Megatron hands all tokens to each rank of their experts{usual}"))
    read = replace(read, run_as=replace(read.run_as, dispatcher=dispatcher))
    own = (
        {}
        if launch.dialect not in _MEGATRON_ITSELF
        else dict.fromkeys(("overlap_grad_reduce", "tp_comm_overlap"), False)
    )
    read = replace(read, of_times=tuple(_overlaps(own | figures_of(launch.settings), read.run_as, instance)))
    is_named = launch.model is not None and named.get("hidden_size") is None
    model = notes_of_model(str(launch.model), instance) if is_named else ()
    said, notes = read.run_as, [*launch.notes, *model, *read.notes, *rest]
    meshes = said.meshes_of(said.pipeline_ranks or 1)
    each = sum(mesh.pipeline_ranks * mesh.tensor_parallel for mesh in meshes) * (said.context_parallel or 1)
    started = launch.ranks
    if started is not None and started % each:
        if each % started:
            raise UsageError(f"{_SOURCE}: the launch starts {started} ranks, no multiple of the {each} of a replica")
        notes.append(
            f"the launch starts {started} ranks, fewer than the {each} of a replica: it is read as one node's part"
        )
        started = None
    return replace(read, run_as=replace(said, world=started), notes=tuple(notes))


def _overlaps(said: Mapping[str, object], run_as: RunAs, instance: Instance) -> Iterator[str]:
    """Sentences on exchanges that overlap with passes here and not in the workload's times, or the other way round."""
    software = None if instance.model is None else load_software().get(instance.model.software)
    t, ranks = run_as.tensor_parallel or 1, run_as.pipeline_ranks or 1
    if software is None:
        return
    has_replicas = instance.devices > t * ranks * (run_as.context_parallel or 1)
    for name, what, counts, applies in (
        ("overlap_grad_reduce", "sums of gradients", software.gradient_overlap, has_replicas),
        (
            "tp_comm_overlap",
            "tensor-parallel exchanges",
            software.forward_overlap > 0,
            t > 1 and run_as.sequence_parallel,
        ),
    ):
        if applies and (is_on := said.get(name)) is not None and is_on != counts:
            yield (
                f"{flag_of(name)} is {'' if is_on else 'not '}set, but the workload's times count {what} as "
                f"{'' if counts else 'not '}overlapped: this launch may take {'longer' if counts else 'less'}"
            )


_MEGATRON_ITSELF = (Dialect.MEGATRON, Dialect.FLAGSCALE)
"""Dialects whose settings go to Megatron's own parser, so that Megatron's defaults apply to missing settings."""


def dispatcher_of_settings(launch: Launch) -> TokenDispatcher | None:
    """How tokens reach experts in the launch, or Megatron-LM's default; None if the launch's framework decides.

    Raises UsageError for a way that Megatron does not have.
    """
    named = named_settings(launch.settings)
    said = named.get("moe_token_dispatcher_type", "allgather" if launch.dialect in _MEGATRON_ITSELF else None)
    ways = {name: way for way, name in DISPATCHERS.items()} | {"alltoall_seq": TokenDispatcher.ALL_TO_ALL}
    if said is not None and said not in ways:
        raise UsageError(f"{_SOURCE}: --moe-token-dispatcher-type {said}: expected {', '.join(DISPATCHERS.values())}")
    return None if said is None else ways[str(said)]


def recomputation_of_settings(settings: Mapping[str, object]) -> Recomputation:
    """The recomputation in the settings. Raises UsageError for settings that Megatron refuses."""
    return _recomputation(SimpleNamespace(**(dict.fromkeys(_KNOWN) | figures_of(settings))), [])[0]


def _typed(flag: PlanFlag, value: object) -> object:
    """The value as Megatron's parser reads it."""
    if any(map(causes, value if isinstance(value, list) else [value])):
        cause = next(one for part in (value if isinstance(value, list) else [value]) for one in causes(part))
        name = cause.lstrip("$").strip("{}")
        hint = f" (--set {name}=VALUE)" if name.isidentifier() else ""
        raise UsageError(f"{flag_of(flag.name)}: {cause} is not known here{hint}")
    if flag.kind == "switch":
        if value in _TRUE or value in _FALSE:
            return value in _TRUE
        raise UsageError(f"{flag.name}: {value!r}; expected true or false")
    if flag.kind == "words":
        words = value if isinstance(value, list) else [] if value is True else [value]
        return [str(word) for word in words]
    if flag.kind == "text":
        return str(value)
    try:
        return int(str(value)) if not isinstance(value, (bool, list)) else int("")
    except ValueError:
        shown = readable(value) if isinstance(value, str) else value
        raise UsageError(f"{_SOURCE}: argument {flag_of(flag.name)}: invalid int value: {shown!r}") from None


def _read(
    named: Mapping[str, object], pieces: ModelPieces, instance: Instance, letters: Sequence[str] | None = None
) -> ReadLayout:
    """The layout of settings. letters: the letters of each stage, such as ``Ett``, if no flag states its layers."""
    given = SimpleNamespace(**(dict.fromkeys(_KNOWN) | figures_of(named)))
    if given.multi_latent_attention is False:  # Primus states the usual ranks of latent attention for all models
        vars(given).update(dict.fromkeys(_LATENT))
    if given.num_experts == 1:  # Megatron-DeepSpeed's value for a dense model
        given.num_experts = None
    said = {flag.says: getattr(given, flag.name) for flag in READ_FLAGS.values() if flag.says}
    for name in ("num_layers", "mtp_num_layers"):
        asked, own = getattr(given, name), getattr(pieces, READ_FLAGS[name].says)
        if asked not in (None, own):
            raise UsageError(f"{_SOURCE}: {flag_of(name)} {asked}, but the model has {own}")
    notes = [*_require_model(given, instance)]
    if named.get("use_checkpoint_args") in _TRUE:
        notes.append(
            "--use-checkpoint-args takes the model from a checkpoint: its model is not compared with the workload's"
        )
    run_as = _run_as(given, said, instance, notes)
    ranks = run_as.pipeline_ranks or 1
    if ranks > instance.devices:
        raise UsageError(f"{_SOURCE}: {ranks} pipeline ranks, but the workload has {instance.devices} devices")
    if letters is not None:
        stages = pieces_of_letters(letters, pieces)
    elif given.pipeline_model_parallel_layout is not None:
        stages = read_string(given.pipeline_model_parallel_layout, pieces, ranks)
    else:
        stages = pieces_of_letters(_older_flags(given, pieces, ranks), pieces)
    notes += _precision(given, named.get(_MIXED) or ("fp16" if named.get(_FP16) in _TRUE else None), instance)
    return ReadLayout(
        stages, run_as, tuple(notes), _SOURCE, said, _transfers(given, is_interleaved=len(stages) > ranks)
    )


def _transfers(given: SimpleNamespace, *, is_interleaved: bool) -> Transfers:
    """How stages pass on tensors. Raises UsageError for a flag that Megatron refuses."""
    if not is_interleaved or given.no_overlap_p2p_communication:
        if given.overlap_p2p_communication_warmup_flush:
            what = "without virtual stages" if not is_interleaved else "with --no-overlap-p2p-communication"
            raise UsageError(f"{_SOURCE}: --overlap-p2p-communication-warmup-flush {what}, which Megatron refuses")
        return Transfers.IN_PASSES
    return Transfers.OVERLAPPED if given.overlap_p2p_communication_warmup_flush else Transfers.OVERLAPPED_STEADY


def _require_model(given: SimpleNamespace, instance: Instance) -> Iterator[str]:
    """Sentences on switches that differ from the workload's model. Raises UsageError if the settings state other
    sizes."""
    if instance.model is None or not instance.model.config:
        if given.hidden_size is not None:
            yield "the workload does not name its model, so the launch's model is not compared with it"
        return
    try:
        model = model_settings(require_megatron_model(instance.model))
    except UsageError:
        if given.hidden_size is not None:
            yield "Megatron has no model like the workload's, so the launch's model is not compared with it"
        return
    for name in MEGATRON.model:
        said, known = getattr(given, name), _usual(model, name)
        if said is not None and known is not None and said != known:
            raise UsageError(f"{_SOURCE}: {flag_of(name)} {said}, but the workload's model has {known}")
        if (said is None) != (known is None) and name in _ALWAYS_SAID and given.num_attention_heads is not None:
            one, other = (
                ("the workload's model", "the launch's") if said is None else ("the launch's model", "the workload's")
            )
            raise UsageError(f"{_SOURCE}: {one} has {flag_of(name)} {said or known}, {other} none")
    if None in (given.hidden_size, given.num_layers, given.num_attention_heads):
        return  # it does not state a whole model
    differing = [name for name in MEGATRON.model_switches if bool(getattr(given, name)) != bool(model.get(name, False))]
    if differing:
        only = (
            f"{', '.join(map(flag_of, names))} only in {where}"
            for where in ("the launch", "the plan's model")
            if (names := [name for name in differing if bool(getattr(given, name)) is (where == "the launch")])
        )
        yield f"the launch's model differs from the plan's: {'; '.join(only)}"


_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

_ALWAYS_SAID = ("num_experts", "kv_lora_rank")
"""Features that a model does not have unless its launch states them."""


def _usual(model: Mapping[str, object], name: str) -> object:
    """The workload's figure; for groups of queries that are not stated, the number of heads."""
    found = model.get(name)
    return model.get("num_attention_heads") if found is None and name == "num_query_groups" else found


_FP16, _MIXED = "fp16", "mixed_precision"
"""Megatron's switch and Megatron-Bridge's field for the precision of products; the field has values such as
bf16_mixed and bf16_with_fp8_current_scaling_mixed."""


def _precision(given: SimpleNamespace, mixed: object, instance: Instance) -> Iterator[str]:
    """A sentence if the launch's precision differs from the workload's. mixed: Megatron-Bridge's value, or fp16."""
    if instance.model is None:
        return
    own, said = instance.model.precision, readable(str(mixed or ""))
    if given.fp8_format not in (None, "none", "None"):
        said = f"fp8 {given.fp8_format}"
    theirs = next((name for name in ("fp8", "fp4", "fp16", "bf16") if name in said), own)
    if theirs != own:
        yield f"the launch trains in {theirs}, and times and memory are for {own}; --precision {theirs} is for that"


def _run_as(given: SimpleNamespace, said: dict[str, Any], instance: Instance, notes: list[str]) -> RunAs:
    """The figures with Megatron's defaults: one rank has all experts, divided like other layers."""
    found = RunAs.of(said)
    for flag in READ_FLAGS.values():
        if flag.kind == "number" and (value := getattr(found, flag.says, None)) is not None:
            positive(flag_of(flag.name), value)
    t = found.tensor_parallel or 1
    if any(layer.experts for layer in instance.layers):
        found = replace(found, expert_parallel=found.expert_parallel or 1, expert_tensor=found.expert_tensor or t)
    recomputation, layers = _recomputation(given, notes)
    shards, weights = _shared(given, notes)
    return replace(
        found,
        pipeline_ranks=found.pipeline_ranks or 1,
        tensor_parallel=t,
        recomputation=recomputation,
        recomputed_layers=layers,
        optimizer_shards=ALL_REPLICAS if shards else 1,
        weights_sharded=weights,
        optimizer_on_host=bool(found.optimizer_on_host),
    )


def _shared(given: SimpleNamespace, notes: list[str]) -> tuple[bool, bool]:
    """Whether replicas divide the optimizer's state, and whether they also divide weights and gradients."""
    if given.use_torch_fsdp2:
        return True, True
    strategy = given.data_parallel_sharding_strategy or "no_shard"
    if not (given.use_megatron_fsdp or given.use_custom_fsdp) or strategy == "no_shard":
        return bool(given.use_distributed_optimizer), False
    if strategy not in ("optim", "optim_grads", "optim_grads_params"):
        known = "no_shard, optim, optim_grads or optim_grads_params"
        raise UsageError(f"--data-parallel-sharding-strategy {strategy}: expected {known}")
    if strategy == "optim_grads":
        notes.append("gradients are shared, too: the plan shares the optimizer's state alone, and takes more memory")
    return True, strategy == "optim_grads_params"


def _recomputation(given: SimpleNamespace, notes: list[str]) -> tuple[Recomputation, int | None]:
    """The recomputation, and the number of first layers in each stage; None: all. Raises UsageError for settings that
    Megatron refuses."""
    granularity = "selective" if given.recompute_activations else given.recompute_granularity
    method, layers = given.recompute_method, given.recompute_num_layers
    if layers == 0 and (granularity, method) == ("full", "block"):
        return Recomputation.NONE, None
    if layers is not None:
        positive("--recompute-num-layers", layers)
    if granularity not in (None, "full", "selective"):
        raise UsageError(f"--recompute-granularity {granularity}: expected full or selective")
    if method not in (None, "uniform", "block"):
        raise UsageError(f"--recompute-method {method}: expected uniform or block")
    if granularity is None:
        modules = None if given.recompute_modules is None else " ".join(given.recompute_modules)
        for flag, value in (("method", method), ("num-layers", layers), ("modules", modules)):
            if value is not None:
                notes.append(
                    f"--recompute-{flag} {value} does nothing in Megatron without --recompute-granularity: nothing is "
                    "recomputed"
                )
        return Recomputation.NONE, None
    if granularity == "selective":
        if layers is not None:
            raise UsageError("--recompute-num-layers with selective recomputation, which Megatron refuses")
        return Recomputation.of_parts(given.recompute_modules or [_DEFAULT_MODULE]), None
    if method is None or layers is None:
        missing = "--recompute-method uniform or block" if method is None else "--recompute-num-layers"
        raise UsageError(f"--recompute-granularity full without {missing}, which Megatron refuses")
    if method == "uniform" and layers > 1:
        notes.append(
            f"--recompute-method uniform over groups of {layers} layers keeps the input of each group; the plan keeps "
            "that of each layer, and takes more memory"
        )
    return Recomputation.FULL, layers if method == "block" else None


def _older_flags(given: SimpleNamespace, pieces: ModelPieces, ranks: int) -> list[str]:
    """Megatron's even split, except for the given layers of the first and last ranks; chunks of a rank are equal."""
    blocks = pieces.blocks
    first, last = given.decoder_first_pipeline_num_layers, given.decoder_last_pipeline_num_layers
    embedding, loss = given.account_for_embedding_in_pipeline_split, given.account_for_loss_in_pipeline_split
    if (first, last) != (None, None) and (embedding or loss):
        raise UsageError(
            "first or last pipeline layers cannot be given together with --account-for-... flags, says Megatron"
        )
    chunks = given.num_virtual_stages_per_pipeline_rank
    per_chunk = given.num_layers_per_virtual_pipeline_stage
    if chunks is not None and per_chunk is not None:
        raise UsageError("layers per virtual stage and virtual stages per rank are given both; Megatron takes one")
    middle = ranks - (first is not None) - (last is not None)
    left = blocks + bool(embedding) + bool(loss) - (first or 0) - (last or 0)
    if middle < 0 or left < 0 or (middle == 0 and left):
        raise UsageError(f"{blocks} layers do not fall on {ranks} pipeline ranks as these flags have it")
    if middle and left % middle:
        raise UsageError(
            f"{left} layers do not divide evenly over {middle} pipeline ranks, which Megatron requires without a "
            "layout (--pipeline-model-parallel-layout, or pipeline_model_parallel_layout of a copied recipe)"
        )
    even = left // middle if middle else 0
    of_rank = [even] * ranks
    of_rank[0] = even if first is None else first
    of_rank[-1] = even if last is None else last
    if per_chunk is not None:
        if first is not None or last is not None:
            raise UsageError("with first or last pipeline layers Megatron takes --num-virtual-stages-per-pipeline-rank")
        if even % positive("--num-layers-per-virtual-pipeline-stage", per_chunk):
            raise UsageError(f"{even} layers of a rank are no multiple of {per_chunk} layers per virtual stage")
        chunks = even // per_chunk
    chunks = positive("--num-virtual-stages-per-pipeline-rank", 1 if chunks is None else chunks)
    if any(count % chunks for count in of_rank):
        raise UsageError(
            f"{' or '.join(map(str, sorted(set(of_rank))))} layers of a rank are not {chunks} equal chunks"
        )
    counts = [count // chunks for _ in range(chunks) for count in of_rank]
    return with_ends(counts, pieces.predictors, embedding=bool(embedding), loss=bool(loss))


_LETTERS = {"embedding": EMBEDDING, "decoder": BLOCK, "loss": LOSS, "mtp": MTP}
"""The letters of a layout string, by the words of a Bridge layout."""


def _layout_text(layout: Sequence[object]) -> str:
    stages = []
    for number, stage in enumerate(layout):
        names = stage if isinstance(stage, list) else [stage]
        unknown = [name for name in names if not isinstance(name, str) or name not in _LETTERS]
        if unknown:
            known = ", ".join(_LETTERS)
            raise UsageError(f"pipeline_model_parallel_layout[{number}]: {unknown[0]!r}; expected one of {known}")
        stages.append("".join(_LETTERS[str(name)] for name in names))
    return "|".join(stages)


_OF_DECODER = "decoder_seq_length"
_FLAGSCALE = "FlagScale system"
_MESHES, _SPLIT = "hetero_process_meshes", "hetero_pipeline_layer_split"
_RECOMPUTED = "recompute_num_layers_per_stage_micro_batch"
_EXPERT_TENSOR, _OF_MESHES = "expert_tensor_parallel_size", "expert_tensor_parallel_size_per_process_mesh"
_OF_FLAGSCALE = (
    _MESHES, _SPLIT, _RECOMPUTED, _OF_MESHES, "enable_hetero", "hetero_device_types", "hetero_current_device_type",
    "hetero_use_cpu_communication", "standalone_embedding_stage",
)  # fmt: skip
_READ = frozenset((*_KNOWN, *_OF_FLAGSCALE, _MIXED, _FP16, "use_checkpoint_args", _OF_DECODER))
_ON_HOST = ("use_precision_aware_optimizer", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
_WHOLE = (None, 1, 1.0, "1", "1.0")


def read_names(named: Mapping[str, object]) -> frozenset[str]:
    """The names of all settings that are read. If the optimizer's state is in host memory, settings for that are
    included."""
    on_host = named.get("optimizer_cpu_offload") in _TRUE and named.get("optimizer_offload_fraction") in _WHOLE
    return _READ.union(_ON_HOST if on_host else ())


def _of_meshes(values: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """The layout of FlagScale's settings: numbers of layers and recomputation of each stage. Raises UsageError."""
    flat, size = values[_MESHES], len(MEGATRON.mesh)
    if not _are_counts(flat) or not flat or len(flat) % size:
        raise UsageError(f"{_FLAGSCALE}: {_MESHES}: {flat}; expected [t, cp, ep, dp, pp] of each mesh in one list")
    said = [dict(zip(MEGATRON.mesh, flat[at : at + size], strict=True)) for at in range(0, len(flat), size)]
    first, ranks = said[0], sum(mesh["pipeline_ranks"] for mesh in said)
    if any(mesh[name] != first[name] for mesh in said for name in ("context_parallel", "data_parallel")):
        raise UsageError(f"{_FLAGSCALE}: {_MESHES}: {flat}; a plan has one cp and one dp for all meshes")
    common = {name: value for name, value in values.items() if not name.startswith("recompute_")}
    for name, sizes in (
        ("tensor_model_parallel_size", sorted({mesh["tensor_parallel"] for mesh in said})),
        ("pipeline_model_parallel_size", [ranks]),
        ("context_parallel_size", [first["context_parallel"]]),
    ):
        if common.setdefault(name, sizes[-1]) not in sizes:
            has = ", ".join(map(str, sizes))
            raise UsageError(f"{_FLAGSCALE}: {name}: {values[name]}, but {_MESHES} has {has}")
    split = values.get(_SPLIT)
    if not _are_counts(split, least=0) or len(split) != ranks or sum(split) != pieces.blocks:
        raise UsageError(f"{_FLAGSCALE}: {_SPLIT}: {split}; expected {ranks} numbers, {pieces.blocks} together")
    each = common.pop(_OF_MESHES, [common.get(_EXPERT_TENSOR, 1)] * len(said))
    common.setdefault(_EXPERT_TENSOR, each[0] if _are_counts(each) and each else 1)
    if each != (expected := [common[_EXPERT_TENSOR]] * len(said)):
        raise UsageError(f"{_FLAGSCALE}: {_OF_MESHES}: {each}; expected {expected}")
    read = _read(common, pieces, instance, with_ends(split, pieces.predictors))
    run_as = replace(read.run_as, data_parallel=first["data_parallel"], expert_parallel=first["expert_parallel"])
    if len(said) > 1 or instance.cluster.kinds:
        meshes = zip(_kinds_of_meshes(values, len(said), instance), said, strict=True)
        run_as = replace(
            run_as,
            meshes=tuple(
                RunMesh(kind, mesh["pipeline_ranks"], mesh["tensor_parallel"], mesh["expert_parallel"])
                for kind, mesh in meshes
            ),
        )
    if (counts := values.get(_RECOMPUTED)) is not None:
        if not isinstance(counts, list) or len(counts) != ranks or not all(_is_one_span(x) for x in counts):
            raise UsageError(
                f"{_FLAGSCALE}: {_RECOMPUTED}: {counts}; expected {ranks} lists such as [1, 16, 2]: the same for all "
                "microbatches"
            )
        run_as = replace(run_as, recomputation=Recomputation.FULL, recomputed_layers=tuple(x[2] for x in counts))
    return replace(read, run_as=run_as)


def _kinds_of_meshes(values: Mapping[str, object], count: int, instance: Instance) -> list[str]:
    """The kind of each mesh's devices, by their types; "" if all are alike. Meshes apart on one kind have numbers.
    Raises UsageError."""
    if not instance.cluster.kinds:
        return [""] * count
    of_type = {"-".join(name.split()): name for name in instance.cluster.kind_names}
    types = values.get("hetero_device_types")
    each = types if isinstance(types, list) else []
    found = [of_type.get(str(one)) or of_type.get(str(one).rpartition("-")[0]) for one in each]
    known = [kind for kind in found if kind is not None]
    if len(known) != count or len(found) != count:
        expected = f"the type of each mesh, {' or '.join(of_type)}"
        raise UsageError(f"{_FLAGSCALE}: hetero_device_types: {types}; expected {expected}")
    return known


def _are_counts(value: object, least: int = 1) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= least for one in value)


def _is_one_span(value: object) -> TypeGuard[list[int]]:
    """Whether the value is one setting for all microbatches, such as ``[1, 16, 2]``."""
    return _are_counts(value, least=0) and len(value) == 3
