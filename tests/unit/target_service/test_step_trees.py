"""A target tells what its steps had to choose from, to who asks, and decides the same for who does not."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.config.drafter_options import NgramOptions, SuffixOptions
from specdec.target_service.logprobs import LEAST_LOGPROB, node_logprobs
from specdec.v1 import common_pb2 as pb
from tests.support.engine.constrained import SCHEMAS, constrained
from tests.support.engine.grammars import json_schema
from tests.support.engine.local_pair import LocalPair, chain, open_session
from tests.support.engine.targets import PROMPT, a_session
from tests.support.engine.worker_client import WorkerClient


def verdict_of(client: WorkerClient, proposal: bytes, *, tells: bool, **sampling: object) -> pb.Verdict:
    """Of the step that verifies a proposal for the token behind the first."""
    body = {"credit_position": 21, "tells_trees": tells}
    client.entry("s", open=a_session(body=body, **sampling))
    client.turn(4)
    client.entry("s", proposal=proposal)
    client.entry("s", credit=pb.Credit(position=100))
    client.turn(1)
    first, verdict = client.take("verdict")[:2]
    assert not first.HasField("tree")  # there was nothing to choose from
    client.entry("s", close=pb.CloseSession())
    client.turn(1)
    return verdict


def forked(truth: list[int]) -> pb.Proposal:
    wrong = (truth[22] + 1) % 4096
    return pb.Proposal(
        start_position=21,
        token_ids=[wrong, truth[21], wrong, truth[22], wrong],
        parents=[-1, -1, 1, 1, 3],
        scores=bytes([10, 200, 20, 255, 0]),
    )


def test_a_tree_is_told_with_what_was_verified_and_what_was_taken(client: WorkerClient, truth: list[int]) -> None:
    proposal = forked(truth)
    verdict = verdict_of(client, proposal.SerializeToString(), tells=True, num_logprobs=0)
    tree = verdict.tree
    assert (tree.token_ids, tree.parents, tree.scores) == (proposal.token_ids, proposal.parents, proposal.scores)
    assert list(tree.accepted) == [1, 3]
    assert [tree.token_ids[node] for node in tree.accepted] == list(verdict.token_ids[:2])
    assert len(tree.verified) == sum(verdict.verified_by_depth) == len(tree.logprobs)
    assert set(tree.accepted) <= set(tree.verified)


def test_every_node_names_who_proposed_it_taken_or_not(loaded_pair: LocalPair) -> None:
    free = open_session(PROMPT, max_tokens=40, ignore_eos=True, body={"tells_trees": True})
    bound = constrained(json_schema(SCHEMAS["long names"]), body={"tells_trees": True})
    loaded_pair.reset(drafters=[NgramOptions(), SuffixOptions()])
    outcomes = loaded_pair.run({"free": free, "bound": bound})
    names: dict[str, set[str]] = {"accepted": set(), "others": set()}
    for outcome in outcomes.values():
        for verdict in outcome.verdicts:
            tree = verdict.tree
            assert len(tree.proposed_by) == len(tree.token_ids)
            of_node = [tree.drafters[place] for place in tree.proposed_by]
            told = [name for name in (of_node[node] for node in tree.accepted) if name != "forced"]
            assert told == list(verdict.accepted_by)
            names["accepted"].update(of_node[node] for node in tree.accepted)
            names["others"].update(name for node, name in enumerate(of_node) if node not in tree.accepted)
    assert {"draft_model", "forced"} <= names["accepted"]
    assert "draft_model" in names["others"]
    assert names["others"] & {"suffix", "ngram"}, "one of them at least, by who is asked first"
    assert (names["accepted"] | names["others"]) <= {"draft_model", "forced", "suffix", "ngram"}


def test_accepted_nodes_have_the_log_probability_of_their_token(client: WorkerClient, truth: list[int]) -> None:
    verdict = verdict_of(client, forked(truth).SerializeToString(), tells=True, num_logprobs=0)
    of_node = dict(zip(verdict.tree.verified, verdict.tree.logprobs, strict=True))
    told = [of_node[node] for node in verdict.tree.accepted]
    assert told == pytest.approx([position.logprob for position in verdict.logprobs[:2]], abs=1e-5)
    assert all(-100 < logprob <= 0 for logprob in of_node.values())


def test_who_does_not_ask_gets_the_same_tokens_and_no_tree(client: WorkerClient, truth: list[int]) -> None:
    told = verdict_of(client, forked(truth).SerializeToString(), tells=True)
    silent = verdict_of(client, forked(truth).SerializeToString(), tells=False)
    assert told.HasField("tree") and not silent.HasField("tree")
    assert told.token_ids == silent.token_ids and told.origins == silent.origins


def test_the_largest_tree_is_told_in_a_small_message(client: WorkerClient, truth: list[int]) -> None:
    proposal = chain(21, [4095] * 64)
    verdict = verdict_of(client, proposal, tells=True)
    assert len(verdict.tree.token_ids) == 64
    assert verdict.tree.ByteSize() < 1024
    assert not verdict.tree.accepted


def test_rows_that_hold_anything_have_a_finite_log_probability() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.nan, 0.0], [-math.inf, 0.0], [math.inf, 0.0]])
    told = node_logprobs(logits, [0, 0, 0, 0], 2)
    assert told[0] == pytest.approx(math.log(0.5))
    assert told[1:] == [LEAST_LOGPROB] * 3
