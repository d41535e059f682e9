"""Bad input is refused with a typed error that names the field, and the service goes on serving."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from specdec.client import Client
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest, ModelNotFound, RequestExists, from_rpc_error
from tests.support.extreme_sampling import bias_cases, cases
from tests.support.services.faults import freeze, thaw

pytestmark = pytest.mark.integration

METHOD = "/specdec.v1.CoordinatorService/Generate"
UNLIMITED = [("grpc.max_send_message_length", -1)]
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def good() -> api.GenerateRequest:
    return api.GenerateRequest(prompt="Once upon a time", sampling=api.SamplingParams(max_tokens=4, seed=1))


def sampling(**fields: Any) -> api.GenerateRequest:
    body = good()
    body.sampling.MergeFrom(api.SamplingParams(**fields))
    return body


def prompted(**fields: Any) -> api.GenerateRequest:
    return api.GenerateRequest(sampling=good().sampling, **fields)


def ids(*token_ids: int) -> api.GenerateRequest:
    return prompted(prompt_token_ids=api.TokenIds(token_ids=token_ids))


REFUSED: dict[str, tuple[Callable[[], api.GenerateRequest], str]] = {
    "no prompt": (prompted, "input"),
    "empty prompt": (lambda: prompted(prompt=""), "prompt"),
    "no token ids": (ids, "prompt_token_ids"),
    "no messages": (lambda: prompted(messages=api.ChatMessages()), "messages.messages"),
    "a prompt longer than the context": (lambda: prompted(prompt="x" * 4096), "prompt"),
    "a prompt of 5 MB": (lambda: prompted(prompt="x" * 5_000_000), "prompt"),
    "a token id out of range": (lambda: ids(5, 6, 1_000_000), "prompt_token_ids.token_ids[2]"),
    "temperature -1": (lambda: sampling(temperature=-1.0), "sampling.temperature"),
    "top_p 0": (lambda: sampling(top_p=0.0), "sampling.top_p"),
    "top_p 1.5": (lambda: sampling(top_p=1.5), "sampling.top_p"),
    "min_p -0.1": (lambda: sampling(min_p=-0.1), "sampling.min_p"),
    "repetition_penalty 0": (lambda: sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    "presence_penalty 3": (lambda: sampling(presence_penalty=3.0), "sampling.presence_penalty"),
    "frequency_penalty -3": (lambda: sampling(frequency_penalty=-3.0), "sampling.frequency_penalty"),
    **{f"{name} NaN": (lambda name=name: sampling(**{name: math.nan}), f"sampling.{name}") for name in NUMBERS},
    **{f"{name} inf": (lambda name=name: sampling(**{name: math.inf}), f"sampling.{name}") for name in NUMBERS},
    "a NaN bias": (lambda: sampling(logit_bias={7: math.nan}), "sampling.logit_bias[7]"),
    "a bias out of range": (lambda: sampling(logit_bias={9_999_999: 1.0}), "sampling.logit_bias[9999999]"),
    "n 0": (lambda: sampling(n=0), "sampling.n"),
    "n 1000": (lambda: sampling(n=1000), "sampling.n"),
    "max_tokens 0": (lambda: sampling(max_tokens=0), "sampling.max_tokens"),
    "min_tokens over max_tokens": (lambda: sampling(min_tokens=5), "sampling.min_tokens"),
    "10,000 stop strings": (lambda: sampling(stop=[f"stop {i}" for i in range(10_000)]), "sampling.stop"),
    "an empty stop string": (lambda: sampling(stop=["a", ""]), "sampling.stop[1]"),
    "a long stop string": (lambda: sampling(stop=["x" * 10_000]), "sampling.stop[0]"),
    "a stop token out of range": (lambda: sampling(stop_token_ids=[2**31]), "sampling.stop_token_ids[0]"),
    "1000 logprobs": (lambda: sampling(logprobs=1000), "sampling.logprobs"),
    "1000 prompt logprobs": (lambda: sampling(prompt_logprobs=1000), "sampling.prompt_logprobs"),
    "a long request id": (lambda: prompted(prompt="x", request_id="x" * 1000), "request_id"),
    "a verify mode that is not": (
        lambda: prompted(prompt="x", speculation=api.SpeculationParams(verify_mode=77)),  # type: ignore[arg-type]
        "speculation.verify_mode",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_bad_field_is_named(tiny_client: Client, name: str) -> None:
    make, field = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        await tiny_client.complete(make())
    assert caught.value.field == field
    assert caught.value.description
    assert (await tiny_client.complete(good())).num_tokens > 0


async def test_the_penalty_that_once_ended_every_draft_is_refused_by_name(tiny_client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tiny_client.complete(sampling(repetition_penalty=1e-40, temperature=1.0))
    assert caught.value.field == "sampling.repetition_penalty"


async def test_extreme_numbers_are_refused_by_name_or_give_all_tokens(
    tiny_cluster: Cluster, tiny_client: Client
) -> None:
    processes = {name: service.pid for name, service in tiny_cluster.services.items()}
    expected = await tiny_client.complete(good())
    bodies: list[tuple[api.GenerateRequest, str | None]] = [
        (sampling(ignore_eos=True, **{name: value}), None if is_legal else f"sampling.{name}")
        for name, value, is_legal in cases()
    ]
    bodies += [
        (sampling(ignore_eos=True, logit_bias={7: bias}), None if is_legal else "sampling.logit_bias[7]")
        for bias, is_legal in bias_cases()
    ]
    # All the ends at once, and the integers that take any value.
    ends = {"repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": -2.0, "top_p": 5e-324}
    for temperature in (0.0, 5e-324, 1.0, 100.0):
        bodies.append((sampling(ignore_eos=True, temperature=temperature, **ends), None))
        bodies.append((sampling(temperature=temperature, top_k=2**32 - 1, seed=2**64 - 1, ignore_eos=True), None))
        every = dict.fromkeys(range(250), -100.0)
        bodies.append(
            (sampling(temperature=temperature, min_tokens=4, logit_bias=every, repetition_penalty=10.0), None)
        )
    bodies.append((sampling(min_tokens=1, stop_token_ids=list(range(259))), "sampling.min_tokens"))
    for body, field in bodies:
        if field is None:
            completion = await tiny_client.complete(body)
            assert completion.num_tokens == 4, body.sampling
            assert completion.finished, body.sampling
            continue
        with pytest.raises(InvalidRequest) as caught:
            await tiny_client.complete(body)
        assert caught.value.field == field, body.sampling
    assert (await tiny_client.complete(good())).identity == expected.identity
    assert {name: service.pid for name, service in tiny_cluster.services.items()} == processes


async def test_an_unknown_model_is_not_found(tiny_client: Client) -> None:
    with pytest.raises(ModelNotFound, match="model 'gpt-17' is not served") as caught:
        await tiny_client.complete(prompted(prompt="x", model="gpt-17"))
    assert caught.value.reason == "MODEL_NOT_FOUND"


async def test_a_request_id_that_is_running_is_taken_and_is_free_again_afterwards(
    tiny_cluster: Cluster, tiny_client: Client
) -> None:
    body = prompted(prompt="x", request_id="mine")
    body.sampling.max_tokens, body.sampling.ignore_eos = 400, True
    first = tiny_client.generate(body)
    freeze(tiny_cluster, "target")
    try:
        await anext(first)
        with pytest.raises(RequestExists, match="request_id 'mine'") as caught:
            await tiny_client.complete(body)
    finally:
        thaw(tiny_cluster, "target")
    assert caught.value.reason == "REQUEST_EXISTS"
    async for _ in first:
        pass
    assert (await tiny_client.complete(body)).num_tokens == 400


async def refusal(address: str, message: bytes) -> grpc.aio.AioRpcError:
    """How the server refuses bytes that no typed client would send."""
    async with grpc.aio.insecure_channel(address, options=UNLIMITED) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in channel.unary_stream(METHOD)(message):
                pass
    return caught.value


async def test_a_message_of_100_mb_is_refused_by_the_server_which_goes_on(tiny_cluster: Cluster) -> None:
    async with Client(tiny_cluster.address) as client:
        streams = asyncio.gather(*(client.complete(good()) for _ in range(4)))
        error = await refusal(tiny_cluster.address, prompted(prompt="x" * 100_000_000).SerializeToString())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (error.details() or "")
        assert all(completion.finished for completion in await streams)
        assert (await client.complete(good())).num_tokens > 0


async def test_a_message_of_100_mb_does_not_leave_the_client(tiny_client: Client) -> None:
    with pytest.raises(InvalidRequest, match="100000") as caught:
        await tiny_client.complete(prompted(prompt="x" * 100_000_000))
    assert caught.value.field == "request"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (prompted(prompt="XX"), "prompt"),
        (sampling(stop=["a", "XX"]), "sampling.stop[1]"),
        (
            prompted(messages=api.ChatMessages(messages=[api.ChatMessage(role="user", content="XX")])),
            "messages.messages[0].content",
        ),
    ],
    ids=["prompt", "stop", "content"],
)
async def test_text_that_is_not_utf8_is_named(tiny_cluster: Cluster, body: api.GenerateRequest, field: str) -> None:
    error = from_rpc_error(await refusal(tiny_cluster.address, body.SerializeToString().replace(b"XX", b"\xff\xfe")))
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert "UTF-8" in error.description


async def test_bytes_that_are_no_message_are_refused(tiny_cluster: Cluster) -> None:
    error = from_rpc_error(await refusal(tiny_cluster.address, b"\xff" * 100))
    assert isinstance(error, InvalidRequest)
    assert error.field == "request"
    assert error.reason == "MALFORMED_MESSAGE"


async def test_bad_token_ids_to_detokenize_are_named(tiny_client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tiny_client.detokenize([1, 10**6])
    assert caught.value.field == "token_ids[1]"
