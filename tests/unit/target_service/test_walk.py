"""The walk down a verified tree: which tokens are committed, where each came from, and where the choice ends."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.engine.tree import TokenTree
from specdec.target_service.tree.walk import EndOfChoice, Walk, walk_tree
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import SamplingParams

EOS = 2
STOP = 77
PROMPT = 5


def end_of_choice(max_model_len: int = 1000, **params: Any) -> EndOfChoice:
    fields = {"max_tokens": 100, "seed": 0, "eos_token_ids": (EOS,), "stop_token_ids": (STOP,), **params}
    return EndOfChoice(SamplingParams(**fields), PROMPT, max_model_len)


def walk(
    tree: TokenTree,
    target: dict[int, int],
    num_verified: int | None = None,
    *,
    end: EndOfChoice | None = None,
    num_tokens: int = PROMPT,
    plain: pb.Origin.ValueType = pb.ORIGIN_DECODE,
) -> Walk:
    """Walk with a target whose token after node ``n`` is ``target[n]`` (-1: after the last committed token)."""
    num_verified = len(tree) if num_verified is None else num_verified
    return walk_tree(tree, num_verified, lambda node: target[node], end or end_of_choice(), num_tokens, plain)


@pytest.mark.parametrize("origin", [pb.ORIGIN_PREFILL, pb.ORIGIN_DECODE])
def test_without_a_tree_one_token_of_the_plain_origin_is_committed(origin: pb.Origin.ValueType) -> None:
    result = walk(TokenTree(), {-1: 9}, plain=origin)
    assert (result.token_ids, result.origins, result.rows, result.path) == ([9], [origin], [-1], [])


def test_a_fully_accepted_chain_ends_with_a_bonus() -> None:
    result = walk(TokenTree([7, 8]), {-1: 7, 0: 8, 1: 9})
    assert result.token_ids == [7, 8, 9]
    assert result.origins == [pb.ORIGIN_DRAFT, pb.ORIGIN_DRAFT, pb.ORIGIN_BONUS]
    assert result.path == [0, 1]
    assert result.rows == [-1, 0, 1]


def test_the_first_mismatch_is_recovered() -> None:
    result = walk(TokenTree([7, 8, 9]), {-1: 7, 0: 50, 1: 9, 2: 9})
    assert result.token_ids == [7, 50]
    assert result.origins == [pb.ORIGIN_DRAFT, pb.ORIGIN_RECOVERED]
    assert result.path == [0]


def test_a_mismatch_at_the_root_commits_one_recovered_token() -> None:
    result = walk(TokenTree([7]), {-1: 50, 0: 9})
    assert (result.token_ids, result.origins, result.path) == ([50], [pb.ORIGIN_RECOVERED], [])


def test_the_walk_takes_the_branch_that_the_target_takes() -> None:
    tree = TokenTree([7, 8, 70, 80, 81], [-1, -1, 0, 1, 1])
    result = walk(tree, {-1: 8, 1: 81, 4: 5})
    assert result.path == [1, 4]
    assert result.token_ids == [8, 81, 5]
    assert result.origins[-1] == pb.ORIGIN_BONUS


def test_a_node_that_was_not_verified_is_not_accepted() -> None:
    result = walk(TokenTree([7, 8, 9]), {-1: 7, 0: 8}, num_verified=1)
    assert result.token_ids == [7, 8]
    assert result.origins == [pb.ORIGIN_DRAFT, pb.ORIGIN_BONUS]
    assert result.path == [0]


@pytest.mark.parametrize("token", [EOS, STOP])
def test_an_accepted_stop_token_ends_the_choice_and_nothing_follows_it(token: int) -> None:
    result = walk(TokenTree([7, token, 8]), {-1: 7, 0: token, 1: 8, 2: 9})
    assert result.token_ids == [7, token]
    assert result.origins == [pb.ORIGIN_DRAFT, pb.ORIGIN_DRAFT]
    assert result.path == [0, 1]
    assert (result.finish_reason, result.stop_token_id) == (pb.FINISH_REASON_STOP, token)


def test_a_recovered_eos_ends_the_choice() -> None:
    result = walk(TokenTree([7]), {-1: EOS, 0: 8})
    assert (result.token_ids, result.finish_reason) == ([EOS], pb.FINISH_REASON_STOP)


def test_an_ignored_eos_is_a_token_like_others_but_stop_tokens_still_stop() -> None:
    end = end_of_choice(ignore_eos=True)
    assert walk(TokenTree([EOS]), {-1: EOS, 0: 8}, end=end).token_ids == [EOS, 8]
    assert walk(TokenTree([STOP]), {-1: STOP, 0: 8}, end=end).finish_reason == pb.FINISH_REASON_STOP


def test_max_tokens_ends_the_choice_inside_the_accepted_path() -> None:
    result = walk(TokenTree([7, 8, 9]), {-1: 7, 0: 8, 1: 9, 2: 1}, end=end_of_choice(max_tokens=2))
    assert result.token_ids == [7, 8]
    assert (result.finish_reason, result.stop_token_id) == (pb.FINISH_REASON_LENGTH, None)


def test_the_end_of_the_context_ends_the_choice() -> None:
    result = walk(TokenTree([7, 8, 9]), {-1: 7, 0: 8, 1: 9, 2: 1}, end=end_of_choice(max_model_len=PROMPT + 1))
    assert (result.token_ids, result.finish_reason) == ([7], pb.FINISH_REASON_LENGTH)


def test_a_stop_token_at_max_tokens_is_a_stop() -> None:
    assert walk(TokenTree(), {-1: EOS}, end=end_of_choice(max_tokens=1)).finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "max_model_len", "depth"),
    [(5, 1, 1000, 0), (5, 2, 1000, 1), (5, 9, 1000, 8), (13, 9, 1000, 0), (5, 99, 7, 1), (7, 99, 8, 0), (8, 99, 8, 0)],
)
def test_no_node_is_verified_that_no_token_could_follow(
    num_tokens: int, max_tokens: int, max_model_len: int, depth: int
) -> None:
    assert end_of_choice(max_model_len, max_tokens=max_tokens).max_depth(num_tokens) == depth
