"""Translate the chunks of a stream to OpenAI's completion objects: events, or whole choices.

A request of several prompts is one object: the choices of prompt p begin at index p * n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.translation.chat_answer import ParsedOutput
from specdec.gateway.translation.completion_request import tells_prompt_logprobs
from specdec.gateway.translation.head import AnswerHead, finish_reason, stop_reason
from specdec.gateway.translation.logprobs import CompletionLogprobsWriter, joined, prompt_logprobs
from specdec.gateway.translation.origins import OriginCounter
from specdec.gateway.translation.steps import steps_told
from specdec.gateway.translation.usage import metrics_of, usage_of, usage_so_far
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import coordinator_pb2 as api

KIND = "text_completion"


@dataclass(frozen=True, slots=True)
class PromptTold:
    """A prompt's part of the answer besides its log-probabilities."""

    text: str = ""
    """Text before the output; empty: no echo."""
    token_ids: list[int] | None = None


@dataclass(slots=True)
class _Choice:
    """State of one choice while its output comes."""

    logprobs: CompletionLogprobsWriter | None
    origins: OriginCounter = field(default_factory=OriginCounter)
    has_begun: bool = False


class _PromptAnswer:
    """Base of events and whole answers of one prompt."""

    def __init__(self, request: CompletionRequest, head: AnswerHead, number: int, told: PromptTold) -> None:
        """Begin the answer to the prompt with this number."""
        self._request = request
        self._head = head
        self._base = number * request.num_choices
        self._told = told
        # Computed once, not per token.
        self._has_output = request.most_tokens != 0
        self._has_details = bool(request.return_token_ids or request.return_token_origins or request.return_steps)

    def _texts(self, texts: TokenTexts) -> TokenTexts:
        return texts.named_by_id() if self._request.return_tokens_as_token_ids else texts

    def _choice(self, texts: TokenTexts) -> _Choice:
        if self._request.logprobs is None:
            return _Choice(None)
        hides_special = self._request.skip_special_tokens is not False
        return _Choice(CompletionLogprobsWriter(self._texts(texts), hides_special=hides_special))

    def _output_tokens(self, tokens: list[api.OutputToken]) -> list[api.OutputToken]:
        return tokens if self._has_output else []

    def _details(
        self, choice: _Choice, tokens: list[api.OutputToken], steps: Sequence[api.DecodingStep], texts: TokenTexts
    ) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if not self._has_details:
            return told
        if self._request.return_token_ids:
            told["token_ids"] = [token.id for token in tokens]
        if self._request.return_token_origins:
            told["token_origins"] = choice.origins.told(tokens)
        if self._request.return_steps:
            told["steps"] = steps_told(steps if self._has_output else (), texts)
        return told

    def _prompt_part(self, choice: _Choice, prompt: api.PromptLogprobs | None) -> list[dict[str, Any]]:
        """The prompt's log-probabilities, if the client wants an echo of them."""
        if choice.logprobs is None or not self._request.echo:
            return []
        if prompt is None:
            choice.logprobs.skip(len(self._told.text))
            return []
        return [choice.logprobs.of_prompt(prompt, self._told.text)]

    def _ending(self, finished: api.ChoiceFinished) -> dict[str, Any]:
        if not self._has_output:
            return {"finish_reason": "length", "stop_reason": None}
        reason = stop_reason(finished, self._request.stop_token_ids)
        return {"finish_reason": finish_reason(finished), "stop_reason": reason}


class CompletionWhole(_PromptAnswer):
    """The whole choices of one prompt."""

    def choices(
        self, outputs: dict[int, ParsedOutput], prompt: api.PromptLogprobs | None, texts: TokenTexts
    ) -> list[dict[str, Any]]:
        """The choices, each a `CompletionChoice`."""
        return [self._whole(index, outputs[index], prompt, texts) for index in sorted(outputs)]

    def _whole(
        self, index: int, output: ParsedOutput, prompt: api.PromptLogprobs | None, texts: TokenTexts
    ) -> dict[str, Any]:
        choice, tokens = self._choice(texts), self._output_tokens(output.tokens)
        parts = self._prompt_part(choice, prompt if tells_prompt_logprobs(self._request) else None)
        if choice.logprobs is not None and tokens:
            parts.append(choice.logprobs.of_output(tokens))
        told: dict[str, Any] = {
            "index": self._base + index,
            "text": self._told.text + (output.text if self._has_output else ""),
            "logprobs": joined(parts),
            **self._details(choice, tokens, output.steps, texts),
            **self._ending(output.finished),
        }
        if self._told.token_ids is not None:
            told["prompt_token_ids"] = self._told.token_ids
        if self._request.prompt_logprobs is not None and prompt is not None:
            told["prompt_logprobs"] = prompt_logprobs(prompt, self._texts(texts))
        return told


