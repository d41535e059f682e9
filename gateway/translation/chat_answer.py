"""Translate the chunks of a stream to OpenAI's chat objects: events, or one whole answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.chat import parsing
from specdec.gateway.chat.deltas import MessageDelta, StreamingParser
from specdec.gateway.chat.tool_choice import named_function
from specdec.gateway.translation.head import AnswerHead, finish_reason, is_thinking, stop_reason
from specdec.gateway.translation.logprobs import chat_logprobs, prompt_logprobs
from specdec.gateway.translation.origins import OriginCounter
from specdec.gateway.translation.steps import steps_told
from specdec.gateway.translation.usage import metrics_of, usage_of, usage_so_far
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import coordinator_pb2 as api

MakeParser = Callable[[], StreamingParser]


@dataclass(slots=True)
class _Choice:
    """State of one choice while its output comes."""

    parser: StreamingParser
    origins: OriginCounter = field(default_factory=OriginCounter)
    has_begun: bool = False
    has_calls: bool = False


class _ChatAnswer:
    """Base of events and whole answers."""

    def __init__(self, request: ChatRequest, head: AnswerHead, make_parser: MakeParser, echo: str) -> None:
        """Begin an answer.

        Args:
            request: the client's request.
            head: the first fields of all objects.
            make_parser: makes a parser for each choice.
            echo: text before each choice's output.
        """
        self._request = request
        self._head = head
        self._echo = echo
        self._make_parser = make_parser
        self._is_thinking: bool | None = None
        self._choices: dict[int, _Choice] = {}
        """Those with output: only a coordinator knows whether a request's number of choices is allowed."""

    def begin(self, started: api.GenerateStarted) -> None:
        """Take what the first chunk says."""
        self._head.take(started)
        self._is_thinking = is_thinking(started)

    def _choice(self, index: int) -> _Choice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(self._make_parser())
            parsing.begin(choice.parser, self._is_thinking)
        return choice

    def _deltas(self, choice: _Choice, deltas: list[MessageDelta]) -> list[dict[str, Any]]:
        """The deltas as `ChatDelta`s without the role."""
        told = []
        for delta in deltas:
            fields: dict[str, Any] = {}
            if delta.content:
                fields["content"] = delta.content
            if delta.reasoning and self._request.include_reasoning is not False:
                fields["reasoning_content"] = delta.reasoning
            if (call := delta.tool_call) is not None:
                choice.has_calls = True
                named = {"id": call.id, "type": "function"} if call.id else {}
                function = {"name": call.name} if call.name else {}
                fields["tool_calls"] = [
                    {"index": call.index, **named, "function": {**function, "arguments": call.arguments}}
                ]
            if fields:
                told.append(fields)
        return told

    def _details(
        self, choice: _Choice, tokens: list[api.OutputToken], steps: Sequence[api.DecodingStep], texts: TokenTexts
    ) -> dict[str, Any]:
        """The tokens' extras besides their text."""
        told: dict[str, Any] = {
            "logprobs": chat_logprobs(tokens, self._named(texts)) if self._request.logprobs and tokens else None
        }
        if self._request.return_token_ids:
            told["token_ids"] = [token.id for token in tokens]
        if self._request.return_token_origins:
            told["token_origins"] = choice.origins.told(tokens)
        if self._request.return_steps:
            told["steps"] = steps_told(steps, texts)
        return told

    @property
    def _no_details(self) -> dict[str, Any]:
        """The same extras without tokens."""
        ids: dict[str, Any] = {"token_ids": []} if self._request.return_token_ids else {}
        origins: dict[str, Any] = {"token_origins": []} if self._request.return_token_origins else {}
        steps: dict[str, Any] = {"steps": []} if self._request.return_steps else {}
        return {"logprobs": None, **ids, **origins, **steps}

    def _named(self, texts: TokenTexts) -> TokenTexts:
        return texts.named_by_id() if self._request.return_tokens_as_token_ids else texts

    def _ending(self, choice: _Choice, finished: api.ChoiceFinished) -> dict[str, Any]:
        reason = finish_reason(finished)
        # OpenAI reports "stop", not "tool_calls", if the client named the function.
        if choice.has_calls and reason == "stop" and named_function(self._request.tool_choice) is None:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": stop_reason(finished, self._request.stop_token_ids)}


