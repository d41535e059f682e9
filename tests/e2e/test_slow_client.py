"""A client that does not keep up slows its own stream, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc
from tests.support.services.faults import addresses_of, another, eventually, load_of, make_request

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("no_block_is_left")]

CREDIT = 32
LONG = 1000
"""Tokens of the slow stream: more than network buffers hold."""
FEW_READS = 1
"""Chunks, at most, that the slow client reads, one a second, during another stream of 200 tokens."""
SAME = 10
"""Looks in a row, some tens of milliseconds apart, that see the same: a session that runs takes a block in each."""
# Else a connection grows its buffers with the speed that it has seen.
SMALL_BUFFERS = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


@pytest.fixture(scope="module")
def address(tiny_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator that gives little credit, at the replicas of `tiny_cluster`."""
    settings = {**addresses_of(tiny_cluster), "credit_window_tokens": CREDIT}
    with another("coordinator", tmp_path_factory.mktemp("slow_client"), **settings) as coordinator:
        yield coordinator.address


@pytest.fixture
async def no_block_is_left(tiny_cluster: Cluster) -> AsyncIterator[None]:
    """A stream leaves no KV block; sessions of coordinators that other tests have killed may hold some for a minute."""

    async def used() -> list[int]:
        names = ("target", "draft")
        return [(await load_of(name, tiny_cluster.services[name].spec.address)).kv_blocks_used for name in names]

    before = await used()
    yield

    async def are_given_back() -> bool:
        return all(now <= then for now, then in zip(await used(), before, strict=True))

    await eventually(are_given_back, "the streams' KV blocks are free")


async def chunks_of(channel: grpc.aio.Channel, body: api.GenerateRequest) -> AsyncIterator[api.GenerateResponse]:
    call = coordinator_pb2_grpc.CoordinatorServiceStub(channel).Generate(body)
    try:
        while (chunk := await call.read()) is not grpc.aio.EOF:
            yield chunk
    finally:
        call.cancel()


async def test_a_client_that_reads_one_chunk_a_second_does_not_slow_another(
    tiny_cluster: Cluster, address: str
) -> None:
    slow_body = make_request(max_tokens=LONG, temperature=1.0)
    fast_body = make_request(max_tokens=200, temperature=1.0, seed=8)
    slow_body.speculation.enabled = fast_body.speculation.enabled = False  # the target alone decides the speed
    target = tiny_cluster.services["target"].spec.address
    slow = Completion()
    async with (
        Client(address) as client,
        grpc.aio.insecure_channel(address, options=SMALL_BUFFERS) as channel,
    ):
        alone = await client.complete(fast_body)
        chunks = chunks_of(channel, slow_body)
        slow.add(await anext(chunks))

        num_read = 0

        async def read_slowly() -> None:
            nonlocal num_read
            async for chunk in chunks:
                slow.add(chunk)
                num_read += 1
                await asyncio.sleep(1.0)

        reader = asyncio.create_task(read_slowly())

        used = [0]

        async def stands_still() -> bool:
            used.append((await load_of("target", target)).kv_blocks_used)
            return used[-1] > 0 and len(used) > SAME and len(set(used[-SAME:])) == 1

        await eventually(stands_still, "the slow stream's session is out of credit")

        async def is_held_up_by_no_read() -> bool:  # in some attempt: a machine may be slower for a while
            num_before = num_read
            assert (await client.complete(fast_body)).identity == alone.identity
            return num_read - num_before <= FEW_READS

        await eventually(is_held_up_by_no_read, f"a stream is done while the slow client reads {FEW_READS} chunk")
        assert slow.finished is None
        assert (await load_of("target", target)).kv_blocks_used * 16 < LONG
        reader.cancel()
        await asyncio.wait([reader])


async def test_a_client_that_stops_reading_for_a_while_loses_nothing(address: str) -> None:
    body = make_request(max_tokens=LONG, temperature=1.0)
    async with (
        Client(address) as client,
        grpc.aio.insecure_channel(address, options=SMALL_BUFFERS) as channel,
    ):
        chunks = chunks_of(channel, body)
        late = Completion()
        late.add(await anext(chunks))
        prompt = await client.complete(body)
        assert prompt.num_tokens == LONG
        async for chunk in chunks:
            late.add(chunk)
        assert late.identity == prompt.identity
