"""A simulation in words, as a table and as a document."""

from __future__ import annotations

import json

import pytest

from piper_ray.model.instance import Instance
from piper_ray.model.schedule import ScheduleName
from piper_ray.report.document import simulation_document, to_text
from piper_ray.report.simulated import findings, print_simulation
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import InFlightRule, SimulationOptions, Transfers, simulate
from tests.report_cases import small_instance, small_plan, string_console
from tests.simulate_support import GIB, chain, cut


def _printed(instance: Instance, simulation: Simulation) -> list[str]:
    console, output = string_console(120)
    print_simulation(console, instance, simulation)
    return output.getvalue().splitlines()


def test_what_bounds_is_said_first() -> None:
    instance = chain([1.0, 1.0, 2.0, 1.0], microbatches=32, memory_bytes=4 * GIB)
    assert findings(simulate(instance, cut([1] * 4), "1f1b")) == (
        "stage 3 bounds: busy 96.5 % of the time",
        "ranks are uneven: stage 3 has 1.60 times the average work; move layers off it first",
        "39.7 % bubble",
        "2 GiB unused on ranks 0-1",
        "2.5 GiB unused on ranks 2-3",
    )


def test_a_bubble_of_filling_and_draining() -> None:
    said = findings(simulate(chain([3.0] * 4, microbatches=4), cut([1] * 4), "gpipe"))
    assert said[1] == (
        "42.9 % bubble, most of it as the pipeline fills and drains (4 ranks, 4 microbatches): more microbatches or "
        "fewer stages shrink it"
    )


def test_communication_is_told_where_it_counts() -> None:
    instance = chain([3.0, 3.0], microbatches=8, weights_bytes=GIB, edge_bytes=GIB / 4)
    said = findings(simulate(instance, cut([1, 1], 2), "1f1b"))
    assert "transfers take 10.3 % of the ranks' time" in said
    assert "the all-reduce of stage 1 takes 2.00 s after its last backward pass, 10.3 % of the step" in said


def test_missing_memory_is_told_by_rank() -> None:
    said = findings(simulate(chain([3.0] * 4, memory_bytes=1.6 * GIB), cut([1] * 4), "1f1b"))
    assert "410 MiB too little memory on ranks 0-1" in said


def test_a_promise_that_is_not_kept_and_what_would_keep_it() -> None:
    instance = chain([3.0, 6.0, 3.0], microbatches=8)
    said = findings(simulate(instance, cut([1] * 3, [1, 2, 1]), "2bw"))
    assert said[0] == (
        "50.0 % slower than the promised 24.0 s a batch: with round-robin replicas 4, 2, 1 microbatches in flight do"
        " not keep the slowest stage busy"
    )
    assert said[1] == "5, 2, 1 in flight would keep the promise, for up to 256 MiB more on a device"
    options = SimulationOptions(in_flight=InFlightRule.SUSTAINING)
    kept = simulate(instance, cut([1] * 3, [1, 2, 1]), "2bw", options=options)
    assert findings(kept)[0] == "the promised 24.0 s a batch are kept"


def test_a_promise_that_latency_or_transfers_break() -> None:
    late = simulate(chain([3.0] * 3), cut([1] * 3), "2bw", options=SimulationOptions(latency_s=0.5))
    assert late.sustaining == (5, 3, 1)
    assert ": 3, 2, 1 microbatches in flight do not keep the slowest stage busy" in findings(late)[0]
    instance = chain([3.0] * 3, microbatches=8, edge_bytes=5 * GIB)
    slow = simulate(instance, cut([1] * 3), "2bw", options=SimulationOptions(transfers=Transfers.OVERLAPPED))
    assert slow.sustaining is None
    assert findings(slow)[0].endswith("slower than the promised 24.0 s a batch: transfers take too long to hide")


def test_versions_of_the_weights() -> None:
    options = SimulationOptions(vertical_sync=True)
    instance, plan = chain([3.0] * 4, weights_bytes=GIB), cut([1] * 4)
    assert findings(simulate(instance, plan, "pipedream", options=options))[-1].endswith("those of vertical sync")
    said = findings(simulate(instance, plan, "pipedream"))
    assert said[-1] == (
        "weight stashing keeps 1 to 4 versions of the weights, up to 4 GiB; vertical sync 4, up to 4 GiB; the peaks "
        "have those of stashing"
    )


