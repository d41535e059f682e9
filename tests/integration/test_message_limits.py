"""Real services between which messages are small: long prompts with log-probabilities break no stream.

The log-probabilities of such a prompt are more than any message may be here. In one verdict they used to break the
stream of all sessions at the target, then at the next one, again and again, until no target was trusted any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.client import Client, Completion, generate_resuming
from specdec.commands.up.cluster import Cluster, free_port
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.message_sizes import MIN_MESSAGE_BYTES
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import (
    Reading,
    addresses_of,
    another,
    eventually,
    held_back,
    resumed,
    sampled_request,
    scrape,
    start_again,
    target_in_use,
)
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_TOP = 20
NUM_PROMPT_TOKENS = 3900
"""Their log-probabilities take a megabyte: sixteen messages, and twice what a target sends ahead of its client."""
TOLERANCE = 1e-4
SMALL: dict[str, object] = {"max_message_bytes": MIN_MESSAGE_BYTES}


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def small_cluster(
    tiny_pair: ModelPair, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two targets and a draft, none of which takes large messages, nor a coordinator that does.

    One failure is enough for a replica to be ejected.
    """
    strict = {"ejection_failures": 1, "metrics_port": metrics_port}
    with start_cluster(
        tiny_pair,
        tmp_path_factory.mktemp("small"),
        num_targets=2,
        target_settings=SMALL,
        draft_settings=SMALL,
        coordinator_settings={**SMALL, **strict},
    ) as cluster:
        yield cluster


@pytest.fixture
async def client(small_cluster: Cluster) -> AsyncIterator[Client]:
    """A client, once all replicas are there."""
    async with Client(small_cluster.address) as client:

        async def are_ready() -> bool:
            return [r.state for r in (await client.status()).replicas] == ["ready"] * 3

        await eventually(are_ready, "all replicas are ready")
        yield client


def a_request(
    seed: int = 1, *, max_tokens: int = 12, num_prompt_tokens: int = NUM_PROMPT_TOKENS
) -> api.GenerateRequest:
    prompt = [10 + (seed * 31 + index * index + 7 * index) % 240 for index in range(num_prompt_tokens)]
    body = sampled_request(seed, prompt, max_tokens)
    body.sampling.prompt_logprobs = body.sampling.logprobs = NUM_TOP
    return body


def logprobs_of(completion: Completion) -> list[bytes]:
    """Of the output, token by token."""
    return [token.logprobs.SerializeToString() for token in completion.choices[0].tokens]


def assert_equal(completion: Completion, undisturbed: Completion) -> None:
    assert completion.identity == undisturbed.identity
    assert logprobs_of(completion) == logprobs_of(undisturbed)
    assert completion.prompt_logprobs == undisturbed.prompt_logprobs
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs.positions) == len(completion.prompt_logprobs.token_ids) - 1


async def assert_nobody_was_blamed(small_cluster: Cluster, client: Client, metrics_port: int) -> None:
    assert "replica_ejected" not in small_cluster.services["coordinator"].log_path.read_text()
    assert [replica.state for replica in (await client.status()).replicas] == ["ready"] * 3
    samples = scrape(metrics_port)
    assert samples.get("specdec_coordinator_stream_reconnects_total", 0) == 0
    assert samples.get("specdec_coordinator_token_mismatches_total", 0) == 0


@torch.inference_mode()
def expected_logprobs(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([list(token_ids)])).logits[0, :-1].float().log_softmax(-1)


async def test_long_prompts_are_described_as_where_messages_are_large_and_no_stream_breaks(
    small_cluster: Cluster, client: Client, tiny_client: Client, metrics_port: int
) -> None:
    bodies = [a_request(seed) for seed in range(3)]
    bystanders = [a_request(50 + seed, max_tokens=60, num_prompt_tokens=20) for seed in range(6)]
    answers = await asyncio.gather(*map(client.complete, [*bodies, *bystanders]))
    for body, answer in zip([*bodies, *bystanders], answers, strict=True):
        assert_equal(answer, await tiny_client.complete(body))
    await assert_nobody_was_blamed(small_cluster, client, metrics_port)


