"""What this machine does between passes: sums of gradients and optimizer steps, two processes at a time.

python -m scripts.run_correlation.machine FOLDER RANK
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_PROCESSES, _REPEATS = 2, 15
_NUMBERS = 4_000_000


@dataclass(frozen=True)
class Machine:
    """bandwidth_bytes_per_s: at which a ring of two processes sums gradients; optimizer_s_per_byte: AdamW's step for a
    byte of full-precision weights."""

    bandwidth_bytes_per_s: float
    optimizer_s_per_byte: float


def measured(environment: dict[str, str]) -> Machine:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.run_correlation.machine", folder]
        processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(_PROCESSES)]
        if any(process.wait() for process in processes):
            raise SystemExit("the machine could not be measured")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(_PROCESSES)]
    weights_bytes = 4.0 * _NUMBERS
    # A ring of two sends and receives each byte once: 2 (d - 1) / d of w.
    return Machine(
        weights_bytes / max(one["all_reduce_s"] for one in found),
        max(one["optimizer_s"] for one in found) / weights_bytes,
    )


def main(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=_PROCESSES)
    weights = torch.nn.Parameter(torch.zeros(_NUMBERS))
    optimizer = torch.optim.AdamW([weights])
    sums_s, steps_s = [], []
    for _ in range(_REPEATS):
        weights.grad = torch.randn(_NUMBERS)
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(weights.grad)
        sums_s.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        optimizer.step()
        steps_s.append(time.perf_counter() - start_s)
    dist.barrier()
    dist.destroy_process_group()
    found = {"all_reduce_s": median(sums_s), "optimizer_s": median(steps_s)}
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    main(Path(sys.argv[1]), int(sys.argv[2]))
