"""What the bench makes of what it has measured: spreads, tables, plots, files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bench.arrivals import summarize
from bench.pairs import Pair, resolve_model
from bench.plan import BenchPlan
from bench.report import file_name, versions
from bench.systems.system import Clock
from specdec.commands.measuring.report import Report, machine
from specdec.commands.measuring.streams import Stream, poisson
from specdec.commands.measuring.summary import percentiles, spread
from specdec.commands.measuring.svg import PlotPoint, bars, lines
from specdec.commands.measuring.tables import Table, cell


def shipped_plan() -> BenchPlan:
    target, draft = (resolve_model(f"shipped-{role}", "cpu") for role in ("target", "draft"))
    return BenchPlan(pair=Pair(name="shipped", target=target, draft=draft), cores=(0,))


def test_the_first_tokens_do_not_count_for_speed() -> None:
    clock = Clock()
    for num_tokens, now_s in ((3, 10.0), (0, 11.0), (2, 12.0), (4, 14.0)):
        clock.add(num_tokens, now_s)
    assert clock.tokens_per_s == 6 / 4


def test_one_chunk_has_no_speed() -> None:
    clock = Clock()
    clock.add(5, 1.0)
    assert clock.tokens_per_s == 0.0


def test_quartiles_of_few_values_lie_between_them() -> None:
    assert spread([4.0]) == {"median": 4.0, "q1": 4.0, "q3": 4.0}
    assert spread([1.0, 2.0, 3.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5}
    assert spread([]) == {}


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([float(n) for n in range(100)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (12, "12"),
        (1234.5, "1234"),
        (0.12345, "0.123"),
        ({"median": 2.0, "q1": 1.5, "q3": 2.5}, "2 (1.5 to 2.5)"),
        ({}, "-"),
    ],
)
def test_cells_are_short(value: object, text: str) -> None:
    assert cell(value) == text


def test_plots_are_svg_with_every_name() -> None:
    points = [PlotPoint.of(x, spread([x, 2 * x, 3 * x])) for x in (1.0, 4.0, 64.0)]
    names = {"plain": points, "speculation <&>": points}
    for text in (
        lines("a & b", "n", "x", "y", names, log_x=True),
        bars("t", "n", "/s", dict.fromkeys(names, points[0])),
    ):
        root = ElementTree.fromstring(text)
        written = {element.text for element in root.iter() if element.tag.endswith("text")}
        assert set(names) <= written


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0, 5.0], [1e-6], [3e7, 1.0]])
def test_plots_of_few_and_odd_values_are_drawn(values: list[float]) -> None:
    points = [PlotPoint(x, x, x, x) for x in values]
    ElementTree.fromstring(lines("t", "n", "x", "y", {"a": points}, log_x=True))
    ElementTree.fromstring(bars("t", "n", "", {str(x): PlotPoint(x, x, x, x) for x in values}))


@pytest.mark.parametrize("width", [60, 80, 119, 120, 200])
def test_no_word_of_a_table_is_cut_in_two_where_there_is_room_for_all(width: int) -> None:
    table = Table(
        "Times", ("load", "speculation", *(f"{name} p{part}" for name in ("TTFT", "whole") for part in (50, 90, 99)))
    )
    table.add("1 at once", True, *({"median": 123.0, "q1": 98.7, "q3": 141.0} for _ in range(6)))
    console = Console(width=width, record=True, file=io.StringIO())
    table.print(console)
    shown = console.export_text().split()
    assert {"speculation", "whole", "once", "(98.7", "141)"} <= set(shown)
    assert shown.count("whole") == 3


def test_a_table_for_which_there_is_no_room_is_shown_whole_all_the_same() -> None:
    table = Table("Narrow", [20 * letter for letter in "abcdef"])
    table.add(*range(100_000, 100_006))
    console = Console(width=40, record=True, file=io.StringIO())
    table.print(console)
    assert "".join(console.export_text().split()).count("b") == 20


def test_results_name_pair_machine_and_versions(tmp_path: Path) -> None:
    facts: dict[str, object] = {"machine": machine((0,)), "versions": versions()}
    report = Report(pair="pair: what it is", facts=facts, console=Console(quiet=True))
    table = Table("Title", ["system", "a|b"])
    table.add("one | two", {"median": 1.0, "q1": 1.0, "q3": 1.0})
    report.add("part", [1, 2], [table], {"picture": lines("t", "n", "x", "y", {})})
    page = report.save(tmp_path, "name")
    text, raw = page.read_text(), json.loads((tmp_path / "name.json").read_text())
    assert "pair: what it is" in text
    assert "![picture](name-picture.svg)" in text
    assert (tmp_path / "name-picture.svg").is_file()
    assert raw["part"] == [1, 2]
    assert raw["machine"]["cores_used"] == 1
    assert {"specdec", "torch", "transformers"} <= raw["versions"].keys()
    assert raw["machine"]["load_average"]


def test_files_are_named_after_no_path() -> None:
    assert file_name("/some/where/target:draft-2m", "cpu").endswith("-cpu-target-draft-2m")


def test_arrivals_come_at_the_rate_and_as_before() -> None:
    times = poisson(50.0, 100.0, seed=3)
    assert times == sorted(times) == poisson(50.0, 100.0, seed=3)
    assert 4500 < len(times) < 5500
    assert poisson(0.001, 1.0, seed=0) == [0.0]


def test_goodput_counts_requests_that_met_both_limits() -> None:
    good = Stream(first_s=0.1, gaps_s=[0.01] * 9, token_ids=[7] * 10, ended_s=102.0)
    late = Stream(first_s=0.9, gaps_s=[0.01] * 9, token_ids=[7] * 10, ended_s=103.0)
    slow = Stream(first_s=0.1, gaps_s=[0.2] * 9, token_ids=[7] * 10, ended_s=104.0)
    failed = Stream()
    row = summarize([good, late, slow, failed], 100.0, 1.5, shipped_plan())
    assert row["goodput_per_s"] == 1 / 4
    assert row["ended_per_s"] == 3 / 4
    assert row["num_failed"] == 1
    assert row["offered_per_s"] == 2.0
