"""Which values of a parametrization are for ``--all`` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_after(quick: int, values: Iterable[Any]) -> list[Any]:
    """The values of a parametrization, all but the first ``quick`` marked long. A tuple is several arguments."""
    return [
        value if number < quick else pytest.param(*_arguments(value), marks=pytest.mark.long)
        for number, value in enumerate(values)
    ]


def asked_for(config: pytest.Config, quick: int, values: Iterable[Any]) -> list[Any]:
    """What of a parametrization with ``long_after`` this run has, for a fixture that prepares all of it."""
    return [*values] if config.getoption("--all") else [*values][:quick]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)
