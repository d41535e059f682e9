"""What a client sends when its stream broke: the request, and all that it holds of the answer."""

from __future__ import annotations

import bisect
import random
from collections.abc import AsyncIterator

import pytest
import structlog

from specdec.client import Completion, ResumePolicy, generate_resuming, resumed_request
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Unavailable
from tests.support.cost import Spent

MOST_BYTES_PER_TOKEN = 64
"""That are kept of a stream that may have to be resumed; its log-probabilities have kilobytes."""


def chunks(*parts: tuple[int, list[int], str]) -> list[api.GenerateResponse]:
    """A first chunk, then a delta for each part: choice, token ids, text."""
    started = api.GenerateStarted(request_id="a", seed=7, resume_token=b"token")
    deltas = [
        api.ChoiceDelta(index=index, text=text, tokens=[api.OutputToken(id=token_id) for token_id in token_ids])
        for index, token_ids, text in parts
    ]
    return [api.GenerateResponse(started=started), *(api.GenerateResponse(delta=delta) for delta in deltas)]


def held(*parts: tuple[int, list[int], str]) -> Completion:
    completion = Completion()
    for chunk in chunks(*parts):
        completion.add(chunk)
    return completion


def told(request: api.GenerateRequest) -> dict[int, tuple[list[int], int]]:
    """Token ids and text offset of each choice that a request resumes."""
    choices = {choice.index: (list(choice.token_ids), choice.text_offset_bytes) for choice in request.resume.choices}
    assert len(choices) == len(request.resume.choices)
    return choices


def test_a_resumed_request_names_all_that_is_held() -> None:
    body = resumed_request(api.GenerateRequest(prompt="p"), held((0, [1, 2], "é"), (1, [3], "b")))
    assert (body.request_id, body.sampling.seed, body.resume.resume_token) == ("a", 7, b"token")
    assert told(body) == {0: ([1, 2], 2), 1: ([3], 1)}


def test_what_followed_a_resumed_request_is_added_to_what_it_holds() -> None:
    first = resumed_request(api.GenerateRequest(prompt="p"), held((0, [1, 2], "é"), (1, [3], "b")))
    second = resumed_request(first, held((0, [4], "cd"), (2, [5], "e")))
    assert told(second) == {0: ([1, 2, 4], 4), 1: ([3], 1), 2: ([5], 1)}
    assert told(first) == {0: ([1, 2], 2), 1: ([3], 1)}


class ClientWithOutages:
    """Serves scripts one after the other; after each but the last the service is unavailable."""

    def __init__(self, *scripts: list[api.GenerateResponse]) -> None:
        self.scripts = list(scripts)
        self.requests: list[api.GenerateRequest] = []

    async def generate(self, request: api.GenerateRequest) -> AsyncIterator[api.GenerateResponse]:
        self.requests.append(request)
        for chunk in self.scripts.pop(0):
            yield chunk
        if self.scripts:
            raise Unavailable("gone", retry_after_s=0.0)


async def read(client: ClientWithOutages, request: api.GenerateRequest) -> list[int]:
    policy = ResumePolicy(max_wait_s=0.0)
    stream = generate_resuming(client, request, policy)  # type: ignore[arg-type]
    return [token.id async for chunk in stream for token in chunk.delta.tokens]


async def test_a_request_that_resumes_is_taken_up_again_behind_all_that_came() -> None:
    request = resumed_request(api.GenerateRequest(prompt="p"), held((0, [1, 2], "ab")))
    client = ClientWithOutages(chunks((0, [3], "c")), chunks((0, [4], "d")), chunks((0, [5], "e")))
    assert await read(client, request) == [3, 4, 5]
    assert [told(body)[0] for body in client.requests] == [([1, 2], 2), ([1, 2, 3], 3), ([1, 2, 3, 4], 4)]


async def test_a_request_that_resumes_is_sent_again_though_nothing_came() -> None:
    request = resumed_request(api.GenerateRequest(prompt="p"), held((0, [1], "a")))
    client = ClientWithOutages([], chunks((0, [2], "b")))
    assert await read(client, request) == [2]
    assert [told(body)[0] for body in client.requests] == [([1], 1), ([1], 1)]


