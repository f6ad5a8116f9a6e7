"""Files that a launch file names, found next to it or in a folder above."""

from __future__ import annotations

from pathlib import Path

_MOST_ABOVE = 8
_MOST_BYTES = 4_000_000


def text_beside(name: str, beside: Path | None) -> tuple[Path | None, str | None]:
    """The path and the text of a file that a launch file names, in its own folder or in a folder above.

    Both are None for a launch without a file, and for a name that is empty or leads nowhere.
    """
    name = name.strip().lstrip("/")
    if beside is None or not name or len(name) > 500 or "\0" in name:
        return None, None
    folder = beside.resolve().parent
    for above in (folder, *folder.parents[:_MOST_ABOVE]):
        path = above / name
        try:
            if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                return path, path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError):
            return None, None
    return None, None
