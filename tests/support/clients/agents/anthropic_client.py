"""Anthropic's own client in the ten turns."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.support.clients.agents.play import Where, main
from tests.support.clients.agents.turns import DESCRIPTION, NAME, PARAMETERS, SCHEMA, Answer, Option

_MOST_TOKENS = 200


class AnthropicConversation:
    """Messages; blocks of answers go back unchanged."""

    def __init__(self, where: Where) -> None:
        self._client = anthropic.Anthropic(base_url=where.url, api_key="none", max_retries=0, timeout=60)
        self._where = where
        self._messages: list[Any] = []
        self._calls: list[Any] = []

    def user(self, text: str) -> None:
        self._add({"type": "text", "text": text})

    def result(self, number: int, text: str) -> None:
        self._add({"type": "tool_result", "tool_use_id": self._calls[number].id, "content": text})

    def break_off(self, option: Option) -> None:
        with self._client.messages.create(**self._request(option), stream=True) as stream:
            next(iter(stream))

    def streamed(self, option: Option) -> Answer:
        with self._client.messages.stream(**self._request(option)) as stream:
            return _answer(stream.get_final_message())

    def whole(self, option: Option) -> Answer:
        message = self._client.messages.create(**self._request(option))
        self._messages.append({"role": "assistant", "content": message.content})
        self._calls = [block for block in message.content if block.type == "tool_use"]
        return _answer(message)

    def _add(self, block: dict[str, Any]) -> None:
        if not self._messages or self._messages[-1]["role"] != "user":
            self._messages.append({"role": "user", "content": []})
        self._messages[-1]["content"].append(block)

    def _request(self, option: Option) -> dict[str, Any]:
        more: dict[str, Any] = {}
        match option:
            case "cut":
                more = {"max_tokens": self._where.cut_tokens}
            case "schema":
                more = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
            case "required":
                more = {"tool_choice": {"type": "any"}}
        tool = {"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}
        request = {"model": self._where.model, "messages": self._messages, "tools": [tool]}
        more["extra_body"] = {"temperature": 0}  # the client has no argument for it
        return {"max_tokens": _MOST_TOKENS, **request, **more}


def _answer(message: Any) -> Answer:
    blocks: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for block in message.content:
        blocks[block.type].append(block)
    is_cut = message.stop_reason == "max_tokens"
    # A call that was cut has what could be read of its arguments.
    calls = [None if is_cut else block.input for block in blocks["tool_use"]]
    text = "".join(block.text for block in blocks["text"])
    return Answer(text, calls, "".join(block.thinking for block in blocks["thinking"]), is_cut)


if __name__ == "__main__":
    main(AnthropicConversation)
