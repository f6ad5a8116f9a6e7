"""What models of text have besides their layers: embeddings, the vocabulary projection, words for a microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from piper_ray.workloads.estimate.architectures.transformer import HIDDEN, BlockStyle, norm, table
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.operators import (
    TOKEN_EMBEDDING,
    Exchange,
    KeptBytes,
    LayerKind,
    LayerNode,
    Operator,
    Product,
    Split,
)


def embedding_kind(
    symbols: Mapping[str, float],
    style: BlockStyle,
    *,
    tables: Sequence[tuple[str, str]] = (),
    normed: bool = False,
    key: str = "embedding",
    name: str = "embedding",
    tied: str = "0",
) -> LayerKind:
    """Rows of the vocabulary over devices, each looking up its own, summed (Megatron).

    tables: further ones that each device has, as (name, parameters). normed: a norm follows. tied: as in LayerKind.
    """
    operators = [
        Operator(
            TOKEN_EMBEDDING,
            forward_bytes="4 s b h",
            backward_bytes="6 s b h",
            split=Split.SEQUENCE,
            parameters="V h",
            saved=(KeptBytes("8 s b", Split.WHOLE),),
        )
    ]
    operators += [table(label, parameters) for label, parameters in tables]
    if normed:
        operators.append(norm(style))
    if style.dropout:
        operators.append(dropout())
    exchange = Exchange("embedding", HIDDEN, backward=0.0)
    return LayerKind(key, name, symbols, tuple(operators), HIDDEN, exchanges=(exchange,), tied=tied)


def dropout() -> Operator:
    """Dropout of the hidden activations by itself."""
    return Operator(
        "dropout",
        forward_bytes="5 s b h",
        backward_bytes="5 s b h",
        split=Split.SEQUENCE,
        saved=(KeptBytes("s b h", Split.SEQUENCE),),
    )


def head_kind(
    symbols: Mapping[str, float],
    style: BlockStyle,
    *,
    tied: bool,
    bias: bool = False,
    before: Sequence[Operator] | None = None,
    tokens: str = "s b",
) -> LayerKind:
    """Vocabulary projection divided by columns, and the loss on logits in fp32; ``before`` it: a norm if not said.

    tied: the projection's weights are the embedding's; its bias is its own. tokens: that are projected, by formula.
    """
    operators = (
        *([norm(style, "last norm")] if before is None else before),
        Operator(
            "vocabulary projection",
            products=(Product(tokens, "V", "h", divided="columns"),),
            parameters="h V + V" if bias else "h V",
            saved=(KeptBytes(f"2 {tokens} h", Split.SEQUENCE),),
        ),
        Operator(
            "loss",
            forward_bytes=f"8 {tokens} V",
            backward_bytes=f"6 {tokens} V",
            saved=(KeptBytes(f"4 {tokens} V", Split.TENSOR),),
        ),
    )
    return LayerKind(
        "head",
        "vocabulary projection",
        symbols,
        operators,
        output="0",
        exchanges=(Exchange("input of the projection", f"2 {tokens} h", forward=0.0),),
        tied="h V" if tied else "0",
    )


def chain(first: LayerNode, *others: LayerNode) -> tuple[LayerNode, ...]:
    """Layers that each read the one before."""
    return (first, *(replace(node, inputs=(index,)) for index, node in enumerate(others)))


def encoder_decoder(
    encoder: Sequence[LayerNode], decoder: Sequence[LayerNode], head: LayerNode
) -> tuple[LayerNode, ...]:
    """Two chains and the head; each layer of the decoder but its embedding also reads what comes out of the encoder."""
    nodes = [*chain(*encoder), decoder[0]]
    for node in decoder[1:]:
        nodes.append(replace(node, inputs=(len(nodes) - 1, len(encoder) - 1)))
    return (*nodes, replace(head, inputs=(len(nodes) - 1,)))


def stack(kinds: Iterable[LayerKind], path: str) -> list[LayerNode]:
    """Layers of a list of modules at ``path``."""
    return [LayerNode(kind, path=f"{path}.{index}") for index, kind in enumerate(kinds)]


def sequences_text(microbatch: Microbatch) -> str:
    """A microbatch in words."""
    return f"{microbatch.samples:,} sequence{'s' if microbatch.samples > 1 else ''} of {microbatch.tokens:,} tokens"
