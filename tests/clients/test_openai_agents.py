"""OpenAI's agents SDK, unchanged: function tools over several turns, a hand-off, a type of output, streams."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from specdec.v1 import coordinator_pb2 as api
from tests.support.services.fake_coordinator import running_fake_coordinator
from tests.support.services.gateways import gateway
from tests.support.services.talking_coordinator import TalkingCoordinator, calls, last_results

pytestmark = [pytest.mark.timeout(300)]
PYTHON = Path(__file__).parents[2] / ".tools" / "clients" / "agents" / "bin" / "python"
PROGRAM = """
import asyncio, json, sys
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

set_tracing_disabled(True)
model = OpenAIResponsesModel("big", AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0))
settings = ModelSettings(
    temperature=0, parallel_tool_calls=True, store=False, reasoning=Reasoning(effort="low", summary="auto"),
    response_include=["reasoning.encrypted_content"], metadata={"run": "1"},
)
called = []

@function_tool
def degrees(city: str) -> int:
    '''The temperature of a city.'''
    called.append(city)
    return {"Rome": 21, "Oslo": 3}[city]

@function_tool
def add(a: int, b: int) -> int:
    '''The sum.'''
    called.append((a, b))
    return a + b

class Sum(BaseModel):
    total: int

maths = Agent(name="Maths", instructions="maths", model=model, model_settings=settings, output_type=Sum)
weather = Agent(name="Weather", instructions="weather", model=model, model_settings=settings, tools=[degrees, add])
triage = Agent(name="Triage", instructions="triage", model=model, model_settings=settings, handoffs=[maths])

async def main():
    told = {}
    first = await Runner.run(weather, "How warm are Rome and Oslo together?")
    told["first"] = first.final_output
    again = Runner.run_streamed(weather, [*first.to_input_list(), {"role": "user", "content": "And again?"}])
    kinds, pieces = set(), []
    async for event in again.stream_events():
        if event.type == "raw_response_event":
            kinds.add(event.data.type)
            if event.data.type == "response.output_text.delta":
                pieces.append(event.data.delta)
    told["again"], told["pieces"], told["kinds"] = again.final_output, "".join(pieces), sorted(kinds)
    told["usage"] = again.context_wrapper.usage.output_tokens
    handed = await Runner.run(triage, "1 and 2?")
    told["handed"] = [handed.last_agent.name, handed.final_output.total]
    told["called"] = called
    print(json.dumps(told))

asyncio.run(main())
"""


def say(request: api.GenerateRequest) -> str:
    """What a model would say, by the agent's instructions and the results so far."""
    results, instructions = last_results(request), request.messages.messages[0].content
    if instructions == "triage":
        return "<think>Sums.</think>" + calls(("transfer_to_maths", {}))
    if instructions == "maths":
        assert json.loads(request.sampling.constraint.json_schema)["required"] == ["total"]
        return '{"total": 3}'
    if not results:
        return "<think>Look.</think>I look." + calls(("degrees", {"city": "Rome"}), ("degrees", {"city": "Oslo"}))
    if len(results) == 2:
        return calls(("add", {"a": int(results[0]), "b": int(results[1])}))
    return f"<think>So.</think>It is {results[-1]}."


async def test_agents_with_tools_run_over_several_turns_and_hand_off() -> None:
    servicer = TalkingCoordinator(say)
    with running_fake_coordinator(servicer=servicer) as (_, address):
        async with gateway(address, tool_parser="hermes", reasoning_parser="deepseek_r1") as one:
            command = [str(PYTHON), "-c", PROGRAM, f"{one.url}/v1"]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, timeout=200
            )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["first"], told["again"]) == ("It is 24.", "It is 24.")
    assert told["called"] == ["Rome", "Oslo", [21, 3]] * 2
    assert told["pieces"] == "I look.It is 24."
    assert told["usage"] > 0
    assert told["handed"] == ["Maths", 3]
    assert {
        *("response.created", "response.in_progress", "response.output_item.added", "response.output_item.done"),
        *("response.reasoning_text.delta", "response.function_call_arguments.done", "response.completed"),
    } <= set(told["kinds"])
    # What was thought, said and called comes back as one message, with the results after it.
    again = [message for message in servicer.requests[5].messages.messages if message.role != "system"]
    assert [message.role for message in again] == [
        *("user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "user"),
        *("assistant", "tool", "tool", "assistant", "tool"),
    ]
    assert json.loads(again[1].fields_json)["reasoning_content"] == "Look."