class CompletionEvents(_PromptAnswer):
    """Events of the streamed answer to one prompt."""

    def __init__(self, request: CompletionRequest, head: AnswerHead, number: int, told: PromptTold) -> None:
        super().__init__(request, head, number, told)
        self.num_prompt = 0
        self.num_output = 0
        self.finished: api.GenerateFinished | None = None
        self._open: dict[int, _Choice] = {}
        self._prompt: api.PromptLogprobs | None = None
        self._lacks_prompt = tells_prompt_logprobs(request)
        self._has_usage, self._has_continuous_usage = request.has_usage_chunk, request.has_continuous_usage
        self._held: list[api.GenerateResponse] = []
        """Output that came early: the prompt's log-probabilities go first."""

    def add(self, chunk: api.GenerateResponse, texts: TokenTexts) -> list[dict[str, Any]]:
        """The events of a chunk; `texts` has the tokens of its log-probabilities."""
        match chunk.WhichOneof("chunk"):
            case "delta" | "choice_finished" if self._lacks_prompt:
                self._held.append(chunk)
            case "delta":
                return self._output(chunk.delta, texts)
            case "choice_finished":
                return self._end(chunk.choice_finished, texts)
            case "started":
                self._head.take(chunk.started)
                self.num_prompt = chunk.started.num_prompt_tokens
            case "prompt_logprobs":
                self._add_prompt(chunk.prompt_logprobs)
                if not self._lacks_prompt:
                    held, self._held = self._held, []
                    return [event for one in held for event in self.add(one, texts)]
            case "finished":
                self.finished = chunk.finished
        return []

    def _add_prompt(self, more: api.PromptLogprobs) -> None:
        if self._prompt is None:
            self._prompt = api.PromptLogprobs()
        self._prompt.token_ids.extend(more.token_ids)
        self._prompt.positions.extend(more.positions)
        self._lacks_prompt = self._lacks_prompt and len(self._prompt.token_ids) < self.num_prompt

    def _end(self, finished: api.ChoiceFinished, texts: TokenTexts) -> list[dict[str, Any]]:
        index = finished.index
        begin = self._begin(index, texts)
        return [*begin, self._event(index, "", None, self._no_details(index), self._ending(finished))]

    def _output(self, delta: api.ChoiceDelta, texts: TokenTexts) -> list[dict[str, Any]]:
        index, text, tokens = delta.index, delta.text, self._output_tokens(list(delta.tokens))
        begin = self._begin(index, texts)
        if not self._has_output:
            text = ""
        if not (text or tokens or delta.steps):
            return begin
        choice = self._open[index]
        self.num_output += len(tokens)
        logprobs = choice.logprobs.of_output(tokens) if choice.logprobs is not None and tokens else None
        details = self._details(choice, tokens, delta.steps, texts)
        return [*begin, self._event(index, text, logprobs, details)]

    def _begin(self, index: int, texts: TokenTexts) -> list[dict[str, Any]]:
        if index in self._open:
            return []
        choice = self._open[index] = self._choice(texts)
        parts = self._prompt_part(choice, self._prompt)
        if not self._told.text and not parts and self._told.token_ids is None:
            return []
        details = self._no_details(index)
        if self._told.token_ids is not None:
            details["prompt_token_ids"] = self._told.token_ids
        return [self._event(index, self._told.text, joined(parts), details)]

    def _no_details(self, index: int) -> dict[str, Any]:
        return self._details(self._open[index], [], (), TokenTexts({}))

    def _event(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        details: dict[str, Any],
        ending: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        ending = ending or {"finish_reason": None, "stop_reason": None}
        event = self._head.fields(KIND)
        event["choices"] = [{"index": self._base + index, "text": text, "logprobs": logprobs, **details, **ending}]
        if self._has_usage:
            continuous = self._has_continuous_usage
            event["usage"] = usage_so_far(self.num_prompt, self.num_output) if continuous else None
        return event


def completion_usage(request: CompletionRequest, finished: list[api.GenerateFinished]) -> dict[str, Any]:
    """The usage and metrics of all prompts, as fields of `TextCompletion`."""
    usages = [one.usage for one in finished]
    if request.most_tokens == 0:
        usages = [api.Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens) for usage in usages]
    return {"usage": usage_of(usages), "metrics": metrics_of([one.stats for one in finished])}
