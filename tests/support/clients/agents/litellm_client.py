"""LiteLLM in the ten turns."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not fetched

import litellm

from tests.support.clients.agents.play import Where, arguments_of, main
from tests.support.clients.agents.turns import SCHEMA, TOOL, Answer, Option


class LiteLLMConversation:
    """Chats of a model of the provider `openai`."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._messages: list[Any] = []
        self._calls: list[Any] = []

    def user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def result(self, number: int, text: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": self._calls[number].id, "content": text})

    def break_off(self, option: Option) -> None:
        stream = self._ask(option, stream=True)
        next(stream)
        stream.completion_stream.close()

    def streamed(self, option: Option) -> Answer:
        return _answer(litellm.stream_chunk_builder(list(self._ask(option, stream=True))))

    def whole(self, option: Option) -> Answer:
        told = self._ask(option)
        message = told.choices[0].message
        self._messages.append(message)
        self._calls = message.tool_calls or []
        return _answer(told)

    def _ask(self, option: Option, **more: Any) -> Any:
        match option:
            case "cut":
                more |= {"max_tokens": self._where.cut_tokens}
            case "schema":
                form = {"name": "data", "schema": SCHEMA, "strict": True}
                more |= {"response_format": {"type": "json_schema", "json_schema": form}}
            case "required":
                more |= {"tool_choice": "required"}
        return litellm.completion(
            model=f"openai/{self._where.model}",
            api_base=f"{self._where.url}/v1",
            api_key="none",
            messages=self._messages,
            tools=[TOOL],
            temperature=0,
            num_retries=0,
            **more,
        )


def _answer(told: Any) -> Answer:
    [choice] = told.choices
    message = choice.message
    calls = [arguments_of(call.function.arguments) for call in message.tool_calls or []]
    thoughts = getattr(message, "reasoning_content", None) or ""
    return Answer(message.content or "", calls, thoughts, choice.finish_reason == "length")


if __name__ == "__main__":
    main(LiteLLMConversation)
