"""Lookahead: a window whose rows the target draws at, and n-grams of what it drew, offered when their turn comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from specdec.config.drafter_options import LookaheadOptions
from specdec.drafting.interface import Context, Offer, Room
from specdec.drafting.lookup.lookahead import MOST_KEYS, Lookahead, LookaheadSession

ROOM = Room(28, 32)
Path = tuple[int, ...]


def opened(tokens: list[int], **options: int) -> tuple[LookaheadSession, Context]:
    context = Context(tokens, len(tokens))
    return Lookahead(LookaheadOptions(**options)).open(context), context


def paths_of(offer: Offer) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(offer.token_ids, offer.parents, strict=True):
        paths.append((token,) if parent < 0 else (*paths[parent], token))
    return paths


def step(session: LookaheadSession, context: Context, model: Callable[[Path], int]) -> int:
    """One step of a target; returns how many tokens it committed."""
    tokens = context.token_ids
    assert isinstance(tokens, list)
    offer = session.propose(context, ROOM)
    assert offer is not None
    paths = {(), *paths_of(offer)}
    session.drawn({path: model((*tokens, *path)) for path in paths})
    path: Path = ()
    while path in paths:
        path = (*path, model((*tokens, *path)))
    tokens += path
    return len(path)


def test_the_window_is_a_chain_with_a_column_below_each_of_its_tokens() -> None:
    session, context = opened([5, 6, 7], window_size=3, ngram_size=4)
    offer = session.propose(context, ROOM)
    assert offer is not None
    assert offer.first_window_node == 0
    depths = sorted(len(path) for path in paths_of(offer))
    assert depths == [1, 2, 2, 3, 3, 3, 4, 4, 5]  # column w, level l: depth 1 + w + l
    assert set(offer.token_ids) <= {5, 6, 7}
    assert set(offer.scores) == {0.0}


def test_a_text_in_which_each_token_decides_the_next_is_soon_decoded_many_tokens_a_step() -> None:
    session, context = opened(list(range(20)))
    counts = [step(session, context, lambda path: (path[-1] * 3 + 1) % 31) for _ in range(40)]
    assert set(counts[:4]) == {1}
    assert sum(counts[20:]) / 20 > 3


def test_what_is_drawn_by_position_is_offered_when_that_position_comes() -> None:
    """As coupled verification draws: the noise of a position decides, whatever comes before."""
    session, context = opened([1, 2, 3])
    counts = [step(session, context, lambda path: (len(path) * len(path) // 3) % 50) for _ in range(60)]
    assert max(counts) > 1


def test_the_window_moves_on_by_as_many_positions_as_tokens_were_committed() -> None:
    session, context = opened(list(range(100, 120)), window_size=4, ngram_size=3)
    assert isinstance(context.token_ids, list)
    before = session.propose(context, ROOM)
    assert before is not None
    session.drawn({path: 1000 + len(path) for path in paths_of(before)})
    context.token_ids += [7, 8]
    after = session.propose(context, ROOM)
    assert after is not None
    columns = [path for path in paths_of(after) if path[-1] >= 1000]
    # What was drawn d tokens after the last committed one is guessed two tokens nearer now.
    assert columns
    assert all(path[-1] - 1000 == len(path) + 1 for path in columns)


def test_each_first_token_keeps_its_newest_n_grams_and_the_least_used_tokens_leave() -> None:
    session, _ = opened([0], guess_set_size=2, window_size=1, ngram_size=2)
    for number in range(MOST_KEYS + 5):
        session._keep(number, (1,))
    for token in (2, 3, 2, 4):
        session._keep(MOST_KEYS, (token,))
    assert len(session.pool) == MOST_KEYS
    assert 0 not in session.pool
    assert list(session.pool[MOST_KEYS]) == [(2,), (4,)]


def test_an_offer_never_has_more_nodes_than_a_tree_and_none_where_only_chains_count() -> None:
    session, context = opened([9], window_size=14, ngram_size=5)
    for token in range(7):
        session._keep(9, (token, token, token, token))
    offer = session.propose(context, Room(64, 64))
    assert offer is not None
    assert len(offer.token_ids) == 64
    assert offer.first_window_node == 8
    assert session.propose(context, Room(64, 64, is_chain=True)) is None


def test_a_window_that_no_step_has_a_place_for_is_refused() -> None:
    with pytest.raises(ValidationError, match="window_size"):
        LookaheadOptions(window_size=15, ngram_size=5)
