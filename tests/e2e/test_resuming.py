"""A client that resumes by itself sees one stream, whatever befalls coordinators; a plain one learns how to resume."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from google.rpc import status_pb2

from specdec.client import Client, Completion, generate_resuming
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest, Unavailable
from tests.support.services.faults import (
    CREDIT_WINDOW,
    PATIENCE_S,
    SmallBuffers,
    addresses_of,
    another,
    eventually,
    held_back,
    make_request,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SECRET = "a secret that two coordinators share"
NUM_TOKENS = 300


@pytest.fixture
def coordinators(tiny_cluster: Cluster, tmp_path: Path) -> Iterator[list[Cluster]]:
    """Two coordinators with one secret, which cut running streams off soon after SIGTERM and let clients read that."""
    settings = {
        **addresses_of(tiny_cluster),
        "resume_secret": SECRET,
        "drain_s": 0.2,
        "stop_grace_s": PATIENCE_S,
        "credit_window_tokens": CREDIT_WINDOW,
    }
    with ExitStack() as stack:
        yield [stack.enter_context(another("coordinator", tmp_path / str(i), **settings)) for i in range(2)]


def drain(cluster: Cluster) -> None:
    cluster.services["coordinator"].terminate()


def kill(cluster: Cluster) -> None:
    cluster.kill("coordinator")


async def serving(coordinators: list[Cluster]) -> Cluster:
    """The coordinator that runs the one request."""
    for cluster in coordinators:
        async with Client(cluster.address) as client:
            if (await client.status()).num_running:
                return cluster
    raise AssertionError("no coordinator runs a request")


@pytest.mark.parametrize("end", [drain, kill])
async def test_a_stream_outlives_its_coordinator(coordinators: list[Cluster], end: Callable[[Cluster], None]) -> None:
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0, n=2)
    completion = Completion()
    num_started = 0
    has_ended = False
    async with held_back(",".join([f"ipv4:{coordinators[0].address}", coordinators[1].address])) as client:
        whole = await client.complete(body)
        async for chunk in generate_resuming(client, body):
            num_started += chunk.HasField("started")
            completion.add(chunk)
            if completion.num_tokens >= 20 and not has_ended:
                has_ended = True
                end(await serving(coordinators))
    assert completion.identity == whole.identity
    assert completion.finished is not None
    assert num_started == 1
    assert all(choice.finished is not None for choice in completion.choices.values())


async def test_a_cut_off_stream_says_how_to_resume_it(coordinators: list[Cluster]) -> None:
    log_path = coordinators[0].services["coordinator"].log_path

    async def is_cut_off() -> bool:
        return re.search(r"\] stopping ", log_path.read_text(encoding="utf-8")) is not None

    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    started: api.GenerateStarted | None = None
    num_tokens = 0
    options = SmallBuffers(keepalive_timeout_s=20.0).channel_options()
    async with grpc.aio.insecure_channel(coordinators[0].address, options=options) as channel:
        generate = channel.unary_stream(
            "/specdec.v1.CoordinatorService/Generate",
            request_serializer=api.GenerateRequest.SerializeToString,
            response_deserializer=api.GenerateResponse.FromString,
        )
        call = generate(body)
        while num_tokens < 20:
            chunk = await call.read()
            started = chunk.started if chunk.HasField("started") else started
            num_tokens += len(chunk.delta.tokens)
        coordinators[0].signal("coordinator", signal.SIGTERM)
        # Until then nothing is read, so that the stream stands still and cannot end by itself.
        await eventually(is_cut_off, "the coordinator has drained")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    trailing = dict(caught.value.trailing_metadata() or ())
    info = api.ResumeInfo()
    details = status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details
    assert any(detail.Unpack(info) for detail in details)
    assert started is not None
    assert (info.request_id, info.seed, info.resume_token) == (started.request_id, started.seed, started.resume_token)


async def test_errors_that_resuming_cannot_mend_are_raised(tiny_client: Client) -> None:
    body = make_request(max_tokens=5)
    body.sampling.temperature = -1
    with pytest.raises(InvalidRequest):
        [chunk async for chunk in generate_resuming(tiny_client, body)]


async def test_a_request_that_never_started_is_not_resumed() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            [chunk async for chunk in generate_resuming(client, make_request())]
