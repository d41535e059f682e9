"""The setting `drafters`: what is said of one that cannot be, and what the page says of those that can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec.config.drafter_options import DRAFT_MODEL, DRAFTER_NAMES, SERVICE_DRAFTER_NAMES, parse_drafters
from specdec.drafting import registry
from specdec.drafting.endpoints import drafter as openai_drafter
from specdec.drafting.heads.methods.registry import CAPABILITIES as HEADS
from specdec.drafting.interface import Capabilities
from specdec.drafting.layer_skip import drafter as layer_skip

PAGE = Path(__file__).parents[3] / "docs" / "drafters.md"
STATED = {
    DRAFT_MODEL: registry.DRAFT_MODEL_CAPABILITIES,
    **registry.CAPABILITIES,
    **HEADS,
    "layer_skip": layer_skip.CAPABILITIES,
    "openai_api": openai_drafter.CAPABILITIES,
}


def row(name: str, can: Capabilities) -> list[str]:
    """Of the table in the page, without the vocabulary."""
    runs = ", ".join(place.replace("_", " ") for place in ("target", "draft_service") if place in can.places)
    needs = [
        *["hidden states"] * can.needs_hidden_states,
        *["its layers and blocks"] * can.needs_engine,
        *["what it draws at every row"] * can.reads_drawn,
    ]
    yes = {True: "yes", False: "no"}
    shape = "trees" if can.makes_trees else "chains"
    return [f"`{name}`", runs, ", ".join(needs) or "nothing", yes[can.is_serial], shape, yes[can.gives_distribution]]


def test_the_page_says_of_every_drafter_what_its_entry_states() -> None:
    section = PAGE.read_text("utf-8").partition("## What each can do")[2].partition("\n## ")[0]
    told = [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    assert sorted(cells[:6] for cells in told) == sorted(row(name, can) for name, can in STATED.items())
    assert {cells[0].strip("`") for cells in told if cells[6] == "the target's"} == {
        name for name, can in STATED.items() if can.has_target_vocabulary
    } - {DRAFT_MODEL}


def test_entries_name_the_places_where_a_drafter_can_be_set() -> None:
    assert {name for name, can in STATED.items() if "target" in can.places} == {DRAFT_MODEL, *DRAFTER_NAMES}
    # The target's own layers are a draft service's model there, and no drafter of it.
    services = {name for name, can in STATED.items() if "draft_service" in can.places}
    assert services == {DRAFT_MODEL, "layer_skip", *SERVICE_DRAFTER_NAMES}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "ngram,token_recycling",
            "token_recycling was removed: use ngram or suffix, which take fewer steps on every text",
        ),
        ("magic", "there is no drafter 'magic' here, only ngram, suffix, "),
        ("eagle3", "eagle3: model: is required"),
        ("ngram,ngram", "a method is named twice"),
        ('[{"model": "head"}]', "a drafter is a name, or an object with its method"),
        ("[5]", "a drafter is a name, or an object with its method"),
        ('[{"method": "ngram", "depth": 3}]', "ngram: depth: is not an option of this drafter"),
        ('[{"method": "ngram", "prompt_lookup_max": 1}]', "ngram: prompt_lookup_min is above prompt_lookup_max"),
        ('[{"method":', "is not JSON: "),
    ],
)
def test_what_is_wrong_is_told_by_method_and_option(text: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_drafters(text)
    assert str(caught.value).startswith(told), str(caught.value)
