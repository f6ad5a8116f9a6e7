"""torchtitan's lists of module names for each part of a model, written and read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.runtimes.pieces import ModelPieces

_EMBEDDING = "tok_embeddings"
_NORM = "norm"
_HEAD = "lm_head"
_HEADS = (_HEAD, "output")
"""torchtitan's name today, and until 0.2."""


def module_names(pieces: ModelPieces, stages: Sequence[Sequence[int]]) -> list[list[str]]:
    """``[["tok_embeddings", "layers.0"], ..., ["norm", "lm_head"]]`` from the pieces of each stage."""
    names = {0: [_EMBEDDING], pieces.head: [_NORM, _HEAD]}
    return [[name for piece in stage for name in names.get(piece, [f"layers.{piece - 1}"])] for stage in stages]


def own_division(
    blocks: int, ranks: int, *, chunked: bool, per_stage: int | None, first_less: int, last_less: int
) -> tuple[tuple[int, ...], ...]:
    """The pieces of each stage where torchtitan 0.3 divides a model itself: as many layers in each, the ends counting
    as so many, and one more in the first stages.

    chunked: whether the schedule has several stages on a rank. per_stage: layers of a stage; None: one stage, or two,
    on each rank. Raises UsageError for what torchtitan refuses.
    """
    counted = blocks + first_less + last_less
    stages = ranks * (2 if chunked else 1) if per_stage is None else -(-counted // per_stage)
    layers = f"{blocks} layers and {first_less} and {last_less} for the ends"
    if stages % ranks:
        raise UsageError(f"torchtitan divides {layers} into {stages} stages, no multiple of {ranks} pipeline ranks")
    if (stages > ranks) != chunked:
        what = "several stages" if chunked else "one stage"
        raise UsageError(f"torchtitan divides {layers} into {stages} stages, and the schedule has {what} on each rank")
    least, more = divmod(counted, stages)
    if max(first_less, last_less, 1) > least:
        raise UsageError(f"{layers} leave too little for {stages} stages, which torchtitan refuses")
    counts = [least + (stage < more) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    ends = [0, *accumulate(counts[:-1]), blocks]
    found = [list(range(begin + 1, end + 1)) for begin, end in pairwise(ends)]
    found[0].insert(0, 0)
    found[-1].append(blocks + 1)
    return tuple(map(tuple, found))


def read_modules(source: str, parts: object, pieces: ModelPieces, path: str = "") -> tuple[tuple[int, ...], ...]:
    """The pieces of each stage. Raises InputError with every name that is none, or the first that is out of order."""
    if not isinstance(parts, list) or not parts or not all(isinstance(part, list) and part for part in parts):
        raise InputError(source, [Fault(path, "is no list of lists of module names, none of them empty")])
    expected = [name for part in module_names(pieces, [range(pieces.head + 1)]) for name in part]
    piece_of = {_EMBEDDING: 0, _NORM: pieces.head, _HEAD: pieces.head}
    found = [
        (f"{path}[{number}][{index}]", number, _HEAD if name in _HEADS else name)
        for number, part in enumerate(parts)
        for index, name in enumerate(part)
    ]
    known = set(expected)
    faults = [
        Fault(
            where, f"{name!r} is no module here; expected {_EMBEDDING}, layers.0 to {expected[-3]}, {_NORM} or {_HEAD}"
        )
        for where, _, name in found
        if not isinstance(name, str) or name not in known
    ]
    if faults:
        raise InputError(source, faults)
    for (where, _, name), wanted in zip(found, expected, strict=False):
        if name != wanted:
            raise InputError(source, [Fault(where, f"{name} stands where {wanted} is due")])
    if len(found) != len(expected):
        where, what = (path, f"ends where {expected[len(found)]} is due")
        if len(found) > len(expected):
            where, what = found[len(expected)][0], f"{found[len(expected)][2]} comes after the last module"
        raise InputError(source, [Fault(where, what)])
    if found[-1][1] != found[-2][1]:
        raise InputError(
            source, [Fault(found[-1][0], f"{_HEAD} is in another part than {_NORM}; plans keep them whole")]
        )
    stages: list[list[int]] = [[] for _ in parts]
    for _, number, name in found:
        piece = piece_of.get(str(name), -1)
        if piece < 0:
            piece = int(str(name).removeprefix("layers.")) + 1
        if piece not in stages[number]:
            stages[number].append(piece)
    return tuple(map(tuple, stages))
