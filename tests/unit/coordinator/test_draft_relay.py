"""What a coordinator relays between target and drafts, and what it leaves to their direct link."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from specdec.config.coordinator import ProposalPath
from specdec.coordinator.draft_relay import DraftRelay
from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.links.link_events import LinkSettings
from specdec.coordinator.observer import Observer
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.drafting import DraftFault, DraftSide
from specdec.coordinator.sessions.session import Request, Session
from specdec.coordinator.text.choice_output import ChoiceOutput
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.store.interface import RequestKey
from specdec.telemetry import CoordinatorMetrics
from specdec.v1 import common_pb2 as pb
from tests.support.scripted.model import make_tokenizer

PROMPT = [1, 2, 3]
STALL_S = 2.0


@dataclass(eq=False)
class Draft:
    """A draft that notes what it gets."""

    address: str = "draft:1"
    identity: pb.ModelIdentity | None = None
    commits: list[tuple[int, list[int], bool]] = field(default_factory=list)

    def commit(self, session: Any, epoch: int, start: int, token_ids: Sequence[int], *, suspend: bool) -> None:
        self.commits.append((start, list(token_ids), suspend))


@dataclass(eq=False)
class Target:
    """A target that notes grants and proposals."""

    address: str = "target:1"
    grants: list[pb.LinkGrant] = field(default_factory=list)
    proposals: list[bytes] = field(default_factory=list)

    def grant_link(self, session: Any, grant: pb.LinkGrant) -> None:
        copy = pb.LinkGrant()
        copy.CopyFrom(grant)
        self.grants.append(copy)

    def relay(self, session: Any, proposal: bytes) -> None:
        self.proposals.append(proposal)


class Stage:
    """One session at one draft, whose clock is the test's."""

    def __init__(self, path: ProposalPath = "auto") -> None:
        detokenizers = DetokenizerFactory(make_tokenizer())
        self.session = Session(
            session_id="one/uid/0",
            choice=0,
            request=Request(RequestKey("a", "mine"), "uid", ClientStream(), 0.0, pb.ModelIdentity()),
            token_ids=array("I", PROMPT),
            num_prompt_tokens=3,
            sampling=pb.TokenSampling(),
            verify_mode=pb.VERIFY_MODE_COUPLED,
            speculate=True,
            output=ChoiceOutput(detokenizers.create(True)),
            detokenizers=detokenizers,
        )
        self.faults: list[DraftFault] = []
        self.draft, self.target = Draft(), Target()
        self.session.target.host = self.target  # type: ignore[assignment]
        self.side: DraftSide = self.session.drafting.opened(self.draft)  # type: ignore[arg-type]
        self.side.told = len(PROMPT)
        self.now_s = 100.0
        self.relay = DraftRelay(
            observer=Observer(CoordinatorMetrics(CollectorRegistry())),
            path=path,
            stall_s=STALL_S,
            on_bad_draft=lambda *_: None,
            on_draft=lambda _session, _side, fault: self.faults.append(fault),
            on_hedged=lambda _: None,
        )

    def link(self, *, is_direct: bool = True, position: int | None = None) -> None:
        told = self.session.position if position is None else position
        self.relay.on_link(self.session, self.side, pb.LinkState(is_direct=is_direct, position=told))

    def verdict(self, *token_ids: int, answered: int | None = None, epoch: int = 1, suspend: bool = False) -> None:
        """A verdict; `answered`: it went to the draft too, whose latest proposal starts there."""
        start = self.session.position
        self.session.token_ids.extend(token_ids)
        linked = None if answered is None else pb.LinkedDraft(epoch=epoch, position=answered, answer_us=900)
        self.relay.commit(self.session, start, token_ids, self.now_s, is_plain=False, suspend=suspend, linked=linked)


def test_tokens_that_the_target_has_sent_are_not_sent_again() -> None:
    at = Stage()
    at.verdict(7)
    assert at.draft.commits == [(3, [7], False)]
    at.link()
    for token in (8, 9, 10):
        at.verdict(token, answered=at.session.position)
    assert at.draft.commits == [(3, [7], False)]
    assert at.side.answer_s == pytest.approx(900e-6)
    assert not at.faults


@pytest.mark.parametrize("epoch", [0, 2])
def test_tokens_that_went_to_another_opening_are_relayed(epoch: int) -> None:
    at = Stage()
    at.link()
    at.verdict(7, answered=3, epoch=epoch)
    assert at.draft.commits == [(3, [7], False)]


def test_a_draft_that_never_joined_gets_its_tokens_whatever_the_target_says() -> None:
    at = Stage()
    at.verdict(7, answered=3)
    assert at.draft.commits == [(3, [7], False)]


