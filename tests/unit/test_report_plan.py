"""The plan's tables and the lines around them, to the letter."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from piper_ray.evaluate import evaluate
from piper_ray.model.instance import Instance, Layer
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.solution import Infeasibility, Solution, Status
from piper_ray.model.stop import StoppedBy
from piper_ray.report.summary import instance_lines, layers_text, print_outcome, print_plan
from piper_ray.report.terminal import SCREEN_LINES, Column, print_within, table_lines
from tests.report_cases import GIB, small_instance, small_plan, solution, string_console

SPEED = "speed: 99.6 microbatches/s, 80.3 ms/step\n"

AT_80_COLUMNS = """\
#  layers                     d  t  devices  TMPCs
1  0 Embedding, 1-3 Block x3  2  1        2  vanilla x2,
                                             activation recomp x2
2  4 Block_3, 5 Head          1  1        1  vanilla x2

#  time ms  compute  comm  grads  mem GiB   acts     %  binds
1    10.04     7.50  0.04   2.50    6.500  2.500  81.2  time   █████████████░░░░
2     5.08     5.00  0.08   0.00    3.000  1.000  37.5         ████████▒
bar: time, █ compute, ▒ communication, ░ gradients; memory limit 8 GiB
grads: summed over replicas; acts: the part of mem for activations in flight
"""

AT_120_COLUMNS = """\
#  layers                     d  t  devices  TMPCs
1  0 Embedding, 1-3 Block x3  2  1        2  vanilla x2, activation recomp x2
2  4 Block_3, 5 Head          1  1        1  vanilla x2

