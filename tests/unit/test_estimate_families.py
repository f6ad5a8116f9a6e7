"""The table of families: each name in it stands for something, and something goes by each fact and each rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from inspect import getmembers, isfunction, signature
from typing import Any, ClassVar

import pytest

from piper_ray.workloads.estimate.architectures import rules
from piper_ray.workloads.estimate.architectures.decoder import PARTS, DecoderConfig, DecoderPaths, Rules
from piper_ray.workloads.estimate.architectures.multimodal import TowerRules, VisionConfig, VlmConfig
from piper_ray.workloads.estimate.architectures.rows import TABLES, Row, RowConfig, row_of, table
from piper_ray.workloads.estimate.families import KINDS

KNOWN = {name: rule for name, rule in getmembers(rules, isfunction) if not name.startswith("_")}
SECTIONS: dict[str, type[RowConfig]] = {"decoders": DecoderConfig, "towers": VisionConfig, "wrappers": VlmConfig}
ROWS = [(section, name) for section in SECTIONS for name in table()[section]] + [("bases", "usual")]
ASKED = {
    "width", "inner", "key_heads", "head_size", "tied", "predictors", "mixing", "feeding", "heads_checked",
    "experts_checked_from", "usual_dropout", "usual_activation", "sigmoid_router", "renormalised_router",
    "norm_before_merging", "projector_output_dim", "decoder", "tower", "projector", "biased", "merged", "image_tokens",
    "norm", "others", "between", "copies",
}  # fmt: skip
"""Facts that code asks for by name."""


def facts(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in row.items() if name not in (*TABLES, "like")}


def parts_of(fact: Any) -> list[Any]:
    """The facts that a fact is made of: those of a list, of a condition, a product or a sum."""
    if isinstance(fact, Mapping) and "text" not in fact and "by" not in fact:
        assert set(fact) in (set(), {"if", "then"}, {"if", "then", "else"}, {"product"}, {"sum"}), fact
        return [one for said in fact.values() for one in (said if isinstance(said, list) else [said])]
    return fact if isinstance(fact, list) else []


def names_in(fact: Any) -> Iterator[str]:
    """Keys and facts that a fact goes by."""
    if isinstance(fact, str):
        yield fact
    elif isinstance(fact, Mapping) and "by" in fact:
        yield from signature(KNOWN[fact["by"]]).parameters
    for one in parts_of(fact):
        yield from names_in(one)


def rules_in(fact: Any) -> set[str]:
    own = {fact["by"]} if isinstance(fact, Mapping) and "by" in fact else set()
    return own.union(*map(rules_in, parts_of(fact)))


def part_names() -> set[str]:
    return {name for part in table()["parts"].values() for fact in part.values() for name in names_in(fact)}


def kinds_of_rules(section: str) -> set[str]:
    return {field.name for field in fields(TowerRules if section == "towers" else Rules)}


def test_names_of_a_row_stand_for_keys_or_facts() -> None:
    everywhere = [one for of in ("bases", *SECTIONS) for one in table()[of].values()]
    read = {other for one in everywhere for said in facts(one).values() for other in names_in(said)}
    read |= {other for rule in KNOWN.values() for other in signature(rule).parameters}
    for section, name in ROWS:
        row = row_of(section, name)
        config = SECTIONS.get(section, DecoderConfig)
        there = {"layer", "given", *row["keys"], *facts(row), *config.model_fields, *vars(config)}
        for fact, said in facts(row).items():
            for other in names_in(said):
                assert other.partition(".")[0] in there, (section, name, fact, other)
        own = {other for said in facts(row).values() for other in names_in(said)}
        asked = {*ASKED, *part_names(), *kinds_of_rules(section), *read, *own}
        assert asked >= facts(row).keys(), (section, name)


def test_keys_of_a_row_have_kinds() -> None:
    kinds = {key: kind for kind, keys in table()["kinds"].items() for key in keys}
    for section, name in ROWS:
        for key, said in row_of(section, name)["keys"].items():
            entry = said if isinstance(said, Mapping) else {"default": said}
            assert set(entry) <= {"names", "default", "kind", "required", "keys"}, (section, name, key)
            kind = entry.get("kind") or kinds[key]
            assert kind == "object" or kind.rstrip("?") in KINDS, (section, name, key)


def test_parts_and_paths_are_known() -> None:
    assert table()["parts"].keys() == PARTS.keys()
    for name in table()["decoders"]:
        DecoderPaths(**row_of("decoders", name)["paths"])


def test_no_row_is_called_as_another_one() -> None:
    names = [name for section in ("bases", "decoders", "towers") for name in table()[section]]
    assert len(names) == len(set(names))
    assert not table()["bases"].keys() & table()["wrappers"].keys()  # whose names towers may have, too


def test_each_rule_and_base_is_used() -> None:
    rows = [row for section in ("bases", *SECTIONS) for row in table()[section].values()]
    said = [fact for row in (*rows, *table()["parts"].values()) for fact in facts(row).values()]
    assert {rule for fact in said for rule in rules_in(fact)} == KNOWN.keys()
    used = {name for row in rows for name in row.get("like", ())} | {"usual"}
    assert used >= table()["bases"].keys()


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ({"if": "tied", "then": "width", "else": {"text": "h"}}, 96),
        ({"if": "untied", "then": "width", "else": {"text": "h"}}, "h"),
        ({"if": "untied", "then": "width"}, None),
        ({"product": [0.5, "width"]}, 48),
        ({"sum": ["width", {"product": ["width", "width"]}, 1]}, 96 + 96 * 96 + 1),
    ],
)
def test_facts_of_other_facts(fact: Any, value: object) -> None:
    class Said(RowConfig):
        row: ClassVar[Row] = {"tied": True, "untied": False, "width": 96}

    assert Said().value(fact) == value
