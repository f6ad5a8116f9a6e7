"""numba without two packages that it takes along where they are installed, which are a twelfth of a short solve's time:
coverage, to be measured with, and yaml, to read a file of settings that is hardly ever there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_SETTINGS = ".numba_config.yaml"


@contextmanager
def _hidden(names: Iterable[str]) -> Iterator[None]:
    """Who tries to import one of these meanwhile finds that it is not there. What is loaded stays."""
    names = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


with _hidden(["coverage"] if os.path.lexists(_SETTINGS) else ["coverage", "yaml"]):
    import numba as numba
