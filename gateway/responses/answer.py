"""Translate the chunks of a stream to the events of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec.gateway.api.errors import ApiError
from specdec.gateway.chat import parsing
from specdec.gateway.chat.deltas import MessageDelta, StreamingParser, ToolCallDelta
from specdec.gateway.responses.output import OutputItem, Told
from specdec.gateway.responses.request import ResponsesRequest
from specdec.gateway.responses.tools import Tools
from specdec.gateway.responses.whole import ReasoningTokens, end_told, response_told
from specdec.gateway.translation.head import AnswerHead, is_thinking
from specdec.gateway.translation.logprobs import chat_logprobs
from specdec.gateway.translation.origins import OriginCounter
from specdec.gateway.translation.steps import steps_told
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

Event = dict[str, Any]
_ABORTED = {"code": "server_error", "message": "the request was aborted"}
_STATUSES = {pb.FINISH_REASON_LENGTH: "incomplete", pb.FINISH_REASON_ABORT: "failed"}
"""Of answers that are not complete."""


class ResponseEvents:
    """The events of one answer. The last one has the whole answer, which is also the answer without a stream."""

    def __init__(self, request: ResponsesRequest, tools: Tools, head: AnswerHead, parser: StreamingParser) -> None:
        """Begin an answer.

        Args:
            request: the client's request.
            tools: those of the request.
            head: its id is the answer's, without a prefix.
            parser: of the message.
        """
        self._request = request
        self._tools = tools
        self._head = head
        self._parser = parser
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        """Items that have ended."""
        self._item: OutputItem | None = None
        """The item whose text comes."""
        self._num_items = 0
        self._call = -1
        """Number of the call that is open."""
        self._space = ""
        """White space of a text that has not begun: beside other items it is left out."""
        self._logprobs: list[dict[str, Any]] = []
        """Those of tokens whose text has not come."""
        self._origins = OriginCounter()
        wanted = {"token_origins": request.return_token_origins, "steps": request.return_steps}
        self._extensions: dict[str, list[dict[str, Any]]] = {
            name: [] for name, is_wanted in wanted.items() if is_wanted
        }
        """The wanted extras of all tokens and steps so far."""
        self._untold: dict[str, list[dict[str, Any]]] = {name: [] for name in self._extensions}
        """Those that no delta has told."""
        self._reasoning = ReasoningTokens()
        self._ended = pb.FINISH_REASON_STOP

    def add(self, chunk: api.GenerateResponse, texts: TokenTexts) -> list[Event]:
        """The events of a chunk; `texts` has the tokens of its log-probabilities. The first come with output."""
        match chunk.WhichOneof("chunk"):
            case "started":
                self._head.take(chunk.started)
                parsing.begin(self._parser, is_thinking(chunk.started))
            case "delta":
                deltas = self._parser.push(chunk.delta.text)
                self._take_extras(chunk.delta, texts, deltas)
                return self._events(self._deltas(deltas))
            case "choice_finished":
                self._ended = chunk.choice_finished.reason
                return self._events(self._last_items())
            case "finished":
                status = _STATUSES.get(self._ended, "completed")
                error = _ABORTED if status == "failed" else None
                return self._events([(f"response.{status}", self._whole(status, error, chunk.finished))])
        return []

    def fail(self, error: ApiError) -> list[Event]:
        """The events that end a stream in an error."""
        told = {"code": error.code, "message": error.message}
        described = ("error", {**told, "param": error.param})
        events = self._events([*self._close("incomplete"), described])
        return [*events, *self._events([("response.failed", self._whole("failed", told))])]

    def _whole(
        self, status: str, error: dict[str, Any] | None = None, finished: api.GenerateFinished | None = None
    ) -> dict[str, Any]:
        told = response_told(self._request, self._tools, self._head, status, self._output, error)
        if finished is not None:
            told |= {**end_told(finished, self._reasoning.num), **self._extensions}
        return {"response": told}

    def _events(self, told: Iterable[Told]) -> list[Event]:
        if not self._num_events:
            running = self._whole("in_progress")
            told = [("response.created", running), ("response.in_progress", running), *told]
        events = []
        for kind, fields in told:
            events.append({"type": kind, "sequence_number": self._num_events, **fields})
            self._num_events += 1
            if kind == "response.output_item.done":
                self._output.append(fields["item"])
        return events

    def _take_extras(self, delta: api.ChoiceDelta, texts: TokenTexts, told: list[MessageDelta]) -> None:
        num_thoughts = self._reasoning.add(delta, told)
        if self._request.num_logprobs is not None:
            if num_thoughts or (told and self._item is not None and self._item.kind != "message"):
                self._logprobs = []
            self._logprobs += chat_logprobs(delta.tokens[num_thoughts:], texts)["content"]
        own: dict[str, list[dict[str, Any]]] = {}
        if "token_origins" in self._extensions:
            own["token_origins"] = self._origins.told(delta.tokens)
        if "steps" in self._extensions:
            own["steps"] = steps_told(delta.steps, texts)
        for name, extras in own.items():
            self._extensions[name] += extras
            self._untold[name] += extras

    def _deltas(self, deltas: list[MessageDelta]) -> list[Told]:
        told: list[Told] = []
        for delta in deltas:
            if delta.reasoning:
                told += [*self._opened("reasoning"), *self._piece(delta.reasoning)]
            if delta.content:
                told += self._text(delta.content)
            if delta.tool_call is not None:
                told += self._called(delta.tool_call)
        return told

    def _text(self, text: str) -> list[Told]:
        if self._item is None or self._item.kind != "message":
            self._space += text
            if not self._space.strip():
                return []
            text, self._space = self._space, ""
        return [*self._opened("message"), *self._piece(text)]

    def _called(self, call: ToolCallDelta) -> list[Told]:
        told: list[Told] = []
        if call.index != self._call:
            self._call = call.index
            namespace, name = self._tools.members.get(call.name, ("", call.name))
            named = {"call_id": call.id, "name": name, **({"namespace": namespace} if namespace else {})}
            told = [*self._close("completed"), *self._opened("function_call", named)]
        return [*told, *self._piece(call.arguments)] if call.arguments else told

    def _opened(self, kind: str, named: dict[str, str] | None = None) -> list[Told]:
        """The events that open an item of a kind, unless one is open."""
        if self._item is not None and self._item.kind == kind:
            return []
        told = self._close("completed")
        if kind != "message":
            self._space = ""
        encrypts = kind == "reasoning" and self._request.encrypts_reasoning
        answer_id = self._head.id.removeprefix("resp_")
        self._item = OutputItem(kind, self._num_items, answer_id, named or {}, encrypts)
        self._num_items += 1
        return [*told, *self._item.begin()]

    def _close(self, status: str) -> list[Told]:
        item, self._item = self._item, None
        return [] if item is None else list(item.end(status))

    def _piece(self, text: str) -> list[Told]:
        """More text of the open item, with the log-probabilities and extras that wait for it."""
        if self._item is None:
            return []
        logprobs: list[dict[str, Any]] = []
        if self._item.kind != "reasoning":
            logprobs, self._logprobs = self._logprobs, []
        name, fields = self._item.piece(text, logprobs)
        untold, self._untold = self._untold, {extra: [] for extra in self._extensions}
        return [(name, {**fields, **untold})]

    def _last_items(self) -> list[Told]:
        told = self._deltas(self._parser.finish())
        if not self._num_items:
            told += self._opened("message")
            told += self._piece(self._space) if self._space else []
        is_message = self._item is not None and self._item.kind == "message"
        if any(self._untold.values()) or (is_message and self._logprobs):
            told += self._piece("")
        return [*told, *self._close("incomplete" if self._ended in _STATUSES else "completed")]
