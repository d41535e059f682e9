"""Sessions that have taken a step's tokens, of which their owners are told while the next step is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.replica.bridge.frames import FrameKind
from specdec.v1 import common_pb2 as pb
from tests.support.engine.constrained import SCHEMAS, constrained
from tests.support.engine.grammars import json_schema
from tests.support.engine.late_device import LateDevice, unhurried
from tests.support.engine.local_pair import LocalPair, chain
from tests.support.engine.overlapping import OTHER, a_session, tokens_of
from tests.support.engine.targets import target_client
from tests.support.engine.worker_client import WorkerClient, reason_of


@pytest.fixture
def untold(client: WorkerClient) -> WorkerClient:
    """With a session whose owner was not told of its first token."""
    client.entry("s", open=a_session(body={"deadline_ms": 5000}))
    client.turn()
    assert client.session().num_tokens == 21
    assert client.take("verdict") == []
    return client


def kinds(client: WorkerClient) -> list[str]:
    return [result.WhichOneof("result") for result in client.results]


def test_a_session_that_is_closed_first_is_told(untold: WorkerClient, truth: dict[str, list[int]]) -> None:
    untold.entry("s", close=pb.CloseSession(reason="cancelled"))
    untold.turn()
    assert untold.session() is None
    assert tokens_of(untold) == truth["s"][20:21]


def test_a_session_that_fails_first_is_told_before_its_error(untold: WorkerClient) -> None:
    untold.results.clear()
    untold.clock.now_s += 600.0
    untold.turn()
    assert kinds(untold) == ["verdict", "error"]
    assert reason_of(untold.results[1].error.status) == "DEADLINE_EXCEEDED"


def test_a_proposal_is_rejected_after_the_tokens_that_it_is_expected_below(untold: WorkerClient) -> None:
    untold.results.clear()
    untold.entry("s", proposal=pb.Proposal(start_position=21, token_ids=[1 << 20]).SerializeToString())
    untold.turn()
    assert kinds(untold)[:2] == ["verdict", "proposal_rejected"]
    assert untold.results[1].proposal_rejected.expected_position == 21


def test_an_owner_that_attaches_again_first_is_told_once(client: WorkerClient, truth: dict[str, list[int]]) -> None:
    client.entry("s", open=a_session())
    client.entry("other", open=a_session(OTHER))
    client.turn(3)
    held = {"s": (1, 20 + len(tokens_of(client))), "other": (1, 25 + len(tokens_of(client, "other")))}
    assert held["s"][1] < client.session().num_tokens
    client.frame(FrameKind.STREAM_CLOSED)
    client.attach(stream_id=2, held=held)
    client.turn(60)
    assert tokens_of(client) == truth["s"][held["s"][1] :]
    assert tokens_of(client, "other") == truth["other"][held["other"][1] :]


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
def test_what_is_learnt_and_counted_is_that_of_steps_that_are_computed_at_once(
    loaded: tuple[LocalPair, LateDevice], truth: dict[str, list[int]], is_chain: bool
) -> None:
    pair, device = loaded
    guess = pb.Proposal.FromString(chain(21, [*truth["s"][21:25], 3]))
    if not is_chain:
        guess.token_ids.append(truth["s"][21] ^ 1)
        guess.parents.extend([-1, 0, 1, 2, 3, -1])
    found: list[Any] = []
    try:
        for launch in (device.launch, None):
            pair.target_built.engine.launch_pass = launch
            with target_client(pair, unhurried()) as client:
                client.entry("s", open=a_session(body={"credit_position": 21}))
                client.turn(2)
                client.entry("s", proposal=guess.SerializeToString())
                client.entry("s", credit=pb.Credit(position=30))
                client.turn(8)
                told = [
                    (v.start_position, [*v.token_ids], v.num_accepted, v.num_wasted) for v in client.take("verdict")
                ]
                acceptance = pair.verifier.steps.pacing.expectations.acceptance
                found.append((told, acceptance.depth_rate, repr(acceptance["draft_model"])))
    finally:
        pair.target_built.engine.launch_pass = device.launch
    assert found[0] == found[1]
    assert found[0][0][1][2] == 4
    assert "accepted=0.995" in found[0][2] or "accepted=1.0" in found[0][2]


def noted(client: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that are sampled when a pass is over."""
    sampler, num_rows = client.pair.verifier.steps.sampler, list[int]()
    sample = sampler.sample

    def noting(logits: torch.Tensor, rows: Sequence[RowContext]) -> list[int | None]:
        num_rows.append(len(rows))
        return sample(logits, rows)

    monkeypatch.setattr(sampler, "sample", noting)
    return num_rows


def test_tokens_are_drawn_behind_the_pass(
    client: WorkerClient, truth: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows = noted(client, monkeypatch)
    client.entry("s", open=a_session())
    client.turn(60)
    assert tokens_of(client) == truth["s"][20:]
    assert num_rows == []


def test_rows_that_await_masks_are_sampled_with_them(client: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = noted(client, monkeypatch)
    client.entry("s", open=constrained(json_schema(SCHEMAS["record"]), temperature=1.0))
    until_s = time.monotonic() + 60.0
    while not num_rows and time.monotonic() < until_s:  # until it is compiled
        client.turn()
    client.turn(2)
    assert num_rows == [1, 1, 1]


def test_where_drawing_behind_a_pass_fails_rows_are_sampled_when_it_is_over(
    client: WorkerClient, truth: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows, sampler = noted(client, monkeypatch), client.pair.verifier.steps.sampler
    start: Callable[..., Any] = Sampler.start
    num_calls = 0

    def failing(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise ValueError("no room")
        return start(sampler, *arguments)

    monkeypatch.setattr(sampler, "start", failing)
    client.entry("s", open=a_session())
    client.turn(60)
    assert tokens_of(client) == truth["s"][20:]
    assert client.take("error") == []
    assert num_rows == [1]
