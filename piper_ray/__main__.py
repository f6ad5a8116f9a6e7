"""``python -m piper_ray``: the same as the command ``piper-ray``."""

from __future__ import annotations

import sys

from piper_ray.cli import main

if __name__ == "__main__":
    sys.exit(main())
