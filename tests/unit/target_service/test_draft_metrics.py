"""What a target exports of drafts, under the names that drafters of its own have, too."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from specdec.config.drafter_options import NgramOptions
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session
from tests.support.engine.targets import PROMPT, a_session
from tests.support.engine.worker_client import WorkerClient

START = len(PROMPT) + 1


@pytest.fixture
def client(client: WorkerClient) -> WorkerClient:
    """With a session whose first token is decided."""
    client.entry("s", open=a_session(body={"max_draft_tokens": 16, "credit_position": START}))
    client.turn(4)
    return client


def counted(registry: CollectorRegistry, what: str) -> dict[tuple[str, ...], float]:
    """The values of one of the drafters' counters by drafter and, where there is one, depth."""
    name = f"specdec_target_drafter_{what}_total"
    samples = [sample for metric in registry.collect() for sample in metric.samples if sample.name == name]
    return {
        tuple(sample.labels[key] for key in sorted(sample.labels, reverse=True)): sample.value for sample in samples
    }


def propose(client: WorkerClient, proposal: pb.Proposal, credit: int) -> pb.Verdict:
    client.entry("s", proposal=proposal.SerializeToString())
    client.entry("s", credit=pb.Credit(position=credit))
    client.turn()
    return client.take("verdict")[-1]


def test_what_drafts_propose_is_counted_by_the_names_that_they_tell(client: WorkerClient, truth: list[int]) -> None:
    wrong = truth[START + 1] ^ 1
    proposal = pb.Proposal(
        start_position=START,
        token_ids=[truth[START], wrong, truth[START + 1]],
        parents=[-1, 0, 0],
        draft_us=3000,
        path_length=2,
        drafters=["suffix", "ngram"],
        proposed_by=bytes([0, 0, 1]),
    )
    verdict = propose(client, proposal, START + 3)
    assert verdict.num_accepted == 2
    registry = client.pair.target_registry
    assert counted(registry, "proposed_tokens") == {("suffix",): 2, ("ngram",): 1}
    assert counted(registry, "verified_tokens") == {("suffix",): 2, ("ngram",): 1}
    assert counted(registry, "accepted_tokens") == {("suffix", "1"): 1, ("ngram", "2"): 1}
    assert counted(registry, "seconds") == pytest.approx({("suffix",): 2e-3, ("ngram",): 1e-3})


def test_a_node_that_is_proposed_again_counts_once(client: WorkerClient, truth: list[int]) -> None:
    proposal = pb.Proposal(start_position=START, token_ids=truth[START : START + 6])
    client.entry("s", proposal=proposal.SerializeToString())
    client.turn()
    propose(client, proposal, START + 3)
    propose(client, proposal, START + 30)
    registry = client.pair.target_registry
    assert counted(registry, "proposed_tokens") == {("draft_model",): 6}
    assert (
        sum(counted(registry, "accepted_tokens").values()) == 5
    )  # the last token that the credit allows is decided without a node


@pytest.mark.parametrize("name", ["draft", "eagle3", "", 'x"} 1\n', "a" * 1000])
def test_a_draft_that_tells_a_name_of_its_own_making_is_a_model(
    client: WorkerClient, truth: list[int], name: str
) -> None:
    proposal = pb.Proposal(
        start_position=START,
        token_ids=[truth[START]],
        draft_us=2**32 - 1,
        path_length=1,
        drafters=[name],
        proposed_by=bytes([0]),
    )
    propose(client, proposal, START + 3)
    registry = client.pair.target_registry
    assert counted(registry, "accepted_tokens") == {("draft_model", "1"): 1}
    assert counted(registry, "seconds") == {("draft_model",): 1}, "nobody is believed to need more for a token"


def test_the_own_draft_is_a_drafter_beside_the_targets_whose_time_is_measured(loaded_pair: LocalPair) -> None:
    loaded_pair.reset(own_draft=True, drafters=(NgramOptions(),))
    outcomes = loaded_pair.run({"a": open_session(PROMPT, max_tokens=40, ignore_eos=True)}, use_draft=False)
    registry = loaded_pair.target_registry
    accepted = counted(registry, "accepted_tokens")
    names = [name for verdict in outcomes["a"].verdicts for name in verdict.accepted_by]
    of_draft = sum(count for (name, _), count in accepted.items() if name == "draft_model")
    assert of_draft >= names.count("draft_model") > 0
    assert counted(registry, "proposed_tokens")["draft_model",] >= counted(registry, "verified_tokens")["draft_model",]
    assert counted(registry, "verified_tokens")["draft_model",] >= of_draft
    assert 0 < counted(registry, "seconds")["draft_model",] < 60
    assert ("ngram",) in counted(registry, "proposed_tokens")
