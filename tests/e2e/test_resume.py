"""A stream that was dropped is taken up with its token ids, and continues to the character."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import DataLoss, InvalidRequest
from tests.support.services.faults import Reading, addresses_of, another, make_request, resumed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MAX_TOKENS = 120
SECRET = "a secret that two coordinators share"


def assert_continues(whole: Completion, held: Completion, rest: Completion) -> None:
    assert sorted(rest.choices) == sorted(whole.choices)
    for index, choice in whole.choices.items():
        before, after = held.choices.get(index), rest.choices[index]
        assert (before.token_ids if before else []) + after.token_ids == choice.token_ids
        assert (before.text if before else "") + after.text == choice.text
        assert after.finished is not None
        assert choice.finished is not None
        assert after.finished.reason == choice.finished.reason


async def dropped(client: Client, body: api.GenerateRequest, num_tokens: int) -> Completion:
    """What a client holds that leaves after some tokens."""
    async with Reading(client, body) as stream:
        return await stream.until(num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 37, MAX_TOKENS - 1])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_dropped_stream_continues_where_it_was(tiny_client: Client, num_tokens: int, n: int) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0, n=n)
    whole = await tiny_client.complete(body)
    held = await dropped(tiny_client, body, num_tokens)
    assert_continues(whole, held, await tiny_client.complete(resumed(body, held)))


async def test_a_stream_whose_seed_the_server_chose_continues_too(tiny_client: Client) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0)
    body.sampling.ClearField("seed")
    held = await dropped(tiny_client, body, 37)
    rest = await tiny_client.complete(resumed(body, held))
    assert held.started is not None
    body.sampling.seed = held.started.seed
    assert_continues(await tiny_client.complete(body), held, rest)


async def test_a_client_that_lost_everything_but_the_first_chunk_gets_it_all_again(tiny_client: Client) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0)
    whole = await tiny_client.complete(body)
    held = Completion(started=(await dropped(tiny_client, body, 37)).started)
    assert_continues(whole, held, await tiny_client.complete(resumed(body, held)))


async def test_a_client_that_holds_fewer_tokens_than_were_sent_gets_the_others_again(tiny_client: Client) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0)
    whole = await tiny_client.complete(body)
    held = await dropped(tiny_client, body, 37)
    again = resumed(body, held)
    del again.resume.choices[0].token_ids[20:]
    again.resume.choices[0].text_offset_bytes = 0
    rest = await tiny_client.complete(again)
    assert whole.choices[0].token_ids == held.choices[0].token_ids[:20] + rest.choices[0].token_ids
    assert rest.choices[0].text == whole.choices[0].text


async def test_penalties_stop_strings_and_speculation_go_on_as_if_nothing_had_happened(tiny_client: Client) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.5)
    text = (await tiny_client.complete(body)).choices[0].text
    body.sampling.stop.append(next(text[i : i + 3] for i in range(50, 100) if text[i : i + 3].isascii()))
    whole = await tiny_client.complete(body)
    held = await dropped(tiny_client, body, 20)
    assert_continues(whole, held, await tiny_client.complete(resumed(body, held)))


@pytest.fixture(scope="module")
def coordinators(tiny_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cluster]]:
    """Two coordinators with one secret and no journal in common."""
    folder = tmp_path_factory.mktemp("coordinators")
    settings = {**addresses_of(tiny_cluster), "resume_secret": SECRET}
    with (
        another("coordinator", folder / "one", **settings) as one,
        another("coordinator", folder / "two", **settings) as two,
    ):
        yield [one, two]


async def test_another_coordinator_takes_up_a_stream_when_the_first_is_killed(coordinators: list[Cluster]) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0)
    async with Client(coordinators[0].address) as one, Client(coordinators[1].address) as two:
        whole = await two.complete(body)
        held = await dropped(one, body, 37)
        coordinators[0].kill("coordinator")
        assert_continues(whole, held, await two.complete(resumed(body, held)))


async def test_tokens_that_were_never_sent_are_data_loss(tiny_client: Client) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0)
    again = resumed(body, await dropped(tiny_client, body, 37))
    again.resume.choices[0].token_ids[5] ^= 1
    with pytest.raises(DataLoss):
        await tiny_client.complete(again)


async def test_a_resume_token_of_another_request_is_refused(tiny_client: Client) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0)
    again = resumed(body, await dropped(tiny_client, body, 37))
    again.sampling.seed += 1
    with pytest.raises(InvalidRequest) as caught:
        await tiny_client.complete(again)
    assert caught.value.field == "resume.resume_token"
