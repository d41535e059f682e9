"""What an endpoint's answers say of a block of draft tokens, and sessions that follow them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specdec.config.endpoint_options import ApiTargetOptions
from specdec.drafting.endpoints.calls import ApiFault
from specdec.replica.worker.sessions import Owner
from specdec.target_service.api.answers import greedy_body, greedy_tokens, next_token, sampled_body
from specdec.target_service.api.session import ApiSession
from specdec.target_service.tree.walk import EndOfChoice
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import SamplingParams
from tests.support.for_each import for_each

VOCABULARY = 100


def ranked(best: int, other: int) -> dict[str, Any]:
    return {str(other): {"logprob": -2.0, "rank": None}, str(best): {"logprob": -0.5, "rank": 1}}


def answer(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": [9], **choice}]}


def test_the_likeliest_tokens_of_a_block_are_read_in_both_forms() -> None:
    told = [None, ranked(1, 2), ranked(3, 4), ranked(5, 6)]
    assert greedy_tokens(answer(prompt_logprobs=told), 4, 2, "prompt_logprobs", VOCABULARY) == [3, 5, 9]
    tops = [None, *({f"token_id:{best}": -0.5, f"token_id:{best + 1}": -2.0} for best in (1, 3, 5, 9))]
    assert greedy_tokens(answer(logprobs={"top_logprobs": tops}), 4, 2, "echo", VOCABULARY) == [3, 5, 9]
    assert greedy_tokens(answer(), 4, 0, "echo", VOCABULARY) == [9]


@for_each(
    "told, fields, kind",
    [
        ({}, "prompt_logprobs", "wrong_json"),
        ({"choices": [{"text": "a"}]}, "prompt_logprobs", "no_token_ids"),
        (answer(), "prompt_logprobs", "no_prompt_logprobs"),
        (answer(prompt_logprobs=[None] * 3), "prompt_logprobs", "no_prompt_logprobs"),
        (answer(prompt_logprobs=[None] * 4), "prompt_logprobs", "no_rank"),
        (answer(prompt_logprobs=[{"1": {"rank": 2}}] * 4), "prompt_logprobs", "no_rank"),
        (answer(prompt_logprobs=[ranked(VOCABULARY, 1)] * 4), "prompt_logprobs", "wrong_token"),
        (answer(prompt_logprobs=[{"x" * 99: {"rank": 1}}] * 4), "prompt_logprobs", "wrong_token"),
        (answer(token_ids=[VOCABULARY]), "echo", "wrong_token"),
        (answer(logprobs={"top_logprobs": [{" the": -1.0}] * 5}), "echo", "no_token_ids"),
        (answer(logprobs={"top_logprobs": [{"token_id:1": "x"}] * 5}), "echo", "no_echo"),
        (answer(logprobs=None), "echo", "no_echo"),
    ],
)
def test_an_answer_that_does_not_say_is_a_fault_of_its_kind(told: Any, fields: str, kind: str) -> None:
    with pytest.raises(ApiFault) as caught:
        greedy_tokens(told, 4, 2, fields, VOCABULARY)
    assert caught.value.kind == kind


def test_a_call_asks_for_no_more_than_it_needs() -> None:
    assert "prompt_logprobs" not in greedy_body("m", [1], 0, "prompt_logprobs")
    assert greedy_body("m", [1, 2], 1, "prompt_logprobs")["prompt_logprobs"] == 1
    assert greedy_body("m", [1, 2], 1, "echo")["echo"] is True
    sampled = sampled_body("m", [1], SamplingParams(temperature=0.7, top_p=0.9, max_tokens=1, seed=0))
    assert (sampled["temperature"], sampled["top_p"], sampled["max_tokens"]) == (0.7, 0.9, 1)
    assert "seed" not in sampled
    assert next_token(answer(), VOCABULARY) == 9


def test_the_inexact_ratio_test_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="needs whole distributions"):
        ApiTargetOptions.model_validate({"base_url": "http://x/v1", "model": "m", "sampled": "ratio"})


def session(*, max_tokens: int = 20, credit: int = 100) -> ApiSession:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, eos_token_ids=(2,))
    return ApiSession(
        session_id="s", epoch=1, owner=Owner("o", 0, 1), params=params, end=EndOfChoice(params, 2, 64),
        token_ids=[10, 11], num_prompt_tokens=2, max_draft_tokens=4, credit_position=credit,
    )  # fmt: skip


def proposal(start: int, *token_ids: int, parents: tuple[int, ...] = ()) -> bytes:
    return pb.Proposal(start_position=start, token_ids=token_ids, parents=parents).SerializeToString()


def test_draft_tokens_are_committed_up_to_the_first_that_the_target_does_not_say() -> None:
    one = session()
    one.propose(proposal(2, 20, 21, 22))
    assert one.commit([20, 21, 30, 40], one.drafted()) == ([20, 21, 30], 2)
    assert one.token_ids == [10, 11, 20, 21, 30]
    assert one.drafted() == []
    one.propose(proposal(2, 20, 21, 30, 31, 32))
    assert one.drafted() == [31, 32]


def test_of_a_tree_its_main_path_is_verified_as_far_as_limits_go() -> None:
    one = session()
    one.propose(proposal(2, 20, 25, 21, 22, 23, 24, parents=(-1, -1, 0, 2, 3, 4)))
    assert one.drafted() == [20, 21, 22, 23]
    limited = session(max_tokens=3, credit=100)
    limited.propose(proposal(2, 20, 21, 22, 23))
    assert limited.drafted() == [20, 21]
    without_credit = session(credit=4)
    without_credit.propose(proposal(2, 20, 21, 22, 23))
    assert without_credit.drafted() == [20]


def test_a_choice_ends_with_its_end_of_sequence_and_nothing_after_it() -> None:
    one = session()
    one.propose(proposal(2, 20, 2, 21))
    assert one.commit([20, 2, 21, 22], one.drafted()) == ([20, 2], 2)
    assert (one.finish_reason, one.stop_token_id) == (pb.FINISH_REASON_STOP, 2)


@pytest.mark.parametrize(
    "encoded", [b"\xff\xff", b"x" * 100_000, proposal(2, *range(65)), proposal(2, 1, parents=(-1, 0))]
)
def test_what_is_no_proposal_is_refused(encoded: bytes) -> None:
    one = session()
    with pytest.raises(ValueError, match="proposal"):
        one.propose(encoded)
    assert one.drafted() == []
