"""A resume token is its request's and its tenant's: what of it may be changed, moved or used again."""

from __future__ import annotations

import pytest

from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    Result,
    collect,
    error_of,
    expected_ids,
    read_tokens,
    request,
    resumed,
    running,
)

OURS, THEIRS = ((TENANT_KEY, "ours"),), ((TENANT_KEY, "theirs"),)
NUM = 20


async def cut_off(harness: Harness, target: ScriptedTarget, request_id: str) -> tuple[Result, api.GenerateRequest]:
    """A stream of theirs that was lost after five tokens, and the request that takes it up."""
    target.set_limit(5)
    body = request(max_tokens=NUM, request_id=request_id)
    call = harness.stub.Generate(body, metadata=THEIRS)
    first = await read_tokens(call, 5)
    call.cancel()
    target.set_limit(None)
    return first, resumed(first, body)


async def refusal(harness: Harness, again: api.GenerateRequest, metadata: object) -> str:
    error = await error_of(harness.stub.Generate(again, metadata=metadata))
    assert isinstance(error, InvalidRequest)
    assert error.field == "resume.resume_token"
    return error.reason


async def test_a_token_is_no_use_to_another_tenant_and_is_none_the_worse_for_its_trying() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        _, again = await cut_off(harness, target, "one")
        for _ in range(3):
            assert await refusal(harness, again, OURS) == "RESUME_TOKEN_INVALID"
        rest = await collect(harness.stub.Generate(again, metadata=THEIRS))
    assert rest.ids() == expected_ids(target, NUM)[5:]


async def test_no_bit_of_a_token_can_be_changed() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        _, again = await cut_off(harness, target, "one")
        token = again.resume.resume_token
        for index in range(len(token)):
            altered = bytearray(token)
            altered[index] ^= 1 << index % 8
            again.resume.resume_token = bytes(altered)
            assert await refusal(harness, again, THEIRS) == "RESUME_TOKEN_INVALID"
        for altered_token in (token[:-1], token + b"\0", token[1:], token * 2, b"", b"\0" * len(token), token * 1000):
            again.resume.resume_token = altered_token
            assert await refusal(harness, again, THEIRS) == "RESUME_TOKEN_INVALID"
        again.resume.resume_token = token
        assert (await collect(harness.stub.Generate(again, metadata=THEIRS))).ids() == expected_ids(target, NUM)[5:]


@pytest.mark.parametrize("field", ["request_id", "seed"])
async def test_a_token_of_another_request_of_the_same_tenant_is_refused(field: str) -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        _, one = await cut_off(harness, target, "one")
        _, two = await cut_off(harness, target, "two")
        if field == "request_id":
            two.resume.resume_token = one.resume.resume_token
        else:
            two.sampling.seed += 1
        assert await refusal(harness, two, THEIRS) == "RESUME_TOKEN_INVALID"
        assert (await collect(harness.stub.Generate(one, metadata=THEIRS))).ids() == expected_ids(target, NUM)[5:]


async def test_a_token_that_is_used_again_after_the_end_gives_its_owner_the_same_and_others_nothing() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        _, again = await cut_off(harness, target, "one")
        told = [(await collect(harness.stub.Generate(again, metadata=THEIRS))).ids() for _ in range(3)]
        assert told == [expected_ids(target, NUM)[5:]] * 3
        assert await refusal(harness, again, OURS) == "RESUME_TOKEN_INVALID"
        again.resume.choices[0].token_ids[0] += 1
        assert await error_of(harness.stub.Generate(again, metadata=THEIRS))


async def test_a_token_of_another_deployment_or_model_is_refused() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        _, again = await cut_off(harness, target, "one")
        (link,) = harness.service.fleet.links
        assert link.is_ready
    other = ScriptedTarget()
    async with running([other], resume_secret="another-secret-of-the-tests") as harness:
        assert await refusal(harness, again, THEIRS) == "RESUME_TOKEN_INVALID"
    renamed = ScriptedTarget()
    renamed.identity.weights_digest = "w2"
    async with running([renamed]) as harness:
        assert await refusal(harness, again, THEIRS) == "RESUME_TOKEN_INVALID"
