"""Few groups of similar layers in place of many kinds: good prices need not know each layer by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.kernels.chunk_bound import LayerKinds
from piper_ray.engine.kernels.types import FloatArray, IndexArray


def similar(kinds: LayerKinds, members: Sequence[IndexArray], most: int) -> tuple[LayerKinds, list[IndexArray]]:
    """At most ``most`` groups of kinds, of one side with as many options each, and their positions, which ascend; more
    if there are more sides and numbers of options. A layer of a group takes and holds the mean of its members, and may
    be in all chunks that one of them may be in.

    The first kind of a group is the one that differs most from the first ones of all groups so far (Gonzalez, 1985);
    each kind is in the group of the first one that is the least different. What layers differ in is measured in means
    of all layers.
    """
    starts = kinds.option_start
    mean = np.maximum(dot(kinds.layers, _mean_options(kinds)) / kinds.layers.sum(), 1e-300)
    by_form: dict[tuple[int, int], list[int]] = {}
    for kind, (start, end) in enumerate(pairwise(starts.tolist())):
        by_form.setdefault((int(kinds.side[kind]), end - start), []).append(kind)
    forms = [np.array(one, np.int64) for one in by_form.values()]
    sizes = [int(starts[form[0] + 1] - starts[form[0]]) for form in forms]
    rows = [
        (kinds.figures[starts[form][:, None] + np.arange(size)] / mean).reshape(form.size, -1)
        for form, size in zip(forms, sizes, strict=True)
    ]
    first = [[int(np.argmax(row.sum(axis=1)))] for row in rows]
    apart = [_apart(row, row[one[0]]) for row, one in zip(rows, first, strict=True)]
    while sum(map(len, first)) < most:
        at = int(np.argmax([one.max() for one in apart]))
        furthest = int(np.argmax(apart[at]))
        if apart[at][furthest] == 0.0:
            break
        first[at].append(furthest)
        apart[at] = np.minimum(apart[at], _apart(rows[at], rows[at][furthest]))
    groups = []
    for form, row, one in zip(forms, rows, first, strict=True):
        nearest = np.argmin([_apart(row, row[x]) for x in one], axis=0)
        groups += [form[nearest == n] for n in range(len(one))]
    return _grouped(kinds, groups), [np.sort(np.concatenate([members[kind] for kind in group])) for group in groups]


def _mean_options(kinds: LayerKinds) -> FloatArray:
    """float64[kinds, figures]: the mean of each kind's options."""
    found: FloatArray = np.add.reduceat(kinds.figures, kinds.option_start[:-1]) / np.diff(kinds.option_start)[:, None]
    return found


def _apart(rows: FloatArray, row: FloatArray) -> FloatArray:
    found: FloatArray = np.abs(rows - row).sum(axis=1)
    return found


def _grouped(kinds: LayerKinds, groups: Sequence[IndexArray]) -> LayerKinds:
    figures, size = list[FloatArray](), np.diff(kinds.option_start)
    for group in groups:
        options = kinds.option_start[group][:, None] + np.arange(size[group[0]])
        figures.append(np.average(kinds.figures[options], axis=0, weights=kinds.layers[group]))
    return LayerKinds(
        np.array([kinds.layers[group].sum() for group in groups]),
        np.ones(len(groups), np.int64),
        np.array([kinds.first_chunk[group].min() for group in groups]),
        np.array([kinds.last_chunk[group].max() for group in groups]),
        np.array([kinds.side[group[0]] for group in groups]),
        np.concatenate([[0], np.cumsum([len(one) for one in figures])]),
        np.concatenate(figures),
        np.zeros(sum(map(len, figures))),
    )
