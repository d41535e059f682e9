"""What drafters without weights offer for texts whose continuation is plain to see."""

from __future__ import annotations

import random

import pytest

from specdec.config.drafter_options import NgramOptions, PredictionOptions, SuffixOptions
from specdec.drafting.corpus import SEPARATOR, Corpus
from specdec.drafting.interface import Context, Offer, Room
from specdec.drafting.lookup.ngram import Ngram
from specdec.drafting.lookup.prediction import PredictionDrafter
from specdec.drafting.lookup.suffix import Suffix
from tests.support.for_each import for_each

ROOM = Room(8, 8)


def chain_of(offer: Offer | None) -> list[int]:
    """The first path."""
    if offer is None:
        return []
    path: list[int] = []
    node = -1
    for index, parent in enumerate(offer.parents):
        if parent == node:
            path.append(offer.token_ids[index])
            node = index
    return path


def first_tokens(offer: Offer | None) -> list[int]:
    return (
        []
        if offer is None
        else [token for token, parent in zip(offer.token_ids, offer.parents, strict=True) if parent == -1]
    )


def slow_matches(tokens: list[int], context: list[int], key: int, most: int) -> dict[int, int]:
    """Every position behind an occurrence of the end of `context`, and how many tokens agree."""
    found = {}
    for position in range(1, len(tokens)):
        if tokens[position] == SEPARATOR:
            continue
        length = 0
        while (
            length < min(most, len(context), position)
            and tokens[position - 1 - length] == context[-1 - length] != SEPARATOR
        ):
            length += 1
        if length >= key:
            found[position] = length
    return found


@for_each("key", [1, 2])
@for_each("seed", range(6))
def test_a_corpus_finds_all_occurrences_newest_first_also_after_old_ones_are_dropped(key: int, seed: int) -> None:
    rng = random.Random(seed)
    corpus, tokens, first = Corpus(key), list[int](), 0
    for _ in range(30):
        piece = [rng.randrange(4) for _ in range(rng.randrange(1, 12))] + [SEPARATOR] * (rng.random() < 0.3)
        corpus.append(piece)
        tokens += piece
        if rng.random() < 0.2:
            num = rng.randrange(len(tokens) + 1)
            corpus.drop(num)
            tokens, first = tokens[num:], first + num
        context = [rng.randrange(4) for _ in range(6)]
        found = corpus.matches(context, 5, 10_000)
        assert found == sorted(found, reverse=True)
        expected = slow_matches(tokens, context, key, 5)
        assert {start - first: length for start, length in found} == expected
        assert len(corpus) == len(tokens)


def test_ngram_continues_the_newest_occurrence_of_the_longest_context_and_branches_to_others() -> None:
    text = [1, 2, 3, 40, 41, 9, 1, 2, 3, 50, 51, 9, 8, 2, 3, 60, 61, 9, 7, 1, 2, 3]
    offer = Ngram(NgramOptions()).propose(Context(text, len(text)), Room(8, 3))
    assert chain_of(offer) == [50, 51, 9]
    assert first_tokens(offer) == [50, 40, 60]
    assert offer is not None
    assert offer.scores[0] == max(offer.scores[offer.token_ids.index(token)] for token in (50, 40, 60))


def test_ngram_goes_on_with_a_text_that_repeats_itself_past_its_end() -> None:
    text = [5, 6, 7, 5, 6, 7, 5, 6]
    assert chain_of(Ngram(NgramOptions()).propose(Context(text, 3), Room(7, 7))) == [7, 5, 6, 7, 5, 6, 7]


def test_ngram_offers_nothing_where_less_than_its_minimum_agrees() -> None:
    text = [1, 2, 3, 4, 9, 3]
    assert Ngram(NgramOptions(prompt_lookup_min=2)).propose(Context(text, 6), ROOM) is None
    assert chain_of(Ngram(NgramOptions(prompt_lookup_min=1)).propose(Context(text, 6), Room(8, 2))) == [4, 9]
    assert Ngram(NgramOptions(prompt_lookup_min=3)).propose(Context([1, 2, 3, 9, 2, 3], 6), ROOM) is None


