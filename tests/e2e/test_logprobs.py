"""Log-probabilities are those of transformers, of the raw logits, and do not depend on speculation."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.client import Client, Completion
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.faults import make_request, plain, speculated
from tests.support.services.model_pair import ModelPair

pytestmark = pytest.mark.integration

TOLERANCE = 1e-4
NUM_TOP = 5
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def model(tiny_pair: ModelPair) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32).eval()


def make_body(**sampling: float) -> api.GenerateRequest:
    """A request for all log-probabilities, with settings that bend the distribution that is sampled from."""
    return make_request(
        max_tokens=MAX_TOKENS, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP, **{"temperature": 0.7, **sampling}
    )


@torch.inference_mode()
def expected_logprobs(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids) - 1, V]: of what may follow each prefix."""
    return model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)


def assert_close(position: pb.PositionLogprobs, expected: torch.Tensor, token_id: int, num_top: int) -> None:
    assert position.logprob == pytest.approx(expected[token_id].item(), abs=TOLERANCE)
    assert len(position.top) == num_top
    values = torch.tensor([entry.logprob for entry in position.top])
    torch.testing.assert_close(values, expected.topk(num_top).values, atol=TOLERANCE, rtol=0)
    own = expected[[entry.token_id for entry in position.top]]
    torch.testing.assert_close(values, own, atol=TOLERANCE, rtol=0)
    assert len({entry.token_id for entry in position.top}) == num_top


def output_positions(completion: Completion, index: int = 0) -> list[pb.PositionLogprobs]:
    return [token.logprobs for token in completion.choices[index].tokens]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.5, "repetition_penalty": 1.5}])
@pytest.mark.parametrize("speculate", [True, False])
async def test_logprobs_are_the_log_softmax_of_transformers(
    tiny_client: Client, model: torch.nn.Module, sampling: dict[str, float], speculate: bool
) -> None:
    body = make_body(**sampling)
    completion = await tiny_client.complete(body if speculate else plain(body))
    assert completion.prompt_logprobs is not None
    prompt = list(completion.prompt_logprobs.token_ids)
    assert prompt == await tiny_client.tokenize(body.prompt)
    token_ids = prompt + completion.choices[0].token_ids
    expected = expected_logprobs(model, token_ids)
    positions = [*completion.prompt_logprobs.positions, *output_positions(completion)]
    assert len(positions) == len(token_ids) - 1
    for position, row, token_id in zip(positions, expected, token_ids[1:], strict=True):
        assert_close(position, row, token_id, NUM_TOP)


async def test_logprobs_are_the_same_with_and_without_speculation(tiny_client: Client) -> None:
    body = make_body()
    fast, slow = await speculated(tiny_client, body), await tiny_client.complete(plain(body))
    assert fast.identity == slow.identity
    assert output_positions(fast) == output_positions(slow)
    assert fast.prompt_logprobs == slow.prompt_logprobs


async def test_no_alternatives_are_sent_when_none_are_asked_for(tiny_client: Client, model: torch.nn.Module) -> None:
    body = make_request(max_tokens=10, logprobs=0)
    completion = await tiny_client.complete(body)
    assert completion.prompt_logprobs is None
    prompt = await tiny_client.tokenize(body.prompt)
    token_ids = prompt + completion.choices[0].token_ids
    expected = expected_logprobs(model, token_ids)[len(prompt) - 1 :]
    for position, row, token_id in zip(output_positions(completion), expected, token_ids[len(prompt) :], strict=True):
        assert_close(position, row, token_id, 0)


async def test_no_logprobs_are_sent_when_none_are_asked_for(tiny_client: Client) -> None:
    completion = await tiny_client.complete(make_request(max_tokens=10))
    assert not any(token.HasField("logprobs") for token in completion.choices[0].tokens)


async def test_every_choice_has_its_own_logprobs(tiny_client: Client, model: torch.nn.Module) -> None:
    body = make_body(temperature=1.0)
    body.sampling.n = 3
    completion = await tiny_client.complete(body)
    prompt = await tiny_client.tokenize(body.prompt)
    for index in range(3):
        token_ids = prompt + completion.choices[index].token_ids
        expected = expected_logprobs(model, token_ids)[len(prompt) - 1 :]
        positions = output_positions(completion, index)
        for position, row, token_id in zip(positions, expected, token_ids[len(prompt) :], strict=True):
            assert_close(position, row, token_id, NUM_TOP)


async def test_prompt_logprobs_are_complete_when_the_prompt_is_in_the_prefix_cache(tiny_client: Client) -> None:
    body = make_body()
    first, second = await tiny_client.complete(body), await tiny_client.complete(body)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs == second.prompt_logprobs
    assert len(first.prompt_logprobs.positions) == len(first.prompt_logprobs.token_ids) - 1
