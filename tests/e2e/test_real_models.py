"""Two real models that Python packages carry: the answers of transformers, and the same ones however they are guessed.

The draft is the target with 8-bit weights, in a service of its own; n-grams and the draft's proposals are merged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.packaged import packaged_model
from specdec.client import Client, Completion, chat_messages
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import plain
from tests.support.services.gateways import gateway
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(1800)]
torch.set_num_threads(2)

MAX_TOKENS = 40
NEAR_TIE = 1e-4
"""Difference of two logits below which either token may follow: transformers sums in another order."""
SHORT = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "SELECT name, count(*) FROM orders",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Deutschland ist",
    "import numpy as np\n\ndef softmax(x):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at",
    "日本の首都は",
    "Q: What is the largest planet?\nA:",
    "<html>\n  <head>\n    <title>",
    "The three primary colours are",
    "In the beginning",
    "fn main() {\n    let mut total = 0;\n",
    "Roses are red,",
]
PARAGRAPH = (
    "Speculative decoding lets a small model guess several tokens, which a large model then checks in one pass. "
    "A guess that the large model would not have made is dropped, so the text is always the large model's own. "
)
LONG = [PARAGRAPH * count + end for count, end in ((16, "In short,"), (18, "The small"), (20, "A guess"), (24, ""))]
"""Prompts beyond Gemma 3's window of 512 tokens."""
CHATS = [
    [("user", "Name three colours.")],
    [("system", "You are terse."), ("user", "What is the capital of Italy?")],
    [("user", "Write a haiku about rain."), ("assistant", "Soft rain on the roof"), ("user", "Go on.")],
    [("user", f"Summarise in one sentence: {PARAGRAPH * 3}")],
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "gemma3-270m"])
def model(request: pytest.FixtureRequest) -> Path:
    return packaged_model(request.param)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_cluster(
        ModelPair(model, model),
        tmp_path_factory.mktemp("real"),
        target_settings={"drafters": '[{"method": "ngram"}]', "kv_cache_memory_bytes": 600_000_000},
        draft_settings={"weight_quantization": "int8", "kv_cache_memory_bytes": 600_000_000},
    ) as running:
        yield running


def tokens_of(completion: Completion) -> list[int]:
    return list(completion.choices[0].token_ids)


async def test_greedy_answers_are_those_of_transformers(cluster: Cluster, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    async with Client(cluster.address) as client:
        for prompt in SHORT + LONG:
            body = api.GenerateRequest(prompt=prompt)
            body.sampling.temperature, body.sampling.max_tokens, body.sampling.ignore_eos = 0.0, MAX_TOKENS, True
            told = await client.complete(body)
            prompt_ids = tokenizer(prompt)["input_ids"]
            assert told.started is not None
            answer = tokens_of(told)
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt_ids, *answer]])).logits[0, len(prompt_ids) - 1 : -1]
            missed = logits.max(dim=-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert len(answer) == MAX_TOKENS
            assert float(missed.max()) < NEAR_TIE, prompt


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_no_guess_changes_an_answer(cluster: Cluster, temperature: float) -> None:
    async with Client(cluster.address) as client:
        bodies = []
        for seed, prompt in enumerate([*SHORT[:6], *LONG[:2]]):
            body = api.GenerateRequest(prompt=prompt)
            body.sampling.temperature, body.sampling.max_tokens, body.sampling.seed = temperature, MAX_TOKENS, seed
            bodies.append(body)
        guessed = await asyncio.gather(*map(client.complete, bodies))
        alone = [await client.complete(plain(body)) for body in bodies]
    assert [each.identity for each in guessed] == [each.identity for each in alone]
    accepted = sum(each.require_finished().stats.num_accepted for each in guessed)
    assert accepted > len(bodies) * MAX_TOKENS * 0.3


async def test_chats_structures_and_calls_are_the_same_without_speculation(cluster: Cluster, model: Path) -> None:
    if AutoTokenizer.from_pretrained(model).chat_template is None:
        async with Client(cluster.address) as client:
            body = api.GenerateRequest(prompt="A person as JSON: ")
            body.sampling.max_tokens, body.sampling.seed = 60, 1
            body.sampling.constraint.json_schema = json.dumps(SCHEMA)
            guessed, alone = await client.complete(body), await client.complete(plain(body))
        assert guessed.identity == alone.identity
        assert json.loads(guessed.choices[0].text)["age"] <= 120
        return
    async with Client(cluster.address) as client:
        for seed, chat in enumerate(CHATS):
            messages = [{"role": role, "content": content} for role, content in chat]
            body = api.GenerateRequest(messages=chat_messages(messages))
            body.sampling.temperature, body.sampling.max_tokens, body.sampling.seed = 0.7, MAX_TOKENS, seed
            assert (await client.complete(body)).identity == (await client.complete(plain(body))).identity
    async with gateway(cluster.address) as door:
        api_client = door.openai()
        answer = await api_client.chat.completions.create(
            model=model.name,
            messages=[{"role": "user", "content": "Give me a person as JSON."}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
            },
            max_tokens=80,
        )
        assert 0 <= json.loads(answer.choices[0].message.content or "")["age"] <= 120
        call = await api_client.chat.completions.create(
            model=model.name,
            messages=[{"role": "user", "content": "Store Ann, who is 30."}],
            tools=[{"type": "function", "function": {"name": "store", "parameters": SCHEMA}}],
            tool_choice={"type": "function", "function": {"name": "store"}},
            max_tokens=80,
        )
        assert call.choices[0].message.tool_calls is not None
        function = call.choices[0].message.tool_calls[0].function  # type: ignore[union-attr]
        assert function.name == "store"
        assert set(json.loads(function.arguments)) == {"name", "age"}
