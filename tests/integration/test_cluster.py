"""The command and the three services together, as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.client import Client
from specdec.commands.app import app
from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2, coordinator_pb2
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import PATIENCE_S, speculated
from tests.support.services.model_pair import ModelPair
from tests.support.services.one_service import running

PROMPT = "Once upon a time"


def request(*, speculate: bool = True, temperature: float = 1.0, seed: int = 7) -> coordinator_pb2.GenerateRequest:
    message = coordinator_pb2.GenerateRequest(prompt=PROMPT)
    message.sampling.temperature = temperature
    message.sampling.seed = seed
    message.sampling.max_tokens = 48
    message.sampling.ignore_eos = True
    message.speculation.enabled = speculate
    return message


async def test_speculation_changes_no_token(tiny_client: Client) -> None:
    for temperature in (0.0, 1.0):
        speculative = await speculated(tiny_client, request(temperature=temperature))
        plain = await tiny_client.complete(request(temperature=temperature, speculate=False))
        assert speculative.identity == plain.identity
        assert speculative.num_tokens == 48
        assert plain.require_finished().stats.num_verify_steps == 0


async def test_first_chunk_has_what_is_needed_to_repeat_the_request(tiny_client: Client) -> None:
    message = request()
    message.sampling.ClearField("seed")
    first = await tiny_client.complete(message)
    assert first.started is not None
    second = await tiny_client.complete(request(seed=first.started.seed))
    assert first.identity == second.identity


async def test_every_token_has_an_origin(tiny_client: Client) -> None:
    completion = await tiny_client.complete(request())
    origins = [token.origin for token in completion.choices[0].tokens]
    assert origins[0] == common_pb2.ORIGIN_PREFILL
    assert common_pb2.ORIGIN_UNSPECIFIED not in origins
    assert origins.count(common_pb2.ORIGIN_DRAFT) == completion.require_finished().stats.num_accepted


@pytest.fixture(scope="module")
def cluster(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster to kill and restart services of; each test leaves it whole."""
    with start_cluster(tiny_pair, tmp_path_factory.mktemp("restarted")) as cluster:
        yield cluster


async def test_a_killed_draft_changes_no_token_and_comes_back(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        before = await client.complete(request())
        cluster.kill("draft")
        without = await client.complete(request())
        assert without.identity == before.identity
        cluster.restart("draft")
        cluster.wait_connected()
        after = await speculated(client, request())
        assert after.identity == before.identity


async def test_a_restarted_target_gives_the_same_tokens(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        before = await client.complete(request())
        cluster.kill("target")
        cluster.restart("target")
        cluster.wait_connected()
        assert (await client.complete(request())).identity == before.identity


def test_the_command_compares_and_finds_equal_tokens(tiny_cluster: Cluster) -> None:
    arguments = ["generate", PROMPT, "--compare", "--show-origin", "--max-tokens", "32", "--ignore-eos"]
    result = CliRunner().invoke(app, [*arguments, "--address", tiny_cluster.address])
    assert result.exit_code == 0, result.stderr
    assert "All 32 tokens are equal." in result.stderr
    assert "acceptance length" in result.stderr


def test_the_command_names_the_field_that_the_server_refuses(tiny_cluster: Cluster) -> None:
    result = CliRunner().invoke(app, ["generate", PROMPT, "--top-p", "2", "--address", tiny_cluster.address])
    assert result.exit_code == 2
    assert "sampling.top_p" in result.stderr


def test_models_lists_both_replicas_as_ready(tiny_cluster: Cluster) -> None:
    result = CliRunner().invoke(app, ["models", "--address", tiny_cluster.address], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("ready") == 2


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_path_that_leads_nowhere_is_told_before_an_engine_starts(role: str, tmp_path: Path) -> None:
    async with running(role, {"model": str(tmp_path / "nothing")}, tmp_path) as process:
        assert process.wait(PATIENCE_S)
    (line,) = process.log_path.read_text().splitlines()
    assert f"model: no such directory: {tmp_path}/nothing" in line
    assert process.exit_code == 1
