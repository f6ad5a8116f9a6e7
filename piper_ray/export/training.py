"""How each form's runtime trains (``training.toml``), and what of a model's training it has not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from pydantic import Field, TypeAdapter

from piper_ray.export.files import Target
from piper_ray.model.instance import TrainedModel
from piper_ray.workloads.formats.documents import parse_toml
from piper_ray.workloads.formats.fields import Closed


class TrainingRules(Closed):
    """See ``training.toml``; what is empty there may be anything."""

    title: str
    precisions: list[str] = Field(default=[])
    weight_bytes: list[float] = Field(default=[])
    gradient_bytes: list[float] = Field(default=[])
    optimizer_bytes: list[float] = Field(default=[])
    adapters: bool = False

    def broken_by(self, model: TrainedModel) -> Iterator[str]:
        """What of the model's training the runtime has not, a sentence each."""
        if model.lora_rank and not self.adapters:
            yield (
                f"{self.title} trains no adapters (LoRA), and this plan does; torchtitan and Megatron-Bridge do "
                "(--to torchtitan, --to megatron-bridge)"
            )
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


_TEXT = files(__package__).joinpath("training.toml").read_text("utf-8")
TRAINING = {
    Target(name): rules
    for name, rules in TypeAdapter(dict[str, TrainingRules]).validate_python(parse_toml("training.toml", _TEXT)).items()
}
"""By form."""
