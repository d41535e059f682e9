"""The command and the three services together, as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from typer.testing import CliRunner

from specdec.cli.app import app
from specdec.cli.local.cluster import Cluster
from specdec.client import Client
from specdec.v1 import common_pb2, coordinator_pb2
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import speculated
from tests.support.services.model_pair import ModelPair

PROMPT = "Once upon a time"
DEADLINE_S = 60.0


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
    assert "The tokens are equal: all 32 of them." in result.stderr
    assert "acceptance length" in result.stderr


def test_the_command_names_the_field_that_the_server_refuses(tiny_cluster: Cluster) -> None:
    result = CliRunner().invoke(app, ["generate", PROMPT, "--top-p", "2", "--address", tiny_cluster.address])
    assert result.exit_code == 2
    assert "sampling.top_p" in result.stderr


def test_models_lists_both_replicas_as_ready(tiny_cluster: Cluster) -> None:
    result = CliRunner().invoke(app, ["models", "--address", tiny_cluster.address], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("ready") == 2


@contextmanager
def running_up(pair: ModelPair) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Yield `specdec up` once it is ready, and all processes below it."""
    arguments = ["up", "--target", str(pair.target), "--draft", str(pair.draft), "--device", "cpu", "--free-ports"]
    command = [sys.executable, "-m", "specdec.cli.main", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # Whoever runs the tests in the background of a shell ignores SIGINT, and children inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, inherited)
    with started as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("Ready at"):
                    break
            assert process.poll() is None, "".join(lines)
            yield process, psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()


def test_one_interrupt_stops_everything(tiny_pair: ModelPair) -> None:
    with running_up(tiny_pair) as (process, children):
        assert len(children) >= 5  # Three services, two of them with an engine.
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []


def test_nothing_survives_a_killed_parent(tiny_pair: ModelPair) -> None:
    with running_up(tiny_pair) as (process, children):
        process.kill()
        assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []


def test_up_ends_with_an_error_when_a_service_dies(tiny_pair: ModelPair) -> None:
    with running_up(tiny_pair) as (process, children):
        draft = next(child for child in children if "draft_service" in child.cmdline())
        draft.kill()
        assert process.stderr is not None
        output = process.stderr.read()
        assert process.wait(DEADLINE_S) == 1
        assert "draft ended with exit code -9" in output
        assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []
