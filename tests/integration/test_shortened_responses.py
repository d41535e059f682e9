"""truncation: auto drops a conversation's oldest turns where it is too long, and the answer is that of the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.gateway.routes.shortened import kept_messages
from tests.support.for_each import for_each
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import running
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(120)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ ' calls' if m.tool_calls }}\n{% endfor %}"
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


@for_each(
    "roles, kept",
    [
        ("u", []),
        ("s", []),
        ("suaua", ["sua"]),
        ("uauau", ["uau", "u"]),
        ("ssuuauu", ["ssuu"]),
        ("suausau", ["susau", "su"]),
        ("sucacta", ["suacta", "sucta", "sua"]),
        ("cacta", ["acta", "cta", "a"]),
        ("uauctct", ["uctct", "uct"]),
    ],
)
def test_whole_turns_go_first_then_answers_of_the_last(roles: str, kept: list[str]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    found = kept_messages([names[each] for each in roles])
    assert ["".join(roles[index] for index in each) for each in found] == kept
    assert all(each[-1] == len(roles) - 1 for each in found)


def said(role: str, number: int, words: int = 100) -> dict[str, Any]:
    return {"role": role, "content": " ".join([f"{role}{number}", *["w5"] * words])}


async def test_the_oldest_turns_are_dropped_till_the_rest_fits_and_no_more() -> None:
    target = ScriptedTarget()
    target.tokenizer_config = json.dumps({"chat_template": TEMPLATE})
    turns = [said(role, number) for number in range(40) for role in ("user", "assistant")]
    items = [*turns, said("user", 40, 3)]
    fields = {"seed": 3, "max_output_tokens": 40, "instructions": "w7"}
    async with running([target]) as harness, gateway(harness.address) as one, one.http() as client:

        async def asked(path: str = "/v1/responses", **more: Any) -> Any:
            return (await client.post(path, json={**fields, **more})).json()

        for truncation in (None, "disabled"):
            refused = await asked(input=items, truncation=truncation)
            assert refused["error"]["code"] == "context_length_exceeded"
        for stream in (False, True):
            answer = (
                await asked(input=items, truncation="auto") if not stream else await streamed(client, fields, items)
            )
            assert (answer["status"], answer["truncation"]) == ("incomplete", "auto")
            most = 4096 - 40
            num_input, num_turn = answer["usage"]["input_tokens"], 2 * await length(client, turns[0])
            assert most - num_turn < num_input <= most
            # Of all shorter conversations one has as many tokens, and its answer is the same.
            rests = [rest for at in range(0, len(turns), 2) if (rest := items[at:])]
            same = [
                whole
                for rest in rests[-10:]
                if (whole := await asked(input=rest)).get("usage", {}).get("input_tokens") == num_input
            ]
            assert [whole["output"][0]["content"] for whole in same] == [answer["output"][0]["content"]]
        short = await asked(input=items[-3:], truncation="auto")
        assert short["output"][0]["content"] == (await asked(input=items[-3:]))["output"][0]["content"]
        # A turn that is too long itself keeps its question, and its last results.
        result = {"type": "function_call_output", "call_id": "c1", "output": " ".join(["w5"] * 500)}
        long = await asked(input=[*turns, said("user", 40, 3), *[CALL, result] * 9], truncation="auto")
        assert 4096 - 40 - 1200 < long["usage"]["input_tokens"] <= 4096 - 40
        # What cannot be made to fit is refused as before.
        for items in ([said("user", 1, 5000)], [*turns, said("user", 1, 5000)]):
            refused = await asked(input=items, truncation="auto")
            assert refused["error"]["code"] == "context_length_exceeded"
        assert (await asked(input=[{"role": "user", "content": 5}], truncation="auto"))["error"]["param"].startswith(
            "input[0]"
        )


async def length(client: Any, message: dict[str, Any]) -> int:
    told = await client.post("/tokenize", json={"messages": [message], "add_generation_prompt": False})
    count: int = told.json()["count"]
    return count


async def streamed(client: Any, fields: dict[str, Any], items: list[Any]) -> Any:
    told = await client.post("/v1/responses", json={**fields, "input": items, "truncation": "auto", "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in told.text.splitlines() if line.startswith("data: ")]
    assert events[0]["type"] == "response.created"
    return events[-1]["response"]
