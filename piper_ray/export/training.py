"""How each form's runtime trains (``training.toml``), and the features of a model's training that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import Field

from piper_ray.export.files import Target
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import TrainedModel
from piper_ray.workloads.estimate.decoder_shape import DecoderShape, decoder_shape
from piper_ray.workloads.formats.documents import package_table
from piper_ray.workloads.formats.fields import Closed


class TrainingRules(Closed):
    """See ``training.toml``; empty fields there mean any value."""

    title: str
    precisions: list[str] = Field(default=[])
    weight_bytes: list[float] = Field(default=[])
    gradient_bytes: list[float] = Field(default=[])
    optimizer_bytes: list[float] = Field(default=[])
    adapters: bool = False
    optimizer_on_host: bool = False
    models: list[str] = Field(default=[])
    query_norms: list[str] = Field(default=[])

    def broken_by(self, model: TrainedModel) -> Iterator[str]:
        """Yields a sentence for each feature of the model's training that the runtime does not have."""
        if model.lora_rank and not self.adapters:
            yield (
                f"{self.title} trains no adapters (LoRA), and this plan does; torchtitan and Megatron-Bridge do "
                "(--to torchtitan, --to megatron-bridge)"
            )
        if model.optimizer_on_host and not self.optimizer_on_host:
            yield f"{self.title} keeps the optimizer's state on GPUs, and this plan in host memory"
        if self.precisions and model.precision not in self.precisions:
            yield f"{self.title} trains in {' or '.join(self.precisions)}, and this plan in {model.precision}"
        for what, able, planned in (
            ("keeps weights", self.weight_bytes, model.weight_bytes),
            ("sums gradients", self.gradient_bytes, model.gradient_bytes),
            ("keeps the optimizer's state of a parameter", self.optimizer_bytes, model.optimizer_bytes),
        ):
            if able and planned not in able:
                sizes = " or ".join(f"{size:g}" for size in able)
                yield f"{self.title} {what} in {sizes} bytes, and the plan in {planned:g}"


TRAINING = {
    Target(name): TrainingRules.model_validate(rules)
    for name, rules in package_table("piper_ray.export", "training.toml").items()
}
"""The training of each form."""


def require_decoder(
    model: TrainedModel, target: Target, further: Callable[[DecoderShape], Iterator[str]]
) -> DecoderShape:
    """The decoder. Raises UsageError with every reason why a form's runtime cannot build it. further: yields the
    reasons of this runtime only."""
    rules, shape = TRAINING[target], decoder_shape(model)
    named = model.config.get("model_type", "a model of an unknown type")
    if shape is None:
        raise UsageError(f"the export for {rules.title} is for text decoders, and {named} is not one")
    reasons = ["some of its layers mix tokens otherwise than by attention"]
    if shape.attends:
        reasons = [*_unlike(rules, shape), *further(shape)]
    if reasons:
        raise UsageError(f"{rules.title} cannot build this model ({named}): {'; '.join(reasons)}")
    return shape


def _unlike(rules: TrainingRules, shape: DecoderShape) -> Iterator[str]:
    if shape.rules.query_norm not in rules.query_norms:
        yield "its norms of queries and keys go over all heads"
    if shape.gates_attention:
        yield "its attention has a gate"
    if shape.model_type not in rules.models:
        yield f"its layers are not known to be {rules.title}'s own"
