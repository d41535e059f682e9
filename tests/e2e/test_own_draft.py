"""Real services whose target runs its draft itself: the answers of plain decoding, also after its engine was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from specdec.client import Client, Completion, generate_resuming
from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.clusters import start_cluster
from tests.support.services.engine_processes import engine_of
from tests.support.services.tiny_pair import ModelPair

pytestmark = pytest.mark.integration

NUM_AT_ONCE = 3


@pytest.fixture(scope="module")
def cluster(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("own-draft")
    with start_cluster(tiny_pair, folder / "logs", placement="together") as started:
        yield started


def request(number: int, *, speculate: bool = True, temperature: float = 1.0, tokens: int = 80) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=f"def number_{number}():\n    return")
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = temperature, number, tokens
    made.sampling.ignore_eos = True
    made.speculation.enabled = speculate
    return made


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
async def test_it_speculates_without_a_draft_service_and_changes_nothing(cluster: Cluster, temperature: float) -> None:
    assert set(cluster.services) == {"target", "coordinator"}
    async with Client(cluster.address) as client:
        info = await client.model_info()
        assert info.HasField("draft") and list(info.drafters) == ["draft_model"]

        async def answers(*, speculate: bool) -> list[Completion]:
            made = [request(n, speculate=speculate, temperature=temperature) for n in range(NUM_AT_ONCE)]
            return await asyncio.gather(*(client.complete(each) for each in made))

        plain, drafted = await answers(speculate=False), await answers(speculate=True)
        assert [each.identity for each in drafted] == [each.identity for each in plain]
        stats = [each.require_finished().stats for each in drafted]
        assert all(each.num_accepted > 0 for each in stats)
        assert all(each.num_hits > each.num_steps / 2 for each in stats)
        assert all(each.require_finished().stats.num_proposed == 0 for each in plain)


async def test_rejection_mode_is_served_too(cluster: Cluster) -> None:
    made = request(1)
    made.speculation.verify_mode = pb.VERIFY_MODE_REJECTION
    async with Client(cluster.address) as client:
        done = await client.complete(made)
    assert done.num_tokens == 80
    assert done.require_finished().stats.num_accepted > 0


async def test_a_stream_goes_on_exactly_when_the_engine_with_both_models_is_killed(cluster: Cluster) -> None:
    body = request(7, tokens=600)
    async with Client(cluster.address) as client:
        undisturbed = await client.complete(body)
        completion, is_killed = Completion(), False
        async for chunk in generate_resuming(client, body):
            completion.add(chunk)
            if not is_killed and completion.num_tokens > 50:
                is_killed = True
                engine_of(cluster, "target").kill()
    assert is_killed
    assert completion.identity == undisturbed.identity
