"""The parsers that a model's chat template asks for."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from specdec.gateway.chat.parsing import check_names
from specdec.gateway.chat.template_parsers import ParserPair, parsers_of_template
from specdec.gateway.parser_names import ParserNames
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Unavailable
from tests.support.chat.templates import CHATML_TOOLS
from tests.support.for_each import for_each

GLM = "<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value></tool_call><think></think>"


@for_each(
    "template, reasoning, tools",
    [
        (CHATML_TOOLS, "think", "hermes"),
        (GLM, "think", "glm45"),
        ("<tool_call>\\n<function=f>\\n<parameter=a>", "none", "qwen3_coder"),
        ("{{ '<minimax:tool_call>' }}<think></think>", "think", "minimax_m2"),
        ("<|tool_calls_section_begin|>", "none", "kimi_k2"),
        ("{% set d = '｜DSML｜' %}</think>", "think", "deepseek_v32"),
        ("<｜tool▁calls▁begin｜></think>", "think", "deepseek"),
        ("<|channel>thought\\n<|tool_call>call:", "gemma4", "gemma4"),
        ("<seed:think><seed:tool_call><function=", "seed_oss", "seed_oss"),
        ("<|channel|>analysis<|message|>functions.", "harmony", "harmony"),
        ("[THINK][TOOL_CALLS]", "mistral", "mistral"),
        ('Respond in the format {\\"name\\": function name, \\"parameters\\": dictionary', "none", "llama3_json"),
        ("{{ messages[0].content }}", "none", "none"),
        ("", "none", "none"),
    ],
)
def test_a_template_tells_them(template: str, reasoning: str, tools: str) -> None:
    assert parsers_of_template(template) == ParserPair(reasoning, tools)
    assert parsers_of_template(template, "mistral", "hermes") == ParserPair("mistral", "hermes")
    for given in ({"reasoning": "none"}, {"tools": "hermes"}):
        pair = parsers_of_template(template, **given)
        check_names(pair.reasoning, pair.tools)


class Coordinator:
    """Tells a template, and counts the questions."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.num_asked = 0
        self.fault: Exception | None = None

    async def call(self, method: str, request: Any) -> Any:
        assert (method, request.with_tokenizer) == ("GetModelInfo", True)
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        return api.GetModelInfoResponse(tokenizer=api.TokenizerInfo(chat_template=self.template))


async def test_a_coordinator_is_asked_once_a_minute_and_again_after_an_error() -> None:
    now_s, told = 0.0, Coordinator(GLM)
    names = ParserNames("auto", "auto", clock=lambda: now_s)
    caller = cast("Any", lambda: told)
    told.fault = Unavailable("none")
    with pytest.raises(Unavailable):
        await names.of(caller)
    told.fault = None
    for _ in range(3):
        assert await names.of(caller) == ParserPair("think", "glm45")
    assert told.num_asked == 2
    now_s, told.template = 61.0, ""
    assert await names.of(caller) == ParserPair("none", "none")


async def test_many_requests_at_once_ask_once() -> None:
    now_s, told = 0.0, Coordinator(GLM)
    names = ParserNames("auto", "auto", clock=lambda: now_s)
    caller = cast("Any", lambda: told)
    for _ in range(2):
        asked = told.num_asked
        found = await asyncio.gather(*(names.of(caller) for _ in range(5)))
        assert (found, told.num_asked - asked) == (5 * [ParserPair("think", "glm45")], 1)
        now_s += 61.0


async def test_nobody_is_asked_where_both_are_set() -> None:
    told = Coordinator(GLM)
    assert await ParserNames("none", "hermes").of(cast("Any", lambda: told)) == ParserPair("none", "hermes")
    assert told.num_asked == 0
