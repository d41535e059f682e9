"""Translate the chunks of a stream to the objects of /v1/responses: one message with one text."""

from __future__ import annotations

from typing import Any

from specdec.gateway.api.responses import ResponsesRequest
from specdec.gateway.chat import parsing
from specdec.gateway.chat.deltas import MessageDelta, StreamingParser
from specdec.gateway.translation.head import AnswerHead, is_thinking
from specdec.gateway.translation.logprobs import chat_logprobs
from specdec.gateway.translation.origins import OriginCounter
from specdec.gateway.translation.steps import steps_told
from specdec.gateway.translation.usage import metrics_of
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

Event = dict[str, Any]


class ResponseEvents:
    """The events of one answer. The last one has the whole answer, which is also the answer without a stream."""

    def __init__(self, request: ResponsesRequest, head: AnswerHead, parser: StreamingParser) -> None:
        self._request = request
        self._head = head
        self._parser = parser
        self._item_id = f"msg_{head.id}"
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._origins = OriginCounter()
        self._extensions: dict[str, list[dict[str, Any]]] = {}
        """The wanted extras of all tokens and steps so far."""
        if request.return_token_origins:
            self._extensions["token_origins"] = []
        if request.return_steps:
            self._extensions["steps"] = []
        self._is_cut = False
        self._num_events = 0

    @property
    def num_events(self) -> int:
        """Number of events so far, which is the number of the next one."""
        return self._num_events

    def add(self, chunk: api.GenerateResponse, texts: TokenTexts) -> list[Event]:
        """The events of a chunk; `texts` has the tokens of its log-probabilities."""
        match chunk.WhichOneof("chunk"):
            case "started":
                self._head.take(chunk.started)
                parsing.begin(self._parser, is_thinking(chunk.started))
                return self._begin()
            case "delta":
                logprobs: list[dict[str, Any]] = []
                if self._request.top_logprobs is not None and chunk.delta.tokens:
                    logprobs = chat_logprobs(chunk.delta.tokens, texts)["content"]
                return self._deltas(self._parser.push(chunk.delta.text), logprobs, self._extend(chunk.delta, texts))
            case "choice_finished":
                self._is_cut = chunk.choice_finished.reason == pb.FINISH_REASON_LENGTH
                return self._deltas(self._parser.finish(), [], {name: [] for name in self._extensions})
            case "finished":
                return self._end(chunk.finished)
        return []

    def _begin(self) -> list[Event]:
        running = self._response("in_progress", [], None)
        return [
            self._event("response.created", response=running),
            self._event("response.in_progress", response=running),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._at, part=self._part("", [])),
        ]

    def _extend(self, delta: api.ChoiceDelta, texts: TokenTexts) -> dict[str, list[dict[str, Any]]]:
        """Add a delta's extras; returns them."""
        own: dict[str, list[dict[str, Any]]] = {}
        if "token_origins" in self._extensions:
            own["token_origins"] = self._origins.told(delta.tokens)
        if "steps" in self._extensions:
            own["steps"] = steps_told(delta.steps, texts)
        for name, told in own.items():
            self._extensions[name] += told
        return own

    def _deltas(
        self, deltas: list[MessageDelta], logprobs: list[dict[str, Any]], extensions: dict[str, list[dict[str, Any]]]
    ) -> list[Event]:
        text = "".join(delta.content for delta in deltas)
        self._text += text
        self._logprobs += logprobs
        if not text and not logprobs and not any(extensions.values()):
            return []
        return [self._event("response.output_text.delta", **self._at, delta=text, logprobs=logprobs, **extensions)]

    def _end(self, finished: api.GenerateFinished) -> list[Event]:
        status = "incomplete" if self._is_cut else "completed"
        part = self._part(self._text, self._logprobs)
        item = self._item(status, [part])
        whole = self._response(status, [item], finished)
        return [
            self._event("response.output_text.done", **self._at, text=self._text, logprobs=self._logprobs),
            self._event("response.content_part.done", **self._at, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=whole),
        ]

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": parts}

    def _response(
        self, status: str, output: list[dict[str, Any]], finished: api.GenerateFinished | None
    ) -> dict[str, Any]:
        request = self._request
        effort = None if request.reasoning is None else request.reasoning.effort
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "system_fingerprint": self._head.fingerprint,
            "temperature": request.temperature,
            "text": {"format": _format(request)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if finished is None else _usage(finished.usage),
            "metrics": None if finished is None else metrics_of([finished.stats]),
            "user": request.user,
            **({} if finished is None else self._extensions),
        }


def _format(request: ResponsesRequest) -> dict[str, Any]:
    wanted = None if request.text is None else request.text.format
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)


def _usage(usage: api.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
