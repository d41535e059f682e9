"""Structured output by OpenAI's own client, and over gRPC, of real processes on the pair that ships."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from specdec.client import Client, SyncClient
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from tests.support.services.clusters import TIMEOUTS
from tests.support.services.gateways import gateway

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CHAT: list[Any] = [{"role": "user", "content": "def colour():"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "depth": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "depth"],
    "additionalProperties": False,
}
# It takes minutes to compile, and is cut off after half a second of them.
HOSTILE = "start: T\nT: " + " & ".join(f"/[a-z]*a[a-z]{{{i}}}/" for i in range(100))


TAG: dict[str, Any] = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<paint>"],
        "tags": [{"begin": "<paint>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</paint>"}],
        "at_least_one": True,
        "stop_after_first": True,
    }
}


class Paint(BaseModel):
    colour: Literal["red", "green"]
    depth: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def url(shipped_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a gateway process before the shared cluster."""
    settings = RoleSettings(overrides={"coordinators": [shipped_cluster.address]})
    spec = service_spec("gateway", "gateway", free_port(), settings, environment=os.environ)
    with Cluster([spec], log_dir=tmp_path_factory.mktemp("gateway"), timeouts=TIMEOUTS) as process:
        process.start()
        yield f"http://{spec.address}"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        yield one


def constrained(constraint: pb.Constraint, **sampling: Any) -> api.GenerateRequest:
    request = api.GenerateRequest(prompt="def colour():")
    request.sampling.CopyFrom(api.SamplingParams(**{"max_tokens": 80, "seed": 4, **sampling, "constraint": constraint}))
    return request


def test_openais_client_parses_what_it_asked_for(client: openai.OpenAI) -> None:
    answer = client.beta.chat.completions.parse(
        model="target", messages=CHAT, response_format=Paint, seed=2, max_tokens=120
    )
    assert isinstance(answer.choices[0].message.parsed, Paint)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.smoke
