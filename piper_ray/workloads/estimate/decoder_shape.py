"""A decoder as launch files need it: what its config says beyond the figures of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ray.model.instance import TrainedModel
from piper_ray.workloads.estimate.architectures.decoder import DecoderConfig, Rules
from piper_ray.workloads.estimate.architectures.experts import Experts
from piper_ray.workloads.estimate.architectures.layers import Attention, Described, LatentAttention
from piper_ray.workloads.estimate.config import model_of_config
from piper_ray.workloads.estimate.software import ContextExchange

_ROTARY_BASES = ("rope_theta", "rotary_emb_base")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")
_DROPOUTS = ("hidden_dropout", "resid_pdrop", "attention_dropout", "attn_pdrop")


@dataclass(frozen=True)
class Rotary:
    """Rotary positions. base: the base of the angles. share: the share of a head's size that is turned. scaling: the
    table for longer contexts, as in configs."""

    base: float
    share: float
    scaling: Mapping[str, object]

    @property
    def kind(self) -> str:
        """How angles are stretched for longer contexts; ``default``: they are not."""
        return str(self.scaling.get("rope_type", self.scaling.get("type", "default")))

    def figure(self, key: str, usual: float) -> float:
        """A figure of the stretching; the usual one if the config has none."""
        found = _number(self.scaling.get(key))
        return usual if found is None else found


@dataclass(frozen=True)
class DecoderShape:
    """A decoder's config. config: values by name, with the family's defaults."""

    model_type: str
    config: DecoderConfig
    document: Mapping[str, object]

    @property
    def rules(self) -> Rules:
        """The rules that hold for all layers."""
        return self.config.rules()

    @property
    def mixing(self) -> tuple[Described | None, ...]:
        """What mixes tokens in each layer."""
        return self.config.mixing

    @property
    def feeding(self) -> tuple[Described | None, ...]:
        """What feeds forward in each layer."""
        return self.config.feeding

    @property
    def attends(self) -> bool:
        """Whether only attention mixes tokens."""
        return all(isinstance(part, (Attention, LatentAttention)) for part in self.mixing)

    @property
    def latent(self) -> LatentAttention | None:
        """The latent attention of the layers that have it."""
        return next((part for part in self.mixing if isinstance(part, LatentAttention)), None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer with plain attention, the number of tokens that a token looks back at; None: all."""
        return tuple(part.window for part in self.mixing if isinstance(part, Attention))

    def context_fault(self, exchange: ContextExchange) -> str | None:
        """Why TransformerEngine's kernels (attn_forward_func_with_cp) cannot share a sequence in this way; None if they
        can."""
        ring = exchange is ContextExchange.RING
        if ring and any(self.windows):
            return (
                "context parallelism as a ring takes no sliding windows (TransformerEngine), and this model has some; "
                "expected --context-exchange all-gather or all-to-all"
            )
        if not ring and self.latent is not None:
            return (
                f"context parallelism by {exchange.value} takes no latent attention (TransformerEngine), and this "
                "model has it; expected --context-exchange ring"
            )
        return None

    @property
    def gates_attention(self) -> bool:
        """Whether a gate scales attention's output."""
        return any(isinstance(part, Attention) and part.output_gate for part in self.mixing)

    @property
    def experts(self) -> Experts | None:
        """The experts of the layers that have any."""
        return next((part for part in self.feeding if isinstance(part, Experts)), None)

    @property
    def sigmoid_router(self) -> bool:
        """Whether a router scores each expert by a sigmoid, rather than all by a softmax."""
        said = self.said("scoring_func")
        return said == "sigmoid" if said in ("sigmoid", "softmax") else bool(self.config.named("sigmoid_router"))

    @property
    def renormalised_router(self) -> bool:
        """Whether the weights of a token's experts add up to one."""
        said = self.said("norm_topk_prob")
        return said if isinstance(said, bool) else bool(self.config.named("renormalised_router"))

    @property
    def router_scale(self) -> float:
        """The factor on the weights of a token's experts."""
        found = self._number("routed_scaling_factor")
        return 1.0 if found is None else found

    @property
    def router_groups(self) -> tuple[int, int] | None:
        """The number of groups of experts, and of how many of them a token may have experts; None if it may choose
        among all."""
        groups, chosen = self.said("n_group"), self.said("topk_group")
        return (groups, chosen) if isinstance(groups, int) and groups > 1 and isinstance(chosen, int) else None

    @property
    def norm_epsilon(self) -> float | None:
        """The norms' epsilon; None if the config does not state it."""
        return self._number(*_EPSILONS)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The keys that the config leaves out although the model has such figures, so usual ones are assumed."""
        own = self.document.get("rope_parameters")
        has_base = self._number(*_ROTARY_BASES) or (isinstance(own, Mapping) and _number(own.get(_ROTARY_BASES[0])))
        says_sum = isinstance(self.said("norm_topk_prob"), bool) or self.renormalised_router
        missing = {
            _ROTARY_BASES[0]: self.rules.rotary and not has_base,
            _EPSILONS[0]: self.norm_epsilon is None,
            "norm_topk_prob": self.experts is not None and not self.sigmoid_router and not says_sum,
        }
        return tuple(key for key, is_missing in missing.items() if is_missing)

    @property
    def activation(self) -> str:
        """The activation function in Hugging Face's words; the family's default if the config does not state it."""
        said = next((self.document[name] for name in _ACTIVATIONS if isinstance(self.document.get(name), str)), None)
        return str(said or self.config.named("usual_activation"))

    @property
    def dropout(self) -> tuple[float, float]:
        """The dropout of hidden activations and that of attention's scores."""
        hidden, residual, attention, scores = (self._number(name) for name in _DROPOUTS)
        usual = float(self.config.named("usual_dropout"))
        first, second = (hidden if residual is None else residual), (attention if scores is None else scores)
        return usual if first is None else first, usual if second is None else second

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions; None if the model has none."""
        if not self.rules.rotary:
            return None
        parameters = self.document.get("rope_parameters")
        own: Mapping[str, object] = parameters if isinstance(parameters, Mapping) else {}
        scaling = self.document.get("rope_scaling") or own
        share = self._number("partial_rotary_factor", "rotary_pct") or _number(own.get("partial_rotary_factor")) or 1.0
        base = self._number(*_ROTARY_BASES) or _number(own.get("rope_theta")) or 10000.0
        return Rotary(base, share, scaling if isinstance(scaling, Mapping) else {})

    def said(self, key: str) -> object:
        """The config's value of a key; None if there is none."""
        return self.document.get(key)

    def _number(self, *keys: str) -> float | None:
        return next((found for key in keys if (found := _number(self.document.get(key))) is not None), None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def decoder_shape(model: TrainedModel) -> DecoderShape | None:
    """The decoder's shape; None if the model is no decoder. Raises InputError for a faulty config."""
    read = model_of_config("model", model.config)
    if not isinstance(read.config, DecoderConfig):
        return None
    return DecoderShape(str(model.config.get("model_type", "")), read.config, model.config)
