"""LangChain's ChatOpenAI in the ten turns. It leaves out what models think."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.support.clients.agents.play import Where, main
from tests.support.clients.agents.turns import SCHEMA, TOOL, Answer, Option


class LangChainConversation:
    """A chat model with bound tools; structured output by `with_structured_output`."""

    def __init__(self, where: Where) -> None:
        self._cut_tokens = where.cut_tokens
        self._chat = ChatOpenAI(
            model=where.model, base_url=f"{where.url}/v1", api_key="none", temperature=0, max_retries=0, timeout=60
        )
        self._messages: list[Any] = []
        self._calls: list[Any] = []

    def user(self, text: str) -> None:
        self._messages.append(HumanMessage(text))

    def result(self, number: int, text: str) -> None:
        self._messages.append(ToolMessage(text, tool_call_id=self._calls[number]["id"]))

    def break_off(self, option: Option) -> None:
        stream = self._bound(option).stream(self._messages)
        next(stream)
        stream.close()

    def streamed(self, option: Option) -> Answer:
        first, *rest = self._bound(option).stream(self._messages)
        for piece in rest:
            first += piece
        return _answer(first)

    def whole(self, option: Option) -> Answer:
        if option == "schema":
            form = {"title": "data", **SCHEMA}
            structured = self._chat.with_structured_output(form, method="json_schema", include_raw=True)
            told = structured.invoke(self._messages)
            if told["parsed"] is None:
                raise AssertionError(told["parsing_error"])
            message = told["raw"]
        else:
            message = self._bound(option).invoke(self._messages)
        self._messages.append(message)
        self._calls = [*message.tool_calls, *message.invalid_tool_calls]
        return _answer(message)

    def _bound(self, option: Option) -> Any:
        bound: Any = self._chat.bind_tools([TOOL], tool_choice="required" if option == "required" else None)
        match option:
            case "cut":
                return bound.bind(max_tokens=self._cut_tokens)
            case "schema":
                form = {"name": "data", "schema": SCHEMA, "strict": True}
                return bound.bind(response_format={"type": "json_schema", "json_schema": form})
        return bound


def _answer(message: Any) -> Answer:
    calls = [*(call["args"] for call in message.tool_calls), *(None for _ in message.invalid_tool_calls)]
    is_cut = message.response_metadata["finish_reason"] == "length"
    return Answer(message.content, [None for _ in calls] if is_cut else calls, "", is_cut)


if __name__ == "__main__":
    main(LangChainConversation)
