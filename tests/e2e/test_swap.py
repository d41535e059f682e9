"""Drafters of a real target are exchanged while streams run, by the command and over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import Result
from typer.testing import CliRunner

from specdec.client import Client, Completion
from specdec.commands.app import app
from specdec.commands.up.cluster import Cluster
from specdec.commands.views.failures import EXIT_CODES, EXIT_USAGE
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import target_pb2, target_pb2_grpc
from specdec.wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    Overloaded,
    SpecdecError,
    from_rpc_error,
)
from tests.support.engine.local_pair import MODELS
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import eventually
from tests.support.services.model_pair import ModelPair

pytestmark = pytest.mark.integration

EAGLE3 = {"method": "eagle3", "model": str(MODELS / "eagle3")}
NUM_STREAMS = 3


class Target:
    """A target as an operator calls it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = target_pb2_grpc.TargetServiceStub(channel)

    async def set(self, *drafters: Any, **fields: Any) -> list[str]:
        """Set drafters, names or objects. Raises the typed errors of `specdec.wire.errors`."""
        return await self.send(json.dumps(drafters), **fields)

    async def send(self, drafters: str, **fields: Any) -> list[str]:
        """The same from the text of a request."""
        request = target_pb2.SetDraftersRequest(drafters=drafters, **fields)
        try:
            return list((await self._stub.SetDrafters(request, timeout=60)).drafters)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def names(self) -> list[str]:
        """What it says that it runs."""
        return list((await self._stub.GetReplicaInfo(pb.GetReplicaInfoRequest(), timeout=20)).drafters)