async def test_a_new_request_that_brought_nothing_is_not_sent_again() -> None:
    client = ClientWithOutages([], chunks((0, [1], "a")))
    with pytest.raises(Unavailable):
        await read(client, api.GenerateRequest(prompt="p"))


async def test_an_interrupted_stream_writes_nothing_among_the_text_that_a_program_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, is_configured = structlog.get_config(), structlog.is_configured()
    structlog.reset_defaults()
    try:
        client = ClientWithOutages(chunks((0, [1], "a")), chunks((0, [2], "b")))
        await read(client, api.GenerateRequest(prompt="p"))
        assert len(client.requests) == 2
    finally:
        if is_configured:
            structlog.configure(**config)
    assert capsys.readouterr() == ("", "")


async def test_of_a_stream_only_what_a_resume_tells_is_kept() -> None:
    num_chunks, tokens_per_chunk = 2000, 10
    position = pb.PositionLogprobs(top=[pb.TokenLogprob(token_id=5, logprob=-1.0)] * 20)
    tokens = [api.OutputToken(id=4_000_000_000, text="a", logprobs=position)] * tokens_per_chunk
    encoded = api.GenerateResponse(delta=api.ChoiceDelta(text="a", tokens=tokens)).SerializeToString()
    prompt = api.PromptLogprobs(token_ids=range(2000), positions=[position] * 1999)
    whole_prompt = api.GenerateResponse(prompt_logprobs=prompt)
    later = [api.GenerateResponse(delta=api.ChoiceDelta(text="b", tokens=[api.OutputToken(id=7)]))]
    requests: list[api.GenerateRequest] = []
    taken_bytes = 0

    class LongAnswer:
        async def generate(self, request: api.GenerateRequest) -> AsyncIterator[api.GenerateResponse]:
            nonlocal taken_bytes
            requests.append(request)
            if request.HasField("resume"):
                for chunk in later:
                    yield chunk
                return
            yield chunks()[0]
            yield api.GenerateResponse.FromString(encoded)
            spent = Spent()
            yield whole_prompt
            for _ in range(num_chunks - 1):
                yield api.GenerateResponse.FromString(encoded)
            taken_bytes = spent.until_now()[2]
            raise Unavailable("gone", retry_after_s=0.0)

    body = api.GenerateRequest(prompt="p", sampling=api.SamplingParams(prompt_logprobs=20))
    policy = ResumePolicy(max_wait_s=0.0)
    num_tokens = 0
    async for chunk in generate_resuming(LongAnswer(), body, policy):  # type: ignore[arg-type]
        num_tokens += len(chunk.delta.tokens)
    assert num_tokens == num_chunks * tokens_per_chunk + 1
    assert told(requests[1]) == {0: ([4_000_000_000] * num_chunks * tokens_per_chunk, num_chunks)}
    assert requests[1].resume.prompt_logprobs_position == 2000
    assert taken_bytes < MOST_BYTES_PER_TOKEN * num_chunks * tokens_per_chunk + 2**20


def test_streams_that_were_lost_together_are_resumed_evenly_over_two_delays() -> None:
    policy, rng = ResumePolicy(), random.Random(1)
    waits_s = sorted(policy.wait_s(1.0, 1, rng.uniform) for _ in range(10_000))
    assert waits_s[-1] <= 2.0
    for part in range(20):
        within = bisect.bisect(waits_s, (part + 1) / 10) - bisect.bisect(waits_s, part / 10)
        assert 0.7 < within / 500 < 1.3, "the twentieth of them in each tenth of a second"


def test_a_coordinator_may_be_away_for_at_least_twelve_seconds() -> None:
    policy = ResumePolicy()
    least_s = [policy.wait_s(1.0, number, min) for number in range(1, policy.max_attempts)]
    assert sum(least_s) >= 12.0
    assert max(policy.wait_s(delay_s, number, max) for delay_s in (1.0, 60.0) for number in (1, 2, 9)) == 5.0
