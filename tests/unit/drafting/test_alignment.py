"""Between an endpoint's text and the target's tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec.commands.up.plan import shipped_model
from specdec.drafting.endpoints.alignment import TargetText

TEXT = "def fibonacci(n):\n    if n < 2:\n        return n  # été, naïve 🙂 done\n    return fibonacci(n - 1)\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{shipped_model('target')}/tokenizer.json")


@pytest.fixture(scope="module")
def target(tokenizer: Tokenizer) -> TargetText:
    return TargetText(tokenizer.to_str())


def test_at_every_place_of_a_text_the_rest_becomes_the_tokens_that_follow(
    target: TargetText, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT).ids
    num_found = 0
    for place in range(1, len(ids)):
        prompt = target.prompt(ids[:place])
        if prompt is None:  # within a character
            continue
        found = target.tokens_after(ids[:place], TEXT[len(prompt) :], 8, is_whole=True)
        assert found == ids[place : place + len(found)]
        num_found += bool(found)
    assert num_found > len(ids) // 2


def test_tokens_that_more_text_could_change_are_not_proposed(target: TargetText, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).ids
    start = 6
    rest = TEXT[len(target.prompt(ids[:start]) or "") :]
    for end in range(1, len(rest)):
        found = target.tokens_after(ids[:start], rest[:end], 64, is_whole=False)
        assert found == ids[start : start + len(found)]


def test_what_was_committed_since_a_place_is_known_as_text(target: TargetText, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).ids
    for start in range(1, len(ids)):
        before = target.prompt(ids[:start])
        for end in range(start, len(ids)):
            whole = target.prompt(ids[:end])
            if before is not None and whole is not None:
                assert target.since(ids[:end], start) == whole[len(before) :]


def test_a_token_that_would_merge_with_the_text_is_followed_by_nothing() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    target = TargetText(tokenizer.to_str())
    a, c = vocabulary["a"], vocabulary["c"]
    assert target.tokens_after([c, a], "b", 4, is_whole=True) == []
    assert target.tokens_after([c, a], "c", 4, is_whole=True) == [c]


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        TargetText("{}")
