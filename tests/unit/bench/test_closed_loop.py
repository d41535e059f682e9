"""The speed of a closed loop is that of the time in which all its places are taken."""

from __future__ import annotations

import pytest

from bench.decode import Case
from specdec.commands.measuring.closed_loop import LoopClock, run_loop
from specdec.commands.measuring.requests import Sampling
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.fake_coordinator import running_fake_coordinator


def test_what_comes_before_all_places_are_taken_or_after_the_last_request_was_sent_does_not_count() -> None:
    clock = LoopClock(2)
    clock.begun(0.0)
    clock.begun(0.0)
    clock.arrived(1, 1.0, is_first=True)
    clock.arrived(90, 1.5, is_first=False)
    clock.arrived(1, 2.0, is_first=True)
    clock.arrived(3, 3.0, is_first=False)
    clock.begun(4.0)
    clock.arrived(5, 4.0, is_first=False)
    clock.arrived(70, 4.5, is_first=True)
    assert clock.tokens_per_s == (3 + 5) / 2


def test_too_few_requests_are_no_loop() -> None:
    clock = LoopClock(2)
    for when_s in (0.0, 0.0):
        clock.begun(when_s)
        clock.arrived(1, 1.0, is_first=True)
    with pytest.raises(ValueError, match="more of them"):
        _ = clock.tokens_per_s


async def test_every_request_of_a_loop_is_asked_once_and_answered() -> None:
    with running_fake_coordinator() as (coordinator, address):
        prompts = [(n,) for n in range(12)]
        run = await run_loop(address, prompts, Sampling(max_tokens=8), at_once=3, speculate=False)
    assert run.tokens_per_s > 0
    assert len(run.token_ids) == 12
    assert all(run.token_ids)
    asked = sorted(list(request.prompt_token_ids.token_ids) for request in coordinator.requests)
    assert asked == [[n] for n in range(12)]
    assert all(isinstance(completion.require_finished(), api.GenerateFinished) for completion in run.completions)


def test_a_group_of_a_loop_has_prompts_for_every_round_and_one_request_alone_has_none() -> None:
    prompts = [(n,) for n in range(8)]
    case = Case(prompts=prompts, sampling=Sampling(), batch=4, rounds=3)
    assert [len(group) for group in case.groups] == [12]
    assert [len(group) for group in Case(prompts=prompts, sampling=Sampling(), batch=4).groups] == [4, 4]
    assert len(Case(prompts=prompts, sampling=Sampling(), rounds=3).groups) == 8
