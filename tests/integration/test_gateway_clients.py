"""Real clients through a gateway process on the pair that ships: OpenAI's own, and curl."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from specdec.client import Client
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.gateway.api.answers import ChatCompletion, ChatCompletionChunk, TextCompletion
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.clusters import TIMEOUTS, MakeCluster
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCHEMATHESIS = Path(__file__).parents[2] / ".tools/schemathesis/bin/schemathesis"
PROMPT = "def fibonacci(n):\n"
CHAT: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def url(shipped_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a gateway process before the shared cluster."""
    with gateway_before(shipped_cluster, tmp_path_factory.mktemp("gateway")) as address:
        yield address


@contextmanager
def gateway_before(cluster: Cluster, log_dir: Path) -> Iterator[str]:
    settings = RoleSettings(overrides={"coordinators": [cluster.address], "tool_parser": "hermes"})
    spec = service_spec("gateway", "gateway", free_port(), settings, environment=os.environ)
    with Cluster([spec], log_dir=log_dir, timeouts=TIMEOUTS) as process:
        process.start()
        yield f"http://{spec.address}"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        yield one


def curl(*arguments: str) -> str:
    return subprocess.run(["curl", "-sS", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_those_of_grpc_with_and_without_speculation(
    client: openai.OpenAI, shipped_client: Client, temperature: float
) -> None:
    body = api.GenerateRequest(prompt=PROMPT)
    body.sampling.seed, body.sampling.max_tokens, body.sampling.temperature = 7, 48, temperature
    direct = await shipped_client.complete(body)
    answers = [
        client.completions.create(
            model="target",
            prompt=PROMPT,
            seed=7,
            max_tokens=48,
            temperature=temperature,
            extra_body={"return_token_ids": True, "speculation": {"enabled": enabled}, "return_token_origins": True},
        )
        for enabled in (True, False)
    ]
    for answer in answers:
        told: Any = answer.choices[0]
        assert told.token_ids == direct.choices[0].token_ids
        assert told.text == direct.choices[0].text
        assert [token["id"] for token in told.token_origins] == told.token_ids
        TextCompletion.model_validate(answer.model_dump(exclude_unset=True))
    plain: Any = answers[1]
    assert plain.metrics["speculative_decoding"]["num_spec_steps"] == 0
    assert {token["origin"] for token in plain.choices[0].token_origins} <= {"prefill", "decode"}


def test_a_chat_streams_what_it_answers_at_once(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": "target",
        "messages": CHAT,
        "seed": 3,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**fields)
    ChatCompletion.model_validate(whole.model_dump(exclude_unset=True))
    text, logprobs, usage, reasons = "", [], None, []
    for event in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        ChatCompletionChunk.model_validate(event.model_dump(exclude_unset=True))
        usage = event.usage
        for choice in event.choices:
            text += choice.delta.content or ""
            logprobs += (choice.logprobs and choice.logprobs.content) or []
            reasons.append(choice.finish_reason)
    told = whole.choices[0]
    assert text == told.message.content
    assert told.logprobs is not None and told.logprobs.content is not None
    assert [entry.logprob for entry in logprobs] == [entry.logprob for entry in told.logprobs.content]
    assert reasons[-1] == told.finish_reason and set(reasons[:-1]) == {None}
    assert usage is not None and whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_choices_differ_and_stop_where_they_are_told_to(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="target", messages=CHAT, n=3, seed=5, temperature=1.0, max_tokens=60, stop=["\n"]
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert "\n" not in (choice.message.content or "")
        if choice.finish_reason == "stop":
            assert choice.model_extra is not None and choice.model_extra["stop_reason"] in ("\n", None)


def test_a_chat_is_tokenised_as_it_is_prompted(client: openai.OpenAI, url: str) -> None:
    body = json.dumps({"messages": CHAT})
    tokens = json.loads(curl(f"{url}/tokenize", "-H", "content-type: application/json", "-d", body))["tokens"]
    extra = {"return_token_ids": True}
    answer: Any = client.chat.completions.create(model="target", messages=CHAT, max_tokens=4, extra_body=extra)
    assert answer.prompt_token_ids == tokens
    assert answer.usage.prompt_tokens == len(tokens)


def test_a_chat_with_tools_is_a_message_like_any_other_where_none_is_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="target", messages=CHAT, tools=[TOOL], max_tokens=8)
    assert answer.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="target", messages=CHAT, tools=[{**TOOL, "type": "web"}], max_tokens=8)
    assert caught.value.param == "tools[0].type"


def test_curl_streams_events(url: str) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 12, "stream": True})
    lines = curl("-N", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="target", prompt=PROMPT, stop=["x"] * 100)
    assert (caught.value.param, caught.value.type) == ("stop", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nothing", prompt=PROMPT)
    told = client.completions.with_raw_response.create(
        model="target", prompt=PROMPT, max_tokens=1, extra_body={"temprature": 1}
    )
    assert told.headers["specdec-ignored-fields"] == "temprature"


def test_the_description_has_every_path_and_every_error(url: str) -> None:
    described = json.loads(curl(f"{url}/openapi.json"))
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} <= described[
        "paths"
    ].keys()
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert {"200", "400", "401", "404", "429", "503"} <= described["paths"][path]["post"]["responses"].keys()
    names = set(described["components"]["schemas"])
    text = json.dumps(described)
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= names


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_nothing_that_the_description_allows_is_a_fault_of_the_server(
    shipped_pair: ModelPair, make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """Two thousand requests: bodies at each limit and beyond, and what is no body at all. Answers are short."""
    cluster = make_cluster(pair=shipped_pair, coordinator_settings={"max_tokens_limit": 16})
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--checks", checks, "--seed", "1", "--max-examples", "40", "--request-timeout", "60"]
    with gateway_before(cluster, tmp_path / "gateway") as address:
        command = [str(SCHEMATHESIS), "run", f"{address}/openapi.json", *options]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert run.returncode == 0, run.stdout


def test_a_response_streams_what_it_answers_at_once(client: openai.OpenAI) -> None:
    fields: Any = {"model": "target", "instructions": "Write Python.", "input": "Add two numbers."}
    fields["max_output_tokens"] = 24
    whole = client.responses.create(**fields, temperature=0)
    with client.responses.create(**fields, temperature=0, stream=True) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    final: Any = events[-1]
    assert final.type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == final.response.output_text
    assert whole.usage is not None and whole.usage.output_tokens == final.response.usage.output_tokens <= 24
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**fields, previous_response_id=whole.id)
