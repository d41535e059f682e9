"""Defaults, limits and names of fields. The integration test has the table of bad requests."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from specdec.coordinator.intake.prompt import check_prompt
from specdec.coordinator.intake.terms import resolve_max_tokens
from specdec.coordinator.intake.validation import Limits, check_sampling, check_speculation
from specdec.coordinator.tenants.quotas import Allowance
from specdec.coordinator.text.bad_words import bad_word_sequences
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

LIMITS = Limits(
    vocab_size=100,
    max_model_len=50,
    max_tokens=40,
    max_choices=4,
    max_stop_strings=2,
    max_stop_string_bytes=8,
    max_logprobs=5,
    max_logit_bias=3,
    max_prompt_bytes=1000,
)


def test_defaults_are_neutral() -> None:
    checked = check_sampling(api.SamplingParams(), LIMITS)
    sampling = checked.for_choice(2, 77, 9)
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (1, 1, 0, 1)
    assert (sampling.seed, sampling.choice, sampling.max_tokens) == (77, 2, 9)
    assert not sampling.HasField("num_logprobs")
    assert (checked.n, checked.skip_special_tokens, checked.include_stop_in_output) == (1, True, False)


def test_zero_is_a_value_and_not_a_default() -> None:
    params = api.SamplingParams(temperature=0.0, logprobs=0, skip_special_tokens=False)
    checked = check_sampling(params, LIMITS)
    assert checked.token_sampling.temperature == 0
    assert checked.token_sampling.HasField("num_logprobs")
    assert not checked.skip_special_tokens


def test_bounds_themselves_are_allowed() -> None:
    check_sampling(
        api.SamplingParams(
            top_p=1.0, min_p=1.0, repetition_penalty=0.01, temperature=100.0, presence_penalty=-2.0,
            frequency_penalty=2.0, logit_bias={99: -100.0}, max_tokens=40, min_tokens=40, stop=["12345678"], n=4,
            logprobs=5,
        ),
        LIMITS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (api.SamplingParams(logit_bias=dict.fromkeys(range(4), 0.0)), "sampling.logit_bias"),
        (api.SamplingParams(stop=["é" * 5]), "sampling.stop[0]"),
        (api.SamplingParams(stop_token_ids=[1] * 2000), "sampling.stop_token_ids"),
        (api.SamplingParams(min_tokens=41), "sampling.min_tokens"),
        (api.SamplingParams(allowed_token_ids=[1] * 16385), "sampling.allowed_token_ids"),
        (api.SamplingParams(allowed_token_ids=[1, 2**32 - 1]), "sampling.allowed_token_ids[1]"),
        (api.SamplingParams(allowed_token_ids=[7], stop_token_ids=[7, 8], min_tokens=1), "sampling.min_tokens"),
        (api.SamplingParams(bad_words=["x"] * 257), "sampling.bad_words"),
        (api.SamplingParams(bad_words=["x", ""]), "sampling.bad_words[1]"),
        (api.SamplingParams(bad_words=[" \n"]), "sampling.bad_words[0]"),
        (api.SamplingParams(bad_words=["é" * 129]), "sampling.bad_words[0]"),
    ],
)
def test_limits_name_the_field(params: api.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(params, LIMITS)
    assert caught.value.field == field


def test_min_tokens_that_holds_back_every_token_is_refused() -> None:
    limits = replace(LIMITS, eos_token_ids=frozenset({98, 99, 100}))
    check_sampling(api.SamplingParams(min_tokens=1, stop_token_ids=range(97)), limits)
    check_sampling(api.SamplingParams(stop_token_ids=range(98)), limits)
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(api.SamplingParams(min_tokens=1, stop_token_ids=range(98)), limits)
    assert caught.value.field == "sampling.min_tokens"


def test_a_prompt_may_leave_room_for_one_token_but_no_less() -> None:
    checked = check_sampling(api.SamplingParams(), LIMITS)
    prompt = check_prompt("prompt", [1] * 49, checked, LIMITS)
    assert resolve_max_tokens(checked, len(prompt), LIMITS) == 1
    with pytest.raises(InvalidRequest, match="no room"):
        check_prompt("prompt", [1] * 50, checked, LIMITS)


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    checked = check_sampling(api.SamplingParams(truncate_prompt_tokens=3), LIMITS)
    assert check_prompt("prompt", list(range(60)), checked, LIMITS) == [57, 58, 59]


@pytest.mark.parametrize(
    ("wanted", "num_prompt_tokens", "given"),
    [(None, 1, 40), (None, 30, 20), (30, 10, 30), (30, 45, 5), (8192, 1, 40), (2**32 - 1, 49, 1)],
)
def test_max_tokens_is_what_was_asked_for_and_can_be_had(
    wanted: int | None, num_prompt_tokens: int, given: int
) -> None:
    checked = check_sampling(api.SamplingParams(max_tokens=wanted), LIMITS)
    assert resolve_max_tokens(checked, num_prompt_tokens, LIMITS) == given


def test_what_cannot_be_had_is_refused_where_that_is_wanted() -> None:
    limits = replace(LIMITS, refuses_excess_tokens=True)
    checked = check_sampling(api.SamplingParams(max_tokens=31), limits)
    assert resolve_max_tokens(checked, 19, limits) == 31
    with pytest.raises(InvalidRequest, match="maximum context length is 50 tokens, and the prompt has 20") as caught:
        resolve_max_tokens(checked, 20, limits)
    assert caught.value.field == "sampling.max_tokens"
    with pytest.raises(InvalidRequest, match="the limit is 7") as caught:
        resolve_max_tokens(checked, 1, limits.within(Allowance(max_tokens=7)))
    assert caught.value.field == "sampling.max_tokens"
    assert resolve_max_tokens(check_sampling(api.SamplingParams(), limits), 20, limits) == 30


def test_no_draft_tokens_means_no_speculation() -> None:
    params = api.SpeculationParams(max_draft_tokens=0)
    assert not check_speculation(params, pb.VERIFY_MODE_COUPLED, LIMITS).enabled
    checked = check_speculation(api.SpeculationParams(), pb.VERIFY_MODE_REJECTION, LIMITS)
    assert checked.verify_mode == pb.VERIFY_MODE_REJECTION
    assert checked.max_draft_tokens is None


@pytest.mark.parametrize("wanted_ms", [0.0, -1.0, 1e-9, 60_001.0, math.inf, -math.inf, math.nan])
def test_a_time_per_token_that_makes_no_sense_is_refused_by_name(wanted_ms: float) -> None:
    params = api.SpeculationParams(time_per_token_ms=wanted_ms)
    with pytest.raises(InvalidRequest) as caught:
        check_speculation(params, pb.VERIFY_MODE_COUPLED, LIMITS)
    assert caught.value.field == "speculation.time_per_token_ms"


@pytest.mark.parametrize(("wanted_ms", "told_us"), [(None, 0), (0.001, 1), (12.5, 12_500), (60_000.0, 60_000_000)])
def test_a_time_per_token_is_told_in_microseconds(wanted_ms: float | None, told_us: int) -> None:
    params = api.SpeculationParams(time_per_token_ms=wanted_ms)
    assert check_speculation(params, pb.VERIFY_MODE_COUPLED, LIMITS).time_per_token_us == told_us


def pieces(text: str) -> list[int]:
    """A tokenizer that joins a space with the letter after it, and knows no space before a digit."""
    return [200 + ord(piece[-1]) if len(piece) > 1 else ord(piece) for piece in re.findall(" ?[a-z]|.", text)]


def test_a_bad_word_is_looked_for_with_a_space_before_it_and_without() -> None:
    assert bad_word_sequences(["ab", " b"], pieces, 1000) == [[97, 98], [297, 98], [98], [298]]


def test_a_space_that_is_a_token_of_its_own_makes_no_second_sequence() -> None:
    assert bad_word_sequences(["1"], pieces, 1000) == [[49]]


def test_a_bad_word_that_the_model_cannot_say_is_left_out_and_one_of_many_tokens_is_refused() -> None:
    assert bad_word_sequences(["b"], pieces, 250) == [[98]]
    with pytest.raises(InvalidRequest) as caught:
        bad_word_sequences(["a", "a" * 65], pieces, 1000)
    assert caught.value.field == "sampling.bad_words[1]"


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (pb.Constraint(), "sampling.constraint"),
        (pb.Constraint(regex=""), "sampling.constraint.regex"),
        (pb.Constraint(json_schema="{"), "sampling.constraint.json_schema"),
        (pb.Constraint(grammar="a" * 2**19), "sampling.constraint.grammar"),
        (pb.Constraint(regex="a", after_token_id=100), "sampling.constraint.after_token_id"),
        (pb.Constraint(regex="a", after_token_id=1, after_token="b"), "sampling.constraint.after_token"),
    ],
)
def test_a_constraint_that_cannot_be_one_is_refused(constraint: pb.Constraint, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_sampling(api.SamplingParams(constraint=constraint), replace(LIMITS, knows_constraints=True))
    assert error.value.field == field


def test_a_constraint_that_no_target_knows_is_refused_by_a_reason_of_its_own() -> None:
    params = api.SamplingParams(constraint=pb.Constraint(regex="a"))
    with pytest.raises(InvalidRequest) as error:
        check_sampling(params, LIMITS)
    assert (error.value.field, error.value.reason) == ("sampling.constraint", "CONSTRAINTS_UNKNOWN")
    checked = check_sampling(params, replace(LIMITS, knows_constraints=True))
    assert checked.for_choice(0, 1, 2).constraint.regex == "a"
