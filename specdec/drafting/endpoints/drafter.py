"""`openai_api`: proposes an OpenAI-compatible endpoint's continuation, streamed ahead of the target.

A session has at most one stream. It starts after the committed text, is followed while the target writes the same text,
and is closed when the target differs. Every call pays for its prompt, so that a session waits longer before a new call
if its last streams were rarely right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from specdec.config.drafter_options import OpenAiApiOptions
from specdec.drafting.endpoints.alignment import TargetText
from specdec.drafting.endpoints.calls import read_endpoint
from specdec.drafting.endpoints.ledger import Ledger
from specdec.drafting.endpoints.stream import CompletionStream
from specdec.drafting.interface import Capabilities, Context, Offer, Room

CAPABILITIES = Capabilities(
    is_serial=True, makes_trees=False, has_target_vocabulary=False, places=frozenset({"draft_service"})
)
_FIRST_SCORE = 0.6
_SCORE_WEIGHT = 1 / 16
_GOOD_TOKENS = 4
"""Tokens that the target must confirm for a stream to be worth its prompt."""
_MOST_WAIT_TOKENS = 256
_MOST_BEHIND_TOKENS = 32
"""Tokens behind the target at which a stream is given up."""
_log = structlog.get_logger("specdec.drafting.lookup")


class OpenAiApi:
    """The drafter `openai_api`. All sessions share the limits of its endpoint."""

    name = "openai_api"
    capabilities = CAPABILITIES

    def __init__(
        self, options: OpenAiApiOptions, tokenizer_json: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ValueError if the options name no endpoint, or the JSON is no tokenizer."""
        self.options = options
        self.endpoint = read_endpoint(options)
        self.text = TargetText(tokenizer_json)
        self.ledger = Ledger(options, clock)
        self.clock = clock
        self.on_fault: Callable[[str], None] = lambda kind: None
        """Called with the kind of each failure, from any thread."""

    def open(self, context: Context) -> EndpointSession:
        """Begin a session."""
        return EndpointSession(self)

    def begin(self, token_ids: Sequence[int]) -> CompletionStream | None:
        """A stream after these tokens; None if none may be opened now."""
        if not self.ledger.may_ask:
            return None
        options = self.options
        prompt = self.text.prompt(token_ids)
        reservation = None if not prompt else self.ledger.reserve(len(token_ids), options.max_tokens)
        if prompt is None or reservation is None:
            return None
        return CompletionStream(self.endpoint, self.ledger, reservation, prompt, self._failed)

    def was_slow(self) -> None:
        """A stream was never ahead of the target."""
        if (wait_s := self.ledger.was_slow()) is not None:
            self._say("slow", wait_s)

    def _failed(self, kind: str) -> None:
        self._say(kind, self.ledger.failed())

    def _say(self, kind: str, wait_s: float) -> None:
        self.on_fault(kind)
        _log.warning("openai_api_paused", kind=kind, host=self.endpoint.host, for_s=round(wait_s, 1))


class EndpointSession:
    """The endpoint's part of one session."""

    def __init__(self, api: OpenAiApi) -> None:
        self._api = api
        self._stream: CompletionStream | None = None
        self._start = 0
        self._ends_at_s = 0.0
        self._was_ahead = False
        self._num_agreed = 0
        self._seen_chars = -1
        self._next_start = 0
        self._wait_tokens = 1
        self._score = _FIRST_SCORE

    @property
    def is_waiting(self) -> bool:
        """Whether more text may come before the next commit."""
        stream = self._stream
        if stream is not None and self._api.clock() > self._ends_at_s:
            stream.close()
        return stream is not None and (not stream.is_over or self.has_news)

    @property
    def has_news(self) -> bool:
        """Whether text has come since the last proposal."""
        return self._stream is not None and len(self._stream.text) > self._seen_chars

    def close(self, context: Context) -> None:
        """Stop the stream: the session has ended or wants no drafts."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def propose(self, context: Context, room: Room) -> Offer | None:
        """A chain of the streamed text beyond the committed tokens."""
        token_ids = context.token_ids
        stream = self._stream
        if stream is None:
            self._begin(token_ids)
            return None
        is_over, text = stream.is_over, stream.text  # in this order, as `text` is final once `is_over`
        self._seen_chars = len(text)
        grown = self._api.text.since(token_ids, self._start)
        if grown is None:
            return None
        num_new = len(token_ids) - self._start
        if not text.startswith(grown):
            is_behind = grown.startswith(text) and not is_over and num_new <= _MOST_BEHIND_TOKENS
            if not is_behind:
                self._end(token_ids)
            return None
        if self._was_ahead and num_new > self._num_agreed:
            self._num_agreed = num_new
            self._score += _SCORE_WEIGHT * (1 - self._score)
            self._api.ledger.was_useful()
        rest = text[len(grown) :]
        self._was_ahead = self._was_ahead or bool(rest)
        if not rest:
            if is_over:
                self._end(token_ids, is_done=stream.is_complete)
            return None
        found = self._api.text.tokens_after(
            token_ids, rest, min(room.depth, room.num_nodes), is_whole=stream.is_complete
        )
        if not found:
            return None
        return Offer(found, list(range(-1, len(found) - 1)), [self._score] * len(found))

    def _begin(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) < self._next_start:
            return
        self._stream = self._api.begin(token_ids)
        self._start, self._num_agreed, self._was_ahead, self._seen_chars = len(token_ids), 0, False, 0
        self._ends_at_s = self._api.clock() + self._api.options.stream_timeout_s

    def _end(self, token_ids: Sequence[int], *, is_done: bool = False) -> None:
        """End the stream, which differs from the target's text or is over; open another when allowed."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if not self._was_ahead and stream is not None and not stream.has_failed:
            self._api.was_slow()
        self._score += _SCORE_WEIGHT * (0 - self._score)
        is_good = self._num_agreed >= _GOOD_TOKENS and not is_done
        self._wait_tokens = 0 if is_good else min(_MOST_WAIT_TOKENS, max(1, 2 * self._wait_tokens))
        self._next_start = len(token_ids) + self._wait_tokens
        self._begin(token_ids)
