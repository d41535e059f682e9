"""From the chunks of a Generate call to vLLM's responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import vllm_engine_pb2 as vllm

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    """All of them; of a streamed call none."""
    logprobs: vllm.VllmOutputLogprobs = field(default_factory=vllm.VllmOutputLogprobs)
    """Of `token_ids`, if requested. The chunks themselves take ten times the memory."""
    num_tokens: int = 0
    ended: api.ChoiceFinished | None = None


class VllmResponses:
    """The responses of one call: with `is_streamed` one for each delta, and at the end one for each choice.

    The ends come together, with the number of cached tokens, which is known last.
    """

    def __init__(self, generate: api.GenerateRequest, *, is_streamed: bool) -> None:
        sampling = generate.sampling
        self._is_streamed = is_streamed
        self._has_logprobs = sampling.HasField("logprobs")
        self._has_tops = sampling.logprobs > 0
        self._has_prompt_tops = sampling.prompt_logprobs > 0
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._num_prompt_tokens = 0
        self._prompt: vllm.VllmInputLogprobs | None = None
        self._choices: dict[int, _Choice] = {}

    def take(self, chunk: api.GenerateResponse) -> Iterator[vllm.VllmGenerateResponse]:
        """Add a chunk; returns the responses that are due."""
        match chunk.WhichOneof("chunk"):
            case "started":
                self._num_prompt_tokens = chunk.started.num_prompt_tokens
            case "prompt_logprobs":
                self._prompt = self._prompt_logprobs(chunk.prompt_logprobs)
            case "delta" if chunk.delta.tokens:
                choice = self._choices.setdefault(chunk.delta.index, _Choice())
                choice.num_tokens += len(chunk.delta.tokens)
                if self._is_streamed:
                    is_first = choice.num_tokens == len(chunk.delta.tokens)
                    yield vllm.VllmGenerateResponse(chunk=self._chunk(chunk.delta, is_first=is_first))
                else:
                    choice.token_ids.extend(token.id for token in chunk.delta.tokens)
                    self._add_logprobs(choice.logprobs, chunk.delta.tokens)
            case "choice_finished":
                self._choices.setdefault(chunk.choice_finished.index, _Choice()).ended = chunk.choice_finished
            case "finished":
                for index, choice in sorted(self._choices.items()):
                    complete = self._complete(index, choice, chunk.finished.usage.cached_tokens)
                    yield vllm.VllmGenerateResponse(complete=complete)

    def _chunk(self, delta: api.ChoiceDelta, *, is_first: bool) -> vllm.VllmGenerateChunk:
        logprobs = vllm.VllmOutputLogprobs()
        self._add_logprobs(logprobs, delta.tokens)
        return vllm.VllmGenerateChunk(
            index=delta.index,
            token_ids=[token.id for token in delta.tokens],
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(delta.tokens),
            output_logprobs=logprobs if self._has_logprobs else None,
            input_logprobs=self._prompt if is_first else None,
        )

    def _complete(self, index: int, choice: _Choice, num_cached_tokens: int) -> vllm.VllmGenerateComplete:
        ended = choice.ended or api.ChoiceFinished()
        complete = vllm.VllmGenerateComplete(
            index=index,
            output_ids=choice.token_ids,
            finish_reason=_REASONS.get(ended.reason, "error"),
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=choice.num_tokens,
            cached_tokens=num_cached_tokens,
            output_logprobs=choice.logprobs if self._has_logprobs and not self._is_streamed else None,
            input_logprobs=None if self._is_streamed and choice.num_tokens else self._prompt,
            spec_accepted_tokens=ended.stats.num_accepted,
            spec_draft_tokens=ended.stats.num_proposed,
        )
        if ended.HasField("stop_string"):
            complete.matched_stop_str = ended.stop_string
        elif ended.HasField("stop_token_id") and ended.stop_token_id in self._stop_token_ids:
            complete.matched_token_id = ended.stop_token_id
        return complete

    def _add_logprobs(self, told: vllm.VllmOutputLogprobs, tokens: Iterable[api.OutputToken]) -> None:
        if not self._has_logprobs:
            return
        for token in tokens:
            told.token_ids.append(token.id)
            told.token_logprobs.append(token.logprobs.logprob)
            if self._has_tops:
                told.top_logprobs.append(_top(token.logprobs))

    def _prompt_logprobs(self, found: api.PromptLogprobs) -> vllm.VllmInputLogprobs:
        told = vllm.VllmInputLogprobs(token_ids=found.token_ids)
        num_without = len(found.token_ids) - len(found.positions)
        for _ in range(num_without):  # the prompt's first token
            told.token_logprobs.add()
        for position in found.positions:
            told.token_logprobs.add(value=position.logprob)
        if self._has_prompt_tops:
            told.top_logprobs.extend(vllm.VllmTopLogprobs() for _ in range(num_without))
            told.top_logprobs.extend(map(_top, found.positions))
        return told


def _top(position: pb.PositionLogprobs) -> vllm.VllmTopLogprobs:
    return vllm.VllmTopLogprobs(
        values=[one.logprob for one in position.top], token_ids=[one.token_id for one in position.top]
    )
