"""``piper_ray.profile``: the command ``piper-ray profile`` as a function."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError, require
from piper_ray.model.instance import Instance
from piper_ray.workloads.measure.arguments import PARAMETERS


@arguments.named_as_parameters(PARAMETERS)
def profile(
    model: str,
    *,
    microbatch_size: int,
    device: str = "cpu",
    arguments_of_model: Mapping[str, object] | None = None,
    layers: Iterable[str] = (),
    inputs: Iterable[str] = (),
    tensor_parallel: Iterable[int] = (),
    gpu: str | None = None,
    hardware: str | os.PathLike[str] | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    memory_bytes: float | str | None = None,
    bandwidth_bytes_per_s: float | str | None = None,
    repeats: int = 20,
    warm_up: int = 5,
) -> Instance:
    """The workload of a PyTorch model, measured on this machine.

    model: its factory, as "file.py:function" or "package.module:function"; arguments_of_model: the factory's arguments.
    microbatch_size, global_batch: in samples. device: "cpu" or "cuda". layers: patterns of module paths; inputs: texts
    such as "3x224x224" or "1024:int64:50257"; tensor_parallel: further degrees, for which ``gpu`` names an entry of the
    table of hardware. devices, memory_bytes, bandwidth_bytes_per_s: K, M and B; None: this machine's.

    Raises UsageError for arguments that make no sense, InputError for a model that cannot be followed, and LimitError
    if the device's memory is too small.

    >>> import piper_ray
    >>> piper_ray.profile("models.py:small_gpt", microbatch_size=4)  # doctest: +SKIP
    Instance('small_gpt': layers 14; edges 13; tensor-parallel degrees 1; devices 8 of 32 GiB; microbatches 256)
    """
    require("torch", "profile")
    from piper_ray.workloads.estimate.hardware import load_hardware
    from piper_ray.workloads.measure import session
    from piper_ray.workloads.measure.factory import find_factory, parse_input
    from piper_ray.workloads.measure.passes import Repeats

    arguments.of_kind("model", model, str, "a factory, such as 'model.py:build'")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device must be 'cpu' or 'cuda', not {arguments.shown(device)}")
    repeats, warm_up = arguments.positive("repeats", repeats), arguments.whole_numbers("warm_up", [warm_up])[0]
    if repeats < 2 or warm_up < 0:
        raise UsageError(f"repeats must be at least 2 and warm_up at least 0, not {repeats} and {warm_up}")
    degrees = arguments.whole_numbers("tensor_parallel", tensor_parallel)
    for degree in degrees:
        arguments.positive("tensor_parallel", degree)
    figures = arguments.cluster_figures(devices, None, memory_bytes, bandwidth_bytes_per_s)
    request = session.ProfileRequest(
        microbatch=arguments.positive("microbatch_size", microbatch_size),
        device=device,
        layers=tuple(layers),
        inputs=[parse_input(text) for text in inputs],
        degrees=sorted(set(degrees) - {1}),
        repeats=Repeats(count=repeats, warm_up=warm_up),
        batch=None if global_batch is None else arguments.positive("global_batch", global_batch),
        gpu=gpu,
        devices=figures.get("devices"),
        memory_bytes=figures.get("memory_bytes"),
        bandwidth_bytes_per_s=figures.get("bandwidth_bytes_per_s"),
    )
    notes: list[str] = []
    table = load_hardware(None if hardware is None else arguments.location("hardware", hardware), notes.append)
    with session.as_a_rank(request), tempfile.TemporaryDirectory() as folder:
        factory = find_factory(model, dict(arguments_of_model or {}))
        store = session.store_of(factory, request, Path(folder) / "partial")
        store.start()
        found = session.profile(factory, request, table, store, lambda _done, _total, _layer: None)
    return replace(found.instance, notes=tuple(notes))
