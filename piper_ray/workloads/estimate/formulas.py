"""Formulas as they are printed: sums of products of numbers and symbols, ``2 s b h + 4 s b V / 2``.

A layer's figures are written this way once; evaluating them and explaining them start from the same text.
"""

from __future__ import annotations

from collections.abc import Mapping

Symbols = Mapping[str, float]


def evaluate(formula: str, symbols: Symbols) -> float:
    """The value of ``formula``. Words are factors, ``/`` divides by the next one, ``+`` separates the summands."""
    total: float = 0
    for summand in formula.split("+"):
        product: float = 1
        divides = False
        for word in summand.split():
            if word == "/":
                divides = True
                continue
            value = _value(word, symbols)
            product = product / value if divides else product * value
            divides = False
        total += product
    return total


def substituted(formula: str, symbols: Symbols) -> str:
    """``formula`` with numbers in the place of symbols: ``2 8192 1 16384`` becomes ``2*8192*1*16384``."""
    summands = []
    for summand in formula.split("+"):
        text = "*".join("/" if word == "/" else number_text(_value(word, symbols)) for word in summand.split())
        summands.append(text.replace("*/*", "/"))
    return " + ".join(summands)


def number_text(value: float) -> str:
    """A whole number without a point, another with six digits."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def _value(word: str, symbols: Symbols) -> float:
    return symbols[word] if word in symbols else float(word) if "." in word else int(word)