#  time ms  compute  comm  grads  mem GiB   acts     %  binds
1    10.04     7.50  0.04   2.50    6.500  2.500  81.2  time   ████████████████████████████████████░░░░░░░░░░░░
2     5.08     5.00  0.08   0.00    3.000  1.000  37.5         ████████████████████████
bar: time, █ compute, ▒ communication, ░ gradients; memory limit 8 GiB
grads: summed over replicas; acts: the part of mem for activations in flight
"""


def _printed(instance: Instance, plan: Plan, width: int, encoding: str = "utf-8") -> str:
    console, output = string_console(width, encoding=encoding)
    print_plan(console, instance, plan, evaluate(instance, plan))
    return output.getvalue()


@pytest.mark.parametrize(("width", "expected"), [(80, AT_80_COLUMNS), (120, AT_120_COLUMNS)])
def test_the_plan_at_both_usual_widths(width: int, expected: str) -> None:
    printed = _printed(small_instance(), small_plan(), width)
    assert printed == expected
    assert max(cell_len(line) for line in printed.splitlines()) <= width


def test_an_ascii_stream_gets_ascii_bars() -> None:
    printed = _printed(small_instance(), small_plan(), 80, encoding="ascii")
    assert printed.isascii()
    assert "time   #############...." in printed
    assert "# compute, + communication, . gradients" in printed


def test_a_terminal_gets_colours_but_the_same_words() -> None:
    console, output = string_console(80, terminal=True)
    instance, plan = small_instance(), small_plan()
    print_plan(console, instance, plan, evaluate(instance, plan))
    assert "\x1b[" in output.getvalue()


def test_consecutive_layers_of_a_kind_are_one_range() -> None:
    instance = small_instance()
    assert layers_text(instance, (0, 1, 2, 3, 4, 5), 60) == "0 Embedding, 1-4 Block\N{NO-BREAK SPACE}x4, 5 Head"
    assert layers_text(instance, (1, 3, 4), 60) == "1 Block_0, 3-4 Block\N{NO-BREAK SPACE}x2"


def test_a_stage_of_many_kinds_is_summed_up_and_cut_to_two_lines() -> None:
    names = ["Conv2d(3, 64)", "ReLU(inplace)"] * 20 + [f"odd{chr(97 + n)}" for n in range(20)]
    instance = dataclasses.replace(
        small_instance(), layers=tuple(Layer(index, name, {}) for index, name in enumerate(names)), edges=()
    )
    text = layers_text(instance, tuple(range(60)), 40).replace("\N{NO-BREAK SPACE}", " ")
    assert text.startswith("0-59: 60 layers, Conv2d x20, ReLU x20, odda, ")
    assert 72 <= len(text) <= 80
    assert re.search(r", odd[a-z], \.\.\.$", text), "no name is cut off"


def test_layers_without_names_are_numbers() -> None:
    instance = dataclasses.replace(small_instance(), layers=tuple(Layer(index, "", {}) for index in range(3)))
    assert layers_text(instance, (0,), 40) == "0"


def test_names_cannot_send_control_codes_to_the_terminal() -> None:
    base = small_instance()
    layers = (dataclasses.replace(base.layers[0], name="\x1b[2J[bold]x"), *base.layers[1:])
    printed = _printed(dataclasses.replace(base, layers=layers), small_plan(), 120)
    assert "\x1b" not in printed
    assert "?[2J[bold]x" in printed


def test_a_plan_that_takes_no_time_has_no_bars() -> None:
    base = small_instance()
    free = tuple(
        dataclasses.replace(layer, tmpcs={1: (dataclasses.replace(layer.tmpcs[1][0], time_per_sample_s=0.0),)})
        for layer in base.layers
    )
    instance = dataclasses.replace(base, layers=free).replace(memory_bytes=16 * GIB)
    plan = Plan((Stage(tuple(range(6)), 1, 1, dict.fromkeys(range(6), "vanilla")),))
    assert "█" not in _printed(instance, plan, 80).split("bar:")[0]


def test_the_instance_in_two_lines() -> None:
    assert instance_lines(small_instance()) == [
        "Workload  small: 6 layers, 5 edges, tensor-parallel degrees 1",
        "Cluster   K = 4 devices, N = 8 microbatches, M = 8 GiB, B = 25 GiB/s",
    ]


WORK = "1.50 s: lattice 0.25 s, stage costs 0.25 s, search 1.00 s in 2 evaluations\n"


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            solution(plan=small_plan()),
            f"optimal: 10.0 ms/microbatch, 3 of 4 devices, gap 0 %\n{SPEED}",
        ),
        (
            solution(Status.FEASIBLE, plan=small_plan(), lower_bound_s=0.01, stopped_by=StoppedBy.TIME_LIMIT),
            (
                f"feasible (time limit): 10.0 ms/microbatch, 3 of 4 devices, gap 0.3984 %\n{SPEED}"
                "no plan is faster than 10.0 ms/microbatch\n"
            ),
        ),
        (
            solution(Status.UNKNOWN, lower_bound_s=0.001, stopped_by=StoppedBy.INTERRUPT),
            "unknown (interrupt): no plan found so far; none is faster than 1.00 ms/microbatch\n",
        ),
        (
            solution(Status.INFEASIBLE, infeasibility=Infeasibility("layer 3 is too large", 9.5 * GIB + 0.5)),
            "infeasible: layer 3 is too large\nleast memory per device with a plan: 9.5 GiB (--memory 9.5001GiB)\n",
        ),
        (
            solution(Status.INFEASIBLE, infeasibility=Infeasibility("no plan, whatever the memory", None)),
            "infeasible: no plan, whatever the memory\n",
        ),
    ],
    ids=["optimal", "feasible", "unknown", "infeasible", "never feasible"],
)
def test_the_outcome(outcome: Solution, expected: str) -> None:
    console, output = string_console(80)
    instance = small_instance()
    print_outcome(console, instance, outcome)
    assert output.getvalue() == expected + WORK


def test_wide_characters_keep_columns_aligned() -> None:
    head, first, second = table_lines([Column("name"), Column("n", right=True)], [["層", "1"], ["ab", "22"]])
    assert (head, first, second) == ("name   n", "層     1", "ab    22")


@pytest.mark.parametrize(("sizes", "lines"), [((200, 61, 60, 3), 60), ((90, 70), 70)])
def test_an_answer_has_the_largest_size_that_fits_a_screen(sizes: tuple[int, ...], lines: int) -> None:
    printed = io.StringIO()
    console = Console(file=printed)

    def draw(count: int) -> None:
        for _ in range(count):
            console.print("a line")

    print_within(console, draw, sizes)
    assert SCREEN_LINES == 60
    assert printed.getvalue().count("\n") == lines
