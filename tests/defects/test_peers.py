"""What peers that lie, die, hang or are not the same did to everybody."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from specdec.client import Client, ClientSettings
from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2_grpc
from specdec.wire.errors import SpecdecError
from tests.support.releases import Build
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import ScriptedSession
from tests.support.services.faults import (
    Reading,
    addresses_of,
    eventually,
    held_back,
    make_request,
    plain,
    target_in_use,
)
from tests.support.services.model_pair import ModelPair
from tests.support.services.poisoned_target import POISON
from tests.support.services.up_command import running_up

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(400)]

ANSWER_S = 60.0
WITHIN_S = 10.0
BEFORE = 20
MOST_U32 = 2**32 - 1
STANDS_STILL = {"credit_window_tokens": 16}
POISONING = f"""
import importlib.abc, importlib.util, sys
NAMES = {{"specdec.engine.model.runner", "specdec.engine.model_runner"}}


class Poisoned(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in NAMES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            forward = module.ModelRunner.forward

            def raising(runner, batch):
                if {POISON} in batch.input_ids.tolist():
                    raise ValueError("poison")
                return forward(runner, batch)

            module.ModelRunner.forward = raising

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Poisoned())
"""


@pytest.fixture
def poisoned(build: Build, tmp_path: Path) -> Build:
    """The build, with a model that raises for one token id."""

    class Poisoned(Build):
        @property
        def environment(self) -> dict[str, str]:
            return {"PYTHONPATH": f"{folder}:{self.folder}", "PYTHONSAFEPATH": "1"}

    folder = tmp_path / "poison"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(POISONING, encoding="utf-8")
    return Poisoned(build.version, build.folder)


async def test_a2_a_draft_that_tells_of_endless_times_ends_no_target(
    start: Callable[..., Cluster],
    beside: Callable[..., Cluster],
    engines: Callable[[Cluster], dict[str, psutil.Process]],
) -> None:
    cluster = start()
    before = engines(cluster)
    async with grpc.aio.insecure_channel(addresses_of(cluster)["drafts"][0]) as channel:
        info = await draft_pb2_grpc.DraftServiceStub(channel).GetReplicaInfo(pb.GetReplicaInfoRequest())

    def lie(session: ScriptedSession) -> bytes:
        start = len(session.token_ids)
        proposal = pb.Proposal(start_position=start, token_ids=[11] * 4, draft_us=MOST_U32, path_length=1)
        return proposal.SerializeToString()

    liar = ScriptedDraft(info.identity)
    liar.make_proposal = lie
    await liar.start()
    try:
        settings = {"targets": addresses_of(cluster)["targets"], "drafts": [liar.address]}
        coordinator = await asyncio.to_thread(beside, "coordinator", **settings)
        await asyncio.to_thread(coordinator.wait_connected, 2)
        body = make_request(max_tokens=60)
        async with Client(coordinator.address) as client, asyncio.timeout(ANSWER_S):
            completion = await client.complete(body)
            undisturbed = await client.complete(plain(body))
    finally:
        await liar.stop()
    assert liar.opened
    assert completion.choices[0].token_ids == undisturbed.choices[0].token_ids
    assert engines(cluster) == before


async def test_a3_a_request_that_every_step_raises_for_fails_alone(
    start: Callable[..., Cluster], poisoned: Build, engines: Callable[[Cluster], dict[str, psutil.Process]]
) -> None:
    cluster = start(build=poisoned, num_targets=3, num_drafts=0, coordinator_settings=STANDS_STILL)
    before = engines(cluster)
    innocent = [plain(make_request(max_tokens=200, temperature=1.0, seed=seed)) for seed in (1, 2)]
    for body in innocent:
        body.sampling.logit_bias[POISON] = -100
    guilty = plain(make_request(max_tokens=8))
    guilty.ClearField("prompt")
    guilty.prompt_token_ids.token_ids.extend([21, POISON, 23])
    async with held_back(cluster.address) as client:
        undisturbed = [await client.complete(body) for body in innocent]
        async with Reading(client, innocent[0]) as first, Reading(client, innocent[1]) as second:
            for stream in (first, second):
                await stream.until(BEFORE)
            with pytest.raises(SpecdecError):
                async with asyncio.timeout(ANSWER_S):
                    await client.complete(guilty)
            async with asyncio.timeout(ANSWER_S):
                completions = [await stream.rest() for stream in (first, second)]
    assert [found.identity for found in completions] == [wanted.identity for wanted in undisturbed]
    assert engines(cluster) == before


async def disturbed(cluster: Cluster, fault: Callable[[str], None], repair: Callable[[str], Awaitable[None]]) -> None:
    """A stream whose target suffers something goes on in time and exactly; the target's name is told."""
    body = plain(make_request(max_tokens=300, temperature=1.0))
    async with held_back(cluster.address) as client:
        undisturbed = await client.complete(body)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            name = await target_in_use(cluster)
            fault(name)
            try:
                async with asyncio.timeout(WITHIN_S):
                    completion = await stream.rest()
                assert completion.identity == undisturbed.identity
            finally:
                await repair(name)


