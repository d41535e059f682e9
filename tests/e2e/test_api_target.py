"""A target behind an endpoint, which is this product's own gateway: greedy tokens are those of the model itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from specdec.client import Client, Completion
from specdec.commands.errors import ClusterFailed
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError
from tests.support.servers.hostile_api import fixed_api
from tests.support.services.clusters import MakeCluster, start_cluster
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def request(number: int = 0, temperature: float = 0.0, max_tokens: int = 40) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=f"def number_{number}():\n    return number_{number}() + ")
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = temperature, number, max_tokens
    return made


async def ask(address: str, asked: api.GenerateRequest) -> Completion:
    async with Client(address) as client:
        return await client.complete(asked)


@pytest.fixture(scope="module")
def served(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The model itself, with a gateway."""
    with start_cluster(tiny_pair, tmp_path_factory.mktemp("served"), gateway=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def url(served: Cluster) -> str:
    return f"http://{served.services['gateway'].spec.address}"


def settings(url: str, **options: object) -> dict[str, object]:
    return {"api": json.dumps({"base_url": f"{url}/v1", "model": "target", **options}), "hold_off_ms": 100}


@pytest.fixture(scope="module", params=["prompt_logprobs", "echo"])
def behind(
    request: pytest.FixtureRequest, url: str, tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster whose target is behind that gateway."""
    options = settings(url, fields=request.param)
    with start_cluster(tiny_pair, tmp_path_factory.mktemp("behind"), target_settings=options) as cluster:
        yield cluster


async def test_greedy_tokens_are_the_models_own(served: Cluster, behind: Cluster) -> None:
    num_accepted = 0
    for number in range(2):
        own = await ask(served.address, request(number))
        through = await ask(behind.address, request(number))
        assert {i: c.token_ids for i, c in through.choices.items()} == {i: c.token_ids for i, c in own.choices.items()}
        assert through.choices[0].finished is not None and own.choices[0].finished is not None
        assert through.choices[0].finished.reason == own.choices[0].finished.reason
        num_accepted += through.require_finished().stats.num_accepted
    assert num_accepted > 0
    async with Client(behind.address) as client:
        model = (await client.model_info()).target
    assert model.numerics_id.startswith("api/")
    assert not model.row_invariant


async def test_what_is_not_greedy_is_refused_with_the_reason(behind: Cluster) -> None:
    with pytest.raises(SpecdecError, match="greedy requests only"):
        await ask(behind.address, request(temperature=1.0))
    asked = request()
    asked.sampling.presence_penalty = 1.0
    with pytest.raises(SpecdecError, match="raw logits"):
        await ask(behind.address, asked)
    assert (await ask(behind.address, request())).choices[0].token_ids


async def test_sampled_requests_take_a_call_for_each_token_where_that_is_wanted(
    url: str, make_cluster: MakeCluster
) -> None:
    behind = make_cluster(target_settings=settings(url, sampled="one_token_calls"))
    told = await ask(behind.address, request(temperature=0.5, max_tokens=12))
    assert told.require_finished().usage.completion_tokens > 0


async def test_an_endpoint_that_cannot_verify_is_named_at_the_start(make_cluster: MakeCluster) -> None:
    body = json.dumps({"choices": [{"text": "a", "token_ids": [1]}]}).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with fixed_api(head.encode() + body) as lacking, pytest.raises(ClusterFailed, match="prompt_logprobs"):
        make_cluster(target_settings=settings(lacking.url.removesuffix("/v1")))
