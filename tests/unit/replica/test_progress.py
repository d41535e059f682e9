"""A session without a verdict says what it is doing, once a second; a load report says how full the replica is."""

from __future__ import annotations

import pytest

from specdec.target_service.verdicts import PROGRESS_INTERVAL_S
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.worker_client import WorkerClient


def body() -> pb.OpenSession:
    sampling = pb.TokenSampling(temperature=1.0, top_p=1.0, repetition_penalty=1.0, max_tokens=50, ignore_eos=True)
    return pb.OpenSession(token_ids=range(20, 40), num_prompt_tokens=20, sampling=sampling, credit_position=22)


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return LocalPair()


def age(client: WorkerClient) -> None:
    """As if all that happened to the session had happened that much earlier, and the next report were due."""
    times = client.session().times
    times.opened_at_s -= PROGRESS_INTERVAL_S
    times.told_at_s -= PROGRESS_INTERVAL_S
    if times.last_verdict_at_s is not None:
        times.last_verdict_at_s -= PROGRESS_INTERVAL_S
    client.clock.now_s += PROGRESS_INTERVAL_S


def test_a_session_that_waits_for_credit_says_so_once_a_second(pair: LocalPair) -> None:
    client = WorkerClient(pair, "target")
    client.attach()
    client.entry("s", open=body())
    client.turn(5)
    assert not client.take("progress")
    for _ in range(2):
        age(client)
        client.turn(2)
        [progress] = client.take("progress")
        assert progress.state == pb.SessionProgress.STATE_PAUSED
        assert progress.num_computed_tokens > 0
    client.end_all()


def test_a_report_counts_sessions_and_the_tokens_that_wait(pair: LocalPair) -> None:
    client = WorkerClient(pair, "target")
    client.attach()
    client.entry("s", open=body())
    client.turn(1)
    load = client.role.load()
    assert (load.num_sessions, load.max_sessions) == (1, pair.target_settings.max_sessions)
    assert load.num_waiting_tokens == 0
    pair.target_built.engine.add(range(100, 130), num_prompt_tokens=30)
    assert client.role.load().num_waiting_tokens == 30
    for seq in list(pair.target_built.engine.scheduler.sequences):
        if len(seq.token_ids) == 30:
            pair.target_built.engine.free(seq)
    client.end_all()
