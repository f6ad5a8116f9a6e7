"""Sphinx over docs/, where every warning is an error."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(out: Path) -> int:
    """Writes the site to ``out``; Sphinx's exit code."""
    from sphinx.cmd.build import main

    memory = out.with_name(f"{out.name}.doctrees")
    return int(
        main(["-b", "html", "-a", "-E", "-W", "--keep-going", "-q", "-d", str(memory), str(ROOT / "docs"), str(out)])
    )
