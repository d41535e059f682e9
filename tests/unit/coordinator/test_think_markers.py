"""Whether a prompt ends within a think section: its end decides, as the chat template has written it."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.coordinator.intake.prompt import PromptReader
from specdec.coordinator.intake.text_limits import TokenizingTurns
from specdec.coordinator.intake.validation import Limits, check_sampling
from specdec.gateway.chat.messages import to_chat_messages
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from tests.support.chat.rendering import USER, tokenizer_with

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is not defined or enable_thinking %}OPEN{% else %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
OPENS, SAYS_NOTHING = TEMPLATE.replace("OPEN", "<think>\n"), TEMPLATE.replace("OPEN", "")
LIMITS = Limits(
    vocab_size=10**6, max_model_len=10**4, max_tokens=10, max_choices=1, max_stop_strings=1, max_stop_string_bytes=1,
    max_logprobs=1, max_logit_bias=1, max_prompt_bytes=2**20,
)  # fmt: skip
MARKERS = api.ThinkMarkers(start="<think>", end="</think>")


async def is_thinking(
    template: str, *messages: dict[str, Any], markers: api.ThinkMarkers | None = MARKERS, **options: Any
) -> bool | None:
    chat = to_chat_messages([USER, *messages], **options)
    body = api.GenerateRequest(messages=chat, think_markers=markers)
    reader = PromptReader(tokenizer_with(template), LIMITS, TokenizingTurns())
    return (await reader.tokenize(body, check_sampling(body.sampling, LIMITS))).is_thinking


async def test_a_template_that_opens_the_section_is_seen() -> None:
    assert await is_thinking(OPENS) is True
    assert await is_thinking(OPENS, template_variables={"enable_thinking": False}) is False
    assert await is_thinking(SAYS_NOTHING) is False
    assert await is_thinking(OPENS, markers=None) is None


async def test_what_others_say_about_thinking_opens_nothing() -> None:
    told = {"role": "user", "content": "What does <think> mean?"}
    assert await is_thinking(SAYS_NOTHING, told) is False
    assert await is_thinking(SAYS_NOTHING, {"role": "assistant", "content": "<think>Hm.</think>4"}, told) is False


@pytest.mark.parametrize(
    ("content", "expected"), [("<think>\nHm, I", True), ("<think>Hm.</think>So", False), ("So", False)]
)
async def test_a_message_that_is_continued_may_be_in_its_thoughts(content: str, expected: bool) -> None:
    told = {"role": "assistant", "content": content}
    assert await is_thinking(OPENS, told, continue_final_message=True) is expected


@pytest.mark.parametrize("start", ["", "a" * 129])
async def test_markers_are_checked(start: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await is_thinking(OPENS, markers=api.ThinkMarkers(start=start, end="b"))
    assert refused.value.field == "think_markers"
