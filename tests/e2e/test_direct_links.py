"""Real services whose drafts and targets talk directly: the tokens are those of the relay and of plain decoding."""

from __future__ import annotations

import asyncio

import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.clusters import MakeCluster
from tests.support.services.faults import eventually, start_again

pytestmark = pytest.mark.integration
NUM_REQUESTS = 4
MODES = {(0.0, pb.VERIFY_MODE_COUPLED), (1.0, pb.VERIFY_MODE_COUPLED), (0.0, pb.VERIFY_MODE_REJECTION)}
PATIENT = {"hold_off_ms": 30.0, "adaptive_speculation": False}


@pytest.fixture
def direct_cluster(make_cluster: MakeCluster) -> Cluster:
    """Its coordinator relays no proposal."""
    return make_cluster(target_settings=PATIENT, coordinator_settings={"proposal_path": "direct"})


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


async def test_tokens_are_those_of_plain_decoding_and_a_lost_draft_comes_back_to_its_link(
    direct_cluster: Cluster,
) -> None:
    async with Client(direct_cluster.address) as client:

        async def is_direct() -> bool:
            """Equal in all modes, with accepted tokens, none of which the coordinator has relayed."""
            num_accepted = set()
            for temperature, mode in MODES:
                fast = await answers(client, temperature, mode, speculate=True)
                assert texts(fast) == texts(await answers(client, temperature, mode, speculate=False))
                num_accepted.add(sum(each.require_finished().stats.num_accepted for each in fast))
            return min(num_accepted) > 0

        await eventually(is_direct, "tokens accepted in all modes")
        draft = direct_cluster.services["draft"]
        running = asyncio.create_task(answers(client, 1.0, pb.VERIFY_MODE_COUPLED, speculate=True))
        await asyncio.sleep(0)
        draft.kill()
        start_again(direct_cluster, "draft")
        plain = await answers(client, 1.0, pb.VERIFY_MODE_COUPLED, speculate=False)
        assert texts(await running) == texts(plain)
        await eventually(is_direct, "tokens accepted again")


async def test_what_a_stop_string_cuts_is_in_no_answer(direct_cluster: Cluster) -> None:
    async with Client(direct_cluster.address) as client:
        whole = texts(await answers(client, 1.0, pb.VERIFY_MODE_COUPLED, speculate=True))
        stop = whole[0].strip()[4:7]
        cut = texts(await answers(client, 1.0, pb.VERIFY_MODE_COUPLED, speculate=True, stop=stop))
        assert [text.partition(stop)[0] for text in whole] == cut
