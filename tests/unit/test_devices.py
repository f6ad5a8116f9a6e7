"""What a GPU does otherwise than a CPU, by stand-ins for it: clocks by events, memory, faults that are told late."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from piper_ray import UsageError  # noqa: E402
from piper_ray.run import rank as ranks  # noqa: E402
from piper_ray.run.pipeline import PassFailed, _own_layers  # noqa: E402
from piper_ray.run.rank import peak_memory, told, work  # noqa: E402
from piper_ray.simulate.actions import ActionKind  # noqa: E402
from piper_ray.workloads.estimate.runtimes import DEFAULT  # noqa: E402
from piper_ray.workloads.measure.passes import EventClock  # noqa: E402
from piper_ray.workloads.measure.session import _memory_bytes  # noqa: E402


class Event:
    """An event of a device that counts float32 milliseconds, as CUDA's do. waited: those that were waited for."""

    now_s = 0.0
    waited = 0

    def __init__(self) -> None:
        self.at_s = Event.now_s

    def synchronize(self) -> None:
        Event.waited += 1

    def elapsed_time(self, other: Event) -> float:
        return float(np.float32((other.at_s - self.at_s) * 1e3))


def test_short_passes_are_timed_as_finely_after_hours() -> None:
    Event.now_s, Event.waited = 0.0, 0
    clock = EventClock(Event)
    for hours in range(3):
        Event.now_s = hours * 3600.0 + 1.0
        start = clock()
        Event.now_s += 40e-6
        between = clock()
        Event.now_s += 25e-6
        end = clock()
        assert end() - between() == pytest.approx(25e-6, rel=1e-5)  # out of order, as stretches are read
        assert between() - start() == pytest.approx(40e-6, rel=1e-5)
    first = Event()
    Event.now_s += 7200.0
    whole, far = first.elapsed_time(Event()), Event.now_s
    Event.now_s = far + 40e-6
    assert first.elapsed_time(Event()) - whole == 0.0  # what one first event for all would tell
    assert Event.waited <= 9


def test_a_gpus_memory_is_what_context_communicators_and_fragments_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = 80.0 * 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=whole))
    assert _memory_bytes(torch.device("cuda", 0)) == whole - DEFAULT.reserve_bytes(whole) < 0.97 * whole


def test_a_rank_takes_the_gpu_of_its_number_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIPER_RAY_RENDEZVOUS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30 if device.index == 1 else 0)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *backend, **how: done.append((backend, how)))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: done.append("met"))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: done.append("ended"))
    monkeypatch.setattr(ranks, "train", lambda _job, device, _progress: peak_memory(device).peak_bytes)
    job = SimpleNamespace(ranks=8, device="cuda")
    gpu = torch.device("cuda", 1)
    peak: object = work(job, print)  # type: ignore[arg-type]
    assert peak == 3 * 2**30
    how = {"init_method": "env://", "rank": 5, "world_size": 8, "device_id": gpu}
    assert done == [gpu, (("cpu:gloo,cuda:nccl",), how), "met", "ended"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="2 GPUs are here, and a rank needs one of its own"):
        work(job, print)  # type: ignore[arg-type]


def test_a_fault_that_a_device_tells_late_is_not_laid_on_the_pass_that_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    job = SimpleNamespace(ranks=2, model="models.py:m", name_of=lambda rank: f"rank {rank} (stages 1, 3)")
    failed = PassFailed(ActionKind.F, 2)
    failed.__cause__ = RuntimeError("CUDA error: device-side assert triggered")
    words = str(told(job, 0, failed).error)  # type: ignore[arg-type]
    assert "found in the forward pass of stage 3, made there or in an earlier pass of this rank" in words
    assert "CUDA_LAUNCH_BLOCKING=1 shows where" in words
    later = told(job, 1, RuntimeError("CUDA error: an illegal memory access was encountered"))  # type: ignore[arg-type]
    assert "rank 1 (stages 1, 3): found in what comes after the passes, made there or in" in str(later.error)
    assert later.own, "it has not just lost the others"
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "rank 0 (stages 1, 3): the forward pass of stage 3" in str(told(job, 0, failed).error)  # type: ignore[arg-type]


def test_layers_are_sharded_one_by_one_unless_they_share_a_weight_or_write_into_what_they_are_given() -> None:
    first, second, third, fourth = (torch.nn.Linear(2, 2) for _ in range(4))
    third.weight = second.weight
    layers = {3: first, 4: torch.nn.ReLU(), 5: second, 6: third, 7: fourth}
    assert _own_layers(layers, {4}) == [first, fourth]
    assert _own_layers(layers, {3}) == [fourth]