async def test_a4_a_stream_goes_on_and_the_engine_is_replaced_when_it_is_stopped(
    start: Callable[..., Cluster], engines: Callable[[Cluster], dict[str, psutil.Process]]
) -> None:
    cluster = start(num_targets=2, num_drafts=0, coordinator_settings=STANDS_STILL)
    before = engines(cluster)

    async def is_replaced(name: str) -> None:
        async def has_another() -> bool:
            return not before[name].is_running() and cluster.is_healthy(name)

        await eventually(has_another, "the engine is replaced")

    await disturbed(cluster, lambda name: before[name].send_signal(signal.SIGSTOP), is_replaced)


async def test_a5_the_settings_of_keepalive_say_when_a_silent_target_is_given_up(
    start: Callable[..., Cluster],
) -> None:
    settings = {**STANDS_STILL, "keepalive_time_s": 1.0, "keepalive_timeout_s": 1.0}
    cluster = start(num_targets=2, num_drafts=0, coordinator_settings=settings)

    async def go_on(name: str) -> None:
        cluster.signal(name, signal.SIGCONT)

    await disturbed(cluster, lambda name: cluster.signal(name, signal.SIGSTOP), go_on)


@pytest.mark.parametrize("different", [{"num_blocks": 40}, {"dtype": "bfloat16"}], ids=["context", "numerics"])
async def test_a6_a_request_has_one_answer_whichever_of_unlike_targets_it_gets(
    start: Callable[..., Cluster], beside: Callable[..., Cluster], different: dict[str, object], tiny_pair: ModelPair
) -> None:
    cluster = start(num_drafts=0, target_settings={"num_blocks": 256, "dtype": "float32"})
    mine: dict[str, object] = {"model": str(tiny_pair.target), "num_blocks": 256, "dtype": "float32"}
    other = beside("target", **{**mine, **different})
    targets = [*addresses_of(cluster)["targets"], other.services["target"].spec.address]
    coordinator = beside("coordinator", targets=targets)
    body = plain(make_request(max_tokens=1200, temperature=1.0))

    async def answer(tenant: str) -> tuple[int, ...]:
        """Tenants share no prefix, so that only the load says where the request goes."""
        settings = ClientSettings(metadata=(("specdec-tenant", tenant),))
        async with Client(coordinator.address, settings) as client, asyncio.timeout(ANSWER_S * 2):
            return tuple((await client.complete(body)).choices[0].token_ids)

    async with Client(coordinator.address) as client:
        await eventually_known(client, len(targets))
    assert len({*await asyncio.gather(*map(answer, "abcdef"))}) == 1


async def eventually_known(client: Client, num_replicas: int) -> None:
    """Wait until the coordinator knows how each of its replicas is."""

    async def is_known() -> bool:
        states = [replica.state for replica in (await client.status()).replicas]
        return len(states) == num_replicas and not {"connecting", "down", ""} & set(states)

    await eventually(is_known, f"{num_replicas} replicas are known")


async def test_a8_one_tenants_flood_refuses_nobody_else(start: Callable[..., Cluster]) -> None:
    cluster = start(num_drafts=0, coordinator_settings={"max_running": 2, "max_waiting": 8, **STANDS_STILL})
    greedy = (("specdec-tenant", "greedy"),)
    settings = replace(held_back(cluster.address)._settings, metadata=greedy)
    async with Client(cluster.address, settings) as flood, Client(cluster.address) as polite:
        streams = [flood.generate(plain(make_request(max_tokens=100, seed=seed))) for seed in range(40)]

        async def read(stream: object) -> None:
            with suppress(SpecdecError):
                async for _ in stream:  # type: ignore[attr-defined]
                    pass

        reading = [asyncio.create_task(read(stream)) for stream in streams]

        async def is_full() -> bool:
            status = await polite.status()
            return status.num_running == 2 and status.num_waiting == 8

        await eventually(is_full, "all places are taken")
        began_s = time.monotonic()
        await polite.complete(plain(make_request(max_tokens=16)))
        took_s = time.monotonic() - began_s
        await asyncio.gather(*reading)
    assert took_s < WITHIN_S


async def test_a12_what_dies_below_specdec_up_is_started_again(tiny_pair: ModelPair, build: Build) -> None:
    with running_up(tiny_pair, variables=build.environment) as up:
        up.service("specdec.draft_service").kill()
        up.wait_line("ready again")
        async with Client(up.address) as client:
            await client.complete(make_request(max_tokens=16))
        assert up.process.poll() is None
