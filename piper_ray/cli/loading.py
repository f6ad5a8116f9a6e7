"""The time in which a command loads its modules and reads its arguments and input: a large part of short commands.

Meanwhile nothing is collected: what is loaded stays, and the collector would look through it again and again. Numpy's
OpenBLAS gets no threads of its own: they begin with a tenth of a second of spinning each, and what is multiplied here
is too small for them. Pydantic does not look for plugins in all that is installed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType

_VARIABLES: Mapping[str, str] = MappingProxyType({"OPENBLAS_NUM_THREADS": "1", "PYDANTIC_DISABLE_PLUGINS": "1"})
"""Read as numpy and pydantic are loaded. What the user has set stays, and no process that the command starts inherits
ours."""

_at_end = ExitStack()


def begin_loading() -> None:
    """For a process that runs one command and ends."""
    for name, value in _VARIABLES.items():
        if name not in os.environ:
            os.environ[name] = value
            _at_end.callback(os.environ.pop, name, None)
    if gc.isenabled():
        gc.disable()
        _at_end.callback(gc.enable)
        _at_end.callback(gc.freeze)  # before: what has been loaded is never looked at


def end_loading() -> None:
    """Before whatever may take long. Does nothing in another process, or a second time."""
    _at_end.close()
