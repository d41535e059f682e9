"""One choice's output: the tokens it keeps, and their text. Pure: no clock, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from specdec.coordinator.text.detokenizer import Detokenizer
from specdec.coordinator.text.stop_strings import StopMatch, StopStringScanner
from specdec.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended, and the matched stop string or token."""

    reason: pb.FinishReason.ValueType
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class OutputStep:
    """Result of some tokens: how many are kept, their text, and the end if any."""

    num_kept: int
    text: str
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class EndRules:
    """The target's rules for the end of a choice, for replays without a target."""

    stop_token_ids: frozenset[int]
    """Stop tokens, with end-of-sequence tokens unless these are ignored."""
    min_tokens: int
    max_tokens: int

    def finish_after(self, token_id: int, num_output_tokens: int) -> Finish | None:
        """Whether the choice ends with this token, the `num_output_tokens`-th."""
        if token_id in self.stop_token_ids and num_output_tokens > self.min_tokens:
            return Finish(pb.FINISH_REASON_STOP, stop_token_id=token_id)
        return Finish(pb.FINISH_REASON_LENGTH) if num_output_tokens >= self.max_tokens else None


class ChoiceOutput:
    """Detokenizes a choice's tokens and ends it at a stop string.

    Stop strings count only from the `min_tokens`-th token on. The text of a stop token is left out unless stop strings
    are kept. Tokens past a stop string are dropped.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
        hidden: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Begin a choice. `hidden`: the special tokens that the text leaves out."""
        self._detokenizer = detokenizer
        self._scanner = StopStringScanner(stop, keep_stop) if stop else None
        named = hidden.items() if stop else ()
        self._hidden = {token_id: text for token_id, text in named if text and any(text in one for one in stop)}
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0

    def take_tokens(self, token_ids: Sequence[int], finish: Finish | None = None) -> OutputStep:
        """Add the next tokens; `finish`: the target's reason if they are the last."""
        num_spoken = len(token_ids)
        if finish is not None and finish.stop_token_id is not None and not self._keep_stop:
            num_spoken -= 1
        if self._scanner is None:
            push = self._detokenizer.push
            text = "".join([push(token_id) for token_id in token_ids[:num_spoken]])
            self.num_tokens += len(token_ids)
        else:
            parts: list[str] = []
            for index, token_id in enumerate(token_ids):
                self.num_tokens += 1
                if index >= num_spoken:
                    continue
                hidden = self._hidden.get(token_id)
                text = self._detokenizer.push(token_id) if hidden is None else hidden
                emitted = self._scan(text, is_hidden=hidden is not None)
                if isinstance(emitted, StopMatch):
                    return self._stopped(index + 1, parts, emitted)
                parts.append(emitted)
            text = "".join(parts)
        return OutputStep(len(token_ids), text, None) if finish is None else self._end(len(token_ids), text, finish)

    def replay(self, token_ids: Sequence[int], rules: EndRules) -> OutputStep:
        """Add tokens that were committed earlier, up to the choice's end if they contain it."""
        texts: list[str] = []
        for index, token_id in enumerate(token_ids):
            step = self.take_tokens([token_id], rules.finish_after(token_id, self.num_tokens + 1))
            texts.append(step.text)
            if step.finish is not None:
                return OutputStep(index + 1, "".join(texts), step.finish)
        return OutputStep(len(token_ids), "".join(texts), None)

    def _scan(self, text: str, *, is_hidden: bool = False) -> str | StopMatch:
        if self._scanner is None or self.num_tokens < self._min_tokens:
            return "" if is_hidden else text
        return self._scanner.push_hidden(text) if is_hidden else self._scanner.push(text)

    def _stopped(self, num_kept: int, parts: list[str], match: StopMatch) -> OutputStep:
        finish = Finish(pb.FINISH_REASON_STOP, stop_string=match.stop_string)
        return OutputStep(num_kept, "".join([*parts, match.text]), finish)

    def _end(self, num_kept: int, text: str, finish: Finish) -> OutputStep:
        rest = self._scan(self._detokenizer.finish())
        if isinstance(rest, StopMatch):
            return self._stopped(num_kept, [text], rest)
        held = self._scanner.finish() if self._scanner is not None else ""
        return OutputStep(num_kept, text + rest + held, finish)
