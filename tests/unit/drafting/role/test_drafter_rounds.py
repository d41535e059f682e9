"""The draft's role in rejection mode: chains, whose lengths and times depend on no token. On the real draft."""

from __future__ import annotations

import pytest

from specdec.config import DraftSettings
from specdec.drafting.role.opening import read_opening
from specdec.engine.sampling.noise import Purpose, uniform
from specdec.v1 import common_pb2 as pb
from tests.support.engine.drafting_client import (
    MAX_AHEAD,
    a_session,
    commit,
    drafting,
    other,
    proposals,
)
from tests.support.engine.sparse_draw import draw
from tests.support.engine.worker_client import WorkerClient


def chain_id(client: WorkerClient) -> int:
    session = client.session()
    return session.chain_id(session.heads[0])


def test_in_rejection_mode_a_chain_is_sent_in_parts_and_with_its_distributions(client: WorkerClient) -> None:
    body = a_session(temperature=1.0, body={"max_draft_tokens": 4})
    body.verify_mode = pb.VERIFY_MODE_REJECTION
    drafting(client, body)
    part, sent = proposals(client)
    assert len(sent.token_ids) == len(sent.distributions) == 4
    assert part.token_ids == sent.token_ids[:2]
    assert not sent.scores
    for token, sparse in zip(sent.token_ids, sent.distributions, strict=True):
        assert token in sparse.token_ids
        assert len(sparse.token_ids) <= 64
        assert sum(sparse.probs) == pytest.approx(1.0, abs=1e-5)


def test_no_owner_can_ask_for_longer_rounds_than_the_draft_is_set_to() -> None:
    body = a_session(temperature=1.0, body={"max_draft_tokens": 64})
    body.verify_mode = pb.VERIFY_MODE_REJECTION
    identity = pb.ModelIdentity(vocab_size=4096, max_model_len=512)
    assert read_opening(body, identity, DraftSettings(model="draft", max_draft_tokens=3)).max_chain == 3


def test_in_rejection_mode_a_chain_goes_on_past_a_stop_token(client: WorkerClient) -> None:
    """How long a chain is, and so when it comes, does not depend on the tokens in it: see sampling/rejection.py."""
    body = a_session(temperature=1.0, body={"max_draft_tokens": 4})
    body.verify_mode = pb.VERIFY_MODE_REJECTION
    drafting(client, body)
    sent = proposals(client)[-1]
    body.sampling.stop_token_ids.append(sent.token_ids[1])
    client.entry("t", open=body)  # the same draws: reopened it would have others
    client.turn(30)
    assert [list(proposal.token_ids) for proposal in proposals(client, "t")] == [
        list(sent.token_ids[:2]),
        list(sent.token_ids),
    ]


def test_in_rejection_mode_a_position_that_is_drafted_again_is_drawn_with_other_numbers(client: WorkerClient) -> None:
    """Those of the chain that was given up have decided about it: see sampling/block_verification.py."""
    body = a_session(temperature=1.0, body={"max_draft_tokens": 4})
    body.verify_mode = pb.VERIFY_MODE_REJECTION
    drafting(client, body)
    sent = proposals(client)[-1]
    assert sent.draws_afresh
    commit(client, 20, [other(sent.token_ids[0])], turns=20)
    following = proposals(client)[-1]
    for t, token, sparse in zip(range(21, 25), following.token_ids, following.distributions, strict=True):
        u = uniform(body.sampling.seed, 0, Purpose.DRAFT, t, chain_id(client))
        assert token == draw(tuple(sparse.token_ids), tuple(sparse.probs), u)
    assert chain_id(client) == (1 << 32) + 21


@pytest.mark.parametrize("num_confirmed", [1, 2, 3, 4])
def test_in_rejection_mode_a_chain_goes_on_where_a_part_of_it_is_committed(
    client: WorkerClient, num_confirmed: int
) -> None:
    """A commit that ends inside the chain leaves nothing to compute; drafting must go on all the same."""
    body = a_session(temperature=1.0, body={"max_draft_tokens": 4})
    body.verify_mode = pb.VERIFY_MODE_REJECTION
    drafting(client, body)
    sent = proposals(client)[-1]
    commit(client, 20, list(sent.token_ids[:num_confirmed]), turns=20)
    following = proposals(client)[-1]
    assert following.start_position == 20 + num_confirmed
    assert len(following.token_ids) == len(following.distributions) == min(4 + 4 - num_confirmed, MAX_AHEAD)
    assert following.token_ids[: 4 - num_confirmed] == sent.token_ids[num_confirmed:]