async def test_they_are_those_of_transformers(client: Client, tiny_pair: ModelPair) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32).eval()
    completion = await client.complete(a_request(seed=4))
    assert completion.prompt_logprobs is not None
    token_ids = [*completion.prompt_logprobs.token_ids, *completion.choices[0].token_ids]
    positions: list[pb.PositionLogprobs] = list(completion.prompt_logprobs.positions)
    positions += [token.logprobs for token in completion.choices[0].tokens]
    expected = expected_logprobs(model, token_ids)
    ours = torch.tensor([position.logprob for position in positions])
    theirs = expected.gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    top = torch.tensor([[entry.logprob for entry in position.top] for position in positions])
    torch.testing.assert_close(top, expected.topk(NUM_TOP).values, atol=TOLERANCE, rtol=0)


async def test_a_prompt_that_is_in_the_prefix_cache_is_described_alike(client: Client) -> None:
    body = a_request(seed=5)
    plain = api.GenerateRequest()
    plain.CopyFrom(body)
    plain.sampling.ClearField("prompt_logprobs")
    first = await client.complete(body)
    assert (await client.complete(plain)).identity == first.identity
    assert_equal(await client.complete(body), first)


@pytest.mark.long
async def test_many_sessions_with_much_to_tell_of_each_token_share_steps(
    small_cluster: Cluster, client: Client, tiny_client: Client, metrics_port: int
) -> None:
    bodies = [a_request(100 + seed, max_tokens=150, num_prompt_tokens=30) for seed in range(24)]
    answers = await asyncio.gather(*map(client.complete, bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert_equal(answer, await tiny_client.complete(body))
    await assert_nobody_was_blamed(small_cluster, client, metrics_port)


async def test_a_client_that_leaves_in_the_middle_of_the_prompt_takes_it_up_there(
    small_cluster: Cluster, client: Client
) -> None:
    body = a_request(seed=6)
    whole = await client.complete(body)
    held = Completion()
    async with held_back(small_cluster.address) as slow, Reading(slow, body) as stream:
        while held.prompt_logprobs_position == 0:
            held.add(await anext(stream.chunks))
    assert 0 < held.prompt_logprobs_position < NUM_PROMPT_TOKENS
    again = resumed(body, held)
    again.resume.prompt_logprobs_position = held.prompt_logprobs_position
    async for chunk in client.generate(again):
        if not chunk.HasField("started"):
            held.add(chunk)
    assert_equal(held, whole)


async def test_a_coordinator_that_is_killed_in_the_middle_of_the_prompt_leaves_no_gap(
    small_cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    body = a_request(seed=7)
    whole = await client.complete(body)
    settings = {**addresses_of(small_cluster), **SMALL, "resume_secret": "a secret of both of them"}
    with ExitStack() as stack:
        one, two = (stack.enter_context(another("coordinator", tmp_path / name, **settings)) for name in "ab")
        held = Completion()
        async with held_back(f"ipv4:{one.address},{two.address}") as slow:
            is_killed = False
            async for chunk in generate_resuming(slow, body):
                held.add(chunk)
                if held.prompt_logprobs_position and not is_killed:
                    assert held.prompt_logprobs_position < NUM_PROMPT_TOKENS
                    is_killed = True
                    for coordinator in (one, two):
                        async with Client(coordinator.address) as asking:
                            if (await asking.status()).num_running:
                                serving = coordinator
                    serving.kill("coordinator")
    assert is_killed
    assert_equal(held, whole)


@pytest.mark.long
async def test_a_target_that_is_killed_in_the_middle_of_the_prompt_is_replaced_there(
    small_cluster: Cluster, client: Client
) -> None:
    body = a_request(seed=8)
    whole = await client.complete(body)
    held = Completion()
    async with held_back(small_cluster.address) as slow, Reading(slow, body) as stream:
        while held.prompt_logprobs_position == 0:
            held.add(await anext(stream.chunks))
        name = await target_in_use(small_cluster)
        small_cluster.kill(name)
        async for chunk in stream.chunks:
            held.add(chunk)
    start_again(small_cluster, name)
    assert_equal(held, whole)
