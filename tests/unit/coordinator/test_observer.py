"""What the observer measures between two events of a session."""

from __future__ import annotations

from array import array

import pytest
from prometheus_client import CollectorRegistry

from specdec.coordinator.observer import Observer
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.session import Request, Session
from specdec.coordinator.text.choice_output import ChoiceOutput
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.store.interface import RequestKey
from specdec.telemetry import CoordinatorMetrics
from specdec.v1 import common_pb2 as pb
from tests.support.scripted.model import make_tokenizer


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def observer(registry: CollectorRegistry) -> Observer:
    return Observer(CoordinatorMetrics(registry))


@pytest.fixture
def session() -> Session:
    detokenizers = DetokenizerFactory(make_tokenizer())
    return Session(
        session_id="one/uid/0",
        choice=0,
        request=Request(RequestKey("a", "mine"), "uid", ClientStream(), 0.0, pb.ModelIdentity()),
        token_ids=array("I", [1, 2, 3]),
        num_prompt_tokens=3,
        sampling=pb.TokenSampling(),
        verify_mode=pb.VERIFY_MODE_COUPLED,
        speculate=True,
        output=ChoiceOutput(detokenizers.create(True)),
        detokenizers=detokenizers,
    )


def measured(registry: CollectorRegistry, name: str, **labels: str) -> tuple[float, float]:
    """How often a time was measured, and the sum of what it was, in seconds."""
    count, total = (registry.get_sample_value(f"specdec_coordinator_{name}_{of}", labels) for of in ("count", "sum"))
    assert count is not None
    assert total is not None
    return count, total


async def test_a_drafts_time_is_what_its_answer_took_and_what_answers_nothing_took_none(
    observer: Observer, registry: CollectorRegistry, session: Session
) -> None:
    observer.proposal(session, 3.0, 2.0, is_direct=False)
    observer.proposal(session, 4.0, None, is_direct=False)
    observer.proposal(session, 5.0, 0.5, is_direct=True)
    assert measured(registry, "draft_latency_seconds", path="relayed") == (1, 2.0)
    assert measured(registry, "draft_latency_seconds", path="direct") == (1, 0.5)


async def test_a_targets_time_is_from_the_first_proposal_since_its_last_verdict_to_the_one_that_verified(
    observer: Observer, registry: CollectorRegistry, session: Session
) -> None:
    for now_s in (1.0, 2.0):
        observer.proposal(session, now_s, None, is_direct=False)
    observer.verdict(session, pb.Verdict(verified_by_depth=[1], num_accepted=1), 2, False, 4.0)
    observer.verdict(session, pb.Verdict(verified_by_depth=[1], num_accepted=1), 2, False, 8.0)
    assert measured(registry, "verify_latency_seconds") == (1, 3.0)


async def test_what_was_under_way_when_a_session_ended_is_forgotten(
    observer: Observer, registry: CollectorRegistry, session: Session
) -> None:
    observer.proposal(session, 1.0, None, is_direct=False)
    observer.session_ended(session)
    observer.verdict(session, pb.Verdict(verified_by_depth=[1], num_accepted=1), 2, False, 4.0)
    assert measured(registry, "verify_latency_seconds") == (0, 0.0)


async def test_drafts_that_make_up_reasons_make_no_series_for_each(
    observer: Observer, registry: CollectorRegistry
) -> None:
    observer.draft_dropped("stalled")
    for number in range(1000):
        observer.draft_dropped(f"reason {number}")
        observer.draft_dropped("x" * 10_000 + str(number))
    observer.draft_dropped("stalled")
    (metric,) = (m for m in registry.collect() if m.name == "specdec_coordinator_draft_fallbacks")
    counts = {s.labels["cause"]: s.value for s in metric.samples if s.name.endswith("_total")}
    assert len(counts) < 100
    assert max(map(len, counts)) < 100
    assert counts["stalled"] == 2
    assert sum(counts.values()) == 2002
