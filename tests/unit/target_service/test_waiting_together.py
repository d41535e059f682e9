"""Whether sessions with something at hand wait along for the drafts of others. On the real target."""

from __future__ import annotations

import pytest

from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.hold_off import DEPTHS, DraftLatency, pays_for_all
from tests.support.engine.local_pair import FreeRows, chain
from tests.support.engine.targets import a_session
from tests.support.engine.worker_client import WorkerClient

LATENCY = DraftLatency(first_s=0.005, node_s=0.001)


@pytest.fixture
def client(client: WorkerClient) -> WorkerClient:
    """Sessions s and t, whose first tokens are decided, on a target that finds it best to wait."""
    pacing = client.pair.verifier.steps.pacing = Pacing(None)
    pacing.clock.rows = FreeRows()
    choice = pacing._hold_off["greedy"]
    choice._current, choice._num_left = DEPTHS[-1], 1000
    for name in ("s", "t"):
        client.entry(name, open=a_session())
    client.turn()
    assert [client.session(name).num_tokens for name in ("s", "t")] == [21, 21]
    return client


def test_who_has_something_waits_along_where_little_is_decoded_meanwhile(
    truth: list[int], client: WorkerClient
) -> None:
    client.pair.verifier.steps.pacing.expectations.tokens_per_s = 10.0
    client.entry("s", proposal=chain(21, truth[21:29]))
    client.turn(3)
    assert client.session("t").hold_off is not None
    assert client.session("s").num_tokens == 21


def test_who_has_something_does_not_wait_along_where_more_is_decoded_meanwhile(
    truth: list[int], client: WorkerClient
) -> None:
    client.pair.verifier.steps.pacing.expectations.tokens_per_s = 10_000.0
    client.entry("s", proposal=chain(21, truth[21:29]))
    client.turn()
    assert client.session("s").num_tokens == 30
    assert client.session("t").num_tokens == 22


def test_where_nobody_has_anything_all_wait_whatever_is_decoded_meanwhile(client: WorkerClient) -> None:
    client.pair.verifier.steps.pacing.expectations.tokens_per_s = 10_000.0
    client.turn(3)
    assert all(client.session(name).hold_off is not None for name in ("s", "t"))


@pytest.mark.parametrize(("num_waiting", "pays"), [(1, False), (2, False), (4, True), (7, True)])
def test_a_wait_pays_for_eight_where_enough_of_them_need_it(num_waiting: int, pays: bool) -> None:
    assert pays_for_all(num_waiting, 0.9, 1000.0, LATENCY) is pays


def test_a_wait_of_which_nothing_is_accepted_pays_for_nobody() -> None:
    assert not pays_for_all(7, 0.0, 10.0, LATENCY)
