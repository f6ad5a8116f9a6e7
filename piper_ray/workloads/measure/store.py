"""Keeps the figures measured so far in a file next to the output, from which a stopped profile continues."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from piper_ray.model.errors import UsageError
from piper_ray.workloads.measure.passes import Kept, MeasuredPasses, Resident

_VERSION = 1


@dataclass(frozen=True)
class LayerFigures:
    """All measured figures of one layer.

    recomputed: None if recomputation saves nothing or the layer overwrites its inputs. output_gradients: whether each
    of its outputs has a gradient. output_bytes: of each output. input_gradient_bytes: of all inputs with gradients
    together.
    """

    plain: MeasuredPasses
    recomputed: MeasuredPasses | None
    kept: Kept
    parameters: tuple[Resident, ...]
    output_gradients: tuple[bool, ...]
    output_bytes: tuple[int, ...]
    input_gradient_bytes: int


class Store:
    """Figures by signature, one line of JSON each, below a line that names the model and the machine."""

    def __init__(self, path: Path, setting: Mapping[str, object]) -> None:
        self.path = path
        head = {"schema": "piper-ray/partial-profile", "version": _VERSION, **setting}
        self._head: dict[str, object] = json.loads(json.dumps(head))
        self._figures: dict[str, LayerFigures] = {}

    def __len__(self) -> int:
        return len(self._figures)

    def get(self, signature: str) -> LayerFigures | None:
        return self._figures.get(signature)

    def start(self) -> None:
        """Writes an empty file. Raises UsageError if it cannot be written."""
        try:
            self.path.write_text(json.dumps(self._head) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def resume(self) -> None:
        """Reads the file, except an incomplete last line. Raises UsageError if it belongs to another profile."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
            head = json.loads(lines[0])
        except FileNotFoundError:
            self.start()
            return
        except (OSError, ValueError, IndexError) as error:
            raise UsageError(f"--resume: {self.path} cannot be read: {error}; remove it to start anew") from error
        if head != self._head:
            known = head if isinstance(head, dict) else {}
            other = ", ".join(key for key, value in self._head.items() if known.get(key) != value) or "keys"
            raise UsageError(
                f"--resume: {self.path} is of another profile: other {other}; without --resume one starts anew"
            )
        read = map(_read, lines[1:])
        self._figures.update(entry for entry in read if entry is not None)
        self._rewrite()

    def add(self, signature: str, figures: LayerFigures) -> None:
        self._figures[signature] = figures
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(signature, figures))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _rewrite(self) -> None:
        """Writes the file again, so that nothing is appended to an incomplete line."""
        self.start()
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(_line(signature, figures) for signature, figures in self._figures.items())


def _line(signature: str, figures: LayerFigures) -> str:
    return json.dumps({"signature": signature, "figures": dataclasses.asdict(figures)}) + "\n"


def _read(line: str) -> tuple[str, LayerFigures] | None:
    """The entry of a line; None for an incomplete line."""
    from pydantic import TypeAdapter

    try:
        document = json.loads(line)
        return document["signature"], TypeAdapter(LayerFigures).validate_python(document["figures"])
    except (ValueError, KeyError, TypeError):
        return None