@pytest.mark.parametrize("position", [4, 6, 1 << 31])
def test_a_draft_that_leaves_its_link_gets_what_it_lacks(position: int) -> None:
    at = Stage()
    at.link()
    for token in (7, 8, 9):
        at.verdict(token, answered=at.session.position)
    at.link(is_direct=False, position=position)
    lacking = [(position, [7, 8, 9][position - 3 :], False)] if position < 6 else []
    assert at.draft.commits == lacking
    at.verdict(10, answered=6)  # the target does not know yet
    assert at.draft.commits == [*lacking, (6, [10], False)]


def test_a_draft_that_left_its_link_with_unknown_tokens_is_ahead_until_they_arrive() -> None:
    at = Stage()
    assert not at.side.may_be_ahead(at.session.position)
    at.link()
    assert at.side.may_be_ahead(at.session.position)
    at.link(is_direct=False, position=5)
    assert at.side.may_be_ahead(at.session.position)
    at.verdict(7)
    assert at.side.may_be_ahead(at.session.position)
    at.verdict(8)
    assert not at.side.may_be_ahead(at.session.position)


def test_a_draft_that_joins_and_leaves_on_and_on_is_faulty() -> None:
    at = Stage()
    at.session.token_ids.extend([7] * 1000)
    for _ in range(200):
        at.link()
        at.link(is_direct=False, position=3)
    assert set(at.faults) == {DraftFault.FLOOD}
    assert len(at.draft.commits) == 32
    at.faults.clear()
    for token in range(100):
        at.verdict(token)
        at.link()
    assert not at.faults


def test_a_draft_that_seems_deaf_gets_its_tokens_from_both_until_it_answers() -> None:
    at = Stage()
    at.link()
    at.verdict(7, answered=3)
    at.now_s += 0.3
    at.verdict(8, answered=3)
    assert at.draft.commits == [(3, [7, 8], False)]
    at.verdict(9, answered=3)
    assert at.draft.commits[1:] == [(5, [9], False)]
    at.verdict(10, answered=6)
    at.verdict(11, answered=7)
    assert len(at.draft.commits) == 2
    assert not at.faults
    at.now_s += STALL_S
    at.verdict(12, answered=7)
    assert at.faults == [DraftFault.STALL]


def test_a_linked_draft_is_suspended_by_its_target_and_resumes_without_a_relay() -> None:
    at = Stage()
    at.link()
    at.verdict(7, answered=3)
    for token in (8, 9):
        at.verdict(token, answered=4, suspend=True)
    assert at.side.is_suspended
    at.verdict(10, answered=4)
    assert not at.side.is_suspended
    assert at.draft.commits == []


def test_a_suspended_draft_that_leaves_its_link_gets_all_tokens_when_it_resumes() -> None:
    at = Stage()
    at.link()
    at.verdict(7, answered=3, suspend=True)
    at.link(is_direct=False, position=3)
    at.verdict(8, suspend=True)
    assert at.draft.commits == []
    at.verdict(9)
    assert at.draft.commits == [(3, [7, 8, 9], False)]


@pytest.mark.parametrize(("path", "num"), [("auto", 1), ("relayed", 1), ("direct", 0)])
def test_proposals_that_come_here_are_relayed_unless_the_setting_forbids_it(path: ProposalPath, num: int) -> None:
    at = Stage(path)
    at.relay.on_proposal(at.session, at.side, pb.Proposal(start_position=3, token_ids=[7]).SerializeToString())
    assert len(at.target.proposals) == num


@pytest.mark.parametrize("grants", [True, False])
async def test_each_pair_of_openings_gets_one_grant_with_a_key_of_its_own(grants: bool) -> None:
    at = Stage()
    events: Any = None
    settings = LinkSettings("owner", 1, 1.0, 0.1, 0.1, grants_links=grants)
    links = [DraftLink(f"draft:{number}", None, settings, events=events, proposals=events) for number in (1, 2)]  # type: ignore[arg-type]
    at.session.drafting.sides.clear()
    for link in links:  # the second one is a hedge
        at.session.drafting.opened(link)
        link.grant_link(at.session)
        link.grant_link(at.session)
    assert len(at.target.grants) == (1 if grants else 0)
    at.session.target.supersede()
    links[0].grant_link(at.session)
    assert len(at.target.grants) == (1 if grants else 0), "the target has not been told to open it again"
    at.session.target.told_epoch = at.session.target.epoch
    for link in links:
        link.grant_link(at.session)
    keys = {grant.key for grant in at.target.grants}
    assert len(keys) == len(at.target.grants) == (2 if grants else 0)
    assert all(len(key) == 16 for key in keys)
    assert {grant.epoch for grant in at.target.grants} <= {2}
