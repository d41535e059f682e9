"""The setting `drafters`, and what is said of one that cannot be."""

from __future__ import annotations

import pytest

from specdec.drafters.options import parse_drafters


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("magic", "there is no drafter 'magic' here, only ngram, suffix, "),
        ("eagle3", "eagle3: model: is required"),
        ("ngram,ngram", "a method is named twice"),
        ('[{"model": "head"}]', "each is a name, or an object with its method"),
        ("[5]", "each is a name, or an object with its method"),
        ('[{"method": "ngram", "depth": 3}]', "ngram: depth: is no option of it"),
        ('[{"method": "ngram", "prompt_lookup_max": 1}]', "ngram: prompt_lookup_min is above prompt_lookup_max"),
        ('[{"method":', "no JSON: "),
    ],
)
def test_what_is_wrong_is_told_by_method_and_option(text: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_drafters(text)
    assert str(caught.value).startswith(told), str(caught.value)
