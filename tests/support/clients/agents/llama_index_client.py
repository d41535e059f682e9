"""LlamaIndex' OpenAILike in the ten turns. It leaves out what models think."""

from __future__ import annotations

import gc
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool, ToolMetadata
from llama_index.llms.openai_like import OpenAILike

from tests.support.clients.agents.play import Where, main
from tests.support.clients.agents.turns import DESCRIPTION, NAME, PARAMETERS, SCHEMA, Answer, Option


class _Look(ToolMetadata):
    def get_parameters_dict(self) -> dict[str, Any]:
        return PARAMETERS


class LlamaIndexConversation:
    """`chat_with_tools` and `stream_chat_with_tools`.

    The library leaves streams open, and httpcore waits for ever where one is collected within a later request's lock:
    so they are collected at once.
    """

    def __init__(self, where: Where) -> None:
        self._cut_tokens = where.cut_tokens
        self._llm = OpenAILike(
            model=where.model,
            api_base=f"{where.url}/v1",
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_retries=0,
            timeout=60,
        )
        self._tools = [FunctionTool(lambda **_: "", metadata=_Look(DESCRIPTION, NAME))]
        self._messages: list[ChatMessage] = []
        self._calls: list[Any] = []

    def user(self, text: str) -> None:
        self._messages.append(ChatMessage(role="user", content=text))

    def result(self, number: int, text: str) -> None:
        told = {"tool_call_id": self._calls[number].tool_id}
        self._messages.append(ChatMessage(role="tool", content=text, additional_kwargs=told))

    def break_off(self, option: Option) -> None:
        stream = self._llm.stream_chat_with_tools(**self._request(option))
        next(stream)
        stream.close()
        gc.collect()

    def streamed(self, option: Option) -> Answer:
        *_, last = self._llm.stream_chat_with_tools(**self._request(option))
        gc.collect()
        return self._answer(last)

    def whole(self, option: Option) -> Answer:
        told = self._llm.chat_with_tools(**self._request(option))
        self._messages.append(told.message)
        self._calls = self._llm.get_tool_calls_from_response(told, error_on_no_tool_call=False)
        return self._answer(told)

    def _request(self, option: Option) -> dict[str, Any]:
        request: dict[str, Any] = {
            "tools": self._tools,
            "chat_history": self._messages,
            "allow_parallel_tool_calls": True,
        }
        match option:
            case "cut":
                request["max_tokens"] = self._cut_tokens
            case "schema":
                form = {"name": "data", "schema": SCHEMA, "strict": True}
                request["response_format"] = {"type": "json_schema", "json_schema": form}
            case "required":
                request["tool_required"] = True
        return request

    def _answer(self, told: Any) -> Answer:
        calls = self._llm.get_tool_calls_from_response(told, error_on_no_tool_call=False)
        is_cut = told.raw.choices[0].finish_reason == "length"
        return Answer(told.message.content or "", [None if is_cut else call.tool_kwargs for call in calls], "", is_cut)


if __name__ == "__main__":
    main(LlamaIndexConversation)
