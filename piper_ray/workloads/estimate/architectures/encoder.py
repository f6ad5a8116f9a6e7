"""BERT-style encoders, trained on masked words."""

from __future__ import annotations

from piper_ray.workloads.estimate.architectures.decoder import check_heads
from piper_ray.workloads.estimate.architectures.text import chain, embedding_kind, head_kind, sequences_text, stack
from piper_ray.workloads.estimate.architectures.transformer import BLOCK_LEGEND, BlockStyle, block, norm, undivided
from piper_ray.workloads.estimate.families import Count, Family, Layers, Microbatch, Share
from piper_ray.workloads.estimate.operators import Architecture, KeptBytes, LayerNode, Operator, Product, Split
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.fields import Open

LEGEND = {
    "s": "tokens of a sample",
    **BLOCK_LEGEND,
    "V": "size of the vocabulary",
    "P": "learned positions",
    "T": "types of tokens",
}


class BertConfig(Open):
    """``bert``, with the heads of its pretraining: masked words and the next sentence."""

    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count = 512
    type_vocab_size: Count = 2
    hidden_dropout_prob: Share = 0.1


class RobertaConfig(BertConfig):
    """``roberta``: masked words only."""


def build(config: BertConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Embedding, layers, and the head for masked words, which looks at every position."""
    symbols: dict[str, float] = {
        "s": microbatch.tokens or 1, "b": microbatch.samples, "h": config.hidden_size,
        "a": config.num_attention_heads, "g": config.num_attention_heads,
        "d": config.hidden_size // config.num_attention_heads, "f": config.intermediate_size,
        "V": config.vocab_size, "P": config.max_position_embeddings, "T": config.type_vocab_size,
    }  # fmt: skip
    style = BlockStyle(fused=microbatch.fused, causal=False, dropout=config.hidden_dropout_prob > 0)
    tables = [("position embedding", "P h"), ("type embedding", "T h")]
    next_sentence = not isinstance(config, RobertaConfig)
    layer = block("block", "encoder layer", symbols, style, config.num_attention_heads)
    root, head_path = ("bert", "cls") if next_sentence else ("roberta", "lm_head")
    head = head_kind(symbols, style, tied=True, before=_before_projection(style, next_sentence))
    nodes = chain(
        LayerNode(embedding_kind(symbols, style, tables=tables, normed=True), path=f"{root}.embeddings"),
        *stack([layer] * config.num_hidden_layers, f"{root}.encoder.layer"),
        LayerNode(head, path=head_path),
    )
    return Architecture(name, nodes, sequences_text(microbatch), LEGEND)


def _before_projection(style: BlockStyle, next_sentence: bool) -> list[Operator]:
    """The dense layer and the norm before the projection, its bias, and what classifies the next sentence."""
    dense = Operator(
        "dense layer before the projection",
        products=(Product("s b", "h", "h", divided="tokens"),),
        forward_bytes="4 s b h",
        backward_bytes="6 s b h",
        split=Split.SEQUENCE,
        parameters="h h + h + V",
        parameters_split=Split.WHOLE,
        saved=(KeptBytes("4 s b h", Split.SEQUENCE),),
    )
    pooler = undivided(
        "pooler and next sentence",
        products=(Product("b", "h", "h"),),
        parameters="h h + h + 2 h + 2",
        saved="4 b h",
    )
    return [*([pooler] if next_sentence else []), dense, norm(style)]


def check(config: BertConfig, faults: Faults) -> None:
    """Heads divide the width."""
    check_heads("hidden_size", config.hidden_size, "num_attention_heads", config.num_attention_heads, faults)


def _positions(config: BertConfig) -> int:
    return config.max_position_embeddings


FAMILIES = {
    "bert": Family(BertConfig, build, check, _positions),
    "roberta": Family(RobertaConfig, build, check, _positions),
    "xlm-roberta": Family(RobertaConfig, build, check, _positions),
    "camembert": Family(RobertaConfig, build, check, _positions),
}
