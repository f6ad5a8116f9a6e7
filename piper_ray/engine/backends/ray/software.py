"""What a machine runs: who computes for a driver must have its versions and sources, or the answer may be another.

A machine of which nothing is known is asked by a function that is sent to it whole: all that it takes for granted is
Python and Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

Software = Mapping[str, str]
"""Version by name; ``SOURCES`` is a hash of all of piper_ray's Python files. Empty: it cannot be imported."""

SOURCES = "sources"
_NAMES = ("piper_ray", "numpy", "numba", "pyarrow", "ray")


def question() -> Callable[[], dict[str, str]]:
    """Tells the software of the process that calls it. A local function, which Ray sends by value."""
    names, sources = _NAMES, SOURCES

    def software() -> dict[str, str]:
        import hashlib
        import importlib
        import pathlib
        import platform

        found = {"Python": platform.python_version()}
        for name in names:
            try:
                module = importlib.import_module(name)
            except Exception:  # noqa: BLE001 - a broken one may raise whatever it likes
                found[name] = ""
                continue
            # A folder of that name, which is no package, can be imported too.
            found[name] = str(getattr(module, "__version__", "")) if module.__file__ else ""
            if name == "piper_ray" and module.__file__:
                digest = hashlib.sha256()
                folder = pathlib.Path(module.__file__).parent
                for path in sorted(folder.rglob("*.py")):
                    digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
                found[sources] = digest.hexdigest()[:16]
        return found

    return software


@cache
def software() -> Software:
    """Of this process."""
    return question()()


def difference(theirs: Software) -> str | None:
    """In which way another process does not run what this one does, in words; None if it does."""
    ours = software()
    missing = [name for name in ours if name != SOURCES and not theirs.get(name)]
    if missing:
        return f"{_listed(missing)} cannot be imported there"
    other = [name for name in ours if name != SOURCES and theirs[name] != ours[name]]
    if other:
        return f"it has {_listed([f'{name} {theirs[name]} ({ours[name]} here)' for name in other])}"
    if theirs.get(SOURCES) != ours[SOURCES]:
        return "its piper_ray has other sources than the one here, which has its version too"
    return None


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