def test_stages_of_one_rank_are_named_together() -> None:
    said = findings(simulate(chain([3.0] * 4), cut([1] * 4), "interleaved"))
    assert said[0].startswith("stages 1, 3 bound: busy ")
    uneven = findings(simulate(chain([3.0, 1.0, 3.0, 1.0]), cut([1] * 4), "interleaved"))
    assert uneven[1].startswith("ranks are uneven: stages 1, 3 have 1.50 times the average work")


def test_the_table_joins_ranks_that_read_alike() -> None:
    instance = chain([3.0] * 4, degrees=(2,), microbatches=8)
    lines = _printed(instance, simulate(instance, cut([1] * 4, 2, 2), "gpipe"))
    assert lines[0].split() == [
        *[
            "rank",
            "stages",
            "devices",
            "compute",
            "comm.",
            "waiting",
            "bubble",
            "in",
            "flight",
            "peak",
            "memory",
            "unused",
        ]
    ]
    assert lines[1].split() == [
        *["0-3", "1-4", "2", "57.1", "%", "0.0", "%", "0.0", "%", "42.9", "%", "4", "2.00", "GiB", "6", "GiB"]
    ]
    assert lines[2] == ""
    assert lines[3] == "gpipe: all forward passes, all backward passes, then a flush"
    assert lines[4] == "step 21.0 s: 2.62 s/microbatch, 0.381 microbatches/s"
    assert lines[-2].startswith("note: one of 2 equal pipelines is simulated, 8 of 16 devices: each does the same")
    assert lines[-1].startswith("note: a rank stands for the 2 devices that share its layers")


def test_the_table_of_chunks_and_of_too_much() -> None:
    options = SimulationOptions(samples_per_microbatch=2, tokens_per_sample=1000)
    instance = chain([3.0] * 4, microbatches=4, memory_bytes=2 * GIB)
    lines = _printed(instance, simulate(instance, cut([1] * 4), "zb-v", options=options))
    assert lines[1].split()[:3] == ["0", "1,", "4"]
    assert lines[2].split()[:3] == ["1", "2,", "3"]
    assert "over by 1" in lines[1]
    assert "zb-v, 2 chunks a rank: two chunks in a V" in "\n".join(lines)
    assert "tokens/s" in "\n".join(lines)


@pytest.mark.parametrize("name", ScheduleName)
def test_every_schedule_is_described_and_documented(name: ScheduleName) -> None:
    instance = chain([3.0] * 4, microbatches=8, weights_bytes=GIB / 8)
    simulation = simulate(instance, cut([1] * 4), name.value)
    assert any(line.startswith(name.value) for line in _printed(instance, simulation))
    document = json.loads(to_text(simulation_document(instance, simulation)))
    assert document["schema"] == "piper-ray/simulation"
    assert document["schedule"] == name.value
    assert document["step_s"] == simulation.step_s
    assert document["options"]["in_flight"] == "rule"
    assert len(document["ranks"]) == len(simulation.ranks)
    assert document["findings"] == list(findings(simulation))
    assert (document["ranks"][0]["weight_versions"] is not None) == (name is ScheduleName.PIPEDREAM)
    on_path_s = sum(sum(rank["seconds"].values()) for rank in document["critical_path"])
    assert on_path_s == pytest.approx(0.0 if simulation.promised_s is not None else simulation.step_s)


def test_a_document_of_given_numbers_in_flight() -> None:
    simulation = simulate(small_instance(), small_plan(), options=SimulationOptions(in_flight=(3, 1)))
    document = simulation_document(small_instance(), simulation)
    assert document["in_flight"] == [3, 1]
    assert document["options"]["in_flight"] == [3, 1]  # type: ignore[index]


def test_steps_of_no_time_read_well() -> None:
    instance = chain([0.0, 0.0])
    for name in ("1f1b", "2bw"):
        simulation = simulate(instance, cut([1, 1]), name)
        assert "step 0 s: 0 s/microbatch, no time at all" in _printed(instance, simulation)
        assert json.loads(to_text(simulation_document(instance, simulation)))["samples_per_s"] is None
