"""What callers give: a wrong type or value is a UsageError that says what to pass; texts and paths are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piper_ray
from piper_ray import ChoiceTooHard, LimitError, Recompute, Restrictions, SolveOptions, UsageError, baselines
from piper_ray.engine.preparation import prepare
from piper_ray.engine.preview import forecast_solve
from piper_ray.model import arguments
from piper_ray.model.events import Note
from piper_ray.model.options import Contract
from piper_ray.planners.published.paper_table import TmpcChoice, paper_table
from piper_ray.workloads.formats.load import load
from tests.cli_cases import write_small
from tests.report_cases import small_instance, small_plan
from tests.solver_support import ONE_THREAD

# As callers without a type checker see them.
solve: Any = piper_ray.solve
frontier: Any = piper_ray.frontier
evaluate: Any = piper_ray.evaluate
any_load: Any = piper_ray.load
dump: Any = piper_ray.dump
load_plan: Any = piper_ray.load_plan
run_sweep: Any = piper_ray.run_sweep
read_dataset: Any = piper_ray.read_dataset
plan: Any = baselines.plan
table: Any = paper_table
Options: Any = SolveOptions
Forbidden: Any = Restrictions
PipeDream: Any = baselines.PipeDream

INSTANCE = small_instance()

WRONG: list[tuple[Callable[[], object], str]] = [
    (
        lambda: Forbidden(recompute="sometimes"),
        "recompute 'sometimes' is unknown; expected one of auto, always, never, ",
    ),
    (lambda: Forbidden(recompute=None), "recompute None is unknown"),
    (lambda: Forbidden(recompute=["never"]), "recompute .* is unknown"),
    (lambda: Forbidden(tensor_parallelism="no"), "tensor_parallelism must be True or False, not 'no'"),
    (lambda: Forbidden(data_parallelism=0), "data_parallelism must be True or False, not 0"),
    (lambda: Options(gap="1%"), r"gap must be at least 0 and below 1 \(0.01 is 1 %\), not '1%'"),
    (lambda: Options(gap=None), "gap must be at least 0"),
    (lambda: Options(gap=10**400), "gap must be at least 0"),
    (lambda: Options(time_limit_s="60"), "the time limit must be a positive number of seconds, not '60'"),
    (lambda: Options(time_limit_s=True), "the time limit must be a positive number of seconds, not True"),
    (lambda: Options(threads=1.5), "threads must be a whole number of at least 1, not 1.5"),
    (lambda: Options(threads="2"), "threads must be a whole number of at least 1, not '2'"),
    (lambda: Options(memory_limit_bytes="8"), "the memory limit must be a positive number of bytes, or a text"),
    (lambda: Options(resume=5), "resume must be a path, not 5"),
    (lambda: Options(contract="blocks"), "contract 'blocks' is unknown; expected one of safe, operators"),
    (lambda: solve(INSTANCE, restrictions="never"), "restrictions must be Restrictions, not 'never'"),
    (lambda: solve(INSTANCE, options={"gap": 0.1}), "options must be SolveOptions, not {'gap': 0.1}"),
    (lambda: solve(INSTANCE, options=None), "options must be SolveOptions, not None"),
    (lambda: solve(INSTANCE, backend="auto"), r"backend must be a backend, such as RayBackend\('auto'\), not 'auto'"),
    (lambda: solve(INSTANCE, listener=5), "listener must be a function, not 5"),
    (lambda: solve(INSTANCE, prepared=INSTANCE), "prepared must be a Preparation"),
    (
        lambda: solve(
            INSTANCE, prepared=prepare(INSTANCE, Restrictions()), options=SolveOptions(contract=Contract.OPERATORS)
        ),
        "prepared is for single layers; leave it out, or contract=OPERATORS",
    ),
    (
        lambda: frontier(INSTANCE, options=SolveOptions(contract=Contract.OPERATORS)),
        "leave out contract='operators', or",
    ),
    (lambda: frontier(INSTANCE, options=SolveOptions(resume="there")), "leave out options.resume"),
    (
        lambda: frontier(INSTANCE, devices="few"),
        "devices 'few': 'few' is not a number or a range; expected 8,16,32 or ",
    ),
    (lambda: frontier(INSTANCE, devices=8), "devices must be whole numbers, such as"),
    (lambda: frontier(INSTANCE, devices=[1.5, 2]), r"devices must be whole numbers, .* not \[1.5, 2\]"),
    (lambda: frontier(INSTANCE, devices=["1", "2"]), "devices must be whole numbers"),
    (lambda: frontier(INSTANCE, devices=[True]), "devices must be whole numbers"),
    (lambda: frontier(INSTANCE, devices=[]), "expected a number of devices at least"),
    (lambda: frontier(INSTANCE, devices=[4, 2]), "above the one before it"),
    (lambda: frontier(INSTANCE, devices=[10**6]), "devices 1000000 is out of range; expected a whole number from 1 to"),
    (lambda: frontier(INSTANCE, restrictions=True), "restrictions must be Restrictions, not True"),
    (lambda: frontier(INSTANCE, options=5), "options must be SolveOptions, not 5"),
    (lambda: frontier(INSTANCE, listener="log"), "listener must be a function, not 'log'"),
    (lambda: frontier(INSTANCE, options=ONE_THREAD).plan("2"), "devices must be a whole number, not '2'"),
    (lambda: frontier(INSTANCE, options=ONE_THREAD).solution(2.5), "devices must be a whole number, not 2.5"),
    (lambda: frontier(INSTANCE, options=ONE_THREAD).by_budget(3), "budgets must be whole numbers"),
    (lambda: evaluate(INSTANCE, "plan.json"), r"plan must be a Plan \(load_plan reads one\), not 'plan.json'"),
    (lambda: evaluate(INSTANCE, small_plan().to_dict()), "plan must be a Plan"),
    (lambda: any_load(None), "NoneType is no input; expected a path or a dict"),
    (lambda: any_load("in.toml", devices="8"), "devices must be a whole number from 1 to"),
    (
        lambda: any_load("in.toml", memory_bytes=True),
        "memory_bytes must be a finite number > 0, or a text as 8GiB, not True",
    ),
    (lambda: any_load("in.toml", bandwidth_bytes_per_s="25 parsecs"), "bandwidth_bytes_per_s: '25 parsecs'"),
    (
        lambda: any_load("in.toml", in_flight="some"),
        "in_flight 'some' is unknown; expected one of two-versions, stashing",
    ),
    (lambda: dump(INSTANCE, 5), "path must be a path, not 5"),
    (lambda: dump(INSTANCE, "out.json", "xml"), "form 'xml' is unknown; expected one of piper, toml, pipedream, dnn"),
    (lambda: dump(INSTANCE, "out.json", 5), "form 5 is unknown"),
    (lambda: load_plan(5, INSTANCE), "int is no input; expected a path or a dict"),
    (lambda: run_sweep(5, "there"), "source must be a path, not 5"),
    (lambda: run_sweep("sweep.toml", None), "storage must be a path, not None"),
    (lambda: run_sweep("sweep.toml", "there", resume="yes"), "resume must be True or False, not 'yes'"),
    (lambda: run_sweep("sweep.toml", "there", address=5), "address must be a text: host:port, auto or local, not 5"),
    (lambda: run_sweep("sweep.toml", "there", listener=5), "listener must be a function, not 5"),
    (lambda: run_sweep("sweep.toml", "there", on_warning=5), "on_warning must be a function, not 5"),
    (lambda: read_dataset(5), "location must be a path, not 5"),
    (lambda: read_dataset("there", 5), "columns must be a list of names, not 5"),
    (lambda: read_dataset("there", "gap"), "columns must be a list of names, not 'gap'"),
    (lambda: read_dataset("there", ["gap", "speed"]), "columns: there is no 'speed'; expected some of input_hash, "),
    (lambda: plan(INSTANCE, 5), r"planner must be a planner such as Megatron\(\), or one of pipedream-2bw, .*; not 5"),
    (lambda: plan(INSTANCE, baselines.GPipe), "planner must be a planner such as"),
    (lambda: plan(INSTANCE, "alpa"), "planner 'alpa' is unknown"),
    (lambda: plan(INSTANCE, "gpipe", restrictions=None), "restrictions must be Restrictions, not None"),
    (lambda: plan(INSTANCE, "pipedream:levels=2x100+2x10GB/s"), "100 has no unit; did you mean 100GB/s?"),
    (lambda: PipeDream().partition(INSTANCE, "never"), "restrictions must be Restrictions, not 'never'"),
    (lambda: PipeDream(states="all"), "states 'all' is unknown; expected one of downsets, single-source, order"),
    (lambda: PipeDream(levels=[4]), r"levels must be Level objects, lowest first, not \[4\]"),
    (lambda: PipeDream(levels=4), "levels must be Level objects, lowest first, not 4"),
    (lambda: PipeDream(activation_compression_ratio="half"), "ratio must be above 0, not 'half'"),
    (lambda: baselines.Level("4", 1e9), "a level needs at least 1 machine and a bandwidth above 0"),  # type: ignore[arg-type]
    (lambda: baselines.Level(4, "1GB/s"), "a level needs at least 1 machine and a bandwidth above 0"),  # type: ignore[arg-type]
    (lambda: baselines.Megatron("8"), "devices_per_node must be a whole number of at least 1, not '8'"),  # type: ignore[arg-type]
    (lambda: baselines.PipeDream2BW("yes"), "separate must be True or False, not 'yes'"),  # type: ignore[arg-type]
    (lambda: baselines.EqualRuns(runs=4), "runs must be whole numbers"),  # type: ignore[arg-type]
    (lambda: baselines.PiperPublished(0), "table_limit_bytes must be a number of bytes of at least 1, not 0"),
    (lambda: baselines.PiperPublished("4GB"), "table_limit_bytes must be a number of bytes"),  # type: ignore[arg-type]
    (lambda: table(INSTANCE, choice="best"), "choice 'best' is unknown; expected one of greedy, exact"),
    (lambda: table(INSTANCE, restrictions="never"), "restrictions must be Restrictions, not 'never'"),
    (lambda: table(INSTANCE, table_limit_bytes=math.inf), "table_limit_bytes must be a number of bytes"),
    (lambda: forecast_solve(INSTANCE, "never"), "restrictions must be Restrictions, not 'never'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words[:50] for _, words in WRONG])
def test_what_makes_no_sense(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"address": 5}, "address must be a text: host:port, auto or local, not 5"),
        ({"workers": "2"}, "workers must be a whole number of at least 1, not '2'"),
        ({"workers": 1.5}, "workers must be a whole number of at least 1, not 1.5"),
        ({"cpus_per_worker": "all"}, "cpus_per_worker must be a whole number of at least 1, not 'all'"),
        ({"without_workers": "stop"}, "without_workers 'stop' is unknown; expected one of continue, wait"),
    ],
)
def test_a_backend_looks_at_its_arguments_before_it_connects(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        piper_ray.RayBackend(**{"address": "127.0.0.1:1", **arguments})


def test_texts_stand_for_choices() -> None:
    assert Forbidden(recompute="never") == Restrictions(recompute=Recompute.NEVER)
    assert Forbidden(recompute="never").recompute is Recompute.NEVER
    assert Options(contract="operators").contract is Contract.OPERATORS
    assert Options(resume=Path("there")).resume == "there"
    assert PipeDream(states="order") == baselines.PipeDream(states=baselines.States.ORDER)
    assert table(INSTANCE, choice="greedy").plan == paper_table(INSTANCE, choice=TmpcChoice.GREEDY).plan


def test_numbers_may_be_of_numpy() -> None:
    options = Options(
        gap=np.float32(0.5), threads=np.int64(2), time_limit_s=np.float64(3), memory_limit_bytes=np.int64(8)
    )
    assert options == SolveOptions(gap=0.5, threads=2, time_limit_s=3.0, memory_limit_bytes=8.0)
    assert SolveOptions(memory_limit_bytes="16GiB").memory_limit_bytes == 16 * 2.0**30  # type: ignore[arg-type]
    assert [type(value) for value in (options.gap, options.threads)] == [float, int]
    assert Forbidden(tensor_parallelism=np.bool_(False)).tensor_parallelism is False


@pytest.mark.parametrize("devices", ["2..4", "2,3,4", (2, 3, 4), np.arange(2, 5), iter([2, 3, 4])])
def test_a_frontier_takes_numbers_as_the_command_line_does(devices: object) -> None:
    found = frontier(INSTANCE, devices=devices, options=ONE_THREAD)
    assert found.by_devices() == frontier(INSTANCE, devices=range(2, 5), options=ONE_THREAD).by_devices()
    assert found.by_budget("1..2") == found.by_budget([1, 2])
    assert found.plan(np.int64(3)) == found.plan(3)


def test_a_path_stands_for_the_instance_in_it(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    solution = solve(path, options=ONE_THREAD)
    assert solution.plan == solve(INSTANCE, options=ONE_THREAD).plan
    assert evaluate(str(path), solution.plan) == evaluate(INSTANCE, solution.plan)
    assert frontier(path, options=ONE_THREAD).by_devices() == frontier(INSTANCE, options=ONE_THREAD).by_devices()
    assert plan(path, "gpipe") == plan(INSTANCE, "gpipe")
    assert load_plan(solution.plan.to_dict(), path) == solution.plan
    dump(path, tmp_path / "again.toml")
    assert load(tmp_path / "again.toml") == INSTANCE


def test_a_solve_from_a_path_hears_its_notes(tmp_path: Path) -> None:
    path = tmp_path / "bytes.json"
    dump(INSTANCE.replace(memory_bytes=8.0), path)
    events: list[object] = []
    solve(path, options=ONE_THREAD, listener=events.append)
    assert events[0] == Note("maxMemoryPerDevice: 8 bytes, less than 1 MB; was 8000000000, 8GB, meant?")
    events.clear()
    frontier(path, options=ONE_THREAD, listener=events.append)
    assert isinstance(events[0], Note)
    events.clear()
    solve(load(path), options=ONE_THREAD, listener=events.append)  # whoever loaded it has its notes
    assert not any(isinstance(event, Note) for event in events)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: piper_ray.estimate("llama3-8b", "H100-SXM", global_batch=7, microbatch_size=2),
            "global_batch 7 is no multiple",
        ),
        (lambda: piper_ray.estimate("llama3-8b", "H100-SXM", reserve_bytes=9e10), "reserve_bytes 83.82 GiB"),
        (lambda: piper_ray.estimate("llama3-8b", "h10"), "gpu h10: unknown"),
        (lambda: piper_ray.plan("llama3-8b", "H100-SXM", context_parallel=(3,)), "context_parallel 3: "),
        (lambda: piper_ray.plan("llama3-8b", "H100-SXM", expert_parallel=(3,)), "expert_parallel: llama3-8b has no"),
    ],
)
def test_functions_name_parameters_where_commands_name_options(call: Callable[[], object], told: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert str(error.value).startswith(told)
    assert "--" not in str(error.value)


@pytest.mark.parametrize("kind", [UsageError, LimitError])
def test_options_of_a_command_are_told_as_parameters_and_those_of_others_stay(kind: type[Exception]) -> None:
    others = "(solve --no-tensor-parallel, estimate --zero all)"
    with pytest.raises(kind) as told, arguments.named_as_parameters({}):
        raise kind(f"--global-batch 7: leave out --time-limit {others}")
    assert str(told.value) == f"global_batch 7: leave out time_limit {others}"


@pytest.mark.parametrize(("former", "name"), [("batch", "global_batch"), ("microbatch", "microbatch_size")])
def test_a_former_name_of_a_parameter_is_told_with_the_one_of_today(former: str, name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{former}'; did you mean '{name}'"):
        piper_ray.estimate("llama3-8b", "H100-SXM", **{former: 8})  # type: ignore[arg-type]


def test_errors_of_another_making_pass_as_they_are() -> None:
    with pytest.raises(ChoiceTooHard, match="--recompute all-or-none"), arguments.named_as_parameters({}):
        raise ChoiceTooHard
