"""Which modules of a model are layers, and which are followed into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from piper_ray.model.errors import UsageError

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip


@dataclass(frozen=True)
class ModuleChoice:
    """Paths of modules. layers: each call of one starts a layer; leaves: those, and what else is not looked into."""

    layers: frozenset[str]
    leaves: frozenset[str]


def chosen(model: nn.Module, patterns: Sequence[str]) -> ModuleChoice:
    """The modules that ``patterns`` (``blocks.*``) match, or else the model's own submodules: see ``_own_layers``.

    Modules of torch.nn are not looked into, containers apart. Raises UsageError for a pattern that matches no module.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    if patterns:
        layers: set[str] = set()
        for pattern in patterns:
            matched = {path for path in paths if fnmatchcase(path, pattern) and _same_depth(path, pattern)}
            if not matched:
                raise UsageError(f"--layers {pattern}: no such module; {_modules_of(model, paths)}")
            layers |= matched
    else:
        layers = set(_own_layers(model, ""))
    leaves = {path for path, module in model.named_modules(remove_duplicate=False) if path and _of_torch(module)}
    return ModuleChoice(frozenset(layers), frozenset(layers | leaves))


def _modules_of(model: nn.Module, paths: Sequence[str]) -> str:
    name = type(model).__name__
    if not paths:
        return f"{name} has no modules in it; expected a model of several"
    return f"{name} has {', '.join(paths[:20])}" + (" ..." if len(paths) > 20 else "")


def _same_depth(path: str, pattern: str) -> bool:
    return path.count(".") == pattern.count(".")


def _own_layers(module: nn.Module, path: str) -> list[str]:
    """Children that are no containers and hold no stack of blocks, from the top; of torch.nn's, those with parameters.

    So the items of ``ModuleList([Block, ...])`` and of ``Sequential(Block, ...)`` are layers, however they are nested,
    a block's own parts are not, and activations and the like go with the layer before them.
    """
    found: list[str] = []
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if isinstance(child, _CONTAINERS) or (
            _holds_stack(child) and not isinstance(module, (nn.Sequential, nn.ModuleList))
        ):
            found += _own_layers(child, below)
        elif not _of_torch(child) or any(True for _ in child.parameters()):
            found.append(below)
    return found


def _holds_stack(module: nn.Module) -> bool:
    """Whether a container of composite modules is somewhere in it."""
    return not _of_torch(module) and any(
        isinstance(part, (nn.Sequential, nn.ModuleList)) and any(_is_composite(item) for item in part.children())
        for part in module.modules()
    )


def _is_composite(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and not _of_torch(module) and any(True for _ in module.children())


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS)
