"""The most memory that tensors take at once: told by the allocator of a GPU, and counted on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory:
    """A context in which the peak is followed. Tensors that are there before count on a CPU if they are ``held``.

    Counted are the storages of what operations give, from then until nobody has them any more: not what an operation
    needs inside. Operations take longer meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live = None if device.type == "cuda" else _LiveBytes()

    def __enter__(self) -> None:
        if self._live is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._live.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def held(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are there."""
        if self._live is not None:
            for tensor in tensors:
                self._live.count(tensor)

    def forget_peak(self) -> None:
        """The peak counts from here; what is there stays counted."""
        if self._live is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._live.forget_peak()

    @property
    def peak_bytes(self) -> float:
        """So far."""
        return float(torch.cuda.max_memory_allocated(self._device) if self._live is None else self._live.peak_bytes)


class _LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages and self._storages[key][0]() is not None:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda gone: self._gone(key, gone)), size
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def forget_peak(self) -> None:
        self.peak_bytes = self._live_bytes

    def _gone(self, key: int, gone: weakref.ref[Any]) -> None:
        held, size = self._storages[key]
        self._live_bytes -= size
        if held is gone:
            del self._storages[key]