def test_response_formats_hold_with_and_without_a_stream(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
    whole = client.chat.completions.create(
        model="target", messages=CHAT, response_format=schema, seed=2, max_tokens=120
    )
    Paint.model_validate_json(whole.choices[0].message.content or "")
    events = client.chat.completions.create(
        model="target", messages=CHAT, response_format=schema, seed=2, max_tokens=120, stream=True
    )
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == whole.choices[0].message.content
    answer = client.responses.create(
        model="target", input="def colour():", max_output_tokens=120, extra_body={"seed": 2},
        text={"format": {"type": "json_schema", "name": "paint", "schema": SCHEMA}},
    )  # fmt: skip
    Paint.model_validate_json(answer.output_text)
    anything = client.chat.completions.create(
        model="target", messages=CHAT, response_format={"type": "json_object"}, seed=2, max_tokens=200, temperature=0.5
    )
    told = anything.choices[0]
    if told.finish_reason == "stop":
        assert isinstance(json.loads(told.message.content or ""), dict)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"json": SCHEMA}, r"\{.*\}"),
        ({"json": json.dumps(SCHEMA)}, r"\{.*\}"),
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "(" /[0-9]{1,3}/ ")"'}, r"\([0-9]{1,3}\)"),
        ({"structural_tag": TAG}, r"<paint>\{.*\}</paint>"),
        ({"structural_tag": json.dumps(TAG)}, r"<paint>\{.*\}</paint>"),
    ],
)
def test_structured_outputs_by_the_names_of_vllm(wanted: Any, pattern: str, client: openai.OpenAI) -> None:
    answers = [
        client.completions.create(
            model="target", prompt="x = ", seed=3, max_tokens=120,
            extra_body={"structured_outputs": wanted, "speculation": {"enabled": enabled}},
        ).choices[0].text
        for enabled in (True, False)
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert re.fullmatch(pattern, answers[0], re.DOTALL)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": HOSTILE}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "start: ((("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"structural_tag": '{"format": {"type": "token"}}'}},
            "structured_outputs.structural_tag.format.type",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}},
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_a_400_that_names_its_field(
    body: Any, param: str, stream: bool, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="target", messages=CHAT, extra_body=body, stream=stream)
    assert error.value.param == param


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_string_cuts_a_constrained_output_alike_with_and_without_speculation(
    temperature: float, client: openai.OpenAI
) -> None:
    fields: Any = {"model": "target", "prompt": "def", "max_tokens": 40, "temperature": temperature, "seed": 3}
    wanted = {"regex": "[a-z]{4,9}(, [a-z]{4,9}){3}"}
    told = {}
    for enabled in (True, False):
        extra = {"structured_outputs": wanted, "speculation": {"enabled": enabled}}
        whole = client.completions.create(**fields, extra_body=extra).choices[0]
        assert re.fullmatch(wanted["regex"], whole.text)
        second = whole.text.split(", ")[1]
        cut = client.completions.create(**fields, extra_body=extra, stop=second).choices[0]
        assert (cut.text, cut.finish_reason) == (whole.text.split(second)[0], "stop")
        told[enabled] = whole.text, cut.text
    assert told[True] == told[False]


async def test_over_grpc_a_hostile_grammar_disturbs_nobody(shipped_client: Client) -> None:
    good = constrained(pb.Constraint(choice=pb.TextChoices(texts=["red", "green"])))
    expected = await shipped_client.complete(good)
    began_s = time.monotonic()
    with pytest.raises(InvalidRequest) as error:
        await shipped_client.complete(constrained(pb.Constraint(grammar=HOSTILE + " ")))
    assert error.value.field == "sampling.constraint.grammar"
    assert time.monotonic() - began_s < 30
    assert (await shipped_client.complete(good)).identity == expected.identity
    info = await shipped_client.model_info()
    assert info.target.constraints_id.startswith("llguidance-")
    assert info.draft.constraints_id == info.target.constraints_id


def test_the_client_without_asyncio_takes_constraints_too(shipped_cluster: Cluster) -> None:
    with SyncClient(shipped_cluster.address) as client:
        completion = client.complete(constrained(pb.Constraint(json_schema=json.dumps(SCHEMA)), n=2))
    assert completion.started is not None
    assert completion.started.is_constrained
    for choice in completion.choices.values():
        Paint.model_validate_json(choice.text)


async def test_an_end_of_thinking_is_named_by_its_text(shipped_client: Client) -> None:
    choice = pb.TextChoices(texts=["red", "green"])
    with pytest.raises(InvalidRequest, match="is not one token") as error:
        await shipped_client.complete(constrained(pb.Constraint(choice=choice, after_token="</think>")))
    assert error.value.field == "sampling.constraint.after_token"
    told = await shipped_client.call("Tokenize", api.TokenizeRequest(text="def colour():"))
    request = constrained(pb.Constraint(choice=choice, after_token=told.tokens[-1]))
    # The prompt ends with it: the answer begins at once.
    assert (await shipped_client.complete(request)).choices[0].text in choice.texts


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wash"}},
]


@pytest.mark.parametrize("speculate", [True, False])
def test_a_named_function_is_called_with_arguments_of_its_schema(client: openai.OpenAI, speculate: bool) -> None:
    answer = client.chat.completions.create(
        model="target",
        messages=CHAT,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "paint"}},
        seed=3,
        max_tokens=120,
        extra_body={"speculation": {"enabled": speculate}},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "paint"
    Paint.model_validate_json(call.function.arguments)
    assert not answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_a_call_that_is_required_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="target", messages=CHAT, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=3,
        max_tokens=120, stream=True,
    )  # fmt: skip
    name, arguments, content, reason = "", "", "", None
    for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name in ("paint", "wash")
    assert isinstance(json.loads(arguments), dict)
    assert (content, reason) == ("", "tool_calls")


FAMILIES = ("hermes", "glm45", "kimi_k2", "deepseek", "mistral", "gemma4", "llama3_json", "pythonic", "harmony")


async def test_beside_tools_the_output_fits_the_format_or_calls_alike_with_and_without_speculation(
    shipped_cluster: Cluster,
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}}
    for family in FAMILIES:
        parsers = {"tool_parser": family, "reasoning_parser": "harmony" if family == "harmony" else "none"}
        async with gateway(shipped_cluster.address, **parsers) as one, one.openai() as client:
            asked: Any = {"messages": CHAT, "tools": TOOLS, "response_format": form, "seed": 3, "max_tokens": 40}
            told = [
                await client.chat.completions.create(
                    model="target", **asked, extra_body={"speculation": {"enabled": enabled}}
                )
                for enabled in (True, False)
            ]
            choices = [answer.choices[0] for answer in told]
            messages = [choice.message for choice in choices]
            functions = [[call.function for call in message.tool_calls or []] for message in messages]
            assert functions[0] == functions[1] and messages[0].content == messages[1].content, family
            if choices[0].finish_reason == "stop" and not functions[0]:
                Paint.model_validate_json(messages[0].content or "")


def test_a_function_whose_schema_cannot_be_compiled_is_named(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"oneOf": [{}, {}]}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="target", messages=CHAT, tools=[tool], tool_choice="required")
    assert refused.value.param == "tools"
