"""A decoder as those who build it need to know it: what its config says beyond the figures of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from piper_ray.model.trained_model import TrainedModel
from piper_ray.workloads.estimate.architectures.decoder import DecoderConfig, Rules
from piper_ray.workloads.estimate.architectures.experts import Experts
from piper_ray.workloads.estimate.architectures.layers import Described
from piper_ray.workloads.estimate.config import model_of_config

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")
_DROPOUTS = ("hidden_dropout", "resid_pdrop", "attention_dropout", "attn_pdrop")
_GPT_LIKE = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "gpt_neox", "starcoder2", "bloom", "phi"})


@dataclass(frozen=True)
class Rotary:
    """base: of the angles. share: of a head's size that is turned. scaling: for longer contexts, as configs say it."""

    base: float
    share: float
    scaling: Mapping[str, object]


@dataclass(frozen=True)
class DecoderShape:
    """A decoder's config, read. config: by name and default as its family has them."""

    model_type: str
    config: DecoderConfig
    document: Mapping[str, object]

    @property
    def rules(self) -> Rules:
        """What is the same in all layers."""
        return self.config.rules()

    @cached_property
    def mixing(self) -> tuple[Described | None, ...]:
        """What mixes tokens, of each layer."""
        return tuple(self.config.mixing(layer) for layer in range(self.config.layers))

    @cached_property
    def feeding(self) -> tuple[Described | None, ...]:
        """What feeds forward, of each layer."""
        return tuple(self.config.feeding(layer) for layer in range(self.config.layers))

    @property
    def experts(self) -> Experts | None:
        """Those of the layers that have any."""
        return next((part for part in self.feeding if isinstance(part, Experts)), None)

    @property
    def norm_epsilon(self) -> float | None:
        """None where the config does not say it."""
        return self._number(*_EPSILONS)

    @property
    def activation(self) -> str:
        """In Hugging Face's words; its family's own where the config does not say it."""
        said = next((self.document[name] for name in _ACTIVATIONS if isinstance(self.document.get(name), str)), None)
        return str(said or ("gelu" if self.model_type in _GPT_LIKE else "relu2" if not self.rules.gated else "silu"))

    @property
    def dropout(self) -> tuple[float, float]:
        """Of hidden activations and of attention's scores."""
        hidden, residual, attention, scores = (self._number(name) for name in _DROPOUTS)
        usual = 0.1 if self.model_type in ("gpt2", "gpt_bigcode") else 0.0
        first, second = (hidden if residual is None else residual), (attention if scores is None else scores)
        return usual if first is None else first, usual if second is None else second

    @property
    def rotary(self) -> Rotary | None:
        """None without rotary positions."""
        if not self.rules.rotary:
            return None
        parameters = self.document.get("rope_parameters")
        own: Mapping[str, object] = parameters if isinstance(parameters, Mapping) else {}
        scaling = self.document.get("rope_scaling") or own
        share = self._number("partial_rotary_factor", "rotary_pct") or _number(own.get("partial_rotary_factor")) or 1.0
        base = self._number("rope_theta", "rotary_emb_base") or _number(own.get("rope_theta")) or 10000.0
        return Rotary(base, share, scaling if isinstance(scaling, Mapping) else {})

    def said(self, key: str) -> object:
        """What the config says under a key; None where it says nothing."""
        return self.document.get(key)

    def _number(self, *keys: str) -> float | None:
        return next((found for key in keys if (found := _number(self.document.get(key))) is not None), None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def decoder_shape(model: TrainedModel) -> DecoderShape | None:
    """None for a model that is no decoder. Raises InputError for a config that is not sound."""
    read = model_of_config("model", model.config)
    if not isinstance(read.config, DecoderConfig):
        return None
    return DecoderShape(str(model.config.get("model_type", "")), read.config, model.config)
