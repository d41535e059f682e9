"""OpenAI's own client in the ten turns."""

from __future__ import annotations

from typing import Any

import openai

from tests.support.clients.agents.play import Where, arguments_of, main
from tests.support.clients.agents.turns import SCHEMA, TOOL, Answer, Option


class OpenAIConversation:
    """Chats; what was answered goes back unchanged."""

    def __init__(self, where: Where) -> None:
        self._client = openai.OpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0, timeout=60)
        self._where = where
        self._messages: list[Any] = []
        self._calls: list[Any] = []

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def result(self, number: int, text: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": self._calls[number].id, "content": text})

    def break_off(self, option: Option) -> None:
        with self._client.chat.completions.create(**self._request(option), stream=True) as stream:
            next(iter(stream))

    def streamed(self, option: Option) -> Answer:
        content, thoughts, arguments, reason = "", "", {}, ""
        for chunk in self._client.chat.completions.create(**self._request(option), stream=True):
            [choice] = chunk.choices
            content += choice.delta.content or ""
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
            reason = choice.finish_reason or reason
        return Answer(content, list(map(arguments_of, arguments.values())), thoughts, reason == "length")

    def whole(self, option: Option) -> Answer:
        [choice] = self._client.chat.completions.create(**self._request(option)).choices
        self._messages.append(choice.message.model_dump())
        self._calls = choice.message.tool_calls or []
        thoughts = getattr(choice.message, "reasoning_content", None) or ""
        arguments = [arguments_of(call.function.arguments) for call in self._calls]
        return Answer(choice.message.content or "", arguments, thoughts, choice.finish_reason == "length")

    def _request(self, option: Option) -> dict[str, Any]:
        more: dict[str, Any] = {}
        match option:
            case "cut":
                more = {"max_tokens": self._where.cut_tokens}
            case "schema":
                form = {"name": "data", "schema": SCHEMA, "strict": True}
                more = {"response_format": {"type": "json_schema", "json_schema": form}}
            case "required":
                more = {"tool_choice": "required"}
        return {"model": self._where.model, "messages": self._messages, "tools": [TOOL], "temperature": 0, **more}


if __name__ == "__main__":
    main(OpenAIConversation)
