"""One tenant pulls every lever that it has, all at once; another one's requests keep a bound, and their tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import from_rpc_error
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import Harness, collect, expected_ids, request, running

GREEDY, POLITE = ((TENANT_KEY, "greedy"),), ((TENANT_KEY, "polite"),)
NUM_POLITE = 8
MOST_ENDED = 12
"""Requests that end while one polite request is served, itself included: twice what it takes, on any machine."""
FAR_S = 10**6
ANSWERS = {
    "OK", "OVERLOADED", "PROMPT_BYTES_EXCEEDED", "TOO_MANY_REQUESTS_OF_TENANT", "QUEUE_TIMEOUT", "READER_STALLED",
    "INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED", "CANCELLED", "DEADLINE_UNREACHABLE",
}  # fmt: skip
PROMPT = "the quick brown fox jumps over the lazy dog. " * 2000
"""As much as takes the tokenizer, and not this process, in which client, coordinator and replicas are, some time."""


async def outcome(call: Any) -> str:
    """OK, or the reason of the call's error."""
    try:
        await (collect(call) if hasattr(call, "read") else call)
    except grpc.RpcError as error:
        return from_rpc_error(error).reason
    except asyncio.CancelledError:
        return "CANCELLED"
    return "OK"


class Greedy:
    """Keeps every lever pulled until it is told to stop; each is pulled again as soon as it answers."""

    def __init__(self, harness: Harness, unread: api_grpc.CoordinatorServiceStub) -> None:
        self._stub = harness.stub
        self._unread = unread
        self._stopped = False
        self.outcomes: set[str] = set()
        self.num_pulled = 0
        self._held: list[Any] = []

    def levers(self) -> list[Any]:
        """How each call is made, over and over."""
        stub, far = self._stub, {"metadata": GREEDY, "timeout": FAR_S}
        messages = api.ChatMessages(messages=[api.ChatMessage(role="user", content="x")] * 500)
        cut = {"prompt": PROMPT, "prompt_ids": (), "truncate_prompt_tokens": 500}
        return [
            lambda: stub.Generate(request(n=16, max_tokens=40, priority=-(2**31)), **far),
            lambda: stub.Generate(request(n=16, max_tokens=40, priority=2**31 - 1), **far),
            lambda: stub.Generate(request(max_tokens=20, **cut), **far),
            lambda: stub.Generate(request([7] * 500, prompt_logprobs=2, logprobs=2, max_tokens=20), **far),
            lambda: stub.Generate(request([8] * 2000, max_tokens=100, ignore_eos=True), **far),
            lambda: stub.Tokenize(api.TokenizeRequest(text=PROMPT), **far),
            lambda: stub.Tokenize(api.TokenizeRequest(messages=messages), **far),
            lambda: stub.Detokenize(api.DetokenizeRequest(token_ids=[100] * 4000), **far),
        ]

    async def pull(self, lever: Any) -> None:
        """Pull a lever until the end."""
        while not self._stopped:
            self.num_pulled += 1
            self.outcomes.add(await outcome(lever()))
            await asyncio.sleep(0.02)  # a client's own pace: it is of this process, too

    def leave_unread(self) -> None:
        """Streams of which nothing is read."""
        body = request(max_tokens=2000, logprobs=2, ignore_eos=True)
        self._held = [self._unread.Generate(body, metadata=GREEDY, timeout=FAR_S) for _ in range(4)]

    def stop(self) -> None:
        """Pull no more."""
        self._stopped = True
        for call in self._held:
            call.cancel()


async def test_a_tenant_that_pulls_every_lever_at_once_costs_another_no_token_and_bounded_time() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.tokens_per_verdict = 8
    bounds = {
        "max_running": 16, "max_waiting": 64, "max_concurrent_requests_per_tenant": 24, "reader_stall_s": 0.5,
        "max_held_prompt_bytes_per_tenant": 4_000_000, "max_held_prompt_bytes": 16_000_000,
    }  # fmt: skip
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    nums_ended = []
    async with (
        running([target], [draft], **bounds) as harness,
        grpc.aio.insecure_channel(harness.address, options=options) as channel,
    ):
        greedy = Greedy(harness, api_grpc.CoordinatorServiceStub(channel))
        greedy.leave_unread()
        levers = greedy.levers() * 2
        pulling = [asyncio.create_task(greedy.pull(lever)) for lever in levers]
        for seed in range(NUM_POLITE):
            num_before = harness.metric("requests_total", outcome="OK")
            result = await collect(harness.stub.Generate(request(seed=seed), metadata=POLITE, timeout=60.0))
            nums_ended.append(harness.metric("requests_total", outcome="OK") - num_before)
            assert result.ids() == expected_ids(target, 20, seed=seed)
        greedy.stop()
        async with asyncio.timeout(120):
            await asyncio.gather(*pulling)
        result = await collect(harness.stub.Generate(request(seed=99), metadata=GREEDY))
        assert result.ids() == expected_ids(target, 20, seed=99)
    assert greedy.num_pulled > len(levers)
    assert greedy.outcomes <= ANSWERS
    assert max(nums_ended) <= MOST_ENDED
