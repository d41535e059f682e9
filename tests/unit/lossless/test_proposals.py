"""Whatever is proposed, garbage or the truth among decoys, the tokens are the target's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, chain
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import (
    Plainly,
    assert_all_equal,
    assert_equal,
    body_of,
    examples,
)


def random_proposals(rng: random.Random, token_ids: list[int]) -> Iterator[bytes]:
    """Wrong tokens, branches, huge, stale, early, duplicate and malformed proposals."""
    length = len(token_ids)
    for _ in range(rng.randrange(3)):
        num_nodes = rng.choice((0, 1, 3, 17, 64, 65, 200))
        proposal = pb.Proposal(
            start_position=max(0, length + rng.choice((0, 0, 0, -1, -2, -30, 1, 1000))),
            token_ids=[
                rng.choice((rng.randrange(4096), rng.randrange(8), 5000 * rng.randrange(2))) for _ in range(num_nodes)
            ],
            draft_us=rng.randrange(1000),
        )
        if num_nodes and rng.random() < 0.1:
            proposal.token_ids[-1] = 4096 + rng.randrange(1000)
        kind = rng.randrange(4)
        if kind:
            proposal.parents.extend(rng.randrange(-1, max(node, 1)) for node in range(num_nodes))
        if kind == 2:
            proposal.scores = rng.randbytes(num_nodes)
        if kind == 3 and rng.random() < 0.3:
            proposal.parents[:] = [rng.randrange(-3, num_nodes + 3) for _ in range(rng.randrange(num_nodes + 2))]
        encoded = proposal.SerializeToString()
        if rng.random() < 0.05:
            encoded = rng.randbytes(rng.randrange(40))
        yield encoded
        if rng.random() < 0.2:
            yield encoded


@given(seed=st.integers(0, 2**32))
@examples
def test_a_draft_that_proposes_garbage_changes_nothing(loaded_pair: LocalPair, plainly: Plainly, seed: int) -> None:
    loaded_pair.reset()
    rng = random.Random(seed)
    opens = {str(i): body_of({**rng.choice(CASES), "max_draft_tokens": 64}) for i in range(3)}
    outcomes = loaded_pair.run(
        opens, use_draft=rng.random() < 0.5, propose=lambda _, tokens: random_proposals(rng, tokens), rng=rng
    )
    assert_all_equal(outcomes, opens, plainly)


def test_bad_proposals_are_rejected_in_band_and_name_what_is_wrong(pair: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 0, "temperature": 0.0})
    length = len(body.token_ids)
    bad = [
        pb.Proposal(start_position=length + 1000, token_ids=[1]),
        pb.Proposal(start_position=length, token_ids=[4096]),
        pb.Proposal(start_position=length, token_ids=[1, 2], parents=[1, 0]),
        pb.Proposal(start_position=length, token_ids=[1] * 65),
        pb.Proposal(start_position=length, token_ids=[1, 2], scores=b"1"),
    ]
    encoded = [proposal.SerializeToString() for proposal in bad] + [b"\xff"]
    each = iter([[one] for one in encoded])
    outcome = pair.run({"a": body}, use_draft=False, propose=lambda *_: next(each, []))["a"]
    assert_equal(outcome, plainly(body))
    messages = [rejected.status.message for rejected in outcome.rejected]
    fields = ("start_position", "token_ids[0]", "parents[0]", "token_ids", "scores", "proposal")
    assert len(messages) == len(fields)
    assert all(field in message for field, message in zip(fields, messages, strict=True)), messages
    assert all(rejected.expected_position >= length for rejected in outcome.rejected)


def tree_with_true_path(rng: random.Random, token_ids: list[int], rest: list[int]) -> bytes:
    """A branching tree in which the true continuation is out of place, among decoys before and after it."""
    behind = min(rng.choice((0, 0, 1, 3)), len(token_ids) - 1)
    start = len(token_ids) - behind
    true_path = [*token_ids[start:], *rest[: rng.randrange(1, 9)]]
    nodes: list[tuple[int, int]] = []
    above = -1
    for token in true_path:
        for _ in range(rng.randrange(3)):
            nodes.append((above, (token + rng.randrange(1, 4096)) % 4096))
            if rng.random() < 0.5:  # decoys have children of their own
                nodes.append((len(nodes) - 1, rng.randrange(4096)))
        nodes.append((above, token))
        above = len(nodes) - 1
    nodes = nodes[:64]
    parents, tokens = zip(*nodes, strict=True)
    return pb.Proposal(start_position=start, token_ids=tokens, parents=parents).SerializeToString()


@pytest.mark.parametrize(("num_sessions", "temperature"), [(1, 0.0), (1, 1.0), (8, 0.0), (8, 1.0)])
def test_the_true_path_of_a_branching_tree_is_accepted_and_its_kv_moved(
    num_sessions: int, temperature: float, pair: LocalPair, plainly: Plainly, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(num_sessions)
    opens = {
        str(i): body_of({"prompt": i % 4, "temperature": temperature, "seed": i, "max_draft_tokens": 64})
        for i in range(num_sessions)
    }
    truth = {session_id: [*body.token_ids, *plainly(body).token_ids] for session_id, body in opens.items()}
    runner = pair.target_built.engine.runner
    moves: list[int] = []
    copy_slots = runner.copy_slots

    def counting_copy(src: list[int], dst: list[int]) -> None:
        moves.append(len(src))
        copy_slots(src, dst)

    monkeypatch.setattr(runner, "copy_slots", counting_copy)

    def propose(session_id: str, tokens: list[int]) -> Iterable[bytes]:
        rest = truth[session_id][len(tokens) :]
        return [tree_with_true_path(rng, tokens, rest)] if rest else []

    outcomes = pair.run(opens, use_draft=False, propose=propose)
    assert_all_equal(outcomes, opens, plainly)
    num_tokens = sum(len(outcome.token_ids) for outcome in outcomes.values())
    num_accepted = sum(outcome.num_accepted for outcome in outcomes.values())
    assert num_accepted > num_tokens / 2
    assert not any(outcome.rejected for outcome in outcomes.values())
    assert moves


def test_branching_trees_under_preemption_change_nothing(tight_pair: LocalPair, plainly: Plainly) -> None:
    tight_pair.reset()
    rng = random.Random(8)
    opens = {str(i): body_of({"prompt": i, "temperature": 1.0, "max_draft_tokens": 64}) for i in range(4)}
    truth = {s: [*body.token_ids, *plainly(body).token_ids] for s, body in opens.items()}

    def propose(session_id: str, tokens: list[int]) -> Iterable[bytes]:
        rest = truth[session_id][len(tokens) :]
        return [tree_with_true_path(rng, tokens, rest)] if rest and rng.random() < 0.7 else []

    assert_all_equal(tight_pair.run(opens, propose=propose, rng=rng), opens, plainly)


def test_a_perfect_chain_takes_one_step_per_nine_tokens(pair: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 2, "temperature": 1.0})
    expected = plainly(body)
    truth = [*body.token_ids, *expected.token_ids]
    outcome = pair.run(
        {"a": body}, use_draft=False, propose=lambda _, tokens: [chain(len(tokens), truth[len(tokens) :][:16])]
    )["a"]
    assert_equal(outcome, expected)
    # The first token comes with the prompt, then eight accepted and a bonus at a time.
    assert len(outcome.verdicts) <= 1 + -(-(len(expected.token_ids) - 1) // 9) + 1
