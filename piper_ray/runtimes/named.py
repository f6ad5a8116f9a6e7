"""The runtimes that plans are made for. What is said of each was read in its source, of the version named."""

from __future__ import annotations

from piper_ray.model.mode import EVERY_SECOND_PRODUCT, MEGATRON_MODULES, Recomputation, Sharding
from piper_ray.model.one_mode import OneMode
from piper_ray.model.schedule import ScheduleName
from piper_ray.runtimes.runtime import Runtime, RuntimeName

_WHOLE_LAYERS = Recomputation.FULL.parts

_TORCH_SCHEDULES = (
    ScheduleName.ONE_F_ONE_B,
    ScheduleName.GPIPE,
    ScheduleName.INTERLEAVED,
    ScheduleName.LOOPED_BFS,
    ScheduleName.ZB_H1,
    ScheduleName.ZB_V,
    ScheduleName.DUALPIPE_V,
)

RUNTIMES: dict[RuntimeName, Runtime] = {
    # megatron-core 0.16: schedules.get_forward_backward_func has 1F1B and, with virtual stages, interleaved 1F1B, whose
    # groups of microbatches hold p at least and m at most. finalize_model_grads sums gradients of a tied embedding
    # over the first and last rank; MoELayer refuses to train on t > 1 without sequence parallelism.
    RuntimeName.MEGATRON: Runtime(
        RuntimeName.MEGATRON,
        "Megatron",
        (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED),
        OneMode((*_WHOLE_LAYERS, *MEGATRON_MODULES), context=True, experts=True, experts_in_sequence=True),
        fills_interleaved=True,
        letters=True,
    ),
    # torchtitan 0.3: one ActivationCheckpointing policy wraps all blocks of a model. What its sequence parallelism
    # gathers autograd keeps; weights are gathered for each pass where fsdp_reshard_after_forward says so. The config of
    # a Decoder refuses enable_weight_tying beside pipeline_parallel_degree > 1, and t that does not divide n_kv_heads.
    # Its training loop lets FSDP reduce gradients in each microbatch's backward pass; torch's pipelines let it do so
    # in the last one's. Keys and values are gathered before attention over a sequence that groups share.
    RuntimeName.TORCHTITAN: Runtime(
        RuntimeName.TORCHTITAN,
        "torchtitan",
        _TORCH_SCHEDULES,
        OneMode(
            (*_WHOLE_LAYERS, EVERY_SECOND_PRODUCT),
            context=True,
            experts=True,
            gathered=True,
            always_gathered=True,
            most_sharding=Sharding.WEIGHTS,
            own_key_heads=True,
        ),
        ties_ends=False,
        rank_order="tp-cp-dp_shard-dp_replicate-pp",
        context_exchange="all-gather",
        software="fsdp",
        sums_each_pass=True,
    ),
    # torch.distributed.pipelining 2.13: any modules, any list of actions; a checkpoint around each layer that needs it.
    # Stages that share a weight would train it apart.
    RuntimeName.TORCH: Runtime(
        RuntimeName.TORCH,
        "torch.distributed.pipelining",
        _TORCH_SCHEDULES,
        OneMode(_WHOLE_LAYERS, by_layer=True, sequence_parallel=False),
        tensor_parallelism=False,
        blocks=False,
        ties_ends=False,
        rank_order="dp-pp",
        software="fsdp",
        shares_state=False,
    ),
    # DeepSpeed 0.19: TrainSchedule is 1F1B; activation_checkpoint_interval is one for all layers; ZeRO-1 beside it.
    # PipelineModule.forward hands each layer the result of the one before it.
    RuntimeName.DEEPSPEED: Runtime(
        RuntimeName.DEEPSPEED,
        "DeepSpeed",
        (ScheduleName.ONE_F_ONE_B,),
        OneMode(_WHOLE_LAYERS, sequence_parallel=False),
        blocks=False,
        rank_order="model-data-pipe",
        chain=True,
        software="deepspeed-2021",
    ),
    # FlagScale 1.0: hetero_pipeline_layer_split without virtual stages; recompute_*_per_stage_micro_batch. Its Megatron
    # is 0.15, which refuses t that does not divide num_query_groups, where 0.16 copies heads for more devices.
    RuntimeName.FLAGSCALE: Runtime(
        RuntimeName.FLAGSCALE,
        "FlagScale",
        (ScheduleName.ONE_F_ONE_B,),
        OneMode(_WHOLE_LAYERS, by_layer=True, context=True, experts=True, experts_in_sequence=True, own_key_heads=True),
        first_k=True,
        letters=True,
    ),
}
