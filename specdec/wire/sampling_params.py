"""The sampling parameters of one choice."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class VerifyMode(enum.Enum):
    """How a target decides whether a drafted token stands; greedy decoding is equality in both."""

    COUPLED = "coupled"
    """Draft and target share the noise; a drafted token is accepted iff it is the token the target samples."""
    REJECTION = "rejection"
    """A drafted token is accepted with probability min(1, p/q), else the residual is sampled."""


class RejectionMethod(enum.Enum):
    """How rejection verification decides on a chain (vLLM's `rejection_sample_method`)."""

    STANDARD = "standard"
    """Token by token."""
    BLOCK = "block"
    """The chain as a whole: on average it accepts at least as many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one choice. They are valid: the service that admits a request checks them.

    Processing order, as in transformers: logit bias, repetition penalty (prompt and output tokens), presence and
    frequency penalty (output tokens only), min_tokens, allowed tokens, bad words, temperature, top-k, top-p, min-p,
    then the draw.
    """

    max_tokens: int
    """Most tokens to produce, counted from the end of the prompt."""
    seed: int
    """Unsigned 64-bit; with `choice` it fixes every random number."""
    choice: int = 0
    """Index of this choice within its request."""
    temperature: float = 1.0
    """0 is greedy: no noise, and no cuts (they never remove the best token)."""
    top_k: int = 0
    """Keep the k best tokens and all that tie with the k-th; 0 is off."""
    top_p: float = 1.0
    """Keep the best tokens until their mass reaches this; the best token always stays; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the best one; 0 is off."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Number that is added to the logit, by token id."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: all tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of at least one token: the last one is not sampled after the others, unless nothing else is left."""
    min_tokens: int = 0
    """No stop or end-of-sequence token is sampled before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """End-of-sequence tokens do not end the choice; `min_tokens` still holds them back."""
    num_logprobs: int | None = None
    """None: no log-probabilities; 0: of the sampled token; n: of the n most likely tokens too."""

    is_greedy: bool = field(init=False, repr=False, compare=False)
    has_penalties: bool = field(init=False, repr=False, compare=False)
    needs_history: bool = field(init=False, repr=False, compare=False)
    """Some penalty is on, or bad words, so the tokens so far matter."""
    adjusts_logits: bool = field(init=False, repr=False, compare=False)
    """Penalties, bias, min_tokens, allowed tokens or bad words may change logits before temperature."""
    has_cuts: bool = field(init=False, repr=False, compare=False)
    """Some of top-k, top-p and min-p is on and matters."""
    bias_token_ids: array[int] = field(init=False, repr=False, compare=False)
    """Token ids of `logit_bias`, 64-bit integers; the values are `bias_values`, float32. Steps read both unchanged."""
    bias_values: array[float] = field(init=False, repr=False, compare=False)
    min_tokens_ids: array[int] = field(init=False, repr=False, compare=False)
    """Tokens that `min_tokens` holds back, in ascending order, as 64-bit integers."""
    allowed_ids: array[int] = field(init=False, repr=False, compare=False)
    """`allowed_token_ids` in ascending order, each once, as 64-bit integers."""
    _bans: Mapping[int | None, tuple[tuple[int, ...], ...]] = field(init=False, repr=False, compare=False)
    """Bad words by their last token but one; bad words of one token by None."""

    def __post_init__(self) -> None:
        """Derive, once per request, the values that the sampler reads for every row."""
        has_penalties = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        restricts = bool(self.allowed_token_ids) or bool(self.bad_words)
        cuts = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        is_greedy = self.temperature == 0.0
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "has_penalties", has_penalties)
        object.__setattr__(self, "needs_history", has_penalties or bool(self.bad_words))
        adjusts = has_penalties or restricts or bool(self.logit_bias) or self.min_tokens > 0
        object.__setattr__(self, "adjusts_logits", adjusts)
        object.__setattr__(self, "has_cuts", cuts and not is_greedy)
        object.__setattr__(self, "bias_token_ids", array("q", self.logit_bias))
        object.__setattr__(self, "bias_values", array("f", self.logit_bias.values()))
        held_back = {*self.eos_token_ids, *self.stop_token_ids} if self.min_tokens > 0 else ()
        object.__setattr__(self, "min_tokens_ids", array("q", sorted(held_back)))
        object.__setattr__(self, "allowed_ids", array("q", sorted(set(self.allowed_token_ids))))
        bans: dict[int | None, list[tuple[int, ...]]] = {}
        for sequence in self.bad_words:
            bans.setdefault(sequence[-2] if len(sequence) > 1 else None, []).append(sequence)
        object.__setattr__(self, "_bans", {last: tuple(sequences) for last, sequences in bans.items()})

    def holds_back(self, num_output_tokens: int) -> bool:
        """Whether `min_tokens_ids` may not follow `num_output_tokens` output tokens."""
        return num_output_tokens < self.min_tokens and bool(self.min_tokens_ids)

    def banned_after(self, output: Sequence[int]) -> set[int]:
        """The tokens that would complete a bad word.

        Args:
            output: the end of the output so far: at least as many tokens as a bad word has, less one, where there are.
        """
        banned = {sequence[-1] for sequence in self._bans.get(None, ())}
        for sequence in self._bans.get(output[-1], ()) if output else ():
            if tuple(output[1 - len(sequence) :]) == sequence[:-1]:
                banned.add(sequence[-1])
        return banned