class ChatEvents(_ChatAnswer):
    """Events of a streamed answer. Together they equal the answer that `ChatWhole` makes of the same chunks."""

    def __init__(self, request: ChatRequest, head: AnswerHead, make_parser: MakeParser, echo: str) -> None:
        super().__init__(request, head, make_parser, echo)
        self._num_prompt = 0
        self._num_output = 0
        self._prompt_token_ids: list[int] | None = None
        self._has_usage, self._has_continuous_usage = request.has_usage_chunk, request.has_continuous_usage

    def tell_prompt(self, token_ids: list[int]) -> None:
        """Put the prompt's token ids into the first event."""
        self._prompt_token_ids = token_ids

    def add(self, chunk: api.GenerateResponse, texts: TokenTexts) -> list[dict[str, Any]]:
        """The events of a chunk; `texts` has the tokens of its log-probabilities."""
        match chunk.WhichOneof("chunk"):
            case "started":
                self.begin(chunk.started)
                self._num_prompt = chunk.started.num_prompt_tokens
            case "delta":
                return self._output(chunk.delta, texts)
            case "choice_finished":
                return self._end(chunk.choice_finished)
            case "finished":
                return self._last(chunk.finished)
        return []

    def _output(self, delta: api.ChoiceDelta, texts: TokenTexts) -> list[dict[str, Any]]:
        choice, tokens = self._choice(delta.index), list(delta.tokens)
        self._num_output += len(tokens)
        deltas = self._deltas(choice, choice.parser.push(delta.text))
        details = self._details(choice, tokens, delta.steps, texts)
        tells = any(details.values())
        if not deltas and tells:
            deltas = [{"content": ""}]
        events = self._begin(delta.index)
        for number, fields in enumerate(deltas):
            own = details if number == 0 else self._no_details
            events.append(self._event(delta.index, fields, own, {"finish_reason": None}))
        return events

    def _begin(self, index: int) -> list[dict[str, Any]]:
        choice = self._choice(index)
        if choice.has_begun:
            return []
        choice.has_begun = True
        no_details = self._no_details
        event = self._event(index, {"role": "assistant", "content": ""}, no_details, {"finish_reason": None})
        if self._prompt_token_ids is not None:
            event["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        if not self._echo:
            return [event]
        return [event, self._event(index, {"content": self._echo}, no_details, {"finish_reason": None})]

    def _end(self, finished: api.ChoiceFinished) -> list[dict[str, Any]]:
        choice, index = self._choice(finished.index), finished.index
        events = self._begin(index)
        for fields in self._deltas(choice, choice.parser.finish()):
            events.append(self._event(index, fields, self._no_details, {"finish_reason": None}))
        return [*events, self._event(index, {}, self._no_details, self._ending(choice, finished))]

    def _last(self, finished: api.GenerateFinished) -> list[dict[str, Any]]:
        if not self._request.has_usage_chunk:
            return []
        usage, metrics = usage_of([finished.usage]), metrics_of([finished.stats])
        return [{**self._head.fields("chat.completion.chunk"), "choices": [], "usage": usage, "metrics": metrics}]

    def _event(
        self, index: int, delta: dict[str, Any], details: dict[str, Any], ending: dict[str, Any]
    ) -> dict[str, Any]:
        event = self._head.fields("chat.completion.chunk")
        event["choices"] = [{"index": index, "delta": delta, **details, **ending}]
        if self._has_usage:
            continuous = self._has_continuous_usage
            event["usage"] = usage_so_far(self._num_prompt, self._num_output) if continuous else None
        return event


class ChatWhole(_ChatAnswer):
    """One whole answer."""

    def answer(
        self, choices: dict[int, ParsedOutput], prompt: api.PromptLogprobs | None, texts: TokenTexts,
        finished: api.GenerateFinished,
    ) -> dict[str, Any]:  # fmt: skip
        """The answer, a `ChatCompletion`."""
        whole: dict[str, Any] = {
            **self._head.fields("chat.completion"),
            "choices": [self._whole(index, choices[index], texts) for index in sorted(choices)],
            "usage": usage_of([finished.usage]),
            "metrics": metrics_of([finished.stats]),
        }
        if prompt is not None:
            whole["prompt_logprobs"] = prompt_logprobs(prompt, texts)
        return whole

    def _whole(self, index: int, output: ParsedOutput, texts: TokenTexts) -> dict[str, Any]:
        choice = self._choice(index)
        parsed = [*choice.parser.push(output.text), *choice.parser.finish()]
        message = _joined(self._deltas(choice, parsed), self._echo)
        details = self._details(choice, output.tokens, output.steps, texts)
        return {"index": index, "message": message, **details, **self._ending(choice, output.finished)}


@dataclass(slots=True)
class ParsedOutput:
    """The whole output of one choice."""

    text: str
    tokens: list[api.OutputToken]
    finished: api.ChoiceFinished
    steps: Sequence[api.DecodingStep] = ()


def _joined(deltas: list[dict[str, Any]], echo: str) -> dict[str, Any]:
    """The joined deltas, a `ChatMessage`."""
    content = echo + "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        whole = calls.setdefault(call["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
        if "id" in call:
            whole["id"], whole["function"]["name"] = call["id"], call["function"].get("name", "")
        whole["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
