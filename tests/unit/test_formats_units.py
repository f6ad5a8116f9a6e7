"""Sizes and rates with units."""

from __future__ import annotations

import math

import pytest

from piper_ray.model.errors import UsageError
from piper_ray.model.units import parse_bytes, parse_bytes_per_s


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("80GB", 80e9),
        ("80 gb", 80e9),
        (" 1.5KiB ", 1536),
        (".5kB", 500),
        ("2.4GiB", int(2.4 * 2**30)),
        ("8192", 8192),
        ("2.5e9", 2.5e9),
        ("0", 0),
        ("8Gbit", 1e9),
        (8192, 8192),
        (0.5, 0.5),
    ],
)
def test_sizes(text: str | float, size: float) -> None:
    assert parse_bytes(text) == size
    assert isinstance(parse_bytes(text), float)


@pytest.mark.parametrize(
    "text", ["25GB/s", "25 GB / s", "25GB", "25GB/sec", "25GBps", "200Gbit/s", "25e9", "25000000000/s"]
)
def test_rates(text: str) -> None:
    assert parse_bytes_per_s(text) == 25e9


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-5", "negative"),
        ("-5GB", "not understood"),
        (-1.0, "negative"),
        ("nan", "unknown unit|not understood"),
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        ("1e400", "not finite"),
        ("1e4GB", "not understood"),
        ("1,5GB", "not understood"),
        ("8GiB/h", "not understood"),
        ("8 parsecs", "unknown unit"),
        ("GiB", "not understood"),
        ("", "not understood"),
        ("25Gb", "ambiguous; write GB for bytes or Gbit for bits"),
        ("9" * 400 + "EiB", "too large"),
        (10**400, "a huge number is not finite"),
        (True, "not a size"),
        (None, "not a size"),
    ],
)
def test_what_is_no_size_is_refused_with_an_example(value: str | float, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_bytes(value)
    assert "8GiB" in str(caught.value) or "ambiguous" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8", "8GB"),
        ("0.5", "0.5GB"),
        (" 80. ", "80GB"),
        ("8e1", "80GB"),
        ("81559", "81559MB"),
        ("16000", "16GB"),
        ("80000000000", "80GB"),
        ("8e9", "8GB"),
        ("8589934592", "8GiB"),
        ("2684354560", "2560MiB"),
        ("1234567", "1234567B"),
    ],
)
def test_where_a_unit_is_required_the_one_that_was_meant_is_named(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, unit_required=True)
    assert str(caught.value) == f"{text.strip()} has no unit; did you mean {meant}?"
    assert parse_bytes(meant, unit_required=True) > 0.0
    with pytest.raises(UsageError) as caught:
        parse_bytes_per_s(f"{text}/s", unit_required=True)
    assert str(caught.value) == f"{text.strip()} has no unit; did you mean {meant}/s?"
    assert parse_bytes_per_s(f"{meant}/s", unit_required=True) > 0.0


def test_with_a_unit_or_as_a_number_nothing_is_missing() -> None:
    assert parse_bytes("8B", unit_required=True) == parse_bytes(8.0, unit_required=True) == 8.0
    assert parse_bytes_per_s("25GB", unit_required=True) == 25e9
    assert parse_bytes("0", unit_required=True) == 0.0  # no unit makes more of it; refused where it is used


@pytest.mark.parametrize("text", ["-8", "nan", "8 parsecs", "8Gb", ""])
def test_other_faults_are_told_as_ever(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, unit_required=True)
    assert "has no unit" not in str(caught.value)


def test_a_rate_shows_what_was_given() -> None:
    with pytest.raises(UsageError, match="'25Gb/s' is ambiguous"):
        parse_bytes_per_s("25Gb/s")
