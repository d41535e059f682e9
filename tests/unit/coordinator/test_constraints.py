"""Constraints at the coordinator: what is refused before a target sees it, where they go, and how they are resumed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specdec.client.completion import check_started
from specdec.constraints.grammar.awaited import tenant_of
from specdec.coordinator.intake.planning import RequestCaller
from specdec.coordinator.intake.prompt import resolve_start
from specdec.coordinator.intake.resume import check_params, encode_params
from specdec.coordinator.replicas.compatibility import may_serve
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.session import Request
from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.store.interface import RequestKey
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import FailedPrecondition, InvalidRequest
from tests.support.for_each import for_each

MODELS = Path(__file__).parents[3] / "models"
IDENTITY = pb.ModelIdentity(
    name="m", weights_digest="w", tokenizer_digest="t", vocab_size=9, max_model_len=99, constraints_id="engine-1"
)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_path(MODELS / "target")


def other(constraints_id: str) -> pb.ModelIdentity:
    identity = pb.ModelIdentity()
    identity.CopyFrom(IDENTITY)
    identity.constraints_id = constraints_id
    return identity


@pytest.mark.parametrize(("constraints_id", "fits"), [("engine-1", True), ("engine-2", False), ("", False)])
def test_only_targets_that_know_the_same_constraints_get_such_a_request(constraints_id: str, fits: bool) -> None:
    requests = [
        Request(RequestKey("", "r"), "u", ClientStream(), 0.0, IDENTITY, is_constrained=is_constrained)
        for is_constrained in (True, False)
    ]
    found = [may_serve(other(constraints_id), request, allow_mixed_numerics=False) for request in requests]
    assert found == [fits, True]


def test_the_start_of_a_constraint_is_the_id_of_its_token(tokenizer: TextTokenizer) -> None:
    constraint = pb.Constraint(regex="a", after_token="<|pad|>")
    resolve_start(constraint, [5, 6, 7, 8], tokenizer)
    assert constraint == pb.Constraint(regex="a", after_token_id=2)


def test_a_prompt_that_ends_with_the_token_begins_the_constraint(tokenizer: TextTokenizer) -> None:
    for prompt in ([5, 2], [5, 2, 6, 7]):
        constraint = pb.Constraint(regex="a", after_token="<|pad|>")
        resolve_start(constraint, prompt, tokenizer)
        assert constraint == pb.Constraint(regex="a")


@for_each(
    "prompt, is_thinking, expected",
    [
        ([5], None, {"after_token_id": 2, "opening_token_id": 0}),
        ([5], False, {"after_token_id": 2, "opening_token_id": 0}),
        ([5, 0], None, {"after_token_id": 2}),
        ([5, 0, 6], None, {"after_token_id": 2}),
        ([0, 5, 6, 7, 8, 9], None, {"after_token_id": 2, "opening_token_id": 0}),
        ([0, 5, 6, 7, 8, 9], True, {"after_token_id": 2}),
        ([0, 2], None, {}),
        ([0, 2, 6], False, {}),
        ([2, 0], None, {"after_token_id": 2}),
    ],
)
def test_the_prompt_s_end_decides_whether_the_output_must_begin_with_the_opening_token(
    tokenizer: TextTokenizer, prompt: list[int], is_thinking: bool | None, expected: dict[str, int]
) -> None:
    constraint = pb.Constraint(regex="a", after_token="<|pad|>", opening_token="<|bos|>")
    resolve_start(constraint, prompt, tokenizer, is_thinking)
    assert constraint == pb.Constraint(regex="a", **expected)


def test_an_opening_that_is_no_token_is_left_out(tokenizer: TextTokenizer) -> None:
    constraint = pb.Constraint(regex="a", after_token="<|pad|>", opening_token="<nothing>")
    resolve_start(constraint, [5], tokenizer)
    assert constraint == pb.Constraint(regex="a", after_token_id=2)


def test_a_start_that_is_no_token_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest) as error:
        resolve_start(pb.Constraint(regex="a", after_token="</nothing>"), [5], tokenizer)
    assert error.value.field == "sampling.constraint.after_token"


def test_a_request_with_another_constraint_does_not_resume_this_one() -> None:
    def params(constraint: pb.Constraint | None) -> bytes:
        return encode_params(api.GenerateRequest(sampling=api.SamplingParams(constraint=constraint)), [1, 2], 3)

    large = pb.Constraint(regex="a" * 50_000)
    assert len(params(large)) < 500
    check_params(params(large), params(large), "prompt")
    for given in (pb.Constraint(regex="b"), None):
        with pytest.raises(InvalidRequest) as error:
            check_params(params(large), params(given), "prompt")
        assert error.value.field == "sampling.constraint"


async def test_an_error_before_the_first_output_is_raised_before_the_first_chunk() -> None:
    stream = ClientStream()
    stream.push(api.GenerateResponse(started=api.GenerateStarted()))
    waiting = asyncio.create_task(stream.wait_for_more())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.close(InvalidRequest("sampling.constraint.regex", "no"))
    with pytest.raises(InvalidRequest):
        await waiting


async def test_an_end_or_output_ends_the_wait() -> None:
    for has_output in (True, False):
        stream = ClientStream()
        stream.push(api.GenerateResponse())
        if has_output:
            stream.push(api.GenerateResponse())
        stream.close()
        await stream.wait_for_more()
        assert await stream.take() is not None


def test_a_client_finds_out_that_a_server_knows_no_constraints() -> None:
    request = api.GenerateRequest(sampling=api.SamplingParams(constraint=pb.Constraint(regex="a")))
    old = api.GenerateResponse(started=api.GenerateStarted())
    with pytest.raises(FailedPrecondition) as error:
        check_started(request, old)
    assert error.value.reason == "CONSTRAINTS_UNKNOWN"
    check_started(request, api.GenerateResponse(started=api.GenerateStarted(is_constrained=True)))
    check_started(api.GenerateRequest(), old)


def test_a_client_finds_out_that_a_server_knows_no_salts() -> None:
    request, old = api.GenerateRequest(cache_salt="a"), api.GenerateResponse(started=api.GenerateStarted())
    with pytest.raises(FailedPrecondition) as error:
        check_started(request, old)
    assert error.value.reason == "CACHE_SALT_UNKNOWN"
    check_started(request, api.GenerateResponse(started=api.GenerateStarted(is_salted=True)))


def test_a_tenant_with_many_salts_takes_turns_as_one() -> None:
    caller = RequestCaller("team-a", None)
    salts = [caller.salted(salt) for salt in ("", "x", "x\0y", "y")]
    assert len(set(salts)) == 4
    assert salts[0] == b"team-a"
    assert {tenant_of(salt) for salt in salts} == {b"team-a"}
    assert RequestCaller("team", None).salted("-a") != caller.salted("")
