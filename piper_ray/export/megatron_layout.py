"""Megatron's layout strings (``Et*2|(t*2|)*34,t*3|(t*2|)*3,tmL``): E embedding, t transformer layer, m multi-token
prediction, L loss, | border.

They are read as in megatron-core 0.16, and errors are reported with their place. A stage is a text such as ``Ett``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby

from piper_ray.model import limits
from piper_ray.model.constraints import SameDegrees
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.runtimes.pieces import ModelPieces, pieces_of

EMBEDDING, BLOCK, LOSS, MTP = "E", "t", "L", "m"
_PIECES = EMBEDDING + BLOCK + LOSS + MTP
_BORDER = "|"


def parse_layout(text: str) -> tuple[str, ...]:
    """The stages, front to back. Raises UsageError that names the place of an error."""
    bare = text.replace(",", "")  # commas have no meaning
    places = [place for place, character in enumerate(text, start=1) if character != ","]

    def fault(at: int, what: str) -> UsageError:
        return UsageError(f"layout {_shown(text)}: character {places[at]} {what}")

    return tuple(_unrolled(bare, 0, len(bare), fault).split(_BORDER))


_ITEM = re.compile(r"(?P<part>[EtLm|]|\((?P<group>[^()]*)\))(?P<times>\*(?P<count>[0-9]*))?")
_Fault = Callable[[int, str], UsageError]


def _unrolled(bare: str, begin: int, end: int, fault: _Fault) -> str:
    """The items of a layout between two places, with repetitions written out."""
    found = ""
    at = begin
    while at < end:
        item = _ITEM.match(bare, at, end)
        if item is None:
            raise _no_item(bare, at, end, fault)
        part, last = item["part"], item.end("part") - 1
        if item["group"] is not None:
            part = _unrolled(bare, at + 1, last, fault)
            if not part:
                raise fault(last, "closes an empty group")
            if item["times"] is None:
                raise fault(last, "ends a group that is not repeated; expected )*n")
        at = item.end()
        if item["count"] == "":
            raise fault(at - 1, "is not followed by a number")
        if item["group"] is not None and bare.startswith("*", at):
            raise fault(at - 1, "ends a group that is repeated twice")
        count = int((item["count"] or "1")[:20])
        if len(found) + count * len(part) > 2 * limits.LAYERS:
            raise fault(at - 1, f"repeats to more than {limits.LAYERS:,} layers")
        found += part * count
    return found


def _no_item(bare: str, at: int, end: int, fault: _Fault) -> UsageError:
    """The error for text that is not an item."""
    if bare[at] == ")":
        return fault(at, "closes no parenthesis")
    if bare[at] == "(":
        until = next((place for place in range(at + 1, end) if bare[place] in "()"), end)
        _unrolled(bare, at + 1, until, fault)  # raises if there is an earlier error
        if until < end:
            return fault(until, "opens a group within a group, which Megatron does not read")
        return fault(at, "opens a group that is not closed")
    known = ", ".join(_PIECES + _BORDER)
    return fault(at, f"is {bare[at]!r}; expected one of {known}, *n after one of them, or (...)*n")


def check_layout(stages: tuple[str, ...], text: str, pieces: ModelPieces, ranks: int) -> None:
    """Megatron's further conditions on the stages, for a model with these pieces. Raises UsageError that names the
    stage."""
    where = f"layout {_shown(text)}"
    if len(stages) % ranks:
        raise UsageError(f"{where}: {len(stages)} stages are no multiple of {ranks} pipeline ranks")
    flat = "".join(stages)
    for piece, what, place, wanted in (
        (EMBEDDING, "embedding (E)", 0, "first"),
        (LOSS, "loss layer (L)", len(flat) - 1, "last"),
    ):
        count = flat.count(piece)
        if count != 1:
            raise UsageError(f"{where}: {count} times the {what}; expected it once")
        if flat[place] != piece:
            stage = next(number for number, one in enumerate(stages, start=1) if piece in one)
            raise UsageError(f"{where}: the {what} stands in stage {stage} and is not the {wanted} of all")
    for piece, what, wanted_count in (
        (BLOCK, "transformer layers (t)", pieces.blocks),
        (MTP, "multi-token-prediction layers (m)", pieces.predictors),
    ):
        if flat.count(piece) != wanted_count:
            raise UsageError(f"{where}: {flat.count(piece)} {what}; the model has {wanted_count}")
    holding = [number for number, one in enumerate(stages, start=1) if MTP in one]
    if len(holding) > 1:
        raise UsageError(f"{where}: several stages hold multi-token-prediction layers (m); Megatron keeps them in one")
    if holding and BLOCK in flat[flat.index(MTP) :]:
        raise UsageError(f"{where}: a transformer layer (t) stands behind a multi-token-prediction layer (m)")
    if holding and holding[0] <= len(stages) - ranks:
        raise UsageError(
            f"{where}: stage {holding[0]} holds multi-token prediction (m) and is not the last one of its rank"
        )


def layout_text(stages: tuple[str, ...]) -> str:
    """The short form: repeated layers as ``t*3``, repeated stages as ``(t*2|)*4``."""
    runs = [(stage, len(list(same))) for stage, same in groupby(stages[:-1])]
    parts = []
    for stage, count in runs:
        short = _stage_text(stage)
        parts.append(f"({short}|)*{count}," if count > 1 else f"{short}|")
    return "".join(parts) + _stage_text(stages[-1])


def stage_letters(pieces: ModelPieces, stages: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """A text for each stage, from its pieces."""
    others = {0: EMBEDDING, pieces.head: LOSS}
    if pieces.predictors:
        others[pieces.head - 1] = MTP * pieces.predictors
    return tuple("".join(others.get(piece, BLOCK) for piece in stage) for stage in stages)


def with_ends(counts: list[int], predictors: int, *, embedding: bool = False, loss: bool = False) -> list[str]:
    """Letters of each stage; predictors are with the loss. embedding, loss: whether it counts as a layer in its
    stage."""
    counts[0] -= embedding
    counts[-1] -= loss
    if min(counts) < 0:
        raise UsageError("a stage has no room for the embedding or the loss layer that are to count as layers")
    letters = [BLOCK * count for count in counts]
    letters[0] = EMBEDDING + letters[0]
    letters[-1] += MTP * predictors + LOSS
    return letters


def pieces_of_letters(letters: Sequence[str], pieces: ModelPieces) -> tuple[tuple[int, ...], ...]:
    """The pieces of each stage, from a text such as ``Ett``."""
    block, stages = 0, []
    for stage in letters:
        found = []
        for letter in stage:
            block += letter == BLOCK
            found.append({EMBEDDING: 0, MTP: pieces.head - 1, LOSS: pieces.head}.get(letter, block))
        stages.append(tuple(dict.fromkeys(found)))
    return tuple(stages)


def read_string(text: str, pieces: ModelPieces, ranks: int | None) -> tuple[tuple[int, ...], ...]:
    """The stages of a layout string. Raises UsageError that states where it is wrong."""
    parsed = parse_layout(text)
    check_layout(parsed, text, pieces, ranks or len(parsed))
    return pieces_of_letters(parsed, pieces)


def plan_layout(instance: Instance, plan: Plan) -> str | None:
    """The short form for messages; None for a model or a plan that the letters cannot express, and for a plan that
    Megatron does not run, as stages differ in their degrees."""
    if any(SameDegrees().violations(instance, plan)):
        return None
    try:
        pieces = pieces_of(instance)
        return layout_text(stage_letters(pieces, pieces.of_stages(plan)))
    except UsageError:
        return None


def _stage_text(stage: str) -> str:
    runs = [(piece, len(list(same))) for piece, same in groupby(stage)]
    return "".join(piece if count == 1 else f"{piece}*{count}" for piece, count in runs)


def _shown(text: str) -> str:
    return f'"{text}"' if len(text) <= 80 else f'"{text[:77]}..."'
