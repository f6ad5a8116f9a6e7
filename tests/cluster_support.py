"""The cluster files as data: their documents, and the commands that they give to a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "cluster"
RAY_UP = sorted((CLUSTER / "ray-up").glob("*.yaml"))
SBATCH = CLUSTER / "slurm" / "solve.sbatch"
RAYJOB = CLUSTER / "kuberay" / "rayjob.yaml"
RAYJOB_SWEEP = CLUSTER / "kuberay" / "sweep.yaml"


def document(path: Path) -> Any:
    """The one YAML document of a file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def pins(path: Path) -> dict[str, str]:
    """Package to version in a lock, as Python 3.12 on Linux reads it. Every pin must have hashes."""
    found: dict[str, str] = {}
    for requirement in _joined(path.read_text(encoding="utf-8")).splitlines():
        match = re.match(r"([\w.-]+)==(\S+)\s*(?:;\s*(.*?))?\s*--hash=sha256:[0-9a-f]{64}", requirement)
        if requirement[:1].isalnum():
            assert match, f"{path.name}: no pin with hashes: {requirement[:80]}"
            name, version, marker = match.groups()
            if marker in (None, "python_full_version >= '3.11'", "python_full_version >= '3.12'"):
                found[name] = version
    return found


def shell_texts() -> dict[Path, list[str]]:
    """What each cluster file has a shell run."""
    texts = {path: list(_strings(document(path))) for path in [*RAY_UP, RAYJOB, RAYJOB_SWEEP]}
    texts[SBATCH] = [SBATCH.read_text(encoding="utf-8")]
    texts[CLUSTER / "Dockerfile"] = [text for name, text in docker_instructions() if name == "RUN"]
    readme = (CLUSTER / "README.md").read_text(encoding="utf-8")
    texts[CLUSTER / "README.md"] = re.findall(r"```sh\n(.*?)```", readme, flags=re.DOTALL)
    return texts


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Every command line of ``program`` in the cluster files: file name and arguments, "4" for a variable."""
    return [
        (path.name, arguments)
        for path, texts in shell_texts().items()
        for text in texts
        for arguments in _commands_of(program, text)
    ]


def docker_instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: name and the rest."""
    text = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
    lines = _joined(re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def _commands_of(program: str, text: str) -> Iterator[list[str]]:
    for line in _joined(text).splitlines():
        if program not in line or line.lstrip().startswith("#"):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for position, word in enumerate(words):
            rest = words[position + 1 :]
            if word.rpartition("/")[2] == program and rest and re.fullmatch(r"[a-z][a-z-]*|--version", rest[0]):
                end = next((i for i, other in enumerate(rest) if set(other) <= set("();<>|&")), len(rest))
                yield [re.sub(r"\$\{?\w+\}?", "4", one) for one in rest[:end] if one != "$@"]
                break
            if f"{program} " in word:  # a command within quotes
                yield from _commands_of(program, word)


def _joined(text: str) -> str:
    return re.sub(r"\\\n\s*", "", text)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
