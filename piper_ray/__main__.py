"""The process of the command ``piper-ray``, and ``python -m piper_ray``, which is the same.

Ctrl-C while this is being loaded is the system's to handle, and ends the process as it does those of other programs:
Python would print where it was. From then on it is ``piper_ray.cli``'s, if whoever started this did not ignore it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself takes a while to load

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from piper_ray.cli import program

if __name__ == "__main__":
    program()
