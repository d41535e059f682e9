"""What is kept of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.adversary.report import compact_json, save


def test_results_have_a_line_for_each_row_and_read_back_as_they_were() -> None:
    results = {"seed": 7, "samples": [{"rss": 1.5, "p99": None}, {"rss": 2.0}], "times_s": [1.0, 2.0], "none": []}
    text = compact_json(results)
    assert json.loads(text) == results
    assert len(text.splitlines()) == 9


def test_figures_are_rounded_to_what_a_clock_has_and_what_is_not_finite_is_null() -> None:
    assert json.loads(compact_json({"a": [1.23456789, math.nan, math.inf]})) == {"a": [1.23457, None, None]}


def test_results_name_the_machine_and_what_ran_on_it(tmp_path: Path) -> None:
    page = save("chaos-tiny", {"seed": 7}, "what was found\n", tmp_path)
    text = page.read_text()
    assert "Revision " in text
    assert " cores of " in text
    assert text.endswith("what was found\n")
    raw = json.loads(page.with_suffix(".json").read_text())
    assert (raw["seed"], raw["machine"]["cores_used"] >= 1) == (7, True)