def test_suffix_offers_what_followed_most_often_with_the_share_as_score() -> None:
    text = [10, 1, 2, 3, 11, 1, 2, 4, 12, 1, 2, 3, 13, 1, 2, 3, 14, 1, 2]
    offer = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=8)).propose(Context(text, 5), ROOM)
    assert offer is not None
    assert first_tokens(offer) == [3, 4]
    by_token = dict(zip(offer.token_ids, offer.scores, strict=True))
    assert 0.5 < by_token[3] < 0.75
    assert 0.1 < by_token[4] < 0.25


def test_suffix_knows_earlier_outputs_of_its_tenant_and_of_no_other() -> None:
    drafter = Suffix(SuffixOptions())
    output = list(range(100, 140))
    drafter.open(Context([1, 2], 2)).close(Context([1, 2, *output], 2, salt=b"a"))
    asked = [7, 8, 100, 101, 102, 103]
    assert chain_of(drafter.propose(Context(asked, 2, salt=b"a"), Room(4, 4))) == [104, 105, 106, 107]
    assert drafter.propose(Context(asked, 2, salt=b"b"), ROOM) is None
    assert drafter.propose(Context([7, 8, 1, 2], 2, salt=b"a"), ROOM) is None  # a prompt is nobody else's


def test_prediction_is_followed_from_its_start_and_found_again_after_each_kind_of_change() -> None:
    expected = list(range(100, 160))
    prompt = [1, 2, 3]

    def offered(output: list[int]) -> list[int]:
        context = Context([*prompt], 3, prediction=expected)
        followed = PredictionDrafter(PredictionOptions()).open(context)
        assert followed is not None
        for length in range(len(output) + 1):
            context.token_ids = [*prompt, *output[:length]]
            offer = followed.propose(context, Room(8, 4))
        return first_tokens(offer)

    assert offered([])[0] == 100
    assert offered([100, 101])[0] == 102
    assert 103 in offered([100, 101, 7])  # 102 was replaced
    assert 102 in offered([100, 101, 7])  # or something is put in before it
    assert 106 in offered([100, 101, 105])  # or what was before 105 is left out
    assert offered([100, 101, 7, 103, 104])[0] == 105
    assert offered([100, 101, 7, 8, 9, 102, 103])[0] == 104
    assert offered(expected) == []
    begun = Context([*prompt, *expected[:20]], 23, prediction=expected)
    followed = PredictionDrafter(PredictionOptions()).open(begun)
    assert followed is not None
    assert first_tokens(followed.propose(begun, Room(8, 4))) == [120]
    assert PredictionDrafter(PredictionOptions()).open(Context(prompt, 3)) is None


@pytest.mark.parametrize("seed", range(8))
def test_offers_are_trees_within_their_room_whatever_the_text(seed: int) -> None:
    rng = random.Random(seed)
    drafters = [
        Ngram(NgramOptions(prompt_lookup_min=1)),
        Suffix(SuffixOptions(suffix_decoding_max_spec_factor=20)),
        PredictionDrafter(PredictionOptions()),
    ]
    for _ in range(40):
        tokens = [rng.randrange(rng.choice((1, 3, 10))) for _ in range(rng.randrange(1, 80))]
        prediction = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        context = Context(tokens, rng.randrange(1, len(tokens) + 1), prediction=prediction)
        room = Room(rng.randrange(1, 20), rng.randrange(1, 9))
        for drafter in drafters:
            opened = drafter.open(context)
            offer = None if opened is None else opened.propose(context, room)
            if opened is not None:
                opened.close(context)
            if offer is None:
                continue
            depths: list[int] = []
            assert 0 < len(offer.token_ids) <= room.num_nodes
            for node, parent in enumerate(offer.parents):
                assert -1 <= parent < node
                depths.append(1 if parent < 0 else depths[parent] + 1)
            assert max(depths) <= room.depth
            pairs = list(zip(offer.parents, offer.token_ids, strict=True))
            assert len(set(pairs)) == len(pairs)
            assert all(0 <= score <= 1 for score in offer.scores)
