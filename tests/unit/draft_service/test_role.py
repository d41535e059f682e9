"""A draft without a model as its owner sees it: commits in, trees or chains out, whatever its drafters do."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from specdec.config import DraftSettings
from specdec.config.drafter_options import NgramOptions
from specdec.draft_service.modelless.metrics import ModellessRecorder
from specdec.draft_service.modelless.proposals import main_chain, merged, named
from specdec.draft_service.modelless.role import ModellessDrafting
from specdec.draft_service.modelless.session import ModellessSession
from specdec.drafting.interface import Capabilities, Context, Drafter, Offer, Room
from specdec.drafting.registry import make_drafter
from specdec.replica.worker.errors import SessionFailure
from specdec.replica.worker.sessions import Owner
from specdec.telemetry import DraftMetrics
from specdec.v1 import common_pb2 as pb
from tests.support.engine.heard import Heard

IDENTITY = pb.ModelIdentity(name="ngram", vocab_size=1000, max_model_len=64, eos_token_ids=[2])
TEXT = [5, 6, 7, 8, 9, 5, 6]


class Broken:
    """A drafter that fails."""

    name = "broken"
    capabilities = Capabilities()

    def open(self, context: Context) -> Broken:
        return self

    def close(self, context: Context) -> None:
        """Nothing is kept."""

    def propose(self, context: Context, room: Room) -> Offer | None:
        raise ValueError("broken")


class World:
    def __init__(self, *drafters: Drafter) -> None:
        self.heard = Heard[ModellessSession]()
        settings = DraftSettings(drafters=(NgramOptions(),), target="127.0.0.1:1", max_ahead_tokens=4)
        recorder = ModellessRecorder(DraftMetrics(CollectorRegistry()))
        made = [*drafters, make_drafter(NgramOptions())]
        self.role = ModellessDrafting(self.heard, made, IDENTITY, settings, recorder)  # type: ignore[arg-type]

    def open(self, *, rejection: bool = False, max_tokens: int = 20) -> ModellessSession:
        body = pb.OpenSession(token_ids=TEXT, num_prompt_tokens=len(TEXT))
        body.sampling.temperature, body.sampling.top_p, body.sampling.repetition_penalty = 1.0, 1.0, 1.0
        body.sampling.max_tokens = max_tokens
        body.verify_mode = pb.VERIFY_MODE_REJECTION if rejection else pb.VERIFY_MODE_COUPLED
        session = self.role.open_session(Owner("o", 0, 1), "s", 1, body)
        self.heard.sessions.add(session)
        return session

    def turn(self) -> list[pb.Proposal]:
        self.heard.proposals.clear()
        self.role.absorb_proposals(0.0)
        if self.role.wait_s(0.0) == 0:
            self.role.step()
        return list(self.heard.proposals)


def test_what_followed_before_is_proposed_below_the_last_committed_token() -> None:
    world = World()
    session = world.open()
    (first,) = world.turn()
    assert (first.start_position, list(first.token_ids)) == (7, [7, 8, 9, 5])
    assert world.turn() == []
    world.role.entry(session, "commit", pb.Commit(start_position=7, token_ids=[7, 8]))
    (second,) = world.turn()
    assert (second.start_position, list(second.token_ids)) == (9, [9, 5, 6, 7])


def test_every_commit_is_answered_also_where_nothing_comes_to_mind() -> None:
    world = World()
    session = world.open()
    world.turn()
    world.role.entry(session, "commit", pb.Commit(start_position=7, token_ids=[77]))
    (answer,) = world.turn()
    assert (answer.start_position, list(answer.token_ids)) == (8, [])


def test_in_rejection_mode_a_chain_of_point_masses_is_proposed() -> None:
    world = World()
    world.open(rejection=True)
    (chain,) = world.turn()
    assert list(chain.token_ids) == [7, 8, 9, 5]
    assert not chain.parents
    assert [(list(q.token_ids), list(q.probs)) for q in chain.distributions] == [([t], [1.0]) for t in chain.token_ids]
    assert chain.draws_afresh


def test_nothing_is_proposed_past_the_end_or_to_who_wants_nothing() -> None:
    world = World()
    session = world.open(max_tokens=2)
    (short,) = world.turn()
    assert list(short.token_ids) == [7, 8]
    world.role.entry(session, "commit", pb.Commit(start_position=7, token_ids=[7], suspend=True))
    assert world.turn() == []


def test_a_drafter_that_fails_is_dropped_and_the_others_go_on() -> None:
    world = World(Broken())
    session = world.open()
    (proposal,) = world.turn()
    assert list(proposal.token_ids) == [7, 8, 9, 5]
    assert list(proposal.drafters) == ["ngram"]
    assert list(proposal.proposed_by) == [0, 0, 0, 0]
    assert [part.name for part in session.parts] == ["ngram"]


@pytest.mark.parametrize(
    ("start", "tokens", "reason"),
    [(9, [1], "COMMIT_GAP"), (5, [1, 2], "COMMIT_MISMATCH"), (7, [1000], "INVALID_FIELD")],
)
def test_a_commit_that_does_not_fit_ends_the_session(start: int, tokens: list[int], reason: str) -> None:
    world = World()
    session = world.open()
    with pytest.raises(SessionFailure) as caught:
        world.role.entry(session, "commit", pb.Commit(start_position=start, token_ids=tokens))
    assert caught.value.reason == reason


def test_offers_are_merged_into_one_tree_of_which_the_main_chain_is_the_first_path() -> None:
    offers = [Offer([1, 2], [-1, 0], [0.9, 0.8]), Offer([1, 3], [-1, 0], [0.5, 0.4]), Offer([4], [-1], [0.1])]
    found = merged([named(offer, name) for offer, name in zip(offers, ("a", "b", "c"), strict=True)], Room(8, 8))
    assert found is not None
    tree = found.offer
    assert (tree.token_ids, tree.parents) == ([1, 2, 3, 4], [-1, 0, 0, -1])
    assert found.drafters == ["a", "a", "b", "c"]
    assert main_chain(tree).token_ids == [1, 2]
    assert merged([], Room(8, 8)) is None
