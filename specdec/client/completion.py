"""A request as it is sent, and its answer as chunks arrive."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from specdec.v1 import coordinator_pb2
from specdec.wire.errors import FailedPrecondition, Internal


def as_sent(request: coordinator_pb2.GenerateRequest) -> coordinator_pb2.GenerateRequest:
    """The request with prompt_logprobs_in_parts set if it wants a prompt's log-probabilities."""
    if not request.sampling.HasField("prompt_logprobs") or request.prompt_logprobs_in_parts:
        return request
    sent = coordinator_pb2.GenerateRequest(prompt_logprobs_in_parts=True)
    sent.MergeFrom(request)
    return sent


def check_started(request: coordinator_pb2.GenerateRequest, chunk: coordinator_pb2.GenerateResponse) -> None:
    """Raise FailedPrecondition if an older server has ignored the request's constraint or salt."""
    if not chunk.HasField("started"):
        return
    if request.sampling.HasField("constraint") and not chunk.started.is_constrained:
        message = "the server does not support constraints: update it, or leave the constraint out"
        raise FailedPrecondition(f"sampling.constraint: {message}", reason="CONSTRAINTS_UNKNOWN")
    if request.cache_salt and not chunk.started.is_salted:
        message = "the server does not support salts, so other requests share its cached prefixes: update it"
        raise FailedPrecondition(f"cache_salt: {message}", reason="CACHE_SALT_UNKNOWN")


@dataclass(slots=True)
class CompletedChoice:
    """The output of one choice so far."""

    text: str = ""
    tokens: list[coordinator_pb2.OutputToken] = field(default_factory=list)
    steps: list[coordinator_pb2.DecodingStep] = field(default_factory=list)
    """The steps that committed them, if the request wants steps."""
    finished: coordinator_pb2.ChoiceFinished | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the output tokens."""
        return [token.id for token in self.tokens]


@dataclass(slots=True)
class Completion:
    """The answer to a request so far. Times in seconds since the object was made."""

    started: coordinator_pb2.GenerateStarted | None = None
    prompt_logprobs: coordinator_pb2.PromptLogprobs | None = None
    """All chunks of prompt log-probabilities, joined."""
    choices: dict[int, CompletedChoice] = field(default_factory=dict)
    finished: coordinator_pb2.GenerateFinished | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_first_tokens: int = 0
    """Tokens in the first chunk with tokens, which does not count for the decoding speed."""
    _begin_s: float = field(default_factory=time.perf_counter)

    def add(self, chunk: coordinator_pb2.GenerateResponse) -> None:
        """Add the next chunk."""
        match chunk.WhichOneof("chunk"):
            case "started":
                self.started = chunk.started
            case "prompt_logprobs":
                self._add_prompt(chunk.prompt_logprobs)
            case "delta":
                self._add_delta(chunk.delta)
            case "choice_finished":
                self._choice(chunk.choice_finished.index).finished = chunk.choice_finished
            case "finished":
                self.finished = chunk.finished

    @property
    def prompt_logprobs_position(self) -> int:
        """Position below which the prompt's log-probabilities have come; 0 if none have."""
        prompt = self.prompt_logprobs
        return 0 if prompt is None else prompt.start_position + len(prompt.token_ids)

    def _add_prompt(self, more: coordinator_pb2.PromptLogprobs) -> None:
        if self.prompt_logprobs is None:
            self.prompt_logprobs = coordinator_pb2.PromptLogprobs(start_position=more.start_position)
        self.prompt_logprobs.token_ids.extend(more.token_ids)
        self.prompt_logprobs.positions.extend(more.positions)

    def _add_delta(self, delta: coordinator_pb2.ChoiceDelta) -> None:
        choice = self._choice(delta.index)
        choice.text += delta.text
        choice.tokens.extend(delta.tokens)
        choice.steps.extend(delta.steps)
        if delta.tokens:
            self.last_token_s = time.perf_counter() - self._begin_s
            if self.first_token_s is None:
                self.first_token_s = self.last_token_s
                self.num_first_tokens = len(delta.tokens)

    def _choice(self, index: int) -> CompletedChoice:
        return self.choices.setdefault(index, CompletedChoice())

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed without the first chunk (prefill); None if no chunk followed it."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return None
        return (self.num_tokens - self.num_first_tokens) / (self.last_token_s - self.first_token_s)

    @property
    def identity(self) -> list[tuple[int, list[int], str]]:
        """Index, token ids and text of every choice: equal runs have equal identities."""
        return [(index, choice.token_ids, choice.text) for index, choice in sorted(self.choices.items())]

    def require_finished(self) -> coordinator_pb2.GenerateFinished:
        """Return the last chunk. Raises Internal if the stream ended without it."""
        if self.finished is None:
            raise Internal("the stream ended without its last chunk", reason="STREAM_INCOMPLETE")
        return self.finished
