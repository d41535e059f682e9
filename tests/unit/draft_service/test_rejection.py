"""Rejection verification of what a draft without a model proposes: the target's distribution, as of any other draft.

By the chi-square test of `tests/support/engine/rejection.py`, whose false-alarm rate is 1e-6.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from specdec.config import DraftSettings
from specdec.config.drafter_options import NgramOptions
from specdec.draft_service.modelless.metrics import ModellessRecorder
from specdec.draft_service.modelless.role import ModellessDrafting
from specdec.draft_service.modelless.session import ModellessSession
from specdec.drafting.interface import Capabilities, Context, Offer, Room
from specdec.drafting.registry import make_drafter
from specdec.replica.worker.sessions import Owner
from specdec.telemetry import DraftMetrics
from specdec.v1 import common_pb2 as pb
from tests.support.engine.heard import Heard
from tests.support.engine.local_pair import LocalPair, prompts
from tests.support.engine.rejection import REJECTION, check_distribution, exact_distribution

NUM_SAMPLES = 768


class Oracle:
    """Says how the text goes on, as an endpoint with a greedy model would: the likeliest output."""

    name = "openai_api"
    capabilities = Capabilities()

    def __init__(self, likely: Sequence[int]) -> None:
        self._likely = list(likely)

    def open(self, context: Context) -> Oracle:
        return self

    def close(self, context: Context) -> None:
        """Nothing is kept."""

    def propose(self, context: Context, room: Room) -> Offer | None:
        said = list(context.token_ids[context.num_prompt_tokens :])
        rest = self._likely[len(said) :] if said == self._likely[: len(said)] else []
        return Offer(rest, list(range(-1, len(rest) - 1)), [0.5] * len(rest)) if rest else None


class PlainDraft:
    """A draft service's role, told what the target has committed, and heard whenever it proposes."""

    def __init__(self, identity: pb.ModelIdentity, likely: Sequence[int]) -> None:
        self.heard = Heard[ModellessSession]()
        settings = DraftSettings(drafters=(NgramOptions(),), target="127.0.0.1:1", max_sessions=NUM_SAMPLES)
        recorder = ModellessRecorder(DraftMetrics(CollectorRegistry()))
        drafters = [Oracle(likely), make_drafter(NgramOptions(prompt_lookup_min=1))]
        self.role = ModellessDrafting(self.heard, drafters, identity, settings, recorder)  # type: ignore[arg-type]
        self._sessions: dict[str, ModellessSession] = {}

    def propose(self, session_id: str, body: pb.OpenSession, tokens: list[int]) -> list[bytes]:
        """What it has to say after these tokens."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self.role.open_session(Owner("o", 0, 1), session_id, 1, body)
            self._sessions[session_id] = session
            self.heard.sessions.add(session)
        known = session.num_committed
        if len(tokens) > known:
            self.role.entry(session, "commit", pb.Commit(start_position=known, token_ids=tokens[known:]))
        self.heard.proposals.clear()
        self.role.step()
        return [proposal.SerializeToString() for proposal in self.heard.proposals]


@pytest.mark.parametrize("method", [pb.REJECTION_SAMPLE_METHOD_STANDARD, pb.REJECTION_SAMPLE_METHOD_BLOCK])
def test_point_masses_of_a_draft_without_a_model_leave_the_distribution(
    method: pb.RejectionSampleMethod.ValueType,
) -> None:
    pair = LocalPair()
    likely = max(exact_distribution(prompts()[1][:17], 3).items(), key=lambda item: item[1])[0]
    draft = PlainDraft(pair.target_built.info.identity, likely)

    def propose(session_id: str, tokens: list[int]) -> list[bytes]:
        return draft.propose(session_id, pair.opens[session_id], tokens)

    check_distribution(pair, REJECTION, NUM_SAMPLES, use_draft=False, propose=propose, method=method)
