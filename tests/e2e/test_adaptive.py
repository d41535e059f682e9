"""Real services with a draft that is of no use: it is suspended, answers are the same, and nothing else is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from specdec.client import Client
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from tests.support.engine.architectures import CONFIGS, make_pair
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import eventually

pytestmark = pytest.mark.integration

NUM_AT_ONCE = 4
MAX_TOKENS = 120
LEAST_SUSPENDED = 0.5


@pytest.fixture(scope="module")
def useless_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The draft is another random model than the target."""
    folder = tmp_path_factory.mktemp("useless")
    pair = make_pair(min(CONFIGS), folder, noise=1.0)
    with start_cluster(pair, folder / "logs", target_settings={"adaptive_speculation": True}) as cluster:
        yield cluster


def request(number: int, *, speculate: bool, temperature: float) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=f"def number_{number}():\n    return")
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = temperature, number, MAX_TOKENS
    made.sampling.ignore_eos = True
    made.speculation.enabled = speculate
    return made


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
async def test_a_useless_draft_is_suspended_and_changes_nothing(useless_cluster: Cluster, temperature: float) -> None:
    async with Client(useless_cluster.address) as client:
        tokens: list[object] = []

        async def stats(*, speculate: bool) -> list[api.SpeculationStats]:
            made = [request(n, speculate=speculate, temperature=temperature) for n in range(NUM_AT_ONCE)]
            done = await asyncio.gather(*(client.complete(each) for each in made))
            tokens.append([each.identity for each in done])
            return [each.require_finished().stats for each in done]

        assert all(each.num_suspended_steps == 0 for each in await stats(speculate=False))

        async def is_suspended() -> bool:
            all_stats = await stats(speculate=True)
            num_steps = sum(each.num_steps for each in all_stats)
            return sum(each.num_suspended_steps for each in all_stats) > LEAST_SUSPENDED * num_steps

        await eventually(is_suspended, "most steps suspend the draft")
        assert all(each == tokens[0] for each in tokens)
