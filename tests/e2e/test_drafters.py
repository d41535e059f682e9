"""Real services whose target has drafters of its own: the tokens of plain decoding, also once the draft has died."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from tests.support.services.clusters import start_cluster
from tests.support.services.gateways import gateway
from tests.support.services.tiny_pair import ModelPair

pytestmark = pytest.mark.integration

EVERY = ["ngram", "prediction", "suffix"]
SETTINGS = {"drafters": ",".join(EVERY), "adaptive_speculation": False}
"""Whether speculation pays is not asked: that depends on how busy the machine is."""


@pytest.fixture(scope="module")
def cluster(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("drafters")
    with start_cluster(tiny_pair, folder / "logs", target_settings=SETTINGS) as started:
        yield started


def request(number: int, *drafters: str, speculate: bool = True, temperature: float = 0.0) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=f"def number_{number}():\n    return number_{number}() + number_{number}()")
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = temperature, number, 90
    made.sampling.ignore_eos = True
    made.speculation.enabled = speculate
    made.speculation.drafters.extend(drafters)
    return made


def foretold(body: api.GenerateRequest, plain: Completion) -> api.GenerateRequest:
    """A request with its own answer as its prediction: there is a right guess, whatever the text is."""
    body.prediction.token_ids.token_ids.extend(plain.choices[0].token_ids)
    return body


async def answers(client: Client, requests: list[api.GenerateRequest]) -> list[Completion]:
    return list(await asyncio.gather(*(client.complete(each) for each in requests)))


def tokens_by_drafter(completions: list[Completion]) -> set[str]:
    return {token.drafter for each in completions for choice in each.choices.values() for token in choice.tokens} - {""}


async def test_what_there_is_is_listed(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        assert list((await client.model_info()).drafters) == ["draft_model", *EVERY]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_beside_a_draft_service_nothing_changes_and_each_token_names_its_source(
    cluster: Cluster, temperature: float
) -> None:
    async with Client(cluster.address) as client:
        plain = await answers(client, [request(n, speculate=False, temperature=temperature) for n in range(3)])
        drafted = await answers(client, [request(n, temperature=temperature) for n in range(3)])
        own = await answers(client, [request(n, *EVERY, temperature=temperature) for n in range(3)])
    assert [each.identity for each in drafted] == [each.identity for each in plain]
    assert [each.identity for each in own] == [each.identity for each in plain]
    assert tokens_by_drafter(own) <= set(EVERY)
    assert tokens_by_drafter(drafted) <= {"draft_model", *EVERY}
    assert all(each.require_finished().stats.num_accepted > 0 for each in own)  # suffixes of the plain answers
    for each in (*drafted, *own):
        stats = each.require_finished().stats
        named = [token for choice in each.choices.values() for token in choice.tokens if token.drafter]
        assert len(named) == stats.num_accepted
        assert {"ngram", "suffix"} <= {record.name for record in stats.drafters} <= {"draft_model", *EVERY}


async def test_a_prediction_is_taken_over_and_counted_in_grpc_and_in_openais_http(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        plain = await client.complete(request(5, speculate=False))
        predicted = await client.complete(foretold(request(5), plain))
    assert predicted.identity == plain.identity
    usage = predicted.require_finished().usage
    assert usage.accepted_prediction_tokens > 45
    assert not plain.require_finished().usage.HasField("accepted_prediction_tokens")
    async with gateway(cluster.address) as one, one.openai() as client_of_openai:
        answer = await client_of_openai.chat.completions.create(
            model="target",
            messages=[{"role": "user", "content": "x"}],
            prediction={"type": "content", "content": "def f(): return f()"},
            max_tokens=20,
            temperature=0,
        )
    details = answer.usage.completion_tokens_details if answer.usage is not None else None
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None


async def test_names_and_predictions_that_cannot_be_are_refused_by_their_field(cluster: Cluster) -> None:
    bodies = {"speculation.drafters[1]": request(1, "ngram", "oracle")}
    for field, token_ids in {
        "prediction.token_ids.token_ids[2]": [1, 2, 2**32 - 1],
        "prediction.token_ids": [1] * 100_000,
    }.items():
        bodies[field] = request(1)
        bodies[field].prediction.token_ids.token_ids.extend(token_ids)
    bodies["prediction.text"] = request(1)
    bodies["prediction.text"].prediction.text = "word " * 20_000
    async with Client(cluster.address) as client:
        for field, body in bodies.items():
            with pytest.raises(InvalidRequest) as caught:
                await client.complete(body)
            assert caught.value.field == field


async def test_streams_go_on_with_the_targets_own_drafters_when_the_draft_is_killed(cluster: Cluster) -> None:
    """The last of this file: the draft stays dead."""
    async with Client(cluster.address) as client:
        undisturbed = await client.complete(request(9, speculate=False))
        completion, is_killed = Completion(), False
        async for chunk in client.generate(request(9)):
            completion.add(chunk)
            if not is_killed and completion.num_tokens > 10:
                is_killed = True
                cluster.kill("draft")
        assert is_killed
        assert completion.identity == undisturbed.identity
        plain = await client.complete(request(10, speculate=False))
        later = await client.complete(request(10))
    assert later.identity == plain.identity
    assert later.require_finished().stats.num_accepted > 0
    assert tokens_by_drafter([later]) <= set(EVERY)
