"""Chains that a draft prepares in rejection mode below likely corrections. On the real draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.drafting.role.corrections import likeliest_correction
from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.tree import TokenTree
from specdec.v1 import common_pb2 as pb
from tests.support.engine.drafting_client import PROMPT, a_session, commit, drafting, grow, proposals
from tests.support.engine.worker_client import WorkerClient


def rejecting(**sampling: object) -> pb.OpenSession:
    body = a_session(temperature=1.0, body={"max_draft_tokens": 4}, **sampling)
    body.verify_mode = pb.VERIFY_MODE_REJECTION
    return body


def prepared(client: WorkerClient, **sampling: object) -> pb.Proposal:
    """The last proposal of a session after its prompt."""
    grow(client, max_heads=2)
    drafting(client, rejecting(**sampling))
    sent = proposals(client)[-1]
    assert sent.continuations
    return sent


def path_to(sent: pb.Proposal, continuation: pb.Continuation) -> list[int]:
    return [*sent.token_ids[: continuation.parent + 1], continuation.token_ids[0]]


def test_the_chain_prepared_below_a_correction_is_the_one_drawn_after_the_verdict(client: WorkerClient) -> None:
    """A draft that knows nothing of the first chain draws the same tokens from the same distributions."""
    sent = prepared(client)
    assert len({continuation.parent for continuation in sent.continuations}) > 1
    for number, continuation in enumerate(sent.continuations):
        body = rejecting()
        path = path_to(sent, continuation)
        body.token_ids.extend(path)
        name = f"other{number}"
        client.entry(name, open=body)
        client.turn(20)
        fresh = proposals(client, name)[-1]
        drawn = continuation.token_ids[1:]
        assert list(fresh.token_ids[: len(drawn)]) == list(drawn)
        assert list(fresh.distributions[: len(drawn)]) == list(continuation.distributions)
        client.entry(name, close=pb.CloseSession())


def test_after_a_correction_that_was_expected_the_chain_goes_on_from_where_it_is(client: WorkerClient) -> None:
    sent = prepared(client)
    for_verdict = max(sent.continuations, key=lambda continuation: len(continuation.token_ids))
    commit(client, len(PROMPT), path_to(sent, for_verdict), turns=20)
    following = proposals(client)[-1]
    drawn = list(for_verdict.token_ids[1:])
    assert list(following.token_ids[: len(drawn)]) == drawn
    assert len(following.token_ids) >= 4
    session = client.session()
    held = session.heads[0].seq.token_ids[session.num_committed :]
    assert held == [session.tree.token_ids[node] for node in session.main_path]


def test_no_chain_is_prepared_below_another_prepared_one_nor_after_the_end(client: WorkerClient) -> None:
    sent = prepared(client, max_tokens=3)
    assert all(-1 <= each.parent < len(sent.token_ids) for each in sent.continuations)
    assert all(each.parent + 1 + len(each.token_ids) <= 3 for each in sent.continuations)
    assert all(len(each.token_ids) > 1 for each in sent.continuations)


def test_where_chains_are_prepared_depends_on_no_token_of_a_prepared_chain(client: WorkerClient) -> None:
    """Seeds draw other tokens; places, lengths and the order of chains are the same."""
    shapes = set()
    for seed in range(12):
        grow(client, max_heads=2)
        name = f"seed{seed}"
        client.entry(name, open=rejecting(seed=seed))
        client.turn(30)
        sent = proposals(client, name)[-1]
        shapes.add(tuple((each.parent, len(each.token_ids)) for each in sent.continuations))
        client.entry(name, close=pb.CloseSession())
        client.turn(1)
    assert len(shapes) == 1


def test_one_head_prepares_nothing(client: WorkerClient) -> None:
    drafting(client, rejecting())
    assert not any(sent.continuations for sent in proposals(client))


# --- which corrections come first


def picked(num_verifying: int, number: int, num_ranks: int = 2) -> list[tuple[int, int]]:
    """Depth and token of the first corrections of a chain of four, each drawn as the likeliest of its distribution."""
    samples = [
        DraftSample(10 * depth, (10 * depth, 10 * depth + 1, 10 * depth + 2), (0.5, 0.3, 0.2)) for depth in range(4)
    ]
    tree = TokenTree([sample.token_id for sample in samples])
    session: Any = SimpleNamespace(
        tree=tree, notes=[SimpleNamespace(sample=sample) for sample in samples], num_verifying=num_verifying,
        main_path=[0, 1, 2, 3],
    )  # fmt: skip
    found = []
    for _ in range(number):
        correction = likeliest_correction(session, num_ranks, 4)
        if correction is None:
            break
        tree.add(correction.parent, correction.token_id)
        found.append((tree.depth(correction.parent) + 1, correction.token_id))
    return found


def test_the_token_after_the_last_verified_one_comes_first_then_corrections_by_depth_and_rank() -> None:
    assert picked(0, 3) == [(1, 1), (1, 2), (2, 11)], "repeated, accepted, runner up"
    assert picked(2, 3) == [(3, 21), (1, 1), (2, 11)], "repeated, accepted"
    assert picked(0, 9) == sorted(set(picked(0, 9)), key=picked(0, 9).index), "each once"
    assert len(picked(0, 9)) == 8, "all"
    assert len(picked(0, 9, num_ranks=1)) == 4, "ranks"


@pytest.mark.parametrize("max_depth", [0, 2])
def test_no_correction_is_deeper_than_allowed(max_depth: int) -> None:
    sample = DraftSample(1, (1, 2), (0.5, 0.5))
    session: Any = SimpleNamespace(
        tree=TokenTree([1, 1, 1]), notes=[SimpleNamespace(sample=sample)] * 3, num_verifying=2, main_path=[0, 1, 2]
    )
    correction = likeliest_correction(session, 2, max_depth)
    assert (correction is None) is (max_depth == 0)
    assert correction is None or session.tree.depth(correction.parent) < max_depth
