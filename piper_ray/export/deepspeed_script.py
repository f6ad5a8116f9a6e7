"""The module that ``export --to deepspeed`` writes: the plan as constants, and a PipelineModule that keeps to them."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.export.job import Job
from piper_ray.model.recomputation import Recomputation

MODULE = "planned_module.py"

_HEAD = '''"""The plan for DeepSpeed: engine(layers, loss_fn), of the workload's layers in its order."""

from itertools import accumulate, pairwise
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

'''

_BODY = '''
CONFIG = Path(__file__).with_name("ds_config.json")


def topology():
    """The ranks of the plan."""
    return PipeModelDataParallelTopology(**DEGREES)


def engine(layers, loss_fn, **options):
    """DeepSpeed's engine of the planned model; its train_batch(data_iter) is a step.

    layers: the workload's, in its order: LayerSpec, TiedLayerSpec, modules or functions, or a list of several that are
    one layer of the workload. loss_fn(outputs, labels): a mean over a microbatch. Raises ValueError for other layers
    or ranks than those of the plan.
    """
    deepspeed.init_distributed()
    return deepspeed.initialize(model=PlannedPipelineModule(layers, loss_fn=loss_fn, **options), config=str(CONFIG))[0]


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule with the plan's stages."""

    def __init__(self, layers, **options):
        given = [list(layer) if isinstance(layer, (list, tuple)) else [layer] for layer in layers]
        _check(given)
        self._starts = [0, *accumulate(map(len, given))]
        options.setdefault("topology", topology())
        options.setdefault("activation_checkpoint_interval", int(any(RECOMPUTED)))
        # The reentrant one, DeepSpeed's default, gives a first layer that reads token ids no gradients.
        options.setdefault("activation_checkpoint_func", checkpointing.non_reentrant_checkpoint)
        super().__init__(layers=[part for layer in given for part in layer], **options)
        self._check_parameters()

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = [self._starts[part] for part in PARTS]
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _own_layers(self):
        """Numbers of the plan's layers on this rank, with the places in forward_funcs of each."""
        for number, (begin, end) in enumerate(pairwise(self._starts)):
            if self._local_start <= begin < self._local_stop:
                yield number, range(begin - self._local_start, end - self._local_start)

    def _is_checkpointable(self, funcs):
        recomputed = [place for number, places in self._own_layers() if RECOMPUTED[number] for place in places]
        return all(any(func is self.forward_funcs[place] for place in recomputed) for func in funcs)

    def _check_parameters(self):
        """Of layers that were divided over tensor-parallel ranks, each rank has its share."""
        for number, places in self._own_layers() if PARAMETERS else ():
            found = {}
            for place in places:
                spec = self._layer_specs[self._local_start + place]
                tied = isinstance(spec, TiedLayerSpec)
                module = self.tied_modules[spec.key] if tied else self.forward_funcs[place]
                if isinstance(module, torch.nn.Module):
                    found |= {id(one): one.numel() for one in module.parameters() if one.requires_grad}
            if sum(found.values()) != PARAMETERS[number]:
                raise ValueError(
                    f"{_named(number)} has {sum(found.values())} parameters to train on a rank, and the plan is of "
                    f"{PARAMETERS[number]}"
                )


def _check(given):
    """Raises ValueError for other layers, ties or ranks than those of the plan."""
    if len(given) != len(LAYERS):
        raise ValueError(f"the plan is of {len(LAYERS)} layers, not {len(given)}")
    ranks = DEGREES["num_pp"] * DEGREES["num_dp"] * DEGREES["num_mp"]
    if comm.get_world_size() != ranks:
        raise ValueError(
            f"the plan is of {ranks} ranks (pipeline {DEGREES['num_pp']}, data {DEGREES['num_dp']}, tensor "
            f"{DEGREES['num_mp']}), not {comm.get_world_size()}"
        )
    tied = {}
    for number, layer in enumerate(given):
        for part in layer:
            if isinstance(part, TiedLayerSpec) and number not in tied.setdefault(part.key, []):
                tied[part.key].append(number)
    for numbers in TIED:
        if numbers not in tied.values():
            raise ValueError(
                f"{' and '.join(map(_named, numbers))} have a weight in common on different pipeline ranks: give each "
                "of them as a deepspeed.pipe.TiedLayerSpec, with one key that no other layer has"
            )
    for numbers in tied.values():
        stages = {sum(part <= number for part in PARTS) for number in numbers}
        if len(stages) > 1 and numbers not in TIED:
            raise ValueError(
                f"{' and '.join(map(_named, numbers))} are given as tied, on different pipeline ranks; those of the "
                "plan are not"
            )


def _named(number):
    return f"layer {number} ({LAYERS[number]})"
'''


def planned_module(job: Job, order: Sequence[int], parts: Sequence[int], parameters: Sequence[int] | None) -> str:
    """The text. order: layer ids; parts: where each stage begins there, and the end; parameters: of each layer that a
    rank trains, None where nobody knows."""
    recomputed = {layer: kind for stage in job.recomputed_layers for layer, kind in stage.items()}
    place = {layer: index for index, layer in enumerate(order)}
    constants = (
        ("PARTS", list(parts), f"Of the {len(order)} layers where each stage begins, and the end."),
        ("LAYERS", [job.named(layer) for layer in order], "What the list holds, for people."),
        (
            "DEGREES",
            {"num_pp": job.pipeline_ranks, "num_mp": job.tensor_parallel_degree, "num_dp": job.data_parallel_degree},
            "Of pipeline, tensor and data parallelism.",
        ),
        (
            "RECOMPUTED",
            [recomputed[layer] == Recomputation.FULL for layer in order],
            "Which layers recompute in their backward pass; the others keep all.",
        ),
        (
            "TIED",
            [[place[layer] for layer in job.in_order(tied)] for tied in job.tied_over_ranks],
            "Numbers of layers with a weight in common, on different pipeline ranks.",
        ),
        (
            "PARAMETERS",
            None if parameters is None else list(parameters),
            "That a rank trains, of each layer; None: the workload does not say.",
        ),
        (
            "STATE_SHARDS",
            job.setting.optimizer_shards,
            "Replicas that share the optimizer's state in the plan; README.md says what DeepSpeed does.",
        ),
    )
    return _HEAD + "".join(f'{name} = {_literal(value)}\n"""{text}"""\n\n' for name, value, text in constants) + _BODY


def _literal(value: object) -> str:
    """Lists of texts a line each."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        return "[\n" + "".join(f"    {text!r},\n" for text in value) + "]"
    return repr(value)
