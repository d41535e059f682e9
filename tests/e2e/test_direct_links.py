"""Real services whose drafts and targets talk directly: the tokens are those of the relay and of plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bench.delay_proxy import DelayProxy
from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster, free_port
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import eventually, scrape, start_again
from tests.support.services.model_pair import ModelPair

pytestmark = pytest.mark.integration
NUM_REQUESTS = 4
MODES = {(0.0, pb.VERIFY_MODE_COUPLED), (1.0, pb.VERIFY_MODE_COUPLED), (0.0, pb.VERIFY_MODE_REJECTION)}
PATIENT = {"hold_off_ms": 30.0, "adaptive_speculation": False}


METRICS_PORT = free_port()
SENT = "specdec_draft_messages_total{direction=out}"
"""Messages of the draft that passed its servicer; those of a Unix socket between engines do not."""


@pytest.fixture(scope="module", params=["one host", "two hosts"])
def direct_cluster(
    request: pytest.FixtureRequest, tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Its coordinator relays no proposal. On two hosts draft and target reach each other by network only."""
    settings: dict[str, Any] = {
        "target_settings": PATIENT,
        "draft_settings": {"metrics_port": METRICS_PORT},
        "coordinator_settings": {"proposal_path": "direct"},
    }
    folder = tmp_path_factory.mktemp("direct_cluster")
    with ExitStack() as stack:
        if request.param == "two hosts":
            settings["arrange"] = stack.enter_context(DelayProxy(())).far_drafts
        yield stack.enter_context(start_cluster(tiny_pair, folder, **settings))


async def answers(
    client: Client, temperature: float, mode: pb.VerifyMode.ValueType, *, speculate: bool, stop: str = ""
) -> list[Completion]:
    requests = []
    for seed in range(NUM_REQUESTS):
        request = api.GenerateRequest(prompt=f"def number_{seed}(path):\n    with open(path) as file:\n")
        sampling, speculation = request.sampling, request.speculation
        sampling.temperature, sampling.seed, sampling.max_tokens, sampling.ignore_eos = temperature, seed, 60, True
        speculation.enabled, speculation.verify_mode = speculate, mode
        if stop:
            sampling.stop.append(stop)
        requests.append(request)
    return list(await asyncio.gather(*(client.complete(request) for request in requests)))


def texts(completions: list[Completion]) -> list[str]:
    return [completion.choices[0].text for completion in completions]


async def check_way(client: Client, *, is_by_network: bool) -> None:
    """Proposals pass the servicers between two hosts, and only there."""
    before = scrape(METRICS_PORT)[SENT]
    request = api.GenerateRequest(prompt="def count(path):\n")
    request.sampling.max_tokens, request.sampling.ignore_eos = 120, True
    stats = (await client.complete(request)).require_finished().stats
    num_sent = scrape(METRICS_PORT)[SENT] - before
    assert stats.num_verify_steps > 10
    assert (num_sent >= stats.num_verify_steps) == is_by_network


async def test_what_a_stop_string_cuts_is_in_no_answer(direct_cluster: Cluster) -> None:
    async with Client(direct_cluster.address) as client:
        whole = texts(await answers(client, 1.0, pb.VERIFY_MODE_COUPLED, speculate=True))
        stop = whole[0].strip()[4:7]
        cut = texts(await answers(client, 1.0, pb.VERIFY_MODE_COUPLED, speculate=True, stop=stop))
        assert [text.partition(stop)[0] for text in whole] == cut


async def test_tokens_are_those_of_plain_decoding_and_a_lost_draft_comes_back_to_its_link(
    direct_cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    async with Client(direct_cluster.address) as client:
        plain = {each: texts(await answers(client, *each, speculate=False)) for each in MODES}

        async def is_direct() -> bool:
            """Equal in all modes, with accepted tokens, none of which the coordinator has relayed."""
            num_accepted = set()
            for temperature, mode in MODES:
                fast = await answers(client, temperature, mode, speculate=True)
                assert texts(fast) == plain[temperature, mode]
                num_accepted.add(sum(each.require_finished().stats.num_accepted for each in fast))
            return min(num_accepted) > 0

        await eventually(is_direct, "tokens accepted in all modes")
        await check_way(client, is_by_network=request.node.callspec.params["direct_cluster"] == "two hosts")
        draft = direct_cluster.services["draft"]
        running = asyncio.create_task(answers(client, 1.0, pb.VERIFY_MODE_COUPLED, speculate=True))
        await asyncio.sleep(0)
        draft.kill()
        start_again(direct_cluster, "draft")
        assert texts(await running) == plain[1.0, pb.VERIFY_MODE_COUPLED]
        await eventually(is_direct, "tokens accepted again")