@pytest.fixture(scope="module")
def cluster(shipped_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The shipped target, whose only drafter is ngram."""
    folder = tmp_path_factory.mktemp("swap")
    with start_cluster(shipped_pair, folder / "logs", num_drafts=0, target_settings={"drafters": "ngram"}) as started:
        yield started


@asynccontextmanager
async def opened(cluster: Cluster) -> AsyncIterator[tuple[Target, Client]]:
    async with (
        grpc.aio.insecure_channel(cluster.services["target"].spec.address) as channel,
        Client(cluster.address) as client,
    ):
        target = Target(channel)
        await target.set("ngram")
        yield target, client


def request(number: int, temperature: float, *, speculate: bool = True) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=f"def add_{number}(a, b):\n    return a + b\n\n\ndef add_{number}")
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = temperature, number, 400
    made.sampling.ignore_eos = True
    made.speculation.enabled = speculate
    return made


async def complete_all(client: Client, temperature: float, *, speculate: bool = True) -> list[Completion]:
    requests = [request(number, temperature, speculate=speculate) for number in range(NUM_STREAMS)]
    return list(await asyncio.gather(*(client.complete(each) for each in requests)))


def by_drafter(completions: list[Completion]) -> set[str]:
    return {token.drafter for each in completions for choice in each.choices.values() for token in choice.tokens} - {""}


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.7])
async def test_streams_stay_the_same_while_drafters_come_and_go(cluster: Cluster, temperature: float) -> None:
    sets: list[tuple[Any, ...]] = [
        ("suffix", "ngram"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 8}, EAGLE3),
        (EAGLE3, {"method": "layer_skip", "skip_mlp_layers": [1, 2, 4, 5, 6]}),
        (),
        ({**EAGLE3, "num_speculative_tokens": 3}, "ngram"),
    ]
    async with opened(cluster) as (target, client):
        plain = await complete_all(client, temperature, speculate=False)
        running: asyncio.Task[list[Completion]] | None = None
        completions: list[Completion] = []
        num_swaps = 0
        for drafters in sets * 2:
            if running is None:
                running = asyncio.create_task(complete_all(client, temperature))
            num_swaps += not running.done()
            names = [each if isinstance(each, str) else each["method"] for each in drafters]
            assert await target.set(*drafters) == names
            assert await target.names() == names
            with pytest.raises(FailedPrecondition, match="eagle3: "):
                await target.set("lookahead", {"method": "eagle3", "model": str(MODELS / "draft")})
            assert await target.names() == names
            if running.done():
                completions += await running
                running = None
        completions += [] if running is None else await running
        assert num_swaps > 2
        await target.set(EAGLE3, "suffix")
        after = await complete_all(client, temperature)
        completions += after
    for number, completion in enumerate(completions):
        assert completion.identity == plain[number % NUM_STREAMS].identity
    assert by_drafter(after) <= {"eagle3", "suffix"}
    assert by_drafter(completions) >= {"suffix", "eagle3"}


async def test_what_clients_are_told_follows(cluster: Cluster) -> None:
    async with opened(cluster) as (target, client):

        async def are(*names: str) -> bool:
            return list((await client.model_info()).drafters) == list(names)

        await eventually(lambda: are("ngram"), "the coordinator knows of ngram")
        await target.set("suffix", EAGLE3)
        await eventually(lambda: are("eagle3", "suffix"), "the coordinator knows of the new ones")
        body = request(1, 0.0)
        body.speculation.drafters.append("eagle3")
        assert by_drafter([await client.complete(body)]) == {"eagle3"}
        status = await client.status()
        assert not any(replica.load.HasField("drafters") for replica in status.replicas)


async def test_what_cannot_be_had_is_a_typed_error_and_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    hung = {"method": "eagle3", "model": str(tmp_path)}
    async with opened(cluster) as (target, _):
        refused: list[tuple[str, type[SpecdecError], str]] = [
            ("unheard_of", InvalidRequest, "unheard_of"),
            ("[" * 60_000, InvalidRequest, "nested"),
            ("x" * 70_000, InvalidRequest, "limit of 65536"),
            ("x" * (17 * 2**20), InvalidRequest, "exceed the server.s limit"),
            (json.dumps([{"method": "medusa", "model": "nowhere"}]), FailedPrecondition, "medusa: nowhere"),
        ]
        for text, kind, words in refused:
            with pytest.raises(kind, match=words):
                await target.send(text)
        with pytest.raises(DeadlineExceeded, match=r"eagle3: not loaded after 0\.3 s") as late:
            await target.send(json.dumps([hung]), load_timeout_ms=300)
        assert late.value.reason == "DRAFTER_LOAD_TIMEOUT"
        with pytest.raises(Overloaded) as busy:
            await target.set(EAGLE3)
        assert busy.value.reason == "DRAFTERS_LOADING"
        assert await target.names() == ["ngram"]
        await asyncio.to_thread((tmp_path / "config.json").write_text, "{}")

        async def is_free() -> bool:
            try:
                return await target.set(EAGLE3) == ["eagle3"]
            except Overloaded:
                return False

        await eventually(is_free, "the load that hung has ended")


def run_command(address: str, *flags: str) -> Result:
    return CliRunner().invoke(app, ["drafters", "--target", address, *flags], env={"COLUMNS": "200"})


def test_the_command_lists_and_sets(cluster: Cluster) -> None:
    address = cluster.services["target"].spec.address
    assert run_command(address, "--set", "ngram,suffix").stdout.split() == ["ngram", "suffix"]
    wanted = [EAGLE3, {"method": "ngram", "prompt_lookup_min": 1}, "suffix"]
    assert json.loads(run_command(address, "--set", json.dumps(wanted), "--json").stdout) == wanted
    assert json.loads(run_command(address, "--json").stdout) == wanted
    shown = [f'eagle3 model="{EAGLE3["model"]}"', "ngram prompt_lookup_min=1", "suffix"]
    assert run_command(address).stdout.splitlines() == shown
    unknown = run_command(address, "--set", "unheard_of")
    assert unknown.exit_code == EXIT_USAGE
    assert "unheard_of" in unknown.stderr
    misfit = run_command(address, "--set", json.dumps([{"method": "eagle3", "model": "nowhere"}]))
    assert misfit.exit_code == EXIT_CODES[FailedPrecondition.code.name]
    assert "eagle3: nowhere" in misfit.stderr
    assert run_command(address).stdout.splitlines() == shown
    assert run_command(address, "--set", "").stdout.split() == ["none"]
    elsewhere = run_command(cluster.address)
    assert elsewhere.exit_code != 0
    assert "the service there is no target" in elsewhere.stderr
