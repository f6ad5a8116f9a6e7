"""Versions of the project to measure: this working tree, and other revisions in worktrees of their own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from piper_ray.model.errors import UsageError
from scripts.benchmarks.cases import ROOT


@dataclass(frozen=True)
class Tree:
    """name: what tables call it. commit: abbreviated, with a + where files differ from it."""

    name: str
    root: Path
    commit: str

    @property
    def environment(self) -> Mapping[str, str]:
        """Of a process that runs this version, and keeps its compiled kernels next to its sources."""
        kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
        return {**kept, "PYTHONPATH": str(self.root)}

    def compiled(self) -> frozenset[Path]:
        """Files of compiled kernels."""
        return frozenset((self.root / "piper_ray").rglob("*.nbc"))


def this_tree() -> Tree:
    """The working tree; its commit is "-" where there is no repository."""
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        commit = _git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        commit = "-"
    return Tree("this", ROOT, commit)


@contextmanager
def tree_at(revision: str) -> Iterator[Tree]:
    """A checkout of ``revision``, gone afterwards. Raises UsageError if there is none."""
    try:
        commit = _git("rev-parse", "--verify", "--quiet", "--short", f"{revision}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        raise UsageError(f"--against: there is no revision {revision} in this repository") from None
    with tempfile.TemporaryDirectory(prefix="piper-ray-bench-") as folder:
        root = Path(folder).resolve() / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(root), commit)
        try:
            yield Tree(revision, root, commit)
        finally:
            with suppress(subprocess.CalledProcessError):  # somebody cleared the folder: git forgets it in time
                _git("worktree", "remove", "--force", str(root))


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return run.stdout.strip()
