"""Numbers in reports: units, digits, ranges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.model.figures import (
    PROOF_DIGITS,
    given_size_text,
    least_text,
    percent_text,
    plural,
    printable,
    range_text,
    rounded,
    size_scale,
    size_text,
    time_scale,
    time_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0007035911844432354, "704 us"),
        (8.666772848487811, "8.67 s"),
        (65.83886745345592, "65.8 s"),
        (0.001, "1.00 ms"),
        (0.0009999999, "1.00 ms"),
        (2.5e-8, "25.0 ns"),
        (2.5e-11, "0.02 ns"),
        (123456.0, "123456 s"),
        (0.0, "0 s"),
        (math.inf, "inf"),
    ],
)
def test_a_time_has_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@given(st.floats(min_value=1e-8, max_value=1e4))
def test_a_time_reads_back_to_as_many_digits(seconds: float) -> None:
    number, unit = time_text(seconds, PROOF_DIGITS).split()
    assert float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit] == pytest.approx(seconds, rel=1e-5)


def test_rates_have_three_digits_and_bounds_are_rounded_down() -> None:
    assert [rounded(rate) for rate in (536_507.0, 1_137.0, 999.7, 65.4916, 90.04)] == [
        "537,000", "1,140", "1,000", "65.5", "90"
    ]  # fmt: skip
    assert (least_text(0.0152691), time_text(0.0152691)) == ("15.2 ms", "15.3 ms")
    assert [rounded(rate, 4) for rate in (1_361.73, 12_345.6)] == ["1,362", "12,350"]


def test_a_column_of_times_has_one_unit() -> None:
    scale = time_scale(0.0205)
    assert (scale.unit, scale.text(0.0205), scale.text(0.00002)) == ("ms", "20.5", "0.0")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(8 * 2**30, "8 GiB"), (80e9, "74.51 GiB"), (1536, "1.5 KiB"), (100, "100 B"), (0, "0 B"), (2**50, "1024 TiB")],
)
def test_a_size_is_in_powers_of_1024(size_bytes: float, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(("size_bytes", "text"), [(8 * 2**30, "8 GiB"), (80e9, "80 GB"), (25e9, "25 GB")])
def test_a_given_size_is_shown_as_it_was_probably_given(size_bytes: float, text: str) -> None:
    assert given_size_text(size_bytes) == text


def test_bytes_have_no_decimals() -> None:
    assert size_scale(100.0).text(64.0) == "64"


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0, "0 %"), (1e-9, "0 %"), (5e-9, "5e-07 %"), (0.008746, "0.8746 %"), (1.0, "100.0000 %")],
)
def test_a_gap_is_zero_only_when_it_is_proved(ratio: float, text: str) -> None:
    assert percent_text(ratio) == text


def test_ids_become_ranges() -> None:
    assert range_text([5, 3, 4, 9, 11, 12]) == "3-5,9,11-12"
    assert range_text([]) == ""


def test_words_have_plurals() -> None:
    assert (plural(1, "stage"), plural(12345, "pair")) == ("1 stage", "12,345 pairs")


def test_a_name_cannot_send_control_codes() -> None:
    assert printable("a\x1b[31mb\nc\u202e") == "a?[31mb?c?"
