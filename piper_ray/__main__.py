"""``python -m piper_ray``: the same as the command ``piper-ray``."""

from __future__ import annotations

from piper_ray.cli import program

if __name__ == "__main__":
    program()
