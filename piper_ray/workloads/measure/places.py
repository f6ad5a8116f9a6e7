"""Where in the user's code an error came from, and the error in words: what a user sees in place of a traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_OURS = Path(__file__).resolve().parents[2]
_TORCH = Path(torch.__file__).resolve().parent
_IMPORT = Path(traceback.__file__).resolve().parent / "importlib"


def place_of(error: BaseException) -> str:
    """``file.py:12``: the innermost line that is neither ours nor torch's; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        generated = frame.filename.startswith("<")
        if not generated and not any(above in path.resolve().parents for above in (_OURS, _TORCH, _IMPORT)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def words_of(error: BaseException) -> str:
    """``ValueError: no such size``, in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
